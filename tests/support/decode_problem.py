"""Ragged paged batches of short queries over poisoned memory, and what attention of them is by definition."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.kernels.attention_scratch import MAX_SHORT_QUERY
from phonograph.kernels.triton.attention.decode import decode_attention
from phonograph.kernels.triton.attention.decode_plan import DecodePlan, make_decode_plan, plan_decode

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A batch of (query length, keys), empty slots as (0, 0); features off unless named.

    shared: by sequence (an earlier sequence, keys): it has that one's pages up to these keys. Empty: nothing is shared,
    and no plan for it is made
    """

    batch: tuple[tuple[int, int], ...]
    shared: tuple[tuple[int, int], ...] = ()
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
    divide: bool = False
    prefix_tiles: bool = False
    in_tiles: bool = True

    def __str__(self) -> str:
        defaults = Case(batch=())
        named = {name: value for name, value in vars(self).items() if value != getattr(defaults, name)}
        return ",".join(f"{name}={str(value).replace('torch.', '')}" for name, value in named.items())[:120]


class Problem:
    """The tensors of a case. Memory that no kernel may read is NaN, and so are outputs and scratch."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(len(str(case)))
        size, heads, kv_heads, dim = case.block_size, case.num_query_heads, case.num_kv_heads, case.head_size
        query_lens, self.lens = [list(column) for column in zip(*case.batch, strict=True)]
        num_blocks = [-(-length // size) for length in self.lens]
        shared = case.shared or ((0, 0),) * len(self.lens)
        num_own = [count - keys // size for count, (_, keys) in zip(num_blocks, shared, strict=True)]
        total_blocks = 1 + sum(num_own) + 3
        ids = 1 + torch.randperm(total_blocks - 1, generator=generator)
        self.table = torch.zeros(len(self.lens), max(num_blocks) + 2, dtype=torch.int32)
        rows = torch.full((2, total_blocks * size, kv_heads, dim), NAN)
        self.slots: list[torch.Tensor] = []
        for index, (blocks, length) in enumerate(zip(ids[: sum(num_own)].split(num_own), self.lens, strict=True)):
            source, keys = shared[index]
            first = keys // size
            self.table[index, :first] = self.table[source, :first]
            self.table[index, first : num_blocks[index]] = blocks
            slots = (self.table[index, : num_blocks[index], None].long() * size + torch.arange(size)).flatten()[:length]
            rows[:, slots[first * size :]] = torch.randn(2, length - first * size, kv_heads, dim, generator=generator)
            self.slots.append(slots)
        if case.window[0] >= 0:
            # Pages behind the windows have been freed.
            for index, (query_len, length) in enumerate(case.batch):
                self.table[index, : max(length - query_len - case.window[0], 0) // size] = ids[-1 - index % 3]
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
            shared_tokens=self.query.shape[0] if case.shared else 0,
            prefix_tiles=case.prefix_tiles,
        )
        if plan.prefixes is not None:
            plan.prefixes.shared.fill_(1 << 20)
            plan.prefixes.words.fill_(-1)
        plan.partial_out.fill_(NAN)
        plan.partial_lse.fill_(NAN)
        plan.records.fill_(-1)
        self.multiprocessors = torch.full((1,), -1, dtype=torch.int32, device=self.device)
        return plan

    def run(self, plan: DecodePlan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Output and LSE, with a row of NaN behind each that nothing may write."""
        case = self.case
        num_tokens, heads, dim = self.query.shape
        out = torch.full((num_tokens + 1, heads, dim), NAN, dtype=case.dtype, device=self.device)
        lse = torch.full((heads + 1, num_tokens), NAN, device=self.device) if case.lse else None
        starts, lens = self.starts.to(self.device), torch.tensor(self.lens, dtype=torch.int32, device=self.device)
        table = self.table.to(self.device)
        plan_decode(
            plan,
            starts,
            lens,
            max_query_len=case.max_query_len,
            window=case.window,
            multiprocessors=self.multiprocessors if case.divide else None,
            divide=case.divide,
            in_tiles=case.prefix_tiles and case.in_tiles,
            block_tables=(table,),
            block_size=case.block_size,
        )

        def on_device(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(self.device)

        decode_attention(
            plan,
            self.query,
            self.cache,
            table,
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
            max_query_len=case.max_query_len,
            in_tiles=case.prefix_tiles and case.in_tiles,
        )
        return out, lse

    def check(self, plan: DecodePlan) -> None:
        """Run, and compare everything that should and should not be written."""
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
        assert plan.prefixes is None or not plan.prefixes.arrivals.any()
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
        scales, slopes, sinks = (
            None if one is None else one.to(self.device, torch.float64)
            for one in (None if self.scales[0] is None else torch.stack([*self.scales]), self.slopes, self.sinks)
        )
        rows = self.cache.flatten(1, 2)[:, slots.to(self.device)].double()
        if scales is not None:
            rows *= scales[:, None, :, None]
        keys, values = rows.repeat_interleave(group, 2).unbind()
        query = self.query[tokens].double()
        logits = torch.einsum("thd,lhd->htl", query, keys) * (1.2 * case.head_size**-0.5)
        if case.softcap:
            logits = case.softcap * torch.tanh(logits / case.softcap)
        key = torch.arange(length, device=self.device)[None, :]
        position = torch.arange(length - len(query), length, device=self.device)[:, None]
        if slopes is not None:
            logits += slopes[:, None, None] * (key - position)
        left, right = case.window
        hidden = torch.zeros(len(query), length, dtype=torch.bool, device=self.device)
        hidden |= (key > position) if case.causal else hidden
        hidden |= (key < position - left) if left >= 0 else hidden
        hidden |= (key > position + right) if right >= 0 else hidden
        logits[:, hidden] = float("-inf")
        joined = logits
        if sinks is not None:
            joined = torch.cat([logits, sinks[:, None, None].expand(-1, len(query), 1)], 2)
        lse = torch.logsumexp(joined, 2)
        weights = torch.exp(logits - torch.where(lse.isinf(), 0.0, lse)[:, :, None])
        return torch.einsum("htl,lhd->thd", weights, values).cpu(), lse.cpu()
