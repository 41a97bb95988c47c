"""Declarations of each family: limits that refuse with a reason, and graph support that names its mechanism."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec, KVLayout
from phonograph.attention.backend import Capabilities
from phonograph.attention.capabilities import Declaration
from phonograph.attention.flash_attn import providers
from phonograph.attention.flash_attn.capabilities import (
    FlashAttention2Capabilities,
    FlashAttention3Capabilities,
    FlashAttention4Capabilities,
)
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.reference.backend import ReferenceCapabilities
from phonograph.attention.triton import capabilities as triton_capabilities
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import known_device
from phonograph.graphs.modes import GraphSupport

FA2, FA3, FA4 = FlashAttention2Capabilities(), FlashAttention3Capabilities(), FlashAttention4Capabilities()
FLASHINFER, TRITON, REFERENCE = FlashInferCapabilities(), TritonCapabilities(), ReferenceCapabilities()
SPEC = AttentionSpec(
    num_query_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=16
)
WINDOWS = ((1023, 0),)


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which library provides FlashAttention decides about block sizes."""
    monkeypatch.setattr(providers, "find_spec", lambda name: None)


def refusals(capabilities: Capabilities, device: str = "h100", **changes: object) -> list[str]:
    return capabilities.refusals(replace(SPEC, **changes), known_device(device))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("capabilities", "device", "changes"),
    [
        (FA2, "a100-80gb", {}),
        (FA2, "h100", {"alibi": True, "softcap": 30.0, "windows": WINDOWS, "head_size": 256}),
        (FA2, "rtx4090", {"kind": AttentionKind.ENCODER_ONLY, "layout": KVLayout.HND}),
        (FA3, "h100", {"sinks": True, "num_query_heads": 64, "windows": ((3, 3), (-1, -1)), "softcap": 30.0}),
        (FA3, "h100", {"num_query_heads": 72}),
        (FA4, "b200", {"sinks": True, "windows": WINDOWS}),
        (FA3, "h100", {"kv_cache_dtype": "float8_e4m3fn", "head_size": 64, "sinks": True, "windows": WINDOWS}),
        (FLASHINFER, "a100-80gb", {"kv_cache_dtype": "float8_e5m2", "softcap": 30.0, "windows": WINDOWS}),
        (TRITON, "l4", {"kv_cache_dtype": "float8_e4m3fn", "alibi": True, "sinks": True, "block_size": 48}),
        (TRITON, "a100-80gb", {"kv_cache_dtype": "float8_e5m2", "windows": ((3, 3), (-1, -1))}),
        (REFERENCE, "cpu", {"head_size": 33, "block_size": 7, "kv_cache_dtype": "float8_e5m2", "alibi": True}),
    ],
)
def test_serves(capabilities: Capabilities, device: str, changes: dict[str, object]) -> None:
    assert refusals(capabilities, device, **changes) == []


@pytest.mark.parametrize(
    ("capabilities", "device", "changes", "part"),
    [
        (FA2, "cpu", {}, "device cpu"),
        (FA2, "h100", {"sinks": True}, "sinks"),
        (FA2, "h100", {"kv_cache_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (FA2, "h100", {"head_size": 264}, "head size 264"),
        (FA2, "h100", {"head_size": 100}, "head size 100"),
        (FA2, "h100", {"block_size": 24}, "block size 24"),
        (FA3, "a100-80gb", {}, "8.0"),
        (FA3, "b200", {}, "10.0"),
        (FA3, "h100", {"alibi": True}, "ALiBi"),
        (FA3, "h100", {"kv_cache_dtype": "float8_e5m2"}, "float8_e5m2"),
        (FA3, "h100", {"kv_cache_dtype": "float8_e4m3fn", "dtype": "float16"}, "write bfloat16 where queries are FP8"),
        (FA3, "h100", {"kv_cache_dtype": "float8_e4m3fn", "head_size": 72}, "head size 72 with an FP8 cache"),
        (
            FA3,
            "h100",
            {"sinks": True, "num_query_heads": 72},
            "sinks with 72 query heads; its kernels take sinks of 64",
        ),
        (FA3, "h100", {"kind": AttentionKind.ENCODER}, "encoder attention; its kernels would take queries, keys"),
        (FA3, "h100", {"kind": AttentionKind.ENCODER_DECODER}, "keys of another length"),
        (FA2, "h100", {"kind": AttentionKind.ENCODER_DECODER}, "which our batches do not have"),
        (FA2, "h100", {"alibi": True, "kind": AttentionKind.ENCODER_ONLY}, "ALiBi in encoder_only attention"),
        (FA2, "h100", {"alibi": True, "lse": True}, "LSE beside ALiBi"),
        (FA2, "h100", {"alibi": True, "non_causal": True}, "ALiBi in batches without a causal mask"),
        (FA3, "h100", {"block_size": 8}, "multiples of 16"),
        (FA4, "b200", {"kind": AttentionKind.ENCODER}, "without a cache"),
        (FA4, "b200", {"alibi": True}, "ALiBi"),
        (FA4, "a100-80gb", {}, "9.x or 10.x"),
        (FA4, "h100", {"head_size": 256}, "64, 96 or 128"),
        (FLASHINFER, "h100", {"head_size": 96}, "head size 96"),
        (FLASHINFER, "h100", {"windows": ((4, 4),)}, "looks ahead"),
        (FLASHINFER, "h100", {"windows": ((4, 0), (-1, -1))}, "2 windows"),
        (FLASHINFER, "h100", {"kind": AttentionKind.ENCODER}, "encoder"),
        (FLASHINFER, "h100", {"sinks": True}, "sinks"),
        (TRITON, "a100-80gb", {"kv_cache_dtype": "float8_e4m3fn"}, "8.9"),
        (TRITON, "cpu", {}, "cuda"),
        (TRITON, "h100", {"num_query_heads": 30}, "30 query heads with 8 KV heads"),
        (TRITON, "h100", {"kv_cache_dtype": "float16"}, "float16 with dtype bfloat16"),
        (REFERENCE, "cpu", {"dtype": "float64", "kv_cache_dtype": "float8_e5m2"}, "float64"),
    ],
)
def test_refuses_with_the_reason(
    capabilities: Capabilities, device: str, changes: dict[str, object], part: str
) -> None:
    found = refusals(capabilities, device, **changes)
    assert len(found) == 1
    assert part in found[0]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"softcap": 30.0}, "softcap 30"),
        ({"windows": WINDOWS}, "windows"),
        ({"lse": True}, "LSE"),
        ({"non_causal": True}, "without a causal mask"),
        ({"alibi": True}, "ALiBi"),
        ({"sinks": True}, "sinks"),
    ],
)
def test_a_feature_that_a_declaration_does_not_name_is_refused(changes: dict[str, object], part: str) -> None:
    """Every optional field of a spec that changes the computation: a first backend need not know of them."""
    spec, device = replace(SPEC, **changes), known_device("h100")  # type: ignore[arg-type]
    (refusal,) = Declaration().refusals(spec, device)
    assert part in refusal
    said = Declaration(**{name: True for name in changes})  # type: ignore[arg-type]
    assert said.refusals(spec, device) == [] and Declaration().refusals(SPEC, device) == []


def test_every_refusal_is_listed() -> None:
    found = refusals(FLASHINFER, "cpu", head_size=96, sinks=True, alibi=True, block_size=8)
    assert len(found) == 5


def support(capabilities: Capabilities, device: str = "h100", **changes: object) -> tuple[GraphSupport, str]:
    answer = capabilities.graph_support(replace(SPEC, **changes), known_device(device))  # type: ignore[arg-type]
    return answer.level, answer.reason


def test_flash_attention_2_says_when_it_folds() -> None:
    level, reason = support(FA2)
    assert level is GraphSupport.ALWAYS
    assert "two launches, decodes and prefills" in reason
    assert "folds the 4 query heads" in reason
    assert "would be wrong for a mixed batch" in reason
    ragged = FA2.ragged_support(SPEC, known_device("h100"))
    assert ragged.level is GraphSupport.ALWAYS and "query length above 1" in ragged.reason
    # A layer without a window still folds, so a window must be in all of them.
    for unlimited in ((-1, -1), (-1, 0)):
        assert "folds the 4" in support(FA2, windows=(unlimited, (7, 0)))[1]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_kv_heads": 32}, "as many KV heads as query heads"),
        ({"windows": WINDOWS}, "a window in every layer"),
        ({"windows": ((0, -1), (-1, 1))}, "a window in every layer"),
        ({"alibi": True}, "ALiBi"),
        ({"alibi": True, "windows": WINDOWS}, "a window in every layer and ALiBi"),
    ],
)
def test_flash_attention_2_says_when_it_does_not_fold(changes: dict[str, object], why: str) -> None:
    level, reason = support(FA2, **changes)
    assert level is GraphSupport.ALWAYS
    assert f": with {why} its host code never folds" in reason


def test_levels_and_mechanisms() -> None:
    assert support(FA3)[0] is GraphSupport.ALWAYS
    assert "zeroed tail" in support(FA3)[1]
    level, reason = support(FA3, windows=((-1, -1), (7, 0)))
    assert level is GraphSupport.ALWAYS
    assert "schedule is off" in reason
    assert "no ahead-of-time schedule" in support(FA4, "b200")[1]
    assert support(FLASHINFER)[0] is GraphSupport.ALWAYS
    level, reason = support(FLASHINFER, "a100-80gb")
    assert level is GraphSupport.UNIFORM_BATCH
    assert "FA2" in reason and "no mixed graphs" in reason
    assert support(TRITON)[0] is GraphSupport.ALWAYS
    assert support(REFERENCE, "cpu")[0] is GraphSupport.ALWAYS
    assert support(REFERENCE, "h100")[0] is GraphSupport.NEVER


def test_only_the_reference_and_our_own_need_nothing_else() -> None:
    assert REFERENCE.missing() is None
    assert all(capabilities.missing() for capabilities in (FA2, FA3, FA4))


def test_each_limit_of_a_declaration_is_a_reason_of_its_own() -> None:
    """Values on the limit are served."""
    declared = Declaration(
        capabilities=(8, 9),
        min_capability=(8, 9),
        head_size_multiple=8,
        max_head_size=128,
        block_size_multiple=16,
        layouts=(KVLayout.NHD,),
        windows=True,
        left_window_only=True,
    )
    right = replace(SPEC, num_query_heads=8, num_kv_heads=8, windows=((-1, 0), (5, -1)))
    l4 = known_device("l4")
    assert l4.capability == (8, 9) and declared.refusals(right, l4) == []
    refused = {
        "head size 136; it has kernels for multiples of 8 up to 128": {"head_size": 136},
        "head size 100; it has kernels for multiples of 8 up to 128": {"head_size": 100},
        "block size 24; it takes multiples of 16": {"block_size": 24},
        f"KV layout {KVLayout.HND.value}; it reads {KVLayout.NHD.value}": {"layout": KVLayout.HND},
        "8 query heads with 16 KV heads; it groups": {"num_kv_heads": 16},
        "KV cache dtype float16 with dtype bfloat16; the cache takes": {"kv_cache_dtype": "float16"},
        "KV cache dtype float8_e5m2; it reads float16 or bfloat16": {"kv_cache_dtype": "float8_e5m2"},
        "a window that looks ahead": {"windows": ((5, 0), (5, 1))},
        "ALiBi; it takes no slopes": {"alibi": True},
        "attention sinks; its kernels have none": {"sinks": True},
        "encoder_only attention; it serves decoder": {"kind": AttentionKind.ENCODER_ONLY},
    }
    for reason, changes in refused.items():
        (found,) = declared.refusals(replace(right, **changes), l4)
        assert found.startswith(reason)
    devices = {"b200": "it runs on 8.x or 9.x", "a100-80gb": "it needs 8.9 or more", "cpu": "it runs on cuda"}
    for device, reason in devices.items():
        (found,) = declared.refusals(right, known_device(device))
        assert found.endswith(reason)
    one_size = Declaration(head_sizes=(64, 128), windows=True)
    assert one_size.refusals(right, l4) == []
    assert one_size.refusals(replace(right, head_size=96), l4) == ["head size 96; it has kernels for 64 or 128"]


def test_a_file_may_be_in_any_folder_of_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As namespace packages have several; every pattern must match."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    monkeypatch.setattr(providers, "_spec", lambda _: SimpleNamespace(submodule_search_locations=map(str, folders)))
    settings: Any = {"version": "3", "module": "some.thing", "distribution": "some", "library": None, "install": "pip"}
    provider = providers.Provider(**settings, files=("a*.so", "b.so"))
    assert provider.absent() == "some is installed without some/a*.so (pip)"
    (folders[1] / "a1.so").touch()
    assert provider.absent() == "some is installed without some/b.so (pip)"
    (folders[0] / "b.so").touch()
    assert provider.absent() is None


def test_our_own_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, reason in ((None, "the package triton is not installed"), ("a spec", None)):
        monkeypatch.setattr(triton_capabilities, "find_spec", lambda name, found=found: found)
        missing = TRITON.missing()
        assert missing is reason is None or (missing or "").startswith(reason or "?")


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "element_bytes", "kv_bytes", "fp8"),
    [
        ("float32", "float32", 4, 4, False),
        ("bfloat16", "bfloat16", 2, 2, False),
        ("float16", "float8_e4m3fn", 2, 1, True),
        ("bfloat16", "float8_e5m2", 2, 1, True),
    ],
)
def test_bytes_of_a_spec(dtype: str, kv_cache_dtype: str, element_bytes: int, kv_bytes: int, fp8: bool) -> None:
    spec = replace(SPEC, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
    assert (spec.element_bytes, spec.has_fp8_cache) == (element_bytes, fp8)
    assert spec.kv_token_bytes == 2 * 8 * 128 * kv_bytes
