"""FlashAttention's adapters on stand-ins for the libraries: what they pass, what a graph freezes, what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any

import fake_flash
import numpy as np
import pytest
import torch
from divided_attention import DECODES, MIXED, check_divided
from fake_flash import CALLS
from flash_kernels import kernel_missing

from phonograph.attention import selection as select_module
from phonograph.attention.attention_spec import AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.backend import AttentionBackend, AttentionCall
from phonograph.attention.flash_attn.providers import missing, provider_of
from phonograph.attention.flash_attn.sizes import ACCUMULATOR_BYTES, MAX_SPLITS, split_bound
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.selection import load, select
from phonograph.core.device import known_device
from phonograph.core.limits import Limits
from phonograph.errors import BackendError, ConfigError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.testing.conformance import check_backend
from phonograph.testing.conformance_batch import BatchShape, batch_shapes, make_layer, shapes_of

pytest.importorskip("triton")

from phonograph.attention.flash_attn.backend import (
    FlashAttention2Backend,
    FlashAttention3Backend,
    FlashAttention4Backend,
    FlashAttentionBackend,
)

Installed = Callable[..., Path]
H100 = known_device("h100")
FULL = (-1, -1)
SPEC = AttentionSpec(
    num_query_heads=4, num_kv_heads=2, head_size=32, dtype="float32", kv_cache_dtype="float32", block_size=16, lse=True
)
BACKENDS: dict[str, type[FlashAttentionBackend]] = {
    "2": FlashAttention2Backend,
    "3": FlashAttention3Backend,
    "4": FlashAttention4Backend,
}


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(package: str, spec: AttentionSpec, device: torch.device, seed: int = 0) -> None:
    spec = replace(spec, non_causal=not spec.alibi)
    # The others, and all features at once, are for the GPU: the interpreter and the oracle are slow.
    shapes = [shape for shape in shapes_of(spec) if shape.name in SHAPES]
    results = check_backend(BACKENDS[package[-1]], spec, device, shapes=shapes, seed=seed)
    assert results and CALLS
    assert all(result.passed for result in results), [str(result) for result in results if not result.passed]


SHAPES = ("decodes", "mixed", "uniform 3", "empty", "not causal", "bidirectional", "without keys")
FEATURES = {
    "plain": {},
    "left windows": {"windows": (FULL, (0, 0), (6, 0), (33, -1))},
    "one window": {"windows": ((9, 0),)},
    "windows on both sides": {"windows": ((5, 4), (-1, 3), (20, 0))},
    "softcap": {"softcap": 1.5, "lse": False},
    "hnd": {"layout": KVLayout.HND, "num_kv_heads": 1},
    "as many heads": {"num_kv_heads": 4},
    "bidirectional": {"kind": AttentionKind.ENCODER_ONLY, "windows": ((5, 4),)},
}


@pytest.mark.parametrize(
    ("package", "feature"),
    [
        *((package, feature) for package in ("vllm 2", "vllm 3") for feature in FEATURES),
        *((package, "windows on both sides") for package in ("interface 3", "vllm 4", "cute 4")),
        ("interface 3", "one window"),
        ("cute 4", "softcap"),
    ],
)
def test_conformance(package: str, feature: str, installed: Installed, device: torch.device) -> None:
    installed(package)
    check(package, replace(SPEC, **FEATURES[feature]), device, seed=len(feature))


def test_pages_of_256(installed: Installed, device: torch.device) -> None:
    installed("package 2")
    shapes = [
        BatchShape(name="decodes", query_lens=(1,) * 3, seq_lens=(257, 256, 1), padded_reqs=1, padded_tokens=1),
        BatchShape(name="mixed", query_lens=(1, 5), seq_lens=(300, 258), padded_reqs=1, padded_tokens=2),
        BatchShape(name="without keys", query_lens=(1, 5), seq_lens=(0, 1), padded_tokens=2, causal=False),
    ]
    results = check_backend(FlashAttention2Backend, replace(SPEC, block_size=256), device, shapes=shapes)
    assert all(result.passed for result in results), [str(result) for result in results]


FP8 = replace(SPEC, dtype="bfloat16", kv_cache_dtype="float8_e4m3fn")


@pytest.fixture
def exact_rounding(monkeypatch: pytest.MonkeyPatch, device: torch.device, request: pytest.FixtureRequest) -> None:
    """Round to FP8 with torch where there is no GPU: the interpreter drops a carry that fills the mantissa."""

    def rounded(query_THD: torch.Tensor, scale_K: torch.Tensor | None, out_THD: torch.Tensor) -> None:
        group = query_THD.shape[1] // (1 if scale_K is None else len(scale_K))
        scale_H1 = 1.0 if scale_K is None else scale_K.repeat_interleave(group)[:, None]
        out_THD.copy_((query_THD.float() / scale_H1).clamp(-448, 448).to(out_THD.dtype))

    if device.type == "cpu":
        monkeypatch.setattr("phonograph.attention.flash_attn.backend.quantize_queries", rounded)
        request.getfixturevalue("quick_kv_write")


@pytest.mark.usefixtures("exact_rounding")
@pytest.mark.parametrize(
    ("package", "changes"),
    [
        ("vllm 3", {}),
        ("vllm 3", {"windows": (FULL, (6, 0)), "layout": KVLayout.HND}),
        ("vllm 3", {"sinks": True, "softcap": 1.5}),
        ("interface 3", {}),
    ],
    ids=str,
)
def test_an_fp8_cache(package: str, changes: dict[str, object], installed: Installed, device: torch.device) -> None:
    """Within the rounding of bfloat16, as the stand-in rounds no weights, and the oracle gets the queries rounded."""
    installed(package)
    shapes = [shape for shape in batch_shapes(16, AttentionKind.DECODER) if shape.name in SHAPES]
    results = check_backend(FlashAttention3Backend, replace(FP8, **changes), device, shapes=shapes)
    assert all(result.passed and result.out_error < 1e-2 for result in results), [str(result) for result in results]
    assert all(call["q"].dtype == torch.float8_e4m3fn for call in CALLS)


@pytest.mark.usefixtures("exact_rounding")
def test_a_graph_over_an_fp8_cache_reads_scales_at_fixed_addresses(installed: Installed) -> None:
    installed("vllm 3")
    step = Step("3", FP8, slots=5, tokens=6)
    calls = [step.run(batch, MIXED)[0] for batch in BATCHES]
    assert len({call["q"].data_ptr() for call in calls}) == 1
    layer = step.layers[0]
    for name, scale in (("q_descale", layer.q_scale), ("k_descale", layer.k_scale), ("v_descale", layer.v_scale)):
        factors = [call[name] for call in calls]
        assert scale is not None and {factor.data_ptr() for factor in factors} == {scale.data_ptr()}
        assert all(torch.equal(factor, scale.expand(5, 2)) for factor in factors)
    step.layers = [replace(layer, q_scale=None, k_scale=None, v_scale=None)]
    (call,) = step.run(BATCHES[0], MIXED)
    assert call["q_descale"] is call["k_descale"] is call["v_descale"] is None


@pytest.mark.parametrize("package", ["vllm 3", "interface 3"])
def test_a_package_without_factors_for_fp8(package: str, installed: Installed) -> None:
    folder = installed(package)
    file, function = {
        "vllm 3": ("vllm/vllm_flash_attn/__init__.py", "flash_attn_varlen_func"),
        "interface 3": ("flash_attn_interface.py", "flash_attn_with_kvcache"),
    }[package]
    without_arguments(folder / file, function, ["k_descale", "q_descale"])
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
    FlashAttention3Backend(SPEC, torch.device("cpu"), limits)
    with pytest.raises(BackendError) as caught:
        FlashAttention3Backend(FP8, torch.device("cpu"), limits)
    for part in (f"has {function} without the argument k_descale, q_descale", "of unknown version"):
        assert part in str(caught.value)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_alibi(softcap: float, installed: Installed, device: torch.device) -> None:
    installed("vllm 2")
    check("vllm 2", replace(SPEC, alibi=True, softcap=softcap), device)
    assert all(call["alibi_slopes"].dtype == torch.float32 for call in CALLS)


@pytest.mark.parametrize("package", ["vllm 3", "cute 4"])
def test_sinks(package: str, installed: Installed, device: torch.device) -> None:
    installed(package)
    check(package, replace(SPEC, sinks=True, dtype="bfloat16", kv_cache_dtype="bfloat16"), device)


def test_the_published_kernel(installed: Installed, device: torch.device) -> None:
    installed("published 3")
    check("published 3", SPEC, device)


class Step:
    """Batches in persistent tensors, and a backend with its builder."""

    def __init__(self, version: str, spec: AttentionSpec, *, slots: int, tokens: int, max_model_len: int = 64) -> None:
        self.spec, self.tokens = spec, tokens
        limits = Limits(max_num_seqs=slots, max_num_batched_tokens=max(tokens, slots), max_model_len=max_model_len)
        self.backend = BACKENDS[version](spec, torch.device("cpu"), limits)
        self.builder = self.backend.make_builder()
        self.starts = torch.zeros(slots + 1, dtype=torch.int32)
        self.lens = torch.zeros(slots, dtype=torch.int32)
        self.table = torch.arange(slots * 4, dtype=torch.int32).view(slots, 4)
        self.slot_mapping = torch.full((tokens,), -1)
        generator = torch.Generator().manual_seed(tokens)
        heads, kv_heads, size = spec.num_query_heads, spec.num_kv_heads, spec.head_size
        cache = torch.randn(2, slots * 4, spec.block_size, kv_heads, size, generator=generator)
        query = torch.randn(tokens, heads + 2 * kv_heads, size, generator=generator)[:, :heads]
        self.cache, self.query = (
            rows.to(getattr(torch, dtype)) for rows, dtype in ((cache, spec.kv_cache_dtype), (query, spec.dtype))
        )
        self.layers = [
            make_layer(spec, index, window, torch.device("cpu"), generator) for index, window in enumerate(spec.windows)
        ]

    def fill(self, batch: list[tuple[int, int]]) -> CommonMetadata:
        queries = np.array([*(query for query, _ in batch), *[0] * (len(self.lens) - len(batch))], np.int32)
        lens = np.array([*(length for _, length in batch), *[0] * (len(self.lens) - len(batch))], np.int32)
        starts = np.concatenate([[0], queries.cumsum()]).astype(np.int32)
        self.starts.copy_(torch.from_numpy(starts))
        self.lens.copy_(torch.from_numpy(lens))
        num_decodes = sum(query == 1 for query, _ in batch)
        return CommonMetadata(
            num_reqs=len(batch),
            num_decodes=num_decodes,
            num_tokens=int(starts[-1]),
            num_decode_tokens=num_decodes,
            max_query_len=int(queries.max()),
            max_seq_len=int(lens.max()),
            query_start_loc=self.starts,
            seq_lens=self.lens,
            block_table=self.table,
            slot_mapping=self.slot_mapping,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
        )

    def run(self, batch: list[tuple[int, int]], key: GraphKey | None) -> list[dict]:
        """Build, schedule and attend; return the arguments that the library got for each layer."""
        metadata = self.builder.build(self.fill(batch), key=key)
        self.backend.schedule(metadata)
        return self.attend(metadata)

    def attend(self, metadata: object) -> list[dict]:
        CALLS.clear()
        for layer in self.layers:
            out = torch.full_like(self.query, torch.nan, memory_format=torch.contiguous_format)
            lse = torch.full((self.spec.num_query_heads, self.tokens), torch.nan) if self.spec.lse else None
            self.backend.forward(self.query, AttentionCall(layer, self.cache, metadata), out, lse)
            end = int(self.starts[-1])
            assert bool(out[:end].isfinite().all())
        return list(CALLS)


@pytest.mark.usefixtures("quick_kv_write")
@pytest.mark.parametrize("lens", [MIXED, DECODES], ids=["mixed", "decodes"])
@pytest.mark.parametrize("package", ["vllm 2", "vllm 3", "interface 3", "cute 4"])
def test_ranks_share_the_tokens_of_a_head(
    package: str, lens: tuple[list[int], list[int]], installed: Installed
) -> None:
    installed(package)
    check_divided(BACKENDS[package[-1]], 2, lens, size=16)


@pytest.mark.parametrize("package", ["vllm 2", "vllm 3", "interface 3", "cute 4"])
@pytest.mark.parametrize("batch", [[(1, 0), (4, 0), (2, 30)], [(1, 0), (2, 0)]])
def test_queries_without_keys(batch: list[tuple[int, int]], package: str, installed: Installed) -> None:
    """Their log-sum-exp is minus infinity, as those of first prompt chunks where ranks share the context."""
    installed(package)
    step = Step(package[-1], SPEC, slots=4, tokens=8)
    metadata = step.builder.build(replace(step.fill(batch), causal=False), key=None)
    step.backend.schedule(metadata)
    out, lse_HT = torch.full((8, 4, 32), torch.nan), torch.full((4, 8), -torch.inf)
    step.backend.forward(step.query, AttentionCall(step.layers[0], step.cache, metadata), out, lse_HT)
    sees = torch.tensor([keys > 0 for query, keys in batch for _ in range(query)])
    sees = torch.cat([sees, torch.zeros(8 - len(sees), dtype=torch.bool)])
    assert bool((lse_HT.isfinite() == sees).all()) and bool((lse_HT[:, ~sees] == -torch.inf).all())


BATCHES = [[(1, 40), (1, 7), (2, 30)], [(1, 64)], [(6, 64)], [(1, 1), (1, 2), (1, 3), (1, 4)]]
MIXED = GraphKey(GraphSet.MIXED, 6, 5)


@pytest.mark.parametrize("version", ["3 vllm", "3 interface"])
def test_one_plan_buffer_and_the_same_numbers_for_every_batch_of_a_graph(version: str, installed: Installed) -> None:
    version, package = version.split()
    installed(f"{package} {version}")
    step = Step(version, SPEC, slots=5, tokens=6)
    calls = [step.run(batch, MIXED)[0] for batch in BATCHES]
    plans = [call["scheduler_metadata"] for call in calls]
    assert len({plan.data_ptr() for plan in plans}) == 1
    assert {plan.shape for plan in plans} == {(1 + 8 * 3,)}
    for argument in ("num_splits", "max_seqlen_q", "causal"):
        assert len({call[argument] for call in calls}) == 1
    assert calls[0]["max_seqlen_q"] == 6 and calls[0]["num_splits"] == MAX_SPLITS
    assert calls[0].get("max_seqlen_k", 64) == 64
    # Another graph, and eager steps, have the same buffer.
    assert step.run(BATCHES[0], None)[0]["scheduler_metadata"].data_ptr() == plans[0].data_ptr()


def test_the_plan_buffer_holds_the_largest_and_its_tail_is_zeroed(installed: Installed) -> None:
    installed("vllm 3")
    step = Step("3", SPEC, slots=5, tokens=6)
    buffer = step.backend._plan
    assert buffer.dtype == torch.int32 and buffer.shape == (1 + 8 * 4,)
    for batch in BATCHES:
        buffer.fill_(99)
        (call,) = step.run(batch, MIXED)
        size = call["scheduler_metadata"].shape[0]
        assert size < len(buffer) and not buffer[size:].any()
        assert torch.equal(buffer[:size], call["scheduler_metadata"])


def test_a_plan_that_just_fits_is_taken_and_a_larger_one_refused(installed: Installed) -> None:
    installed("vllm 3")
    step = Step("3", SPEC, slots=5, tokens=6)
    functions = step.backend._library.functions
    fits = functions["get_scheduler_metadata"] = lambda **_: torch.arange(33, dtype=torch.int32)
    metadata = step.builder.build(step.fill(BATCHES[0]), key=MIXED)
    step.backend.schedule(metadata)
    assert torch.equal(metadata.plan.part, fits())
    functions["get_scheduler_metadata"] = lambda **_: torch.zeros(34, dtype=torch.int32)
    with pytest.raises(BackendError, match="34 numbers for 5 request slots"):
        step.run(BATCHES[0], MIXED)


def test_pieces_attend_with_the_plan_that_their_graph_makes(installed: Installed) -> None:
    """At replay only the kernels of `schedule` run: here, once more with the metadata of the capture."""
    installed("vllm 3")
    step = Step("3", SPEC, slots=5, tokens=6)
    key = replace(MIXED, graphs=GraphSet.PIECEWISE)
    captured = step.builder.build(step.fill(BATCHES[0]), key=key)
    step.backend.schedule(captured)
    step.run(BATCHES[3], None)  # something eager in between
    for batch in BATCHES:
        metadata = step.builder.build(step.fill(batch), key=key)
        step.backend.schedule(captured)
        (call,) = step.attend(metadata)
        assert call["scheduler_metadata"] is not None and call["max_seqlen_q"] == 6


def test_mixed_windows_have_no_plan_and_one_split_in_graphs(installed: Installed) -> None:
    installed("vllm 3")
    step = Step("3", replace(SPEC, windows=(FULL, (4, 0))), slots=5, tokens=6)
    for batch in BATCHES:
        calls = step.run(batch, MIXED)
        assert [call["window_size"] for call in calls] == [[-1, -1], [4, 0]]
        assert all(call["scheduler_metadata"] is None and call["num_splits"] == 1 for call in calls)
        assert all(call["num_splits"] == 0 for call in step.run(batch, None))
    assert not step.backend._plan.any()
    wide = replace(SPEC, windows=(FULL, (4, 0)), num_query_heads=64, head_size=256)
    many = Step("3", wide, slots=20, tokens=20)
    assert {call["num_splits"] for call in many.run([(1, 5)], None)} == {1}


@pytest.mark.parametrize("package", ["vllm 3", "interface 3"])
def test_batch_invariance_is_one_split_no_plan_and_one_launch_for_all(package: str, installed: Installed) -> None:
    installed(package)
    step = Step("3", replace(SPEC, batch_invariant=True), slots=5, tokens=6)
    keys = (None, MIXED, GraphKey(GraphSet.DECODE, 5, 5, 1), replace(MIXED, graphs=GraphSet.PIECEWISE))
    told: set[tuple[object, ...]] = set()
    for key in keys:
        for batch in [BATCHES[3]] if key is not None and key.graphs is GraphSet.DECODE else BATCHES:
            for call in step.run(batch, key):
                assert call["scheduler_metadata"] is None
                told.add((call["num_splits"], call["max_seqlen_q"], call.get("max_seqlen_k")))
    assert len(told) == 1 and told.pop()[:2] == (1, 6)
    assert not step.backend._plan.any()


@pytest.mark.parametrize(
    ("heads", "head_size", "tokens", "bound"),
    [
        (32, 128, 1, 32),
        (32, 128, 256, 32),
        (32, 128, 257, 31),
        (32, 128, 512, 16),
        (32, 128, 2048, 4),
        (32, 128, 4096, 2),
        (32, 128, 4097, 1),
        (32, 128, 8192, 1),
        (64, 256, 1000, 2),
        (4, 32, 0, 32),
    ],
)
def test_the_bound_on_splits(heads: int, head_size: int, tokens: int, bound: int) -> None:
    spec = replace(SPEC, num_query_heads=heads, head_size=head_size)
    assert split_bound(tokens, spec) == bound
    assert bound == 1 or bound * heads * tokens * head_size * 4 <= ACCUMULATOR_BYTES


def test_the_bound_is_the_same_in_capture_replay_and_eager(installed: Installed) -> None:
    installed("vllm 3")
    step = Step("3", replace(SPEC, num_query_heads=64, head_size=256), slots=100, tokens=100)
    key = GraphKey(GraphSet.DECODE, 100, 100, 1)
    assert {step.run([(1, 3)] * count, key)[0]["num_splits"] for count in (1, 40, 100)} == {20}
    assert step.run([(1, 3)] * 7, None)[0]["num_splits"] == 20


def test_more_slots_than_the_library_splits_for(installed: Installed) -> None:
    installed("vllm 3")
    step = Step("3", SPEC, slots=1000, tokens=1000)
    (call,) = step.run([(1, 3)] * 1000, GraphKey(GraphSet.DECODE, 1000, 1000, 1))
    assert call["scheduler_metadata"].shape == (1 + 1000 * 2,)  # no vector of splits


@pytest.mark.parametrize("version", ["2", "3", "4"])
@pytest.mark.parametrize(
    ("key", "slots", "tokens", "batch", "longest"),
    [
        (GraphKey(GraphSet.DECODE, 4, 4, 1), 4, 4, [(1, 9), (1, 5)], 1),
        (GraphKey(GraphSet.DECODE, 8, 2, 4), 2, 8, [(4, 9)], 4),
        (GraphKey(GraphSet.MIXED, 6, 6), 6, 6, [(1, 9), (1, 5)], 6),
        (GraphKey(GraphSet.MIXED, 90, 3), 3, 90, [(1, 9)], 64),
    ],
)
def test_metadata_that_a_graph_freezes(
    version: str,
    key: GraphKey,
    slots: int,
    tokens: int,
    batch: list[tuple[int, int]],
    longest: int,
    installed: Installed,
) -> None:
    installed(f"vllm {version}")
    (call,) = Step(version, replace(SPEC, lse=False), slots=slots, tokens=tokens).run(batch, key)
    assert (call["max_seqlen_q"], call["max_seqlen_k"]) == (longest, 64)


@pytest.mark.parametrize(
    ("key", "slots", "tokens", "batch", "longest"),
    [
        # One token in every slot: folding is right, and fast.
        (None, 3, 3, [(1, 9), (1, 5), (1, 2)], 1),
        (GraphKey(GraphSet.PIECEWISE, 3, 3), 3, 3, [(1, 9), (1, 5)], 1),
        # Fewer or more tokens than slots: it must not fold.
        (None, 3, 5, [(1, 9), (1, 5)], 2),
        (GraphKey(GraphSet.PIECEWISE, 1, 4), 4, 1, [(1, 9)], 2),
        (GraphKey(GraphSet.MIXED, 1, 4), 4, 1, [(1, 9)], 2),
        (GraphKey(GraphSet.MIXED, 1, 1), 1, 1, [(1, 9)], 2),
        # Between pieces numbers are the batch's own.
        (GraphKey(GraphSet.PIECEWISE, 30, 4), 4, 30, [(1, 9), (7, 8)], 7),
    ],
)
def test_version_2_folds_only_where_every_slot_has_a_token(
    key: GraphKey | None, slots: int, tokens: int, batch: list[tuple[int, int]], longest: int, installed: Installed
) -> None:
    installed("vllm 2")
    (call,) = Step("2", replace(SPEC, lse=False), slots=slots, tokens=tokens).run(batch, key)
    assert call["max_seqlen_q"] == longest
    (with_lse,) = Step("2", SPEC, slots=slots, tokens=tokens).run(batch, key)
    assert with_lse["max_seqlen_q"] == max(longest, 2)
    assert call["num_splits"] == 0 and call["scheduler_metadata"] is None


@pytest.mark.parametrize("package", ["vllm 2", "package 2"])
@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 1, 1), (1, 3)])
@pytest.mark.parametrize("padding", [0, 4])
def test_version_2_as_two_launches(
    padding: int, lengths: tuple[int, ...], package: str, installed: Installed, device: torch.device
) -> None:
    """As it is selected: neither part writes over the other's rows, also where it has none of its own."""
    installed(package)
    block_size = 256 if package == "package 2" else 16
    made = load(select("flash_attn", "2", replace(HALF, block_size=block_size), H100))
    spec = replace(SPEC, speculative_tokens=lengths[0] - 1, block_size=block_size)
    # As many tokens as slots, in pieces and eagerly.
    slots = max(len(lengths), sum(lengths)) + padding
    shape = BatchShape(
        name="as many tokens as slots",
        query_lens=lengths,
        seq_lens=tuple(length + 20 for length in lengths),
        padded_reqs=slots - len(lengths),
        padded_tokens=slots - sum(lengths),
    )
    (result,) = check_backend(made, spec, device, shapes=[shape])
    assert result.passed, str(result)


@pytest.mark.parametrize(
    ("key", "slots", "tokens"),
    [
        (GraphKey(GraphSet.MIXED, 40, 5), 5, 40),
        (GraphKey(GraphSet.MIXED, 33, 40), 40, 33),
        (GraphKey(GraphSet.PIECEWISE, 40, 5), 5, 40),
        (None, 3, 32),
    ],
)
def test_version_2_folds_the_decodes_of_a_mixed_batch(
    key: GraphKey | None, slots: int, tokens: int, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their launch has a row for each of its slots, with and without tokens to spare; only folded, it cuts keys."""
    installed("vllm 2")
    monkeypatch.setitem(BACKENDS, "2", load(select("flash_attn", "2", HALF, H100)))
    step = Step("2", replace(SPEC, lse=False), slots=slots, tokens=tokens)
    decodes, prefills = step.run([(1, 40), (1, 7), (30, 50)], key)
    assert decodes["max_seqlen_q"] == 1 and len(decodes["q"]) == len(decodes["seqused_k"]) == min(slots, tokens)
    assert prefills["max_seqlen_q"] > 1 and len(prefills["q"]) == tokens


def test_lengths_of_keys_for_the_package_lie_in_the_persistent_buffer(installed: Installed) -> None:
    installed("package 2")
    step = Step("2", replace(SPEC, block_size=256), slots=5, tokens=6)
    calls = [step.run(batch, MIXED)[0] for batch in BATCHES]
    assert len({call["cu_seqlens_k"].data_ptr() for call in calls}) == 1
    assert calls[-1]["cu_seqlens_k"].tolist() == [0, 1, 3, 6, 10, 11], "the empty slot has a key too"


def test_alibi_without_a_causal_mask_is_refused(installed: Installed) -> None:
    installed("vllm 2")
    step = Step("2", replace(SPEC, alibi=True), slots=2, tokens=4)
    with pytest.raises(BackendError, match="ALiBi without a causal mask"):
        step.builder.build(replace(step.fill([(2, 9)]), causal=False), key=None)


# -- providers ---------------------------------------------------------------------------------------------------------

HALF = replace(SPEC, num_query_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16")


@pytest.mark.parametrize(
    ("version", "parts"),
    [
        ("2", ("vllm is not installed (pip install vllm)", "pip install flash-attn;", "multiple of 256")),
        ("3", ("pip install vllm", "hopper/", "pip install kernels", "kernels-community/flash-attn3")),
        ("4", ("pip install vllm", "pip install flash-attn-4")),
    ],
)
def test_nothing_is_installed(version: str, parts: tuple[str, ...], installed: Installed) -> None:
    installed()
    selection = select("flash_attn", version, HALF, H100)
    with pytest.raises(ConfigError) as caught:
        load(selection)
    for part in (f"'flash_attn {version}': cannot run: nothing here provides FlashAttention {version}", *parts):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match=f"nothing here provides FlashAttention {version}"):
        BACKENDS[version](HALF, torch.device("cpu"), Limits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1))


def test_half_an_installation_is_named(installed: Installed) -> None:
    folder = installed("vllm 2", "package 2")
    assert "vllm is installed without vllm/vllm_flash_attn/_vllm_fa3_C*.so" in str(missing("3"))
    assert "flash_attn is installed without flash_attn/cute/interface.py" in str(missing("4"))
    (folder / "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so").unlink()
    (folder / "flash_attn_2_cuda.py").unlink()
    assert "flash_attn is installed without flash_attn_2_cuda" in str(missing("2"))


@pytest.mark.parametrize("package", fake_flash.PACKAGES)
def test_nothing_is_imported_before_it_is_loaded(package: str, installed: Installed) -> None:
    installed(package)
    version = package[-1]
    spec = replace(HALF, block_size=256)
    selection = select("flash_attn", version, spec, H100)
    assert missing(version) is None and not any("cannot run here" in reason for reason in selection.reasons)
    top = provider_of(version).module.partition(".")[0]  # type: ignore[union-attr]
    assert top not in sys.modules
    made = load(selection)
    parts = made.keywords.values() if isinstance(made, partial) else [made]
    assert all(part is BACKENDS[version] for part in parts)
    assert isinstance(made, partial) == (version == "2"), "version 2 is two launches"
    assert top in sys.modules


def test_the_first_provider_of_a_version_is_taken(installed: Installed) -> None:
    installed("interface 3", "vllm 3", "published 3", "package 2")
    assert provider_of("3").module == "vllm.vllm_flash_attn"  # type: ignore[union-attr]
    assert provider_of("2").module == "flash_attn"  # type: ignore[union-attr]


def test_pages_of_the_package_are_multiples_of_256(installed: Installed) -> None:
    installed("package 2")
    selection = select(None, "2", replace(HALF, block_size=512), H100)
    assert selection.capabilities.label == "flash_attn 2"
    with pytest.raises(BackendError, match="block size 64; flash_attn, which provides it here, takes multiples of 256"):
        select(None, "2", replace(HALF, block_size=64), H100)
    installed("vllm 2")
    assert select(None, "2", replace(HALF, block_size=64), H100)


def without_arguments(file: Path, function: str, names: list[str]) -> None:
    """Remove these arguments from the signature of a function."""
    old = f"""
import inspect
_now = inspect.signature({function})

def {function}(*arguments): ...

{function}.__signature__ = _now.replace(parameters=[p for p in _now.parameters.values() if p.name not in {names}])
"""
    file.write_text(file.read_text() + old)


@pytest.mark.parametrize(
    ("package", "file", "function", "arguments", "lacking"),
    [
        ("vllm 3", "vllm/vllm_flash_attn/__init__.py", "flash_attn_varlen_func", "scheduler_metadata", "get_scheduler"),
        (
            "interface 3",
            "flash_attn_interface.py",
            "flash_attn_with_kvcache",
            "page_table, num_splits",
            "get_scheduler",
        ),
        ("package 2", "flash_attn/__init__.py", "flash_attn_varlen_func", "block_table, softcap", "flash_attn_varlen"),
    ],
)
def test_too_old(package: str, file: str, function: str, arguments: str, lacking: str, installed: Installed) -> None:
    folder, version = installed(package), package[-1]
    names = sorted(arguments.split(", "))
    without_arguments(folder / file, function, names)
    spec = replace(HALF, block_size=256)
    with pytest.raises(BackendError) as caught:
        load(select("flash_attn", version, spec, H100))
    for part in (
        f"has {function} without the argument {', '.join(names)}",
        "of unknown version",
        file.split("/")[0][:5],
    ):
        assert part in str(caught.value)
    sys.modules.pop(file.split("/")[0].removesuffix(".py"), None)
    for name in [name for name in sys.modules if name.startswith("vllm")]:
        del sys.modules[name]
    (folder / file).write_text("")
    with pytest.raises(BackendError, match="has no function (flash_attn|get_scheduler)"):
        load(select("flash_attn", version, spec, H100))


def test_an_import_that_fails(installed: Installed) -> None:
    folder = installed("vllm 3")
    (folder / "vllm/__init__.py").write_text("raise OSError('libcudart.so.11: cannot open')")
    with pytest.raises(BackendError, match=r"vllm.vllm_flash_attn \(vllm .*\) cannot be imported: libcudart.so.11"):
        load(select("flash_attn", "3", HALF, H100))


def test_a_compiled_part_that_does_not_load(installed: Installed) -> None:
    folder = installed("vllm 2", "vllm 3")
    init = folder / "vllm/vllm_flash_attn/__init__.py"
    init.write_text(init.read_text() + "from vllm.vllm_flash_attn import flash_attn_interface\n")
    (init.parent / "flash_attn_interface.py").write_text(
        "FA2_UNAVAILABLE_REASON = None\nFA3_UNAVAILABLE_REASON = 'undefined symbol: _ZN3c10'\n"
    )
    with pytest.raises(BackendError, match="cannot be imported: undefined symbol: _ZN3c10"):
        load(select("flash_attn", "3", HALF, H100))
    assert load(select("flash_attn", "2", HALF, H100))


def test_the_installed_version_is_named(installed: Installed) -> None:
    folder = installed("vllm 3")
    (folder / "vllm-0.9.1.dist-info").mkdir()
    (folder / "vllm-0.9.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.9.1\n")
    (folder / "vllm/vllm_flash_attn/__init__.py").write_text("")
    with pytest.raises(BackendError, match=r"vllm.vllm_flash_attn \(vllm 0.9.1\) has no function"):
        load(select("flash_attn", "3", HALF, H100))


def test_sinks_where_the_library_takes_none(installed: Installed) -> None:
    installed("interface 3")
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1)
    with pytest.raises(BackendError, match="has flash_attn_with_kvcache without the argument s_aux"):
        FlashAttention3Backend(replace(HALF, sinks=True), torch.device("cpu"), limits)


def test_version_4_is_loaded_on_blackwell(installed: Installed) -> None:
    installed("vllm 2", "vllm 3", "vllm 4")
    assert load(select("flash_attn", None, HALF, known_device("b200"))) is FlashAttention4Backend


def test_the_registry_is_complete() -> None:
    labels = {one.capabilities.label: one.loader for one in select_module.BUILT_IN}
    assert all(f"flash_attn {version}" in labels for version in "234")
    assert issubclass(FlashAttention3Backend, AttentionBackend)


def test_one_shape_is_not_the_rule() -> None:
    """The stand-in leaves rows of no request alone, so a backend that promised zeros would be caught."""
    assert not FlashAttentionBackend.clears_padding and AttentionBackend.clears_padding


def test_padding_that_is_written_is_noticed(installed: Installed, device: torch.device) -> None:
    installed("vllm 3")

    class Careless(FlashAttention3Backend):
        def forward(self, query_THD, call, out_THD, lse_HT=None) -> None:  # type: ignore[no-untyped-def]
            super().forward(query_THD, call, out_THD, lse_HT)
            out_THD[-1] = 1

    shape = BatchShape(name="padded", query_lens=(1, 3), seq_lens=(7, 9), padded_reqs=1, padded_tokens=2)
    (result,) = check_backend(Careless, SPEC, device, shapes=[shape])
    assert result.left or result.dirty


@pytest.mark.parametrize("package", ["vllm 2", "vllm 3", "package 2", "interface 3"])
def test_kernels_that_a_build_lacks(package: str, installed: Installed, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {"package 2": "package_varlen", "interface 3": "with_kvcache"}
    name, version = functions.get(package, "vllm_varlen"), package[-1]
    whole = getattr(fake_flash, name)
    faults = {48: "no kernel image is available for execution on the device", 80: "an illegal memory access"}

    @wraps(whole)
    def partial_build(*args: Any, **kwargs: Any) -> Any:
        head_size = (args[0] if args else kwargs["q"]).shape[-1]
        if head_size in faults:
            raise RuntimeError(f"CUDA error: {faults[head_size]}")
        return whole(*args, **kwargs)

    monkeypatch.setattr(fake_flash, name, partial_build)
    installed(package)
    kernel_missing.cache_clear()
    cpu = torch.device("cpu")
    assert kernel_missing(version, 64, "float16", cpu) is None
    reason = kernel_missing(version, 48, "float16", cpu)
    assert reason is not None and f"FlashAttention {version}" in reason
    assert "head size 48 in float16: no kernel image is available" in reason
    with pytest.raises(RuntimeError, match="illegal memory access"):
        kernel_missing(version, 80, "float16", cpu)
    kernel_missing.cache_clear()
