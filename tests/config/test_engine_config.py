"""Values that EngineConfig accepts and refuses, and the words of a refusal."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from phonograph import EngineConfig
from phonograph.errors import UNSET, ConfigError, RequestError, counted, quoted
from phonograph.graphs.modes import GraphMode


def refusal(**settings: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    return caught.value


def test_defaults_leave_sizes_to_the_engine() -> None:
    config = EngineConfig(model="demo")
    assert config.max_num_seqs is None and config.cudagraph_mode is None and config.attention_backend is None
    assert (config.dtype, config.device, config.kv_cache_layout) == ("auto", "auto", "NHD")
    assert config.enable_prefix_caching and config.gpu_memory_utilization == 0.9


def test_it_is_frozen_keyword_only_hashable_and_goes_to_another_process() -> None:
    config = EngineConfig(model="demo", cudagraph_capture_sizes=[4, 1], cudagraph_mode=GraphMode.FULL)
    with pytest.raises(ValidationError):
        config.model = "other"
    with pytest.raises(TypeError):
        EngineConfig("demo")  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(config)) == config
    assert len({config, EngineConfig(**config.model_dump()), EngineConfig(**config.model_dump(mode="json"))}) == 1


@pytest.mark.parametrize(
    ("setting", "given", "stored"),
    [
        ("model", Path("some/folder"), "some/folder"),
        ("max_num_seqs", "17", 17),
        ("max_num_seqs", np.int64(17), 17),
        ("max_num_seqs", "null", None),
        ("max_model_len", "auto", None),
        ("max_model_len", -1, None),
        ("max_model_len", "17", 17),
        ("gpu_memory_utilization", "1", 1.0),
        ("enable_prefix_caching", "Off", False),
        ("enforce_eager", 1, True),
        ("dtype", "BFloat16", "bfloat16"),
        ("kv_cache_layout", "hnd", "HND"),
        ("flash_attn_version", "3", 3),
        ("cudagraph_mode", "full_decode_only", GraphMode.FULL_DECODE_ONLY),
        ("cudagraph_mode", "none", GraphMode.NONE),
        ("cudagraph_capture_sizes", 8, (8,)),
        ("cudagraph_capture_sizes", "8", (8,)),
        ("cudagraph_capture_sizes", [8, 2, 8], (2, 8)),
        ("cudagraph_capture_sizes", "[1, 2,4 8]", (1, 2, 4, 8)),
        ("seed", 0, 0),
        ("num_speculative_tokens", 0, 0),
    ],
)
def test_values_that_work(setting: str, given: object, stored: object) -> None:
    config = EngineConfig(**{"model": "demo", setting: given})
    assert getattr(config, setting) == stored and type(getattr(config, setting)) is type(stored)


@pytest.mark.parametrize(
    ("setting", "value", "works"),
    [
        ("model", "", "text that is not empty"),
        ("model", 3, "text that is not empty"),
        ("model", None, "text that is not empty"),
        ("tokenizer", "  ", "text that is not empty"),
        ("max_num_seqs", 0, "a whole number >= 1"),
        ("max_num_seqs", -3, "a whole number >= 1"),
        ("max_num_seqs", True, "a whole number >= 1"),
        ("max_num_seqs", 2.0, "a whole number >= 1"),
        ("max_num_seqs", "auto", "a whole number >= 1"),
        ("max_model_len", -2, "a whole number >= 1, or auto (or -1) for the largest that fits"),
        ("max_model_len", True, "a whole number >= 1, or auto"),
        ("max_num_seqs", "many", "a whole number >= 1"),
        ("max_num_seqs", "", "a whole number >= 1"),
        ("num_speculative_tokens", -1, "a whole number >= 0"),
        ("num_speculative_tokens", None, "a whole number >= 0"),
        ("seed", 2**63, "a whole number >= 0 and <= 9223372036854775807"),
        ("max_num_seqs", 1_000_000, "a whole number >= 1 and <= 131072"),
        ("max_num_batched_tokens", 10**7, "a whole number >= 1 and <= 1048576"),
        ("gpu_memory_utilization", float("nan"), "a number > 0 and <= 1"),
        ("gpu_memory_utilization", 0, "a number > 0 and <= 1"),
        ("gpu_memory_utilization", 1.01, "a number > 0 and <= 1"),
        ("gpu_memory_utilization", "inf", "a number > 0 and <= 1"),
        ("gpu_memory_utilization", True, "a number > 0 and <= 1"),
        ("gpu_memory_utilization", 10**400, "a number > 0 and <= 1"),
        ("enable_prefix_caching", "maybe", "true or false"),
        ("enable_prefix_caching", 2, "true or false"),
        ("dtype", "int8", "one of auto, float32, float16, bfloat16"),
        ("dtype", None, "one of auto, float32, float16, bfloat16"),
        ("device", "tpu", "one of auto, cpu, cuda"),
        ("flash_attn_version", 5, "one of 2, 3, 4"),
        ("cudagraph_mode", "PART", "one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE"),
        ("cudagraph_mode", 2, "one of NONE, PIECEWISE, FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE"),
        ("cudagraph_capture_sizes", 0, "whole numbers >= 1"),
        ("cudagraph_capture_sizes", [1, -2], "whole numbers >= 1"),
        ("cudagraph_capture_sizes", [1, 2.5], "whole numbers >= 1"),
        ("cudagraph_capture_sizes", [True], "whole numbers >= 1"),
        ("cudagraph_capture_sizes", [], "whole numbers >= 1"),
        ("cudagraph_capture_sizes", "1,,2", "whole numbers >= 1"),
        ("cudagraph_capture_sizes", {1: 2}, "whole numbers >= 1"),
    ],
)
def test_errors_name_the_value_and_valid_ones(setting: str, value: object, works: str) -> None:
    error = refusal(**{"model": "demo", setting: value})
    assert error.setting == setting
    assert error.value is value
    assert f"must be {works}" in str(error)
    assert str(error).startswith(f"{setting}={quoted(value)}")


def test_an_unknown_setting_suggests_the_nearest() -> None:
    assert "did you mean max_num_seqs?" in str(refusal(model="demo", max_num_seq=8))
    assert "did you mean block_size?" in str(refusal(model="demo", **{"block-size": 8}))
    error = refusal(model="demo", qqqq=8)
    assert error.setting == "qqqq" and "gpu_memory_utilization" in str(error)


def test_the_model_must_be_given() -> None:
    assert "model is required" in str(refusal())


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"num_kv_blocks": 9, "kv_cache_memory_bytes": 1 << 20}, ("num_kv_blocks=9", "kv_cache_memory_bytes=1048576")),
        ({"flash_attn_version": 3, "attention_backend": "triton"}, ("flash_attn_version=3", "'triton'")),
        ({"enforce_eager": True, "cudagraph_mode": "FULL"}, ("enforce_eager=True", "cudagraph_mode='FULL'")),
        ({"enforce_eager": True, "verify_graphs": True}, ("verify_graphs=True", "enforce_eager=True")),
        ({"cudagraph_mode": "NONE", "verify_graphs": True}, ("verify_graphs=True", "cudagraph_mode='NONE'")),
        (
            {"cudagraph_capture_sizes": [2, 64], "max_cudagraph_capture_size": 63},
            ("max_cudagraph_capture_size=63", "(2, 64)", "64 or more"),
        ),
        ({"max_num_batched_tokens": 7, "max_num_seqs": 8}, ("max_num_batched_tokens=7", "max_num_seqs=8", "8 or more")),
    ],
)
def test_contradictions_name_both_sides(settings: dict[str, object], names: tuple[str, ...]) -> None:
    message = str(refusal(model="demo", **settings))
    assert all(name in message for name in names), message


@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": True, "cudagraph_mode": "NONE"},
        {"flash_attn_version": 2, "attention_backend": "FLASH_ATTN"},
        {"flash_attn_version": 2},
        {"cudagraph_capture_sizes": [2, 64], "max_cudagraph_capture_size": 64},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"num_kv_blocks": 9, "kv_cache_memory_bytes": None},
    ],
)
def test_agreeing_settings_are_no_contradiction(settings: dict[str, Any]) -> None:
    EngineConfig(model="demo", **settings)


def test_compilation_config_becomes_the_settings_it_stands_for() -> None:
    plain = EngineConfig(
        model="demo", cudagraph_mode="FULL", cudagraph_capture_sizes=[1, 2], max_cudagraph_capture_size=2
    )
    keys = {"cudagraph_mode": "full", "cudagraph_capture_sizes": [2, 1], "max_cudagraph_capture_size": 2}
    text = '{"cudagraph_mode": "FULL", "cudagraph_capture_sizes": "1,2", "max_cudagraph_capture_size": 2}'
    for given in (keys, text):
        config = EngineConfig(model="demo", compilation_config=given)
        assert config == plain
        assert config.compilation_config is None
    assert keys == {"cudagraph_mode": "full", "cudagraph_capture_sizes": [2, 1], "max_cudagraph_capture_size": 2}
    assert "compilation_config" not in plain.model_dump()


def test_compilation_config_may_repeat_a_setting_but_not_contradict_it() -> None:
    same = EngineConfig(model="demo", cudagraph_mode=GraphMode.FULL, compilation_config={"cudagraph_mode": "full"})
    assert same.cudagraph_mode is GraphMode.FULL
    unset = EngineConfig(model="demo", cudagraph_mode=None, compilation_config={"cudagraph_mode": "full"})
    assert unset == same
    error = refusal(model="demo", cudagraph_mode="NONE", compilation_config={"cudagraph_mode": "FULL"})
    assert error.setting == "compilation_config" and "cudagraph_mode='NONE'" in str(error)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"level": 3}, "known keys are cudagraph_mode"),
        ('{"cudagraph_mode": ', "must be a JSON object such as"),
        ('{"cudagraph_mode": "FULL", "cudagraph_mode": "NONE"}', "cudagraph_mode is set twice"),
        ("[1]", "must be an object with cudagraph_mode"),
        (3, "must be an object with cudagraph_mode"),
    ],
)
def test_compilation_config_that_does_not_work(value: object, says: str) -> None:
    error = refusal(model="demo", compilation_config=value)
    assert error.setting == "compilation_config" and says in str(error)


def test_a_bad_value_inside_compilation_config_is_named_by_its_setting() -> None:
    error = refusal(model="demo", compilation_config={"cudagraph_capture_sizes": [0]})
    assert error.setting == "cudagraph_capture_sizes"


def test_an_error_shows_no_value_of_a_setting_without_one() -> None:
    missing = ConfigError("model", UNSET, "is required")
    assert (str(missing), missing.value) == ("model is required", None)
    assert str(ConfigError("model", None, "must be text")) == "model=None: must be text"


def test_a_noun_agrees_with_its_number() -> None:
    assert [counted(count, "step") for count in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]


def test_values_are_cut_where_they_are_quoted() -> None:
    """Without writing all of a long one: one of a million items takes no longer than one of a hundred."""
    for value in (
        "a" * 10**6,
        b"a" * 10**6,
        [1] * 10**6,
        {str(i): "a" * 999 for i in range(10**4)},
        10**10**5,
        {1} | set(range(10**5)),
    ):
        assert (len(quoted(value)) < 300 and "..." in quoted(value)) or "bits" in quoted(value)
    nested: list[object] = []
    for _ in range(500):
        nested = [nested] * 100
    assert len(quoted(nested)) < 300
    for short in ("a", 5, 1.5, None, [1, "a"], {"a": [1, 2]}, [], {}):
        assert quoted(short) == repr(short)
    assert len(str(RequestError("x" * 10**6, "y" * 10**6, "is wrong"))) < 500
