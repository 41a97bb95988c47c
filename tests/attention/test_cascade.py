"""Cascade attention: when it pays, who can, and whether the two launches together are the whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention_specs import TINY, llama
from cascade_arena import CascadeArena
from fake_flash import CALLS
from paged import Batch

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.backend import AttentionCall, MakeBackend
from phonograph.attention.cascade.backend import CascadeBackend, CascadeMetadata
from phonograph.attention.cascade.rule import MIN_PREFIX, MIN_REQUESTS, CascadeTimeRule, cascade_bytes, cascade_refusals
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata
from phonograph.attention.reference.backend import ReferenceBackend, ReferenceCapabilities
from phonograph.attention.selection import load, select
from phonograph.core.device import DeviceSpec, known_device
from phonograph.core.limits import Limits
from phonograph.errors import BackendError, ConfigError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.cascade_tensors import PrefixCut
from phonograph.kernels.torch.attention import cascade as in_torch

pytest.importorskip("triton")

from phonograph.attention.composite.backend import SplitMetadata
from phonograph.attention.triton.backend import TritonBackend
from phonograph.kernels.triton.attention import cascade as in_triton

Installed = Callable[..., Path]
H200 = known_device("h200")
CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = replace(TINY, cascade=True)
HALF = llama(cascade=True)


# -- the rule ----------------------------------------------------------------------------------------------------------

LLAMA = CascadeTimeRule(num_query_heads=32, num_kv_heads=8, num_sms=132)


@pytest.mark.parametrize(
    ("rule", "num_reqs", "prefix_len", "taken", "words"),
    [
        (LLAMA, 64, 8192, True, "64 requests share 8192 tokens; modelled time 64 with cascade, 249 without"),
        (LLAMA, 64, 0, False, "no common prefix"),
        # One token, and one request, too few.
        (replace(LLAMA, num_sms=1), MIN_REQUESTS, MIN_PREFIX - 1, False, "a common prefix of 255 tokens"),
        (replace(LLAMA, num_sms=1), MIN_REQUESTS, MIN_PREFIX, True, "64 with cascade, 128 without"),
        (replace(LLAMA, num_sms=1), MIN_REQUESTS - 1, MIN_PREFIX, False, "7 requests are fewer than 8"),
        # 8 requests of 8 KV heads with a prefix of 2 tiles are 128 of 132 multiprocessors busy once.
        (LLAMA, 8, 256, False, "2 with cascade, 1 without"),
        # Equal times: the ordinary graph has fewer launches. 16 * 8 * 2 = 256 tiles take 132 multiprocessors twice.
        (LLAMA, 16, 256, False, "2 with cascade, 2 without"),
        (LLAMA, 17, 256, True, "2 with cascade, 3 without"),
        # A tile of 128 queries more doubles the cascade's time once the multiprocessors are all busy.
        (replace(LLAMA, num_sms=32), 128, 1280, True, "10 with cascade, 320 without"),
        (replace(LLAMA, num_sms=32), 129, 1280, True, "20 with cascade, 323 without"),
        # Keys behind a whole tile count as one.
        (LLAMA, 64, 257, True, "3 with cascade, 12 without"),
        # Split decoding would not serve these.
        (CascadeTimeRule(num_query_heads=8, num_kv_heads=8, num_sms=132), 8, 256, True, "as many KV heads"),
        (LLAMA, 7, 256, False, "fewer than 8"),
        (LLAMA, 8, 240, False, "256 are worth it"),
        # More heads for each KV head than a tile takes.
        (
            CascadeTimeRule(num_query_heads=256, num_kv_heads=1, num_sms=1),
            8,
            256,
            False,
            "512 with cascade, 32 without",
        ),
        (replace(LLAMA, num_sms=0), 8, 256, True, "64 with cascade, 128 without"),
    ],
)
def test_the_rule(rule: CascadeTimeRule, num_reqs: int, prefix_len: int, taken: bool, words: str) -> None:
    choice = rule.weigh(num_reqs=num_reqs, prefix_len=prefix_len)
    assert choice.taken is taken and words in choice.reason


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"windows": ((-1, -1), (99, 0))}, "with windows"),
        ({"windows": ((-1, 0),)}, "with windows"),
        ({"alibi": True}, "with ALiBi"),
        ({"sinks": True}, "with sinks"),
        ({"kind": AttentionKind.ENCODER_ONLY}, "in encoder_only attention"),
    ],
)
def test_settings_that_no_backend_cascades_with(changes: dict[str, object], words: str) -> None:
    assert cascade_refusals(SPEC) == []
    (refusal,) = cascade_refusals(replace(SPEC, **changes))
    assert refusal.startswith("cascade attention ") and words in refusal


def test_the_bytes_of_a_cascade() -> None:
    """Two launches with LSE, the output of one, and a block table: 16 decodes of 32 heads, and 63 blocks of each."""

    class Sized(ReferenceCapabilities):
        def buffer_bytes(
            self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]
        ) -> int:
            assert spec.lse and not spec.cascade and len(graphs) == 1 and graphs[0].cascade
            return 1_000_000 * limits.max_num_seqs + limits.max_num_batched_tokens

    limits = Limits(max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=1000)
    graphs = [GraphKey(GraphSet.DECODE, 16, 16, 1), GraphKey(GraphSet.DECODE, 16, 16, 1, cascade=True)]
    spec = replace(HALF, num_query_heads=32, head_size=128, block_size=16, dtype="bfloat16")
    parts = 1_000_000 + 16_000_000 + 2 * 16
    assert cascade_bytes(Sized(), spec, H200, limits, graphs) == parts + 16 * 32 * 128 * 2 + 4 * 16 * 63
    wider = replace(spec, dtype="float32", speculative_tokens=2)
    assert cascade_bytes(Sized(), wider, H200, limits, graphs) == parts + 64 + 48 * 32 * 128 * 4 + 4 * 16 * 63


# -- who can -----------------------------------------------------------------------------------------------------------


def test_the_default_is_the_first_that_can() -> None:
    selection = select(None, None, HALF, H200)
    assert selection.capabilities.label == "flash_attn 3"
    assert "cascade attention" in selection.rejected["triton"][-1]
    assert select(None, None, replace(HALF, cascade=False), H200).capabilities.label == "triton"
    assert select(None, None, HALF, known_device("a10")).capabilities.label == "flash_attn 2"
    assert select(None, None, SPEC, known_device("cpu")).capabilities.label == "reference"


@pytest.mark.parametrize("asked", ["triton", "flashinfer"])
def test_those_that_cannot_name_those_that_can(asked: str) -> None:
    with pytest.raises(BackendError) as caught:
        select(asked, None, HALF, H200)
    text = str(caught.value)
    assert f"{asked} refuses: cascade attention; it is not made to" in text
    assert "Would serve: flash_attn 3, flash_attn 4, flash_attn 2, reference" in text


def test_windows_are_refused_by_those_that_could() -> None:
    with pytest.raises(BackendError, match="flash_attn 3 refuses: cascade attention with windows"):
        select("flash_attn", "3", replace(HALF, windows=((99, 0),)), H200)


def test_parts_of_a_batch_do_not_cascade() -> None:
    with pytest.raises(ConfigError, match="cascade_attention=True: takes one backend.*decode=flash_attn is two"):
        select("prefill=flash_attn,decode=flash_attn", None, HALF, H200)


@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_every_version_is_wrapped(version: str, installed: Installed) -> None:
    installed(f"vllm {version}")
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)
    backend = load(select("flash_attn", version, HALF, H200))(HALF, CPU, limits)
    assert isinstance(backend, CascadeBackend) and backend.capabilities.label == f"flash_attn {version}"
    assert not backend.clears_padding
    plain = replace(HALF, cascade=False)
    assert not isinstance(load(select("flash_attn", version, plain, H200))(plain, CPU, limits), CascadeBackend)


# -- the launches ------------------------------------------------------------------------------------------------------

SLOTS, LONGEST = 9, 200


class FreezingArena(CascadeArena):
    """Arena whose graph is the frozen metadata of the captured batch."""

    def freeze(self, batch: Batch, key: GraphKey, prefix_len: int | None) -> SimpleNamespace:
        """Stands for a graph: what was built for the captured batch is run again on the contents of another."""
        self.captured = key
        metadata = self.builder.build(self.fill(batch, prefix_len), key=key)
        return SimpleNamespace(replay=lambda: self.run(metadata))


def arena_of(make: MakeBackend, spec: AttentionSpec, *, num_reqs: int = SLOTS, query_len: int = 1) -> FreezingArena:
    return FreezingArena(
        make,
        spec,
        CPU if make is REFERENCE else DEVICE,
        causal=True,
        num_reqs=num_reqs,
        num_tokens=num_reqs * query_len,
        num_blocks=200,
        max_keys=LONGEST,
    )


REFERENCE = partial(CascadeBackend, ordinary=ReferenceBackend, part=ReferenceBackend, kernels=in_torch)
TRITON = partial(CascadeBackend, ordinary=TritonBackend, part=TritonBackend, kernels=in_triton)
BATCHES: list[tuple[int, list[int]]] = [
    (16, [17]),
    (48, [49, 64, 65, 80, 81, 130]),
    (112, [150, 113, 128, 129, 199, 113, 120, 144]),
    (160, [161] * SLOTS),
    (0, [1, 30]),
]
"""Prefix, and keys of each sequence."""


def check(make: MakeBackend, spec: AttentionSpec, query_len: int = 1) -> None:
    """Eager and frozen, on other prefixes, lengths and numbers of requests than those of the capture."""
    arena = arena_of(make, spec, query_len=query_len)
    key = GraphKey(GraphSet.DECODE, SLOTS * query_len, SLOTS, query_len, cascade=True)
    with torch.inference_mode():
        graph = arena.freeze([(query_len, 16 + query_len)] * SLOTS, key, 16)
        for prefix_len, lengths in BATCHES[1:]:
            batch = [(query_len, min(LONGEST, length + query_len - 1)) for length in lengths]
            arena.check(batch, graph, prefix_len=prefix_len)
        # And where nothing cascades.
        ordinary = arena.freeze([(query_len, query_len)] * SLOTS, replace(key, cascade=False), None)
        arena.check([(query_len, 90), (query_len, 33)], ordinary)


@pytest.mark.parametrize("changes", [{}, {"softcap": 2.0}, {"layout": KVLayout.HND}, {"num_kv_heads": 4}], ids=str)
@pytest.mark.parametrize("query_len", [1, 3])
def test_reference(query_len: int, changes: dict[str, object]) -> None:
    check(REFERENCE, replace(SPEC, speculative_tokens=query_len - 1, **changes), query_len)


@pytest.mark.parametrize(
    ("package", "query_len"),
    [("vllm 2", 1), ("vllm 2", 3), ("vllm 3", 1), ("vllm 3", 3), ("interface 3", 1), ("cute 4", 1)],
)
def test_flash_attention(package: str, query_len: int, installed: Installed) -> None:
    installed(package)
    spec = replace(SPEC, speculative_tokens=query_len - 1)
    check(loaded(package), spec, query_len)


def loaded(package: str, block_size: int = 16) -> MakeBackend:
    return load(select("flash_attn", package[-1], replace(HALF, block_size=block_size), H200))


def test_pages_of_256(installed: Installed) -> None:
    installed("package 2")
    spec = replace(SPEC, block_size=256)
    arena = FreezingArena(
        loaded("package 2", 256), spec, DEVICE, causal=True, num_reqs=3, num_tokens=3, num_blocks=20, max_keys=900
    )
    key = GraphKey(GraphSet.DECODE, 3, 3, 1, cascade=True)
    with torch.inference_mode():
        graph = arena.freeze([(1, 257)] * 3, key, 256)
        arena.check([(1, 513), (1, 800)], graph, prefix_len=512)


def test_any_backend_that_returns_the_lse() -> None:
    """Our Triton kernels, in the interpreter: nothing in the cascade knows whose launches they are."""
    arena = arena_of(TRITON, SPEC, num_reqs=4)
    key = GraphKey(GraphSet.DECODE, 4, 4, 1, cascade=True)
    with torch.inference_mode():
        graph = arena.freeze([(1, 17)] * 4, key, 16)
        arena.check([(1, 49), (1, 70), (1, 128)], graph, prefix_len=48)


def test_arguments_of_the_launches_of_version_3(installed: Installed) -> None:
    """Each launch has a plan of its own, in a buffer of its own, and nothing of a batch is in the numbers."""
    installed("vllm 3")
    arena = arena_of(loaded("vllm 3"), SPEC)
    key = GraphKey(GraphSet.DECODE, SLOTS, SLOTS, 1, cascade=True)
    seen = []
    for prefix_len, lengths in BATCHES[:4]:
        common = arena.fill([(1, length) for length in lengths], prefix_len)
        metadata = arena.builder.build(common, key=key)
        arena.poison()
        arena.backend.schedule(metadata)
        CALLS.clear()
        out = torch.zeros(SLOTS, 4, 32, device=DEVICE)
        call = AttentionCall(arena.layers[0], arena.cache.nan_to_num(), metadata)
        arena.backend.forward(arena.query, call, out)
        prefix, suffix = CALLS
        assert (prefix["causal"], suffix["causal"]) == (False, True)
        assert prefix["cu_seqlens_q"].tolist() == [0, len(lengths)] and prefix["seqused_k"].tolist() == [prefix_len]
        lens = [length - prefix_len for length in lengths]
        assert suffix["seqused_k"].tolist() == lens + [0] * (SLOTS - len(lens))
        assert (prefix["max_seqlen_q"], suffix["max_seqlen_q"]) == (SLOTS, 1)
        assert prefix["scheduler_metadata"] is not None and suffix["scheduler_metadata"] is not None
        assert prefix["num_splits"] == suffix["num_splits"] == 32
        assert prefix["return_softmax_lse"] and suffix["return_softmax_lse"]
        tensors = ("cu_seqlens_q", "seqused_k", "block_table", "scheduler_metadata")
        seen.append([call[name].data_ptr() for call in CALLS for name in tensors])
    assert all(addresses == seen[0] for addresses in seen), "a replay would read other memory"
    # What both have in common is the batch's own query_start_loc alone, which the prefix has not.
    assert len(set(seen[0])) == len(seen[0])


def test_arguments_of_the_launches_of_version_2(installed: Installed) -> None:
    """Neither folds query heads: over the prefix not every slot has a token, and of the suffixes the LSE is wanted."""
    installed("vllm 2")
    arena = arena_of(loaded("vllm 2"), SPEC)
    for key, longest in ((GraphKey(GraphSet.DECODE, SLOTS, SLOTS, 1, cascade=True), SLOTS), (None, 9)):
        metadata = arena.builder.build(arena.fill([(1, 50)] * 9, 32), key=key)
        assert isinstance(metadata, CascadeMetadata)
        assert [part.launch.max_query_len for part in (metadata.prefix, metadata.suffix)] == [longest, 2]


def test_the_longest_query_over_the_prefix_is_longer_than_any_sequence(installed: Installed) -> None:
    installed("vllm 3")
    limits = Limits(max_num_seqs=400, max_num_batched_tokens=400, max_model_len=300)
    backend = loaded("vllm 3")(SPEC, DEVICE, limits)
    arena = arena_of(loaded("vllm 3"), SPEC)
    common = arena.fill([(1, 20)] * 9, 16)
    common = replace(common, slot_mapping=torch.full((400,), -1), seq_lens=torch.zeros(400, dtype=torch.int32))
    metadata = backend.make_builder().build(common, key=GraphKey(GraphSet.DECODE, 400, 400, 1, cascade=True))
    assert isinstance(metadata, CascadeMetadata)
    assert metadata.prefix.launch.max_query_len == 400


def test_host_copies_are_cut_as_the_tensors_are() -> None:
    arena = arena_of(REFERENCE, SPEC)
    kept = []

    class Keeping:
        def build(self, common: CommonMetadata, *, key: GraphKey | None) -> AttentionMetadata:
            kept.append((common, key))
            return AttentionMetadata(common=common)

    arena.builder._prefix = arena.builder._suffix = Keeping()
    key = GraphKey(GraphSet.DECODE, SLOTS, SLOTS, 1, cascade=True)
    arena.builder.build(arena.fill([(1, 70), (1, 49), (1, 64)], 48), key=key)
    (prefix, prefix_key), (suffix, suffix_key) = kept
    assert (prefix.num_reqs, prefix.num_tokens, prefix.max_query_len, prefix.max_seq_len) == (1, 3, 3, 48)
    assert prefix.query_start_loc_cpu.tolist() == [0, 3] and prefix.seq_lens_cpu.tolist() == [48]
    assert prefix_key == GraphKey(GraphSet.MIXED, SLOTS, 1) and suffix_key == key
    assert suffix.seq_lens_cpu.tolist() == [22, 1, 16] + [0] * (SLOTS - 3)
    assert (suffix.max_seq_len, suffix.num_reqs, suffix.prefix) == (22, 3, None)


def test_a_step_that_does_not_cascade_is_the_ordinary_backends(installed: Installed) -> None:
    installed("vllm 2")
    arena = arena_of(loaded("vllm 2"), SPEC)
    ordinary = GraphKey(GraphSet.MIXED, SLOTS, SLOTS)
    assert isinstance(arena.builder.build(arena.fill([(1, 9), (3, 7)]), key=ordinary), SplitMetadata)
    with pytest.raises(AssertionError, match="cascades only"):
        arena.builder.build(arena.fill([(1, 9)]), key=GraphKey(GraphSet.DECODE, SLOTS, SLOTS, 1, cascade=True))
    with pytest.raises(AssertionError, match="cascades only"):
        arena.builder.build(arena.fill([(1, 20)], 16), key=ordinary)


@pytest.mark.parametrize("fault", ["prefix_lens", "suffix_lens", "suffix_table", "merge"])
def test_the_arena_detects_errors(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""
    arena = arena_of(REFERENCE, SPEC)
    cut_prefix = in_torch.cut_prefix

    def wrong(cut: PrefixCut, *tensors: torch.Tensor, block_size: int) -> None:
        cut_prefix(cut, *tensors, block_size=block_size)
        if fault == "prefix_lens":
            cut.prefix_lens.sub_(16)
        elif fault == "suffix_lens":
            cut.suffix_lens[1] -= 1
        else:
            cut.suffix_table.copy_(cut.suffix_table.roll(1, 0))

    if fault == "merge":
        monkeypatch.setattr(in_torch, "merge_by_lse", lambda *_: None)
    else:
        monkeypatch.setattr(in_torch, "cut_prefix", wrong)
    with pytest.raises(AssertionError, match="relative error"):
        arena.check([(1, 70), (1, 52), (1, 64)], prefix_len=48)
