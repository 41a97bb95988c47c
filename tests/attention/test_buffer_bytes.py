"""Device memory that backends declare, compared with what they allocate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_flashinfer
import pytest
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.attention.composite.capabilities import SplitCapabilities
from phonograph.attention.flash_attn.capabilities import FlashAttention2Capabilities, FlashAttention3Capabilities
from phonograph.attention.flash_attn.sizes import ACCUMULATOR_BYTES
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.reference.backend import ReferenceCapabilities
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec, known_device
from phonograph.core.limits import Limits
from phonograph.engine.plan import make_plan
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.attention_scratch import holds_all_programs
from phonograph.models.spec import read_model_spec
from phonograph.testing.addresses import tensors_of

pytest.importorskip("triton")

from phonograph.attention.flash_attn.backend import FlashAttention3Backend
from phonograph.attention.flashinfer.backend import FlashInferBackend
from phonograph.attention.triton.backend import _NO_GPU, TritonBackend

CPU = torch.device("cpu")
H200 = known_device("h200")
SPEC = AttentionSpec(
    num_query_heads=8, num_kv_heads=2, head_size=64, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16
)
LLAMA = replace(SPEC, num_query_heads=32, num_kv_heads=8, head_size=128, block_size=64)
LIMITS = Limits(max_num_seqs=12, max_num_batched_tokens=300, max_model_len=500)
LARGE = Limits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)
MIB = 1 << 20


def decode(slots: int, query_len: int = 1) -> GraphKey:
    return GraphKey(GraphSet.DECODE, slots * query_len, slots, query_len)


def mixed(tokens: int, slots: int) -> GraphKey:
    return GraphKey(GraphSet.MIXED, tokens, slots)


def kept(*held: object) -> int:
    """Bytes of the memory that the tensors which these objects hold lie in."""
    found = [tensor for one in held for tensor in tensors_of(one, CPU).values()]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in found}.values())


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"windows": ((-1, -1), (9, 0))},
        {"num_query_heads": 4, "num_kv_heads": 4, "speculative_tokens": 3},
        {"num_query_heads": 14, "head_size": 72},
        {"head_size": 256, "num_kv_heads": 1},
        {"num_kv_heads": 8, "batch_invariant": True},
    ],
    ids=str,
)
def test_triton(changes: dict[str, Any]) -> None:
    spec = replace(SPEC, **changes)
    builder = TritonBackend(spec, CPU, LIMITS).make_builder()
    device = DeviceSpec(name="here", kind="cuda", capability=(9, 0), num_sms=_NO_GPU[1])
    said = TritonCapabilities().buffer_bytes(spec, device, LIMITS, [])
    assert said <= kept(builder) <= said + 64 * 1024


def test_triton_on_a_gpu_that_is_not_here() -> None:
    parts = 4 * 129 * (2 * 264 * 64 + 99 * 8 * 128)
    # Shared prefixes: as many parts again, two levels of each row of up to 256 decodes, and 33 tiles of each KV head.
    said = TritonCapabilities().buffer_bytes(LLAMA, H200, LARGE, [])
    assert said == parts + 4 * 129 * (2 * 264 * 64 + 2 * 256 * 32 + 33 * 8 * 128)
    assert [holds_all_programs(one) for one in ((0, 0), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0))] == [
        True, False, False, True, True, False,
    ]  # fmt: skip
    said = TritonCapabilities().buffer_bytes(replace(LLAMA, shared_prefixes=False), H200, LARGE, [])
    assert said == parts
    # The kernel for long queries has the same buffers on all of them.
    assert TritonCapabilities().buffer_bytes(LLAMA, replace(H200, capability=(8, 9)), LARGE, []) == parts
    whole = TritonCapabilities().buffer_bytes(replace(LLAMA, batch_invariant=True), H200, LARGE, [])
    assert whole == 4 * 129 * (2 * 264 * 64 + 8 * 128)


@pytest.mark.parametrize("cache", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("lse", [False, True])
def test_buffers_of_flash_attention_3(cache: str, lse: bool, installed: Callable[..., Path]) -> None:
    installed("vllm 3")
    # Without partial results, which no backend object holds: batch-invariant, it has one split.
    spec = replace(SPEC, kv_cache_dtype=cache, lse=lse, batch_invariant=True)
    backend = FlashAttention3Backend(spec, CPU, LIMITS)
    said = FlashAttention3Capabilities().buffer_bytes(spec, H200, LIMITS, [mixed(256, 12)])
    assert said == kept(backend)
    assert (said > 300 * 8 * 64) == (cache != "bfloat16")


def test_partial_results_of_flash_attention_3() -> None:
    def said(*graphs: GraphKey, **changes: Any) -> int:
        return FlashAttention3Capabilities().buffer_bytes(replace(LLAMA, **changes), H200, LARGE, graphs)

    eager = said()
    assert eager == 4 * (1 + 2048 * 16) + ACCUMULATOR_BYTES + ACCUMULATOR_BYTES // 128
    # 32 splits of 16 tokens; 16 of 512, which fill the budget; at 8192 there is one, which is no partial result.
    assert said(decode(16)) - eager == 32 * 16 * 32 * 129 * 4
    assert said(decode(16), mixed(512, 256)) - eager == 16 * 512 * 32 * 129 * 4 == ACCUMULATOR_BYTES * 129 // 128
    assert said(mixed(8192, 256)) == said(GraphKey(GraphSet.PIECEWISE, 512, 256)) == eager
    # Where layers differ in their windows graphs have one split.
    assert said(decode(16), windows=((-1, -1), (9, 0))) == eager
    assert said(decode(16), batch_invariant=True) == 4 * (1 + 2048 * 16)
    assert FlashAttention2Capabilities().buffer_bytes(LLAMA, H200, LARGE, [decode(16)]) == 4 * (1 + 2048 * 16)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_flashinfer(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(
        "phonograph.attention.flashinfer.backend._NO_GPU", (capability, fake_flashinfer.NUM_SMS), raising=True
    )
    builder = FlashInferBackend(SPEC, CPU, LIMITS).make_builder()
    device = DeviceSpec(name="here", kind="cuda", capability=capability, num_sms=fake_flashinfer.NUM_SMS)
    graphs = [decode(1), decode(12), GraphKey(GraphSet.PIECEWISE, 64, 12)]
    if capability[0] == 9:
        graphs += [mixed(16, 12), mixed(300, 12)]
    planner = builder._planner
    for key in graphs:
        host = builder._host_plans.take()
        host.queries[:] = key.num_tokens
        host.queries[: key.num_reqs + 1] = torch.arange(key.num_reqs + 1)
        host.pages[:] = torch.arange(len(host.pages)).clamp(max=key.num_reqs)
        host.last_page[:], host.lens[:] = 1, 1
        host.last_page[key.num_reqs :] = host.lens[key.num_reqs :] = 0
        if key.graphs is GraphSet.DECODE:
            planner.decode(host, key.num_reqs)
        elif key.graphs is GraphSet.MIXED:
            planner.prefill(host, key.num_reqs, key.num_tokens, max_query_len=key.num_tokens, causal=True)
    said = FlashInferCapabilities().buffer_bytes(SPEC, device, LIMITS, graphs)
    wrappers = [*planner._decode.values(), *planner._prefill.values(), planner._eager_decode, planner._eager_prefill]
    buffers = [planner.indices, planner._queries, planner._pages, planner._last_page, planner._floats]
    buffers += [planner._decode_pages, planner._decode_last_page]
    held = kept(buffers, [wrapper.integers for wrapper in wrappers])
    assert said - 64 <= held <= said
    more = FlashInferCapabilities().buffer_bytes(SPEC, device, LIMITS, [*graphs, decode(5)])
    assert more > said, "a graph more, a workspace more"


def test_flashinfer_at_the_size_of_a_server() -> None:
    graphs = [*(decode(size) for size in range(8, 257, 8)), *(mixed(size, 256) for size in range(64, 2049, 64))]
    said = FlashInferCapabilities().buffer_bytes(LLAMA, H200, LARGE, graphs)
    assert 100 * MIB < said < 160 * MIB


def test_buffers_of_a_split_batch_are_those_of_its_parts() -> None:
    infer = FlashInferCapabilities()
    together = SplitCapabilities(infer, infer)
    graphs = [decode(8), decode(64), mixed(40, 256), mixed(2048, 256)]
    of_decodes = infer.buffer_bytes(LLAMA, H200, LARGE, [decode(8), decode(64), decode(40), decode(256)])
    of_prefills = infer.buffer_bytes(LLAMA, H200, LARGE, graphs[2:])
    assert together.buffer_bytes(LLAMA, H200, LARGE, graphs) == of_decodes + of_prefills


@pytest.mark.parametrize("capabilities", [ReferenceCapabilities()], ids=["reference"])
def test_other_backends_have_no_buffers(capabilities: Capabilities) -> None:
    assert capabilities.buffer_bytes(LLAMA, H200, LARGE, [decode(8)]) == 0


def test_the_kv_cache_takes_the_rest_of_the_memory() -> None:
    model = read_model_spec("demo")
    plans = {
        backend: make_plan(EngineConfig(model="demo", attention_backend=backend), model, H200)
        for backend in ("triton", "flash_attn", "flashinfer", "reference")
    }
    for backend, plan in plans.items():
        memory = plan.memory
        taken = plan.selection.capabilities.buffer_bytes(
            plan.attention, H200, plan.limits, plan.captures.largest_first()
        )
        assert memory.attention == taken and (taken > 0) == (backend != "reference")
        room = int(H200.memory * 0.9) - 334 * MIB - memory.weights - memory.graphs - memory.attention - memory.sampling
        assert 0 <= room - memory.kv_cache < memory.block
    assert len({plan.memory.kv_cache for plan in plans.values()}) > 2
