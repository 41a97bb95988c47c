"""A suite that passes everything proves nothing: each backend here is wrong in one way, and must be found out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AnyCall, AttentionCall, AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.reference.backend import ReferenceBackend, ReferenceCapabilities, ReferenceMetadata
from phonograph.testing.conformance import check_backend

SPEC = AttentionSpec(
    num_query_heads=4,
    num_kv_heads=2,
    head_size=32,
    dtype="float32",
    kv_cache_dtype="float8_e4m3fn",
    block_size=8,
    windows=((-1, -1), (6, 0)),
    softcap=3.0,
    alibi=True,
    sinks=True,
    lse=True,
)


class Wrong(ReferenceBackend):
    """Right, until a subclass changes something on the way in."""

    def layer(self, layer: AttentionLayer) -> AttentionLayer:
        return layer

    def common(self, common: CommonMetadata) -> CommonMetadata:
        return common

    def metadata(self, metadata: ReferenceMetadata) -> ReferenceMetadata:
        return replace(metadata, common=self.common(metadata.common))

    def schedule(self, metadata: Any) -> None:
        super().schedule(self.metadata(metadata))

    def forward(self, query: Any, call: AttentionCall[ReferenceMetadata], *outputs: Any) -> None:
        call = AttentionCall(self.layer(call.layer), call.kv_cache, self.metadata(call.metadata))
        super().forward(query, call, *outputs)


def without(**changes: object) -> type[ReferenceBackend]:
    class Forgetful(Wrong):
        def layer(self, layer: AttentionLayer) -> AttentionLayer:
            return replace(layer, **changes)

    return Forgetful


class OneKeyShort(Wrong):
    def common(self, common: CommonMetadata) -> CommonMetadata:
        return replace(common, seq_lens=common.seq_lens - (common.seq_lens > 1).int())


class OneKeyTooMany(Wrong):
    def common(self, common: CommonMetadata) -> CommonMetadata:
        return replace(common, seq_lens=common.seq_lens + (common.seq_lens > 1).int())


class NotCausal(Wrong):
    def common(self, common: CommonMetadata) -> CommonMetadata:
        return replace(common, causal=False)


class IgnoresQueryStartLoc(Wrong):
    """A backend that reads a mixed batch as a graph of one-token queries does."""

    def common(self, common: CommonMetadata) -> CommonMetadata:
        starts = torch.arange(len(common.query_start_loc), dtype=torch.int32)
        return replace(common, query_start_loc=torch.minimum(starts, common.query_start_loc[-1]))


class LeavesPadding(ReferenceBackend):
    def forward(self, query: Any, call: AnyCall, out: Any, *lse: Any) -> None:
        super().forward(query, call, out, *lse)
        out[call.metadata.common.query_start_loc[-1] :] = 1e-30


class WritesPadding(ReferenceBackend):
    def write_kv(self, key: Any, value: Any, call: AnyCall) -> None:
        call.kv_cache[:, 0, -1] = 0
        super().write_kv(key, value, call)


class SwapsKeysAndValues(ReferenceBackend):
    def write_kv(self, key: Any, value: Any, call: AnyCall) -> None:
        super().write_kv(value, key, call)


WRONG = {
    "no window": without(window=(-1, -1)),
    "a window one longer": without(window=(7, 0)),
    "no softcap": without(softcap=0.0),
    "no alibi": without(alibi_slopes=None),
    "no sinks": without(sinks=None),
    "no key scales": without(k_scale=None),
    "no value scales": without(v_scale=None),
    "the usual scale": without(scale=SPEC.head_size**-0.5),
    "one key short": OneKeyShort,
    "one key too many": OneKeyTooMany,
    "not causal": NotCausal,
    "query_start_loc ignored": IgnoresQueryStartLoc,
    "padding left": LeavesPadding,
    "another slot written": WritesPadding,
    "keys and values swapped": SwapsKeysAndValues,
}


def test_the_right_one_passes() -> None:
    assert all(result.passed for result in check_backend(Wrong, SPEC, torch.device("cpu")))


@pytest.mark.parametrize("wrong", WRONG)
def test_the_wrong_one_fails(wrong: str) -> None:
    results = check_backend(WRONG[wrong], SPEC, torch.device("cpu"))
    assert not all(result.passed for result in results)


def test_values_of_freed_blocks_times_zero_fail() -> None:
    """A kernel may read the table's entry of a freed block, but no weight of 0 makes its NaN harmless."""

    class ReadsFreedBlocks(ReferenceBackend):
        def forward(self, query: Any, call: AnyCall, out: Any, *lse: Any) -> None:
            super().forward(query, call, out, *lse)
            common = call.metadata.common
            for row, table in enumerate(common.block_table):
                start, end = common.query_start_loc[row : row + 2].tolist()
                out[start:end] += 0 * call.kv_cache[1, table[0]].float().sum()

    full_blocks = replace(SPEC, kv_cache_dtype="float32", windows=((6, 0),))
    device = torch.device("cpu")
    assert all(result.passed for result in check_backend(ReferenceBackend, full_blocks, device))
    results = check_backend(ReadsFreedBlocks, full_blocks, device)
    assert not next(result for result in results if result.name == "one decode").passed

    class Finite(ReferenceCapabilities):
        skips_freed_blocks = False

    class Declares(ReadsFreedBlocks):
        capabilities = Finite()

    results = check_backend(Declares, full_blocks, device)
    assert next(result for result in results if result.name == "one decode").passed


def test_host_lengths_taken_for_exact_fail() -> None:
    """A backend that plans with the host's lengths must say so; then the suite gives it exact ones."""

    class ReadsHostLengths(ReferenceBackend):
        def forward(self, query: Any, call: AnyCall, out: Any, *lse: Any) -> None:
            super().forward(query, call, out, *lse)
            common = call.metadata.common
            exact = common.seq_lens.tolist() == common.seq_lens_cpu[: len(common.seq_lens)].tolist()
            out += 0.0 if exact else 1.0

    class Exact(ReferenceCapabilities):
        takes_length_bounds = False

    class Declares(ReadsHostLengths):
        capabilities = Exact()

    device = torch.device("cpu")
    found = {result.name: result.passed for result in check_backend(ReadsHostLengths, SPEC, device)}
    assert not found["one decode"]
    assert all(result.passed for result in check_backend(Declares, SPEC, device))


def test_a_missing_lse_fails() -> None:
    class NoLse(ReferenceBackend):
        def forward(self, query: Any, call: AnyCall, out: Any, *lse: Any) -> None:
            super().forward(query, call, out)

    results = check_backend(NoLse, SPEC, torch.device("cpu"))
    assert [result.name for result in results if result.passed] == ["empty"] * len(SPEC.windows)


def test_a_key_for_queries_without_keys_fails() -> None:
    class GivesAKey(Wrong):
        def common(self, common: CommonMetadata) -> CommonMetadata:
            return replace(common, seq_lens=common.seq_lens.clamp(min=1))

    spec = replace(SPEC, windows=((-1, -1),), sinks=False, non_causal=True)
    assert all(result.passed for result in check_backend(ReferenceBackend, spec, torch.device("cpu")))
    results = check_backend(GivesAKey, spec, torch.device("cpu"))
    assert [result.name for result in results if not result.passed] == ["without keys"]
