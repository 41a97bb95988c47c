"""Our kernels as a backend, through the conformance suite: in Triton's interpreter on small sizes, fully on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_specs import TINY, llama

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.backend import AttentionCall, AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.selection import load, select
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import known_device
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet, GraphSupport
from phonograph.testing.conformance import check_backend
from phonograph.testing.conformance_batch import BatchShape

pytest.importorskip("triton")

from phonograph.attention.triton.backend import TritonBackend

H100 = known_device("h100")
FULL = (-1, -1)
HALF = llama()
MIXED = BatchShape(
    name="mixed", query_lens=(1, 1, 3, 20, 16), seq_lens=(40, 1, 3, 33, 16), padded_reqs=2, padded_tokens=3
)
DECODES = BatchShape(name="decodes", query_lens=(1,) * 3, seq_lens=(70, 16, 1), padded_reqs=1, padded_tokens=1)
EMPTY = BatchShape(name="empty", query_lens=(), seq_lens=(), padded_reqs=2, padded_tokens=3)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(spec: AttentionSpec, device: torch.device, shapes: tuple[BatchShape, ...] = ()) -> None:
    results = check_backend(TritonBackend, spec, device, shapes=shapes)
    assert results
    assert all(result.passed for result in results), [str(result) for result in results if not result.passed]


@pytest.mark.parametrize(
    "spec",
    [
        replace(TINY, non_causal=True),
        replace(TINY, windows=(FULL, (6, 0)), sinks=True, layout=KVLayout.HND),
        replace(TINY, softcap=1.5, alibi=True, lse=False),
        replace(TINY, kind=AttentionKind.ENCODER_ONLY, windows=((5, 4),)),
        replace(TINY, kind=AttentionKind.ENCODER_DECODER),
    ],
    ids=["plain", "windows and sinks", "softcap and alibi", "bidirectional", "keys of an encoder"],
)
def test_small(spec: AttentionSpec, device: torch.device) -> None:
    check(spec, device, (DECODES, MIXED, EMPTY))


@pytest.mark.parametrize(
    "spec", [TINY, replace(TINY, windows=(FULL, (6, 0))), replace(TINY, batch_invariant=True)], ids=str
)
def test_divided_multiprocessors(spec: AttentionSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where both launches run at the same time, which these small GPUs of the interpreter do not."""
    monkeypatch.setattr("phonograph.attention.triton.backend.prefill_overlaps", lambda _: True)
    more = BatchShape(
        name="more", query_lens=(1, 2, 40, 17, 1), seq_lens=(300, 50, 40, 90, 17), padded_reqs=1, padded_tokens=4
    )
    check(spec, device, (MIXED, more))


@pytest.mark.parametrize(
    ("query_lens", "together"), [([1, 1, 40], True), ([1] * 20, False), ([1, 1998], True), ([1, 1999], False)]
)
def test_when_both_launches_run_at_the_same_time(
    query_lens: list[int], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches overlap with PDL, but not with the Hopper kernel, which lets the next launch begin before it waits."""
    launched: list[tuple[str, bool]] = []

    def note(name: str) -> Callable[..., None]:
        def launch(*_: object, overlaps_prefill: bool = False, **others: object) -> None:
            launched.append((name, overlaps_prefill))

        return launch

    for name in ("prefill_attention", "decode_attention", "merge_prefill"):
        monkeypatch.setattr(f"phonograph.attention.triton.backend.{name}", note(name))
    monkeypatch.setattr("phonograph.kernels.triton.attention.prefill.pdl_usable", lambda: True)
    limits = Limits(max_num_seqs=32, max_num_batched_tokens=4096, max_model_len=4096)
    backend = TritonBackend(TINY, torch.device("cpu"), limits)
    metadata = backend.make_builder().build(common(query_lens), key=None)
    query = torch.empty(sum(query_lens), 4, 32)
    call = AttentionCall(AttentionLayer(index=0, scale=1.0), torch.empty(2, 1, 16, 2, 32), metadata)
    backend.forward(query, call, query)
    assert metadata.divide == together
    alone = [("decode_attention", False)]
    assert launched == (
        [("prefill_attention", False), ("decode_attention", together), ("merge_prefill", False)]
        if max(query_lens) > 16
        else alone
    )


FEATURES = {
    "plain": {},
    "left windows": {"windows": (FULL, (0, 0), (6, 0), (33, -1))},
    "windows on both sides": {"windows": ((5, 4), (-1, 3), (20, 0))},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "everything": {"windows": (FULL, (9, 0), (4, 7)), "softcap": 2.0, "alibi": True, "sinks": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features(feature: str, cache: str, device: torch.device) -> None:
    dtype = cache if not cache.startswith("float8") else "bfloat16"
    spec = replace(HALF, dtype=dtype, kv_cache_dtype=cache, **FEATURES[feature])
    check(replace(spec, num_query_heads=8, num_kv_heads=2), device)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AttentionKind.DECODER, AttentionKind.ENCODER_ONLY])
@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("block_size", [16, 64])
def test_layouts(block_size: int, layout: KVLayout, kind: AttentionKind, device: torch.device) -> None:
    check(replace(HALF, block_size=block_size, layout=layout, kind=kind, windows=(FULL, (5, 4))), device)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "block_size"),
    [
        (28, 4, 128, 32),
        (4, 4, 64, 128),
        (71, 1, 64, 16),
        (4, 4, 32, 256),
        (14, 2, 72, 48),
        (16, 8, 256, 64),
        (32, 4, 512, 64),
    ],
)
def test_sizes(heads: int, kv_heads: int, head_size: int, block_size: int, device: torch.device) -> None:
    spec = replace(HALF, num_query_heads=heads, num_kv_heads=kv_heads, head_size=head_size, block_size=block_size)
    check(spec, device)


def test_selection() -> None:
    selection = select(None, None, HALF, H100)
    assert selection.capabilities.graph_support(HALF, H100).level is GraphSupport.ALWAYS
    assert load(selection) is TritonBackend


@pytest.mark.parametrize(
    "refused",
    [
        replace(HALF, block_size=8),
        replace(HALF, head_size=260),
        replace(HALF, head_size=520),
        replace(HALF, head_size=100),
        replace(HALF, dtype="float32", kv_cache_dtype="float32"),
        replace(HALF, kind=AttentionKind.ENCODER),
    ],
)
def test_refusals(refused: AttentionSpec) -> None:
    assert TritonCapabilities().refusals(refused, H100)
    assert not TritonCapabilities().refusals(HALF, H100)
    assert TritonCapabilities().refusals(HALF, known_device("cpu"))


def common(query_lens: list[int]) -> CommonMetadata:
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    lens = np.array(query_lens, np.int32)
    return CommonMetadata(
        num_reqs=len(lens),
        num_decodes=query_lens.count(1),
        num_tokens=int(starts[-1]),
        num_decode_tokens=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(query_lens),
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        block_table=torch.zeros(len(lens), 8, dtype=torch.int32),
        slot_mapping=torch.zeros(int(starts[-1]), dtype=torch.int64),
        query_start_loc_cpu=starts,
        seq_lens_cpu=lens,
    )


@pytest.mark.parametrize(
    ("key", "query_lens", "short_query_len", "has_long"),
    [
        (GraphKey(GraphSet.DECODE, 4, 4, 1), [1, 1], 1, False),
        (GraphKey(GraphSet.DECODE, 8, 2, 4), [4], 4, False),
        (GraphKey(GraphSet.DECODE, 40, 2, 20), [20], 16, True),
        # Whatever batch a graph is captured with, it is replayed with others.
        (GraphKey(GraphSet.MIXED, 17, 4), [1, 1], 16, True),
        (GraphKey(GraphSet.PIECEWISE, 17, 4), [1, 1], 16, True),
        # But no long query fits into so few tokens.
        (GraphKey(GraphSet.MIXED, 16, 4), [1, 1], 16, False),
        (None, [1, 1, 1], 1, False),
        (None, [1, 3], 16, False),
        (None, [1, 17], 16, True),
    ],
)
def test_metadata_that_a_graph_freezes(
    key: GraphKey | None, query_lens: list[int], short_query_len: int, has_long: bool
) -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=128)
    builder = TritonBackend(TINY, torch.device("cpu"), limits).make_builder()
    metadata = builder.build(common(query_lens), key=key)
    assert (metadata.short_query_len, metadata.has_long) == (short_query_len, has_long)
    assert metadata.plans is builder.build(common([1]), key=None).plans
    if key is not None:
        # Callers may keep it: the numbers of a batch on the host change nothing.
        assert builder.depends_on_key
        changed = replace(metadata.common, num_reqs=0, num_decodes=0, num_tokens=0, max_query_len=99, max_seq_len=100)
        again = builder.build(changed, key=key)
        assert replace(again, common=metadata.common) == metadata
