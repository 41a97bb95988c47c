"""Memory that the sample backend declares, compared with a graph of one layer on the tape."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from phonograph_dense import DenseBackend, DenseCapabilities

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionCall, AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.core.device import known_device
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.tape.tape import TapeRuntime

CPU = torch.device("cpu")
SPEC = AttentionSpec(
    num_query_heads=8, num_kv_heads=2, head_size=64, dtype="float32", kv_cache_dtype="float32", block_size=16
)
LIMITS = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=600)


def recorded_bytes(spec: AttentionSpec, limits: Limits, key: GraphKey, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes of all tensors that a capture of one layer makes, and of the memory that its graph keeps."""
    num_blocks = -(-limits.max_model_len // spec.block_size)
    num_reqs = key.num_reqs if key.graphs is GraphSet.DECODE else 1
    starts = torch.arange(key.num_reqs + 1, dtype=torch.int32).clamp(max=num_reqs) * (key.num_tokens // num_reqs)
    lens = starts.diff()
    common = CommonMetadata(
        num_reqs=num_reqs,
        num_decodes=0,
        num_tokens=key.num_tokens,
        num_decode_tokens=0,
        max_query_len=key.num_tokens // num_reqs,
        max_seq_len=key.num_tokens // num_reqs,
        query_start_loc=starts,
        seq_lens=lens,
        block_table=torch.zeros(key.num_reqs, num_blocks, dtype=torch.int32),
        slot_mapping=torch.arange(key.num_tokens),
        query_start_loc_cpu=starts.numpy(),
        seq_lens_cpu=lens.numpy(),
    )
    backend = DenseBackend(spec, CPU, limits)
    metadata = backend.make_builder().build(common, key=key)
    cache = torch.zeros(2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_size)
    query_THD = torch.randn(key.num_tokens, spec.num_query_heads, spec.head_size)
    out_THD = torch.empty_like(query_THD)
    runtime, sizes = TapeRuntime(), {}
    bind = runtime._bind

    def noting(recorder: Any, outputs: Any) -> Any:
        storages = [output.untyped_storage() for call in recorder.calls for output in call.outputs]
        sizes.update({storage.data_ptr(): storage.nbytes() for storage in storages})
        return bind(recorder, outputs)

    monkeypatch.setattr(runtime, "_bind", noting)

    def step() -> tuple[torch.Tensor, ...]:
        backend.schedule(metadata)
        call = AttentionCall(AttentionLayer(index=0, scale=1.0, softcap=1.5), cache, metadata)
        backend.forward(query_THD, call, out_THD)
        return (out_THD,)

    runtime.capture(step)
    return sum(sizes.values()) + runtime.memory_bytes


@pytest.mark.parametrize("key", [GraphKey(GraphSet.MIXED, 64, 8), GraphKey(GraphSet.DECODE, 8, 8, 1)], ids=str)
@pytest.mark.parametrize(
    ("spec", "limits"),
    [
        (SPEC, LIMITS),
        (replace(SPEC, num_query_heads=32, num_kv_heads=8, head_size=128), LIMITS),
        (replace(SPEC, num_query_heads=2, num_kv_heads=2, head_size=16), replace(LIMITS, max_model_len=2000)),
    ],
)
def test_what_it_says_is_enough_and_not_far_off(
    key: GraphKey, spec: AttentionSpec, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities, device = DenseCapabilities(), known_device("cpu")
    eager = capabilities.buffer_bytes(spec, device, limits, ())
    said = capabilities.buffer_bytes(spec, device, limits, (key, GraphKey(GraphSet.DECODE, 1, 1, 1))) - eager
    taken = recorded_bytes(spec, limits, key, monkeypatch)
    assert taken <= said <= 3.5 * taken
    assert 0 < eager <= said or key.graphs is GraphSet.DECODE


def test_the_cache_is_sized_by_what_it_leaves() -> None:
    capabilities, limits = DenseCapabilities(), Limits(max_num_seqs=64, max_num_batched_tokens=512, max_model_len=8192)
    graphs = (GraphKey(GraphSet.MIXED, 512, 64),)
    said = {kind: capabilities.buffer_bytes(SPEC, known_device(kind), limits, graphs) for kind in ("cpu", "h200")}
    assert said["cpu"] > 64 << 30 and 1 << 30 < said["h200"] < 4 << 30
