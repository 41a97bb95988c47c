"""Attention of short queries against the definition, on ragged paged batches over poisoned memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from phonograph.kernels.triton.attention_decode import (
    MAX_SHORT_QUERY,
    DecodePlan,
    decode_attention,
    make_decode_plan,
    plan_decode,
)

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of (query length, keys), empty slots as (0, 0); features off unless named."""

    batch: tuple[tuple[int, int], ...]
    num_query_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    hnd: bool = False
    max_query_len: int = MAX_SHORT_QUERY
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lse: bool = True
    padding: int = 2
    num_sms: int = 2

    def __str__(self) -> str:
        defaults = Case(batch=())
        named = {name: value for name, value in vars(self).items() if value != getattr(defaults, name)}
        return ",".join(f"{name}={str(value).replace('torch.', '')}" for name, value in named.items())[:120]


class Problem:
    """The tensors of a case. Everything nobody should read is NaN, and so are outputs and scratch."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(len(str(case)))
        size, heads, kv_heads, dim = case.block_size, case.num_query_heads, case.num_kv_heads, case.head_size
        query_lens, self.lens = [list(column) for column in zip(*case.batch, strict=True)]
        num_blocks = [-(-length // size) for length in self.lens]
        total_blocks = 1 + sum(num_blocks) + 3
        ids = 1 + torch.randperm(total_blocks - 1, generator=generator)
        self.table = torch.zeros(len(self.lens), max(num_blocks) + 2, dtype=torch.int32)
        rows = torch.full((2, total_blocks * size, kv_heads, dim), NAN)
        self.slots: list[torch.Tensor] = []
        for index, (blocks, length) in enumerate(zip(ids[: sum(num_blocks)].split(num_blocks), self.lens, strict=True)):
            self.table[index, : len(blocks)] = blocks
            slots = (blocks[:, None] * size + torch.arange(size)).flatten()[:length]
            rows[:, slots] = torch.randn(2, length, kv_heads, dim, generator=generator)
            self.slots.append(slots)
        self.scales = (None, None)
        if case.kv_dtype is not None:
            self.scales = tuple(torch.rand(kv_heads, generator=generator) * 0.05 + 0.02 for _ in range(2))
            rows = torch.stack([rows[i] / self.scales[i][:, None] for i in range(2)])
        self.cache = rows.to(case.kv_dtype or case.dtype).unflatten(1, (total_blocks, size)).to(device)
        if case.hnd:
            self.cache = self.cache.transpose(2, 3).contiguous().transpose(2, 3)
        self.starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        num_tokens = int(self.starts[-1]) + case.padding
        # As in the engine: a view of the fused projections.
        fused = torch.full((num_tokens, (heads + 2 * kv_heads) * dim), NAN)
        fused[: int(self.starts[-1])] = torch.randn(int(self.starts[-1]), fused.shape[1], generator=generator)
        self.query = fused.to(device, case.dtype)[:, : heads * dim].unflatten(-1, (heads, dim))
        self.slopes = torch.rand(heads, generator=generator) * 0.3 if case.alibi else None
        self.sinks = torch.randn(heads, generator=generator) if case.sinks else None
        self.device = device

    def plan(self) -> DecodePlan:
        case = self.case
        plan = make_decode_plan(
            num_query_heads=case.num_query_heads,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            max_num_seqs=len(case.batch) + 1,
            num_sms=case.num_sms,
            device=self.device,
        )
        plan.partial_out.fill_(NAN)
        plan.partial_lse.fill_(NAN)
        plan.records.fill_(-1)
        return plan

    def run(self, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and LSE, with a row of NaN behind each that nothing may write."""
        case = self.case
        num_tokens, heads, dim = self.query.shape
        out = torch.full((num_tokens + 1, heads, dim), NAN, dtype=case.dtype, device=self.device)
        lse = torch.full((heads + 1, num_tokens), NAN, device=self.device) if case.lse else None
        starts, lens = self.starts.to(self.device), torch.tensor(self.lens, dtype=torch.int32, device=self.device)
        plan_decode(plan, starts, lens, max_query_len=case.max_query_len, window=case.window)

        def on_device(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(self.device)

        decode_attention(
            plan,
            self.query,
            self.cache,
            self.table.to(self.device),
            starts,
            lens,
            out[:num_tokens],
            None if lse is None else lse[:heads],
            scale=1.2 * dim**-0.5,
            window=case.window,
            softcap=case.softcap,
            alibi_slopes=on_device(self.slopes),
            sinks=on_device(self.sinks),
            k_scale=on_device(self.scales[0]),
            v_scale=on_device(self.scales[1]),
            causal=case.causal,
        )
        return out, lse

    def check(self, plan: DecodePlan) -> None:
        """Runs, and compares everything that was or was not to be written."""
        case = self.case
        out, lse = self.run(plan)
        num_tokens, heads = self.query.shape[:2]
        assert out[num_tokens].isnan().all()
        assert lse is None or lse[heads].isnan().all()
        tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[case.dtype]
        end = int(self.starts[-1])
        assert not out[end:num_tokens].any()
        assert lse is None or (lse[:heads, end:] == float("-inf")).all()
        assert not plan.counters.any()
        for index, (query_len, length) in enumerate(case.batch):
            tokens = slice(int(self.starts[index]), int(self.starts[index + 1]))
            if query_len > case.max_query_len:
                assert out[tokens].isnan().all()
                continue
            if query_len == 0:
                continue
            expected, expected_lse = self.attend(tokens, length, self.slots[index])
            got = out[tokens].double().cpu()
            assert (got - expected).norm() <= tolerance * max(float(expected.norm()), 1e-30), (index, query_len, length)
            if lse is not None:
                torch.testing.assert_close(
                    lse[:heads, tokens].double().cpu(), expected_lse, rtol=tolerance, atol=tolerance
                )

    def attend(self, tokens: slice, length: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        group = case.num_query_heads // case.num_kv_heads
        rows = self.cache.cpu().flatten(1, 2)[:, slots].double()
        if self.scales[0] is not None:
            rows *= torch.stack([self.scales[0], self.scales[1]])[:, None, :, None]
        keys, values = rows.repeat_interleave(group, 2).unbind()
        query = self.query[tokens].double().cpu()
        logits = torch.einsum("thd,lhd->htl", query, keys) * (1.2 * case.head_size**-0.5)
        if case.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        key, position = torch.arange(length)[None, :], (length - len(query) + torch.arange(len(query)))[:, None]
        if self.slopes is not None:
            logits += self.slopes.double()[:, None, None] * (key - position)
        left, right = case.window
        hidden = torch.zeros(len(query), length, dtype=torch.bool)
        hidden |= (key > position) if case.causal else hidden
        hidden |= (key < position - left) if left >= 0 else hidden
        hidden |= (key > position + right) if right >= 0 else hidden
        logits[:, hidden] = float("-inf")
        joined = logits
        if self.sinks is not None:
            joined = torch.cat([logits, self.sinks.double()[:, None, None].expand(-1, len(query), 1)], 2)
        lse = torch.logsumexp(joined, 2)
        weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[:, :, None])
        return torch.einsum("htl,lhd->thd", weights, values), lse


RAGGED = ((1, 300), (1, 1), (1, 17), (1, 129), (0, 0))
QUERIES = ((1, 200), (1, 3), (3, 150), (16, 16), (9, 260), (17, 40), (2, 2), (0, 0), (0, 0))
SMALL = [
    Case(batch=RAGGED, max_query_len=1),
    Case(batch=((1, 513),), max_query_len=1, padding=0, num_sms=4),
    Case(batch=QUERIES),
    Case(batch=QUERIES, num_query_heads=14, num_sms=3, lse=False),
    Case(batch=((4, 260), (4, 4), (4, 70), (0, 0)), max_query_len=4),
    Case(batch=RAGGED, num_query_heads=2, max_query_len=1, hnd=True, block_size=48),
    Case(batch=((1, 150), (1, 40)), num_query_heads=71, num_kv_heads=1, max_query_len=1, num_sms=3),
    Case(batch=((2, 150), (16, 200)), num_query_heads=12, num_kv_heads=1, num_sms=1),
    Case(batch=QUERIES, window=(70, 0), sinks=True),
    Case(batch=((1, 150), (12, 200), (3, 3)), causal=False, window=(40, 5), block_size=128),
    Case(batch=((1, 150), (12, 200), (3, 3)), causal=False, block_size=64),
    Case(batch=QUERIES[:4], softcap=2.5, alibi=True, sinks=True, hnd=True),
    Case(batch=RAGGED, head_size=72, max_query_len=1, sinks=True),
    Case(batch=((1, 150), (1, 20)), head_size=256, max_query_len=1),
    Case(batch=RAGGED, head_size=64, dtype=torch.float16, max_query_len=1),
    Case(batch=((1, 0), (3, 2), (1, 5)), sinks=True),
    Case(batch=((1, 0), (0, 0))),
    Case(batch=((0, 0), (0, 0)), padding=5),
    Case(batch=((17, 90), (40, 40)), padding=3),
    Case(batch=((1, 150), (2, 90)), dtype=torch.float16, kv_dtype=torch.float8_e5m2),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_short_queries(case: Case, device: torch.device) -> None:
    problem = Problem(case, device)
    problem.check(problem.plan())


def test_one_plan_serves_any_batch(device: torch.device) -> None:
    """What a graph does: the same tensors, other contents; and nothing is left over from the batch before."""
    base = Case(batch=RAGGED)
    plan = Problem(base, device).plan()
    for batch in (RAGGED, ((3, 5),), ((16, 400), (1, 1)), ((0, 0), (0, 0)), RAGGED):
        Problem(replace(base, batch=batch), device).check(plan)


@pytest.mark.parametrize(
    ("lens", "chunk_tiles", "chunks"),
    [
        # Two units of 9 tiles each among 8 programs: 3 tiles each.
        ([513], 3, 6),
        # Units of 9 and 6 tiles: a fair share of the 30 is 4, but makes 10 chunks.
        ([513, 350], 5, 8),
        # More units than programs.
        ([513, 64, 64, 64, 64], 1, 26),
        ([0, 0], 1, 0),
    ],
)
def test_few_units_are_cut_evenly(lens: list[int], chunk_tiles: int, chunks: int, device: torch.device) -> None:
    batch = tuple((min(length, 1), length) for length in lens)
    problem = Problem(Case(batch=batch, num_sms=4), device)
    plan = problem.plan()
    problem.check(plan)
    assert plan.programs == 8
    assert (plan.records[:, 2] == chunk_tiles * plan.block_n).all()
    assert (plan.records[:, 3] == chunks).all()


def test_the_order_of_arrival_does_not_matter(device: torch.device) -> None:
    problem = Problem(Case(batch=((1, 700), (2, 300)), num_sms=5), device)
    plan = problem.plan()
    first, _ = problem.run(plan)
    for _ in range(3):
        again, _ = problem.run(plan)
        assert torch.equal(first[:3], again[:3])


LONG = ((1, 1), (1, 16), (1, 127), (1, 128), (1, 129), (1, 4096), (1, 30000), (2, 999), (5, 5), (16, 5000), (11, 64))
ONES = tuple((1, 1 + 613 * index % 2500) for index in range(70)) + ((0, 0),) * 5


@pytest.mark.gpu
@pytest.mark.parametrize(("block_size", "dtype"), [(16, torch.bfloat16), (128, torch.bfloat16), (48, torch.float16)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 8, 128), (28, 4, 128), (4, 2, 64)])
def test_models(heads: int, kv_heads: int, dim: int, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
    base = Case(
        batch=LONG,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=dim,
        block_size=block_size,
        dtype=dtype,
        num_sms=132,
    )
    for case in (base, replace(base, batch=ONES, max_query_len=1), replace(base, hnd=True, batch=LONG[::-1])):
        problem = Problem(case, device)
        problem.check(problem.plan())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("group", "dim"), [(1, 32), (3, 40), (7, 72), (8, 80), (71, 64), (4, 96), (2, 112), (5, 160), (6, 192), (8, 256)]
)
def test_sizes(group: int, dim: int, device: torch.device) -> None:
    case = Case(batch=LONG, num_query_heads=2 * group, head_size=dim, dtype=torch.bfloat16, num_sms=132)
    for one in (case, replace(case, batch=ONES, max_query_len=1)):
        problem = Problem(one, device)
        problem.check(problem.plan())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), (100, 0), (4096, -1), (0, 0), (31, 7)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_features(window: tuple[int, int], causal: bool, kv_dtype: torch.dtype | None, device: torch.device) -> None:
    base = Case(
        batch=LONG,
        num_query_heads=32,
        num_kv_heads=8,
        head_size=128,
        dtype=torch.bfloat16,
        kv_dtype=kv_dtype,
        window=window,
        causal=causal,
        num_sms=132,
    )
    for softcap, alibi, sinks in ((0.0, False, False), (20.0, False, True), (0.0, True, False), (5.0, True, True)):
        problem = Problem(replace(base, softcap=softcap, alibi=alibi, sinks=sinks), device)
        problem.check(problem.plan())


@pytest.mark.gpu
def test_a_graph_serves_other_batches(device: torch.device) -> None:
    """Captured on one batch, replayed on others of other lengths, with scratch and outputs poisoned in between."""
    base = Case(batch=ONES, num_query_heads=32, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, num_sms=132)
    problem = Problem(base, device)
    plan = problem.plan()
    problem.run(plan)
    table, lens, starts = problem.table.to(device), torch.tensor(problem.lens, dtype=torch.int32), problem.starts
    lens, starts = lens.to(device), starts.to(device)
    query, out = problem.query, torch.empty(problem.query.shape, dtype=torch.bfloat16, device=device)

    def step() -> None:
        plan_decode(plan, starts, lens, max_query_len=1, window=(-1, -1))
        decode_attention(
            plan, query, problem.cache, table, starts, lens, out, None, scale=1.2 * 128**-0.5,
            window=(-1, -1), softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, causal=True,
        )  # fmt: skip

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    expected_of = [problem.attend(slice(i, i + 1), n, problem.slots[i])[0] for i, n in enumerate(problem.lens[:70])]
    for seed in range(3):
        order = torch.randperm(70, generator=torch.Generator().manual_seed(seed))
        table[:70] = problem.table[order].to(device)
        lens[:70] = torch.tensor(problem.lens)[order].int().to(device)
        query[:70] = problem.query[:70].clone()[order.to(device)] if seed == 0 else query[:70]
        out.fill_(NAN)
        plan.partial_out.fill_(NAN)
        plan.partial_lse.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        if seed == 0:
            for row, index in enumerate(order.tolist()):
                got, expected = out[row].double().cpu(), expected_of[index][0]
                assert (got - expected).norm() <= 1e-2 * expected.norm()
        assert not out[70:].any()
        assert not out.isnan().any()
