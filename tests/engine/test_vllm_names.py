"""Names, neutral values and missing parts of vLLM's Python API: each works, or the error says what does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

import phonograph
from phonograph import LLM, AsyncLLM, EngineConfig, SamplingParams, StructuredOutputs
from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import _HINTS, _NEUTRAL, MAX_LOGPROBS
from phonograph.engine.offline.vllm_methods import MISSING
from phonograph.errors import ConfigError, RequestError


def test_old_and_present_names_of_vllm_work() -> None:
    from phonograph import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, GuidedDecodingParams, StructuredOutputsParams

    assert EngineArgs is EngineConfig is AsyncEngineArgs and AsyncLLMEngine is AsyncLLM
    assert GuidedDecodingParams(json={"type": "object"}, backend="xgrammar") == StructuredOutputs(
        json={"type": "object"}
    )
    assert StructuredOutputsParams is StructuredOutputs
    with pytest.raises(AttributeError, match="no attribute 'ModelRegistry'; its names are LLM, "):
        phonograph.ModelRegistry  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'LLMEngine'; LLM.enqueue and .* them; its names are LLM, "):
        phonograph.LLMEngine  # noqa: B018
    with LLM.from_engine_args(EngineArgs(model="demo", enforce_eager=True, max_model_len=64)) as llm:
        assert llm.config.enforce_eager
    assert AsyncLLM.from_engine_args(AsyncEngineArgs(model="demo", max_num_seqs=3)).config.max_num_seqs == 3


@pytest.mark.parametrize(
    "values",
    [
        {"stop": None, "stop_token_ids": None, "logit_bias": None},
        {"best_of": None, "logits_processors": None, "use_beam_search": False, "bad_words": []},
        {"truncate_prompt_tokens": None, "spaces_between_special_tokens": True, "length_penalty": 1.0},
        {"guided_decoding": None, "extra_args": None, "skip_reading_prefix_cache": False},
    ],
)
def test_neutral_values_of_sampling_parameters_are_taken(values: dict[str, Any]) -> None:
    assert SamplingParams(**values, temperature=0.5) == SamplingParams(temperature=0.5)


def test_what_is_a_parameter_here_is_in_no_table_of_vllms() -> None:
    assert not {field.name for field in fields(SamplingParams)} & {*_NEUTRAL, *_HINTS}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"temprature": 1}, "temprature='1': is not a sampling parameter; did you mean temperature?"),
        ({"zzz": 1, "temperature": 0}, "zzz='1': is not a sampling parameter; they are n, temperature, "),
        ({"guided_decoding": {"json": "{}"}}, "vLLM's old name; structured_outputs takes the same value"),
        ({"best_of": 3}, "n samples are returned, and cumulative_logprob ranks them"),
        ({"extra_args": torch.zeros(2)}, "is vLLM's and not here yet"),
        ({"use_beam_search": True}, "LLM.beam_search does it"),
        ({"logits_processors": [print]}, "logit_bias, allowed_token_ids and bad_words change logits"),
        ({"trace_decode_token_ids": [5]}, "is vLLM's and not here yet"),
        ({"output_kind": 3}, "output_kind=3: must be one of RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, "),
        ({"output_kind": True}, "output_kind=True: must be one of "),
    ],
)
def test_an_unknown_sampling_parameter_gets_a_sentence(values: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**values)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_an_error_inside_of_the_constructor_is_not_taken_for_an_unknown_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(1)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RequestError, match="temperature=-1"):
        SamplingParams(temperature=-1, best_of=None)  # pyright: ignore[reportCallIssue]
    with pytest.raises(RequestError, match="whitespace_pattern=.*disable_any_whitespace"):
        StructuredOutputs(json="{}", whitespace_pattern=" ")  # pyright: ignore[reportCallIssue]
    with pytest.raises(RequestError, match="is not a structured output; did you mean regex"):
        StructuredOutputs(regexp="a")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("setting", "dtype"), [("half", "float16"), ("float", "float32"), ("HALF", "float16"), (torch.bfloat16, "bfloat16")]
)
def test_types_have_the_names_of_vllm(setting: object, dtype: str) -> None:
    assert EngineConfig(model="demo", dtype=setting).dtype == dtype  # pyright: ignore[reportArgumentType]
    assert ServerConfig(generation_config="vllm").generation_config == "none"  # pyright: ignore[reportArgumentType]


def test_neutral_settings_are_taken() -> None:
    neutral = {
        **{"tensor_parallel_size": 1, "enable_chunked_prefill": True, "disable_log_stats": True, "swap_space": 0},
        **{"tokenizer_mode": "auto", "runner": "auto", "speculative_config": None, "pipeline_parallel_size": 1},
        "logprobs_mode": "raw_logprobs",
        **{"max_logprobs": MAX_LOGPROBS, "async_scheduling": False},
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    assert EngineConfig(model="demo", **neutral) == EngineConfig(model="demo")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: is vLLM's and not here yet .-tp N runs an engine"):
        EngineConfig(model="demo", pipeline_parallel_size=2)  # pyright: ignore[reportCallIssue]
    reasons = {"structured_outputs_config": {"backend": "auto", "enable_in_reasoning": True}}
    with pytest.raises(ConfigError, match="structured_outputs_config=.*not here yet"):
        EngineConfig(model="demo", **reasons)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", ServerConfig.model_fields)
def test_a_setting_of_the_server_is_refused_as_such(name: str) -> None:
    value = MAX_LOGPROBS + 1 if name == "max_logprobs" else 7
    with pytest.raises(ConfigError) as caught:
        LLM("demo", **{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name}={value}: is a setting of phonograph serve; ") and "did you mean" not in text
    if name == "max_logprobs":
        assert f"up to {MAX_LOGPROBS} without" in text


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_missing_methods_say_what_works(kind: Any) -> None:
    engine = kind.__new__(kind)
    for name, reason in MISSING.items():
        assert not hasattr(kind, name), f"{name} exists now"
        with pytest.raises(AttributeError, match=f"object has no attribute '{name}'; ") as caught:
            getattr(engine, name)
        assert str(caught.value).endswith(reason)
    with pytest.raises(AttributeError, match="object has no attribute 'enocde'$"):
        engine.enocde  # noqa: B018
