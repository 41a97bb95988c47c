"""Decodes and prefills by two launches: the parts together are the whole."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from attention_specs import TINY

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.attention.composite.capabilities import SplitCapabilities
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.selection import load, select
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import known_device
from phonograph.core.limits import Limits
from phonograph.errors import BackendError, ConfigError
from phonograph.graphs.modes import GraphKey, GraphSet, GraphSupport, Support
from phonograph.testing.conformance import check_backend
from phonograph.testing.conformance_batch import BatchShape

pytest.importorskip("triton")

from phonograph.attention.composite.backend import SplitBackend, SplitMetadata
from phonograph.attention.triton.backend import TritonBackend, TritonMetadata

H100 = known_device("h100")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = (
    BatchShape(name="both", query_lens=(1, 1, 3, 20, 1), seq_lens=(40, 1, 3, 33, 9), padded_reqs=2, padded_tokens=3),
    BatchShape(name="decodes", query_lens=(1,) * 3, seq_lens=(70, 16, 1), padded_reqs=1, padded_tokens=1),
    BatchShape(name="drafts", query_lens=(3, 3, 7), seq_lens=(20, 40, 7), padded_reqs=1, padded_tokens=2),
    BatchShape(name="prefills", query_lens=(5, 18), seq_lens=(5, 40), padded_reqs=0, padded_tokens=0),
    BatchShape(name="empty", query_lens=(), seq_lens=(), padded_reqs=2, padded_tokens=3),
)
triton_twice = partial(SplitBackend, decode=TritonBackend, prefill=TritonBackend)


@pytest.mark.parametrize("speculative_tokens", [0, 2])
def test_parts_together_are_the_batch(speculative_tokens: int) -> None:
    spec = replace(TINY, speculative_tokens=speculative_tokens)
    results = check_backend(triton_twice, spec, DEVICE, shapes=SHAPES)
    assert len(results) == len(SHAPES)
    assert all(result.passed for result in results), [str(result) for result in results]


@pytest.mark.gpu
@pytest.mark.parametrize("windows", [((-1, -1),), ((-1, -1), (40, 0))])
def test_real_sizes(windows: tuple[tuple[int, int], ...]) -> None:
    spec = replace(TINY, num_query_heads=32, num_kv_heads=8, head_size=128, windows=windows)
    spec = replace(spec, dtype="bfloat16", kv_cache_dtype="bfloat16")
    results = check_backend(triton_twice, replace(spec, non_causal=True), DEVICE)
    assert results and all(result.passed for result in results), [str(result) for result in results]


def common(query_lens: list[int], *, slots: int, tokens: int) -> CommonMetadata:
    lens = np.array([*query_lens, *[0] * (slots - len(query_lens))], np.int32)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    seq_lens = np.where(lens > 0, lens + 3, 0).astype(np.int32)
    return CommonMetadata(
        num_reqs=len(query_lens),
        num_decodes=query_lens.count(1),
        num_tokens=int(starts[-1]),
        num_decode_tokens=query_lens.count(1),
        max_query_len=max(query_lens),
        max_seq_len=max(query_lens) + 3,
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(seq_lens),
        block_table=torch.zeros(slots, 8, dtype=torch.int32),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
    )


def test_the_parts_tensors_stay_where_they_are() -> None:
    backend = triton_twice(
        TINY, torch.device("cpu"), Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
    )
    builder = backend.make_builder()
    key = GraphKey(GraphSet.MIXED, 6, 8)
    seen: list[list[int]] = []
    for query_lens in ([1, 1, 4], [6], [1, 2, 1, 1]):
        metadata = builder.build(common(query_lens, slots=8, tokens=6), key=key)
        parts = metadata.decode, metadata.prefill
        assert all(isinstance(part, TritonMetadata) for part in parts)
        commons = [part.common for part in parts]
        seen.append([tensor.data_ptr() for one in commons for tensor in (one.query_start_loc, one.seq_lens)])
        # Six tokens hold no more than six decodes, whatever the slots.
        assert [one.seq_lens.shape for one in commons] == [(6,), (8,)]
        assert metadata.num_decode_rows == 6
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 4


def test_host_copies_are_cut_as_the_tensors_are() -> None:
    backend = triton_twice(TINY, DEVICE, Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64))
    whole = common([1, 1, 4, 1], slots=6, tokens=8)
    kept: list[CommonMetadata] = []

    class Keeping:
        def build(self, common: CommonMetadata, *, key: GraphKey | None) -> object:
            kept.append(common)
            return object()

    builder = backend.make_builder()
    builder._decode = builder._prefill = Keeping()
    metadata = builder.build(whole, key=GraphKey(GraphSet.MIXED, 8, 6))
    assert isinstance(metadata, SplitMetadata)
    decodes, prefills = kept
    assert decodes.query_start_loc_cpu.tolist() == [0, 1, 2, 2, 2, 2, 2]
    assert decodes.seq_lens_cpu.tolist() == [4, 4, 0, 0, 0, 0]
    assert prefills.query_start_loc_cpu.tolist() == [2, 2, 2, 6, 7, 7, 7]
    assert prefills.seq_lens_cpu.tolist() == [0, 0, 7, 4, 0, 0]
    assert (decodes.max_query_len, prefills.max_query_len) == (1, 4)
    assert (decodes.num_reqs, decodes.num_tokens, prefills.num_reqs) == (2, 2, 4)


class Uniform(TritonCapabilities):
    """Reads query_start_loc only where it was captured for long queries."""

    name = "uniform"

    def graph_support(self, spec: AttentionSpec, device: object) -> Support:
        return Support(GraphSupport.UNIFORM_BATCH, "folds query heads at query length 1")

    def ragged_support(self, spec: AttentionSpec, device: object) -> Support:
        return Support(GraphSupport.ALWAYS, "reads query_start_loc at longer queries")


class Never(TritonCapabilities):
    name = "never"

    def graph_support(self, spec: AttentionSpec, device: object) -> Support:
        return Support(GraphSupport.NEVER, "says so")


@pytest.mark.parametrize(
    ("decode", "prefill", "level"),
    [
        (Uniform(), Uniform(), GraphSupport.ALWAYS),
        (TritonCapabilities(), Uniform(), GraphSupport.ALWAYS),
        (FlashInferCapabilities(), TritonCapabilities(), GraphSupport.ALWAYS),
        (TritonCapabilities(), FlashInferCapabilities(), GraphSupport.ALWAYS),
        (TritonCapabilities(), Never(), GraphSupport.UNIFORM_BATCH),
    ],
)
def test_support_is_that_of_the_parts(decode: Capabilities, prefill: Capabilities, level: GraphSupport) -> None:
    support = SplitCapabilities(decode, prefill).graph_support(replace(TINY, head_size=128), H100)
    assert support.level is level
    assert decode.label in support.reason and prefill.label in support.reason


def test_refusals_name_the_part() -> None:
    capabilities = SplitCapabilities(TritonCapabilities(), FlashInferCapabilities())
    spec = replace(TINY, head_size=72, dtype="bfloat16", kv_cache_dtype="bfloat16")
    refusals = capabilities.refusals(spec, H100)
    assert refusals and all(reason.startswith("prefill: ") for reason in refusals)
    assert any(reason.startswith("device") for reason in capabilities.refusals(spec, known_device("cpu")))
    assert capabilities.name == "prefill=flashinfer,decode=triton"


def test_selection_by_part() -> None:
    spec = replace(TINY, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16")
    selection = select("prefill=triton, Decode=Triton", None, spec, H100)
    assert selection.capabilities.name == "prefill=triton,decode=triton"
    assert any(reason.startswith("prefill: ") for reason in selection.reasons)
    made = load(selection)(spec, torch.device("cpu"), Limits(max_num_seqs=2, max_num_batched_tokens=4, max_model_len=8))
    assert isinstance(made, SplitBackend) and isinstance(made.prefill, TritonBackend)
    versions = select("prefill=flash_attn,decode=triton", "2", spec, H100)
    assert versions.capabilities.name == "prefill=flash_attn2,decode=triton"


@pytest.mark.parametrize(
    ("asked", "version", "error", "words"),
    [
        ("prefill=triton", None, ConfigError, "prefill=flash_attn,decode=triton"),
        ("prefill=triton,decode=", None, ConfigError, "each part"),
        ("prefill=triton,prefill=triton", None, ConfigError, "each part"),
        ("prefill=triton,decode=nothing", None, ConfigError, "is not a backend; there are "),
        ("prefill=triton,decode=triton", "3", ConfigError, "neither part has versions"),
        ("prefill=triton,decode=flashinfer", None, BackendError, "flashinfer refuses"),
    ],
)
def test_parts_that_do_not_work(asked: str, version: str | None, error: type[Exception], words: str) -> None:
    spec = replace(TINY, head_size=72, dtype="bfloat16", kv_cache_dtype="bfloat16")
    with pytest.raises(error, match=words):
        select(asked, version, spec, H100)


def test_a_cpu_has_no_parts() -> None:
    with pytest.raises(BackendError, match="cut by a kernel for NVIDIA GPUs"):
        select("prefill=reference,decode=reference", None, TINY, known_device("cpu"))
