"""Counts and refusals of a plan at the edges of its limits."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import eagle_heads
import pytest
from checkpoints import make_checkpoint
from resized import resized

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import GIB, known_device
from phonograph.core.host_resources import FreeMemory
from phonograph.engine import build, memory
from phonograph.engine.plan import EnginePlan, _check_block_size, make_plan
from phonograph.errors import ConfigError, MemoryLimitError, WeightError
from phonograph.kernels.torch.grouped import TILE
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.models.layer_spec import LayerSpec
from phonograph.models.layers.workspace import Workspace
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.scheme import Quantization
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.sampling.grammar_masks import bitmask_words

DEMO = read_model_spec("demo")
INTERMEDIATE_SIZE = DEMO.layers[0].feed_forward.down.num_inputs


def plan_of(device: str = "cpu", model: Any = DEMO, **settings: Any) -> EnginePlan:
    return make_plan(EngineConfig(model="demo", **settings), model, known_device(device))


def test_blocks_for_exactly_one_request_are_enough_and_one_less_is_not() -> None:
    for tokens in (64, 49):
        assert plan_of(max_model_len=tokens, num_kv_blocks=4).memory.num_blocks == 4
        with pytest.raises(MemoryLimitError, match="needs 4 KV blocks"):
            plan_of(max_model_len=tokens, num_kv_blocks=3)


LONG = replace(DEMO, context_length=1 << 24, context_source="max_position_embeddings")


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("cpu", {}),
        ("cpu", {"num_kv_blocks": 3}),
        ("cpu", {"kv_cache_memory_bytes": 1 << 20, "block_size": 1}),
        ("a10", {"attention_backend": "triton", "gpu_memory_utilization": 0.2}),
        # The buffers of this backend grow with the context.
        ("a10", {"attention_backend": "flashinfer", "max_num_seqs": 512}),
    ],
)
def test_the_context_is_the_largest_that_one_sequence_has_room_for(device: str, settings: dict[str, Any]) -> None:
    """The context that is chosen fits as a number too, and one block more does not."""
    plan = plan_of(device, LONG, **settings)
    context, size = plan.limits.max_model_len, plan.attention.block_size
    assert context % size == 0 and size <= context < LONG.context_length
    assert plan_of(device, LONG, max_model_len=context, **settings).limits == plan.limits
    with pytest.raises(MemoryLimitError, match=f"max_model_len={context + size}"):
        plan_of(device, LONG, max_model_len=context + size, **settings)
    assert plan.notes[0].startswith(
        f"max_model_len {context}: the largest that fits the memory; the model's 16777216 ("
    )


def test_a_context_that_fits_whole_is_the_models() -> None:
    model = replace(DEMO, context_length=63, context_source="max_position_embeddings 63")
    plan = plan_of(model=model, num_kv_blocks=4)
    assert plan.limits.max_model_len == 63 and plan.notes[0] == "max_model_len 63: max_position_embeddings 63"
    assert plan_of(model=model, num_kv_blocks=3).limits.max_model_len == 48
    with pytest.raises(MemoryLimitError, match=r"max_model_len=auto: one request of 2 tokens needs 2 KV blocks"):
        plan_of(model=model, num_kv_blocks=1, block_size=1)


def test_the_share_of_the_card_that_an_error_names_holds_the_weights() -> None:
    large = resized(DEMO, intermediate_size=INTERMEDIATE_SIZE * 1_500)
    settings = {"max_num_batched_tokens": 256, "enforce_eager": True}
    with pytest.raises(
        MemoryLimitError, match=r"leave no KV block in gpu_memory_utilization=0.3 of 24.0 GiB; at least"
    ) as caught:
        plan_of("a10", large, gpu_memory_utilization=0.3, **settings)
    found = re.search(r"at least (.*) GiB more are needed; gpu_memory_utilization=([\d.]+),", str(caught.value))
    assert found is not None
    missing, share = map(float, found.groups())
    assert plan_of("a10", large, gpu_memory_utilization=share, **settings).memory.num_blocks > 0
    assert abs(0.3 + missing / 24 - share) < 0.01
    with pytest.raises(MemoryLimitError, match="leave no KV block"):
        plan_of("a10", large, gpu_memory_utilization=round(share - 0.001, 3), **settings)


def test_no_more_sequences_than_blocks() -> None:
    plan = plan_of(max_model_len=64, num_kv_blocks=4, max_num_seqs=8)
    assert plan.limits.max_num_seqs == 4 and any("max_num_seqs 8 -> 4" in note for note in plan.notes)


def test_a_cpu_claims_no_more_than_its_requests_could_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_free(gib: int, **settings: Any) -> memory.MemoryPlan:
        monkeypatch.setattr(memory, "free_memory", lambda: FreeMemory(gib * GIB))
        return plan_of(enforce_eager=True, **settings).memory

    assert with_free(64, max_num_seqs=2, max_model_len=50).num_blocks == 2 * 4
    wide = {"max_num_seqs": 1_000}
    found = with_free(1, **wide)
    assert GIB // 2 - 2 * found.block - found.weights - found.sampling < found.kv_cache <= GIB // 2
    found = with_free(64, **wide)
    assert 2 * GIB - found.block < found.kv_cache <= 2 * GIB


def test_a_gpus_workspace_is_that_of_the_largest_step_with_masks_of_all_rows() -> None:
    plan = plan_of("h200", enforce_eager=True, max_num_seqs=100, max_num_batched_tokens=4096)
    workspace = Workspace.nbytes(DEMO, 4096, 100, plan.dtype, gemm_device=GemmDevice.with_capability((9, 0)))
    assert plan.memory.graphs == workspace + 4 * bitmask_words(DEMO.vocab_size) * 100


def test_fp8_activations_take_the_place_of_weights_that_are_written_out() -> None:
    """On devices with FP8 tensor cores, if the weights have one scale an output."""
    settings = {"enforce_eager": True, "max_num_batched_tokens": 4096, "dtype": "bfloat16"}
    channels, blocks = (
        DEMO.with_quantization(Quantization("fp8", scheme))
        for scheme in (
            Fp8(origin="FP8", scales="channel"),
            Fp8(origin="FP8", scales="block", block=(128, 128)),
        )
    )
    largest = 2 * INTERMEDIATE_SIZE * DEMO.hidden_size
    graphs = {
        name: [plan_of(device, model, **settings).memory.graphs for model in (DEMO, channels, blocks)]
        for name, device in (("h200", "h200"), ("a100", "a100-40gb"))
    }
    plain, scaled, written = graphs["h200"]
    assert scaled - plain == 4096 * (max(DEMO.hidden_size, INTERMEDIATE_SIZE) + 4)
    assert written - plain == 2 * largest
    plain, scaled, written = graphs["a100"]
    assert scaled - plain == written - plain == 2 * largest
    notes = [
        "FP8 activations" in " ".join(plan_of("h200", model, **settings).notes) for model in (DEMO, channels, blocks)
    ]
    assert notes == [False, True, False]


def test_limits_that_follow_from_each_other() -> None:
    assert plan_of(max_num_batched_tokens=16).limits.max_num_seqs == 16
    assert plan_of(max_num_seqs=1000).limits.max_num_batched_tokens == 1000
    with pytest.raises(ConfigError, match="max_model_len=1: must hold a prompt token and an output token"):
        plan_of(max_model_len=1)
    sized = plan_of(max_num_batched_tokens=64, max_num_seqs=8, max_cudagraph_capture_size=64)
    assert max(key.num_tokens for key in sized.captures.largest_first()) == 64


def test_batch_invariance_is_not_for_cpus() -> None:
    with pytest.raises(ConfigError, match="batch_invariant=True: .*it works on a GPU"):
        plan_of(batch_invariant=True)


@pytest.mark.parametrize(
    ("device", "own", "dtype"),
    [("h200", "float32", "bfloat16"), ("h200", "float16", "float16"), ("cpu", "bfloat16", "float32")],
)
def test_auto_is_the_models_type_or_a_faster_one(device: str, own: str, dtype: str) -> None:
    assert plan_of(device, replace(DEMO, dtype=own)).dtype == dtype


@pytest.mark.parametrize(
    ("given", "dtype"),
    [("auto", "float32"), ("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn"), ("fp8_e5m2", "float8_e5m2")],
)
def test_types_of_the_cache(given: str, dtype: str) -> None:
    assert plan_of(kv_cache_dtype=given).attention.kv_cache_dtype == dtype


def test_attention_serves_every_window_of_the_model() -> None:
    windows = ((-1, -1), (31, 0)) * (DEMO.num_layers // 2 or 1)
    layers = [
        replace(layer, mixer=replace(layer.attention, window=window))
        for layer, window in zip(DEMO.layers, windows, strict=True)
    ]
    kv = plan_of(model=replace(DEMO, layers=tuple(layers))).kv
    for window, group in zip(windows, kv.group_of_layer, strict=True):
        assert window in kv.specs[group].windows


def test_every_part_of_a_cards_memory_lowers_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The context and libraries of CUDA included, which torch does not count."""
    before = plan_of("h200").memory
    with monkeypatch.context() as patch:
        patch.setattr(memory, "_LIBRARY_BYTES", memory._LIBRARY_BYTES + 10 * before.block)
        assert plan_of("h200").memory.num_blocks == before.num_blocks - 10
    share = int(known_device("h200").memory * EngineConfig(model="demo").gpu_memory_utilization)
    parts = before.weights + before.graphs + before.attention + before.sampling + memory._LIBRARY_BYTES
    assert before.num_blocks == (share - parts) // before.block


def fitting_blocks(error: MemoryLimitError) -> int:
    found = re.search(r"(\d+) blocks \((\d+) bytes\) fit", str(error))
    assert found is not None, str(error)
    return int(found[1])


@pytest.mark.parametrize("free", [None, 3 * GIB])
@pytest.mark.parametrize("setting", ["num_kv_blocks", "kv_cache_memory_bytes"])
def test_a_cache_that_the_card_does_not_hold(setting: str, free: int | None) -> None:
    """The number of blocks that the message names fits, and one more does not."""
    device = replace(known_device("a10"), free=free)

    def plan(value: int) -> EnginePlan:
        return make_plan(EngineConfig(model="demo", max_model_len=64, **{setting: value}), DEMO, device)

    block = plan(1 << 20).memory.block if setting == "kv_cache_memory_bytes" else 1
    where = "3.0 GiB that are free of 24.0 GiB of a10" if free else "23.4 GiB that the CUDA context leaves of 24.0 GiB"
    with pytest.raises(
        MemoryLimitError, match=rf"{setting}=\d+: a KV cache of .* does not fit beside .*{where}"
    ) as caught:
        plan(10**12)
    fits = fitting_blocks(caught.value)
    memory = plan(fits * block).memory
    assert memory.num_blocks == fits
    taken = memory.weights + memory.graphs + memory.attention + memory.kv_cache
    assert taken < (free or 24 * GIB) < taken + GIB + memory.block
    with pytest.raises(MemoryLimitError, match=setting):
        plan((fits + 1) * block)


def test_a_request_that_the_card_does_not_hold() -> None:
    """Grants are compared with what is free, and one request with what fits."""
    device = replace(known_device("a10"), free=GIB)
    model = replace(DEMO, context_length=1 << 24)
    with pytest.raises(MemoryLimitError, match=r"one request of max_model_len=4000000 needs 62500$") as caught:
        make_plan(EngineConfig(model="demo", max_model_len=4_000_000, num_kv_blocks=62_500), model, device)
    assert fitting_blocks(caught.value) < 62_500


def test_weights_that_the_card_does_not_hold() -> None:
    large = resized(DEMO, intermediate_size=INTERMEDIATE_SIZE << 14)
    assert large.weight_bytes("bfloat16") > 9 * GIB
    small = replace(known_device("a10"), memory=8 * GIB)
    for settings in ({"num_kv_blocks": 8}, {}):
        config = EngineConfig(model="demo", max_model_len=64, **settings)
        with pytest.raises(MemoryLimitError, match=r"demo: weights of .* GiB, .* do not fit the 7.4 GiB .* needed"):
            make_plan(config, large, small)


def test_a_share_of_a_card_that_others_use() -> None:
    """The share that the message names fits what is free."""
    busy = replace(known_device("h200"), free=30 * GIB)
    with pytest.raises(
        MemoryLimitError, match=r"gpu_memory_utilization=0.9: a KV cache.*30.0 GiB that are free"
    ) as caught:
        make_plan(EngineConfig(model="demo"), DEMO, busy)
    share = float(str(caught.value).rpartition("gpu_memory_utilization=")[2])
    assert 0.2 < share <= 30 / 141
    plan = make_plan(EngineConfig(model="demo", gpu_memory_utilization=share), DEMO, busy)
    assert plan.memory.kv_cache > 20 * GIB


def test_a_cache_that_the_machine_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: FreeMemory(GIB))
    with pytest.raises(MemoryLimitError, match="the 1.0 GiB of free memory of this machine") as caught:
        plan_of(max_model_len=64, num_kv_blocks=10**9)
    assert plan_of(max_model_len=64, num_kv_blocks=fitting_blocks(caught.value)).memory.num_blocks > 64


def test_memory_that_torch_caches_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that this process had before leaves its memory with torch, not with the driver."""
    facts = SimpleNamespace(name="here", major=9, minor=0, multi_processor_count=132, total_memory=80 * GIB)
    fakes = {"is_available": True, "current_device": 0, "get_device_properties": facts}
    fakes |= {"mem_get_info": (10 * GIB, 80 * GIB), "memory_reserved": 60 * GIB, "memory_allocated": 2 * GIB}
    for name, value in fakes.items():
        monkeypatch.setattr(build.torch.cuda, name, lambda *_, value=value: value)
    device = build.this_device("cuda")
    assert (device.memory, device.free) == (80 * GIB, 68 * GIB)


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize("sizes", [{"intermediate_size": 8 * INTERMEDIATE_SIZE}, {"num_query_heads": 64}])
def test_graphs_have_room_for_the_widest_layer(device: str, sizes: dict[str, int]) -> None:
    """A narrow layer before or after it changes nothing."""
    wide = resized(DEMO, **sizes)
    first, last = (replace(wide, layers=layers) for layers in (_mixed(wide, DEMO), _mixed(DEMO, wide)))
    plain, whole, *mixed = (plan_of(device, model).memory.graphs for model in (DEMO, wide, first, last))
    assert plain < whole and mixed == [whole, whole]


def _mixed(first: ModelSpec, last: ModelSpec) -> tuple[LayerSpec, ...]:
    return (*first.layers[:1], *last.layers[1:])


def test_a_cpus_graphs_are_a_layer_at_its_widest_with_the_logits_of_all_requests() -> None:
    """Weights of 4 bits have a tile in addition, which no eager step needs."""
    settings = {"max_num_seqs": 6, "cudagraph_capture_sizes": [4, 24]}
    attention, vocab_size = DEMO.layers[0].attention, DEMO.vocab_size
    heads = (2 * attention.num_query_heads + 2 * attention.num_kv_heads) * attention.head_size
    width = 2 * DEMO.hidden_size + max(heads, 3 * INTERMEDIATE_SIZE)
    numbers = 24 * width + 6 * (vocab_size + DEMO.hidden_size)
    assert plan_of(**settings).memory.graphs == 4 * numbers
    packed = DEMO.with_quantization(Quantization("gptq", Gptq(bits=4, group_size=32, version=1)))
    assert plan_of(model=packed, **settings).memory.graphs == 4 * (numbers + TILE)
    assert plan_of(model=packed, enforce_eager=True).memory.graphs == 0


@pytest.mark.parametrize(
    ("kind", "has_gpu", "found"),
    [
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cuda", True, "cuda"),
        ("cuda", False, None),
    ],
)
def test_the_device_of_this_machine(
    kind: str, has_gpu: bool, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(name="here", major=9, minor=0, multi_processor_count=132, total_memory=80 * GIB)
    fakes = {"current_device": 0, "get_device_properties": facts, "mem_get_info": (10 * GIB, 80 * GIB)}
    fakes |= {"is_available": has_gpu, "memory_reserved": 0, "memory_allocated": 0}
    for name, value in fakes.items():
        monkeypatch.setattr(build.torch.cuda, name, lambda *_, value=value: value)
    if found is None:
        with pytest.raises(ConfigError, match="device='cuda': torch sees no CUDA device here; cpu or auto works"):
            build.this_device(kind)
    else:
        assert build.this_device(kind).kind == found


def test_blocks_that_offsets_of_32_bits_reach() -> None:
    attention = plan_of().attention
    slot = attention.num_kv_heads * attention.head_size
    most = 2**31 // slot - 16
    _check_block_size(replace(attention, block_size=most))
    with pytest.raises(ConfigError, match=f"block_size={most + 16}: .*have {2**31} elements .*; {most} or less works"):
        _check_block_size(replace(attention, block_size=most + 16))


def test_a_context_may_be_as_long_as_the_models() -> None:
    model = replace(DEMO, context_length=640, context_source="max_position_embeddings 640")
    assert plan_of(model=model, max_model_len=640).limits.max_model_len == 640
    with pytest.raises(
        ConfigError, match=r"max_model_len=641: exceeds the model's context length of 640 \(max_position_embeddings 640"
    ):
        plan_of(model=model, max_model_len=641)
    assert plan_of(model=model, max_model_len=2).limits.max_model_len == 2


SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize("backend", [None, "triton", "flash_attn"])
def test_a_gpu_speculates_on_backends_that_take_bounds_of_lengths(backend: str | None) -> None:
    plan = plan_of("h200", attention_backend=backend, speculative_config=SPECULATION)
    assert plan.captures.drafting and plan.captures.wide and plan.limits.max_num_logits == 256 * 5
    assert any(note.startswith("speculation: 0 to 4 drafts a decode, by acceptance") for note in plan.notes)
    plain = plan_of("h200", attention_backend=backend)
    assert not plain.captures.drafting and plain.limits.max_num_logits == 256


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"attention_backend": "decode=triton,prefill=flash_attn"}, "takes decodes of one length.* triton or"),
    ],
)
def test_a_gpu_refuses_speculation_where_drafts_cannot_be_verified(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config=.*{problem}"):
        plan_of("h200", speculative_config=SPECULATION, **settings)


@pytest.mark.parametrize(
    ("backend", "speculation", "reason"),
    [
        ("triton", SPECULATION, None),
        ("flashinfer", SPECULATION, "flashinfer plans with exact lengths"),
        ("triton", {"method": "suffix"}, "the host makes the drafts of method suffix"),
    ],
)
def test_a_step_waits_for_the_tokens_of_the_one_before(
    backend: str, speculation: dict[str, Any], reason: str | None
) -> None:
    plan = plan_of("h200", attention_backend=backend, speculative_config=speculation)
    found = [note for note in plan.notes if "waits for the tokens of the one before" in note]
    assert plan.waits == (reason is not None) == bool(found) and (reason or "") in "".join(found)
    assert plan.captures.drafting and plan.captures.wide
    assert not plan_of("h200", attention_backend=backend).waits


def test_memory_of_drafts_on_a_gpu_is_planned() -> None:
    """Rows of logits, their scratch, copies of masked ones, and the tokens of all slots."""
    shape: dict[str, Any] = {"attention_backend": "triton", "max_num_seqs": 64, "max_model_len": 1000}
    plain, drafting = (plan_of("h200", **shape, **more).memory for more in ({}, {"speculative_config": SPECULATION}))
    rows = 4 * 64
    assert drafting.sampling - plain.sampling == 4 * 64 * 1001 + 33 * 1024 * rows + 64 * DEMO.vocab_size * 2
    assert drafting.graphs - plain.graphs >= rows * DEMO.vocab_size * 2
    suffix = plan_of("h200", **shape, speculative_config={"method": "suffix", "num_speculative_tokens": 4}).memory
    assert drafting.sampling - suffix.sampling == 4 * 64 * 1001


def plan_with_draft(folder: Path, device: str = "h200", **settings: Any) -> EnginePlan:
    speculation = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    shape = {"max_num_seqs": 8, "max_model_len": 128, "num_kv_blocks": 64}
    return plan_of(device, speculative_config=speculation, **(shape | settings))


def test_memory_of_a_draft_model_is_planned(tmp_path: Path) -> None:
    make_checkpoint("llama_bias", tmp_path, vocab_size=DEMO.vocab_size, num_hidden_layers=3)
    plan, draft_spec = plan_with_draft(tmp_path), read_model_spec(tmp_path)
    draft, plain = plan.draft, plan_of("h200", max_num_seqs=8, max_model_len=128, num_kv_blocks=64)
    assert draft is not None and draft.model == draft_spec
    assert plan.memory.weights - plain.memory.weights == draft_spec.weight_bytes("bfloat16")
    layer = draft_spec.layers[0].attention
    block = 3 * plan.attention.block_size * 2 * layer.num_kv_heads * layer.head_size * 2
    assert plan.memory.block - plain.memory.block == draft.page_bytes == block
    assert draft.attention.block_size == plan.attention.block_size and plan.limits.lookahead_tokens == 3
    assert any(note.startswith("draft model LlamaForCausalLM: 3 layers") for note in plan.notes)


@pytest.mark.parametrize(
    ("family", "changes", "settings", "problem"),
    [
        ("llama_bias", {"vocab_size": 70}, {}, "has a vocabulary of 70 tokens and the model 2048"),
        ("llama_bias", {"max_position_embeddings": 64}, {}, "context of 64 tokens .* max_model_len=64 works"),
        ("llama_bias", {"head_dim": 64}, {"attention_backend": "flashinfer"}, "flashinfer plans with exact lengths"),
        ("qwen2_window", {"sliding_window": 20}, {}, "layers of one kind of attention, without a window"),
        ("lfm2", {}, {}, "is of Lfm2ForCausalLM; a model that generates, has no states"),
    ],
)
def test_draft_models_that_cannot_run(
    family: str, changes: dict[str, Any], settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path, **({"vocab_size": DEMO.vocab_size} | changes))
    with pytest.raises(ConfigError, match=f"speculative_config.*{problem}"):
        plan_with_draft(tmp_path, **settings)


HEAD = eagle_heads.HEAD | {"vocab_size": DEMO.vocab_size, "draft_vocab_size": 100}
FIRST_HEAD = eagle_heads.FIRST | {"vocab_size": DEMO.vocab_size, "rms_norm_eps": DEMO.rms_norm_eps}


def plan_with_head(folder: Path, config: dict[str, Any], *, method: str = "eagle3", device: str = "h200") -> EnginePlan:
    head = folder / "head"
    head.mkdir()
    sizes = {"hidden_size": DEMO.hidden_size, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    (head / "config.json").write_text(json.dumps(config | sizes))
    speculation = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    shape: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "num_kv_blocks": 64, "load_format": "dummy"}
    return plan_of(device, speculative_config=speculation, **shape)


def test_memory_of_a_draft_head_is_planned(tmp_path: Path) -> None:
    plan = plan_with_head(tmp_path, HEAD)
    plain = plan_of("h200", max_num_seqs=8, max_model_len=128, num_kv_blocks=64)
    assert plan.draft is not None and plan.draft.taps == (2, 4, 5) and plan.limits.lookahead_tokens == 3
    hidden, inner = DEMO.hidden_size, HEAD["intermediate_size"]
    layer = (4 + 2 * 2) * 64 * 2 * hidden + 4 * 64 * hidden + 3 * inner * hidden + 3 * hidden
    weights = 3 * hidden * hidden + layer + hidden + 100 * hidden
    assert plan.memory.weights - plain.memory.weights == 2 * weights
    states = plan.limits.max_num_batched_tokens * (3 + 4) * hidden + 8 * DEMO.vocab_size
    assert plan.memory.graphs - plain.memory.graphs > 2 * states
    # Tokens of all slots, scratch of the rows of logits, and copies of rows of drafts that a grammar masks.
    copies = 2 * 8 * DEMO.vocab_size
    assert plan.memory.sampling - plain.memory.sampling == 4 * 8 * (128 + 1) + 33 * 1024 * 3 * 8 + copies
    assert any("the head reads the states that enter layers [2, 4, 5]" in note for note in plan.notes)
    assert not any("trained for" in note for note in plan.notes)
    (tmp_path / "short").mkdir()
    plan = plan_with_head(tmp_path / "short", HEAD | {"max_position_embeddings": 100})
    assert any("trained for 100 positions, and max_model_len is 128" in note for note in plan.notes)


def test_memory_of_a_head_on_a_cpu_is_planned(tmp_path: Path) -> None:
    plan = plan_with_head(tmp_path, HEAD, device="cpu")
    plain = plan_of("cpu", max_num_seqs=8, max_model_len=128, num_kv_blocks=64)
    states = plan.limits.max_num_batched_tokens * (3 + 4) * DEMO.hidden_size + 8 * DEMO.vocab_size
    assert plan.memory.graphs - plain.memory.graphs > 4 * states


def test_memory_of_a_head_of_the_first_version_is_planned(tmp_path: Path) -> None:
    """It has the logits' matrix and the last norm of the model."""
    plan = plan_with_head(tmp_path, FIRST_HEAD, method="eagle")
    plain = plan_of("h200", max_num_seqs=8, max_model_len=128, num_kv_blocks=64)
    assert plan.draft is not None and plan.draft.taps == (8,)
    hidden, inner = DEMO.hidden_size, FIRST_HEAD["intermediate_size"]
    layer = (4 + 2 * 2) * 64 * hidden + 4 * 64 * hidden + 3 * inner * hidden + hidden
    assert plan.memory.weights - plain.memory.weights == 2 * (2 * hidden * hidden + layer)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "LlamaForCausalLMEagle", "EagleLlamaForCausalLM"])
def test_architectures_of_the_first_version(architecture: str, tmp_path: Path) -> None:
    """Files of the authors have the name of a whole model; the method says what they are."""
    plan = plan_with_head(tmp_path, FIRST_HEAD | {"architectures": [architecture]}, method="eagle")
    assert any(note.startswith(f"draft head {architecture}: 1 layer") for note in plan.notes)


@pytest.mark.parametrize(
    ("config", "settings", "problem"),
    [
        (HEAD, {"method": "draft_model"}, "method='draft_model': does not fit the model; eagle3 works"),
        (HEAD, {"method": "eagle"}, "method='eagle': does not fit the model; eagle3 works"),
        (FIRST_HEAD, {"method": "eagle3"}, "method='eagle3': does not fit the model; eagle works"),
        (
            HEAD | {"architectures": ["LlamaForCausalLM"]},
            {},
            "method='eagle3': does not fit the model; draft_model works",
        ),
    ],
)
def test_draft_heads_that_cannot_run(
    config: dict[str, Any], settings: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"speculative_config.*{problem}"):
        plan_with_head(tmp_path, config, **settings)


def test_a_head_of_the_hub_comes_with_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of its tensors say whether it has an embedding and a matrix of logits of its own."""
    sizes = {"hidden_size": DEMO.hidden_size, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    eagle_heads.make_head(tmp_path / "hub", "eagle3", {"vocab_size": DEMO.vocab_size} | sizes, {})
    folder = tmp_path / "cache"
    folder.mkdir()

    def download(hub_id: str, *, allow_patterns: list[str], **_: object) -> str:
        assert hub_id == "owner/head"
        for file in (tmp_path / "hub").iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, folder)
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: SimpleNamespace(siblings=[]))
    speculation = {"method": "eagle3", "model": "owner/head", "num_speculative_tokens": 3}
    plan = plan_of("cpu", speculative_config=speculation, max_num_seqs=8, max_model_len=128, num_kv_blocks=64)
    assert plan.draft is not None and plan.draft.taps == (0, 1, 3) and plan.draft.model.vocab_size == 50
    (folder / "model.safetensors").unlink()
    (tmp_path / "hub" / "model.safetensors").unlink()
    with pytest.raises(WeightError, match="no .*safetensors files .pytorch_model.bin is not read: convert it"):
        plan_of("cpu", speculative_config=speculation, max_num_seqs=8, max_model_len=128, num_kv_blocks=64)
