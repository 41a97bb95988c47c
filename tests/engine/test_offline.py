"""Arguments of `LLM`, `generate` and `chat`: the shapes, names and order that vLLM takes; refusals by name."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest

from phonograph import LLM, AsyncLLM, EngineConfig, SamplingParams
from phonograph.errors import ConfigError, RequestError

TEXT = "Tom has 12 apples"
SHORT = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
TURN = {"role": "user", "content": TEXT}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_model_len=256, max_num_seqs=4, enforce_eager=True, seed=0)


def tokens_of(outputs: Any) -> list[list[int]]:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def expected(llm: LLM, prompt_token_ids: list[int], params: SamplingParams = SHORT) -> list[int]:
    """Tokens of the prompt, from the session itself."""
    output = llm.session.add(prompt_token_ids, params)
    while not output.finished:
        llm.session.step()
    return output.outputs[0].token_ids


def test_prompts_have_the_shapes_of_vllm(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text, other = llm.tokenizer.encode(TEXT), [7, 9, 12]
    wanted = [expected(llm, text), expected(llm, other)]
    assert wanted[0] != wanted[1]
    for single, one in (
        (TEXT, 0),
        ({"prompt": TEXT}, 0),
        ({"prompt_token_ids": other, "multi_modal_data": None}, 1),
        (other, 1),
        (tuple(other), 1),
        (numpy.array(other).tolist(), 1),
    ):
        assert tokens_of(llm.generate(single, SHORT)) == [wanted[one]]
    for several in (
        [TEXT, other],
        [{"prompt": TEXT}, {"prompt_token_ids": other}],
        (text, {"prompt_token_ids": tuple(other)}),
    ):
        assert tokens_of(llm.generate(several, SHORT)) == wanted
    assert llm.generate([], SHORT) == []


def test_conversations_have_the_shapes_of_vllm(llm: LLM) -> None:
    assert llm.tokenizer is not None
    wanted = [expected(llm, llm.tokenizer.encode_chat(turns)) for turns in ([TURN], [TURN, {**TURN, "role": "system"}])]
    assert tokens_of(llm.chat([TURN], SHORT)) == wanted[:1]
    assert tokens_of(llm.chat([[TURN], [TURN, {**TURN, "role": "system"}]], SHORT, False)) == wanted
    assert tokens_of(llm.chat(messages=[[TURN]], sampling_params=[SHORT], use_tqdm=False)) == wanted[:1]
    assert llm.chat([]) == []


def test_chat_passes_options_to_the_template(llm: LLM) -> None:
    assert llm.tokenizer is not None
    template = "{{ messages[0]['content'] }} {{ extra }} {{ tools | length }}{% if add_generation_prompt %}!{% endif %}"
    asked = {"chat_template": template, "chat_template_kwargs": {"extra": "and"}, "tools": [{}, {}]}
    for end, options in (("!", {}), ("", {"add_generation_prompt": False})):
        (output,) = llm.chat([TURN], SHORT, **asked, **options)
        assert llm.tokenizer.decode(output.prompt_token_ids) == f"{TEXT} and 2{end}"
    answer = {"role": "assistant", "content": "Tom has"}
    (output,) = llm.chat([TURN, answer], SHORT, add_generation_prompt=False, continue_final_message=True)
    assert llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False).endswith("Tom has")


def test_names_and_order_of_arguments_are_those_of_vllm(llm: LLM) -> None:
    def names(method: Any) -> list[str]:
        return list(inspect.signature(method).parameters)

    assert names(LLM.generate)[1:] == [
        "prompts",
        "sampling_params",
        "use_tqdm",
        "lora_request",
        "priority",
        "tokenization_kwargs",
    ]
    assert names(LLM.chat)[1:4] == ["messages", "sampling_params", "use_tqdm"]
    each = [SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (1, 3)]
    outputs = llm.generate(prompts=[TEXT] * 2, sampling_params=each, use_tqdm=True, lora_request=None)
    assert [len(tokens) for tokens in tokens_of(outputs)] == [1, 3]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"lora_request": "adapter"}, "lora_request=\"'adapter'\": is not supported"),
        ({"tokenization_kwargs": {"truncation": True}}, "tokenization_kwargs="),
        ({"use_tqdm": print}, "use_tqdm="),
        ({"sampling_params": {"temperature": 0}}, "must be SamplingParams, or a list of them"),
        ({"sampling_params": "greedy"}, "must be SamplingParams, or a list of them"),
        ({"sampling_params": [SHORT, SHORT]}, "2 of them"),
        ({"priority": []}, "priority='0 of them'"),
    ],
)
def test_arguments_without_effect_are_refused_by_name(llm: LLM, arguments: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(TEXT, **arguments)
    assert not llm.session.has_unfinished


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        (None, "prompts='None': must be text"),
        (3, "prompts='3': must be text"),
        (b"x", "must be text"),
        ([None], "prompt='None': must be text"),
        ([b"x"], "must be text"),
        ([1, "x"], "prompt='x': must be text or a list of integers"),
        ({}, "must have exactly one of prompt and prompt_token_ids"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "must have exactly one of"),
        ({"prompt": [1]}, "must be text"),
        ({"prompt_token_ids": "x"}, "must be a list of token ids"),
        ({"prompt_token_ids": 3}, "must be a list of token ids"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt=\"''\": must be a non-empty string"),
        ({"prompt": "x", "cache_salt": 7}, "cache_salt='7': must be a non-empty string"),
        ({"prompt": "x", "multi_modal_data": {"image": 1}}, r"prompt\['multi_modal_data'\]=.*is not supported"),
    ],
)
def test_prompts_of_other_shapes_are_refused(llm: LLM, prompt: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        llm.generate(prompt, SHORT)
    assert not llm.session.has_unfinished


def test_prompts_of_unlike_salts_share_no_prefix(llm: LLM) -> None:
    prompt = [3 + position * position % 1999 for position in range(40)]
    wanted = expected(llm, prompt)
    cached: list[int] = []
    for salt in ("a", "b", "a", "\udc00", "\udc00", None):
        (output,) = llm.generate({"prompt_token_ids": prompt, "cache_salt": salt}, SHORT)
        cached.append(output.num_cached_tokens)
        assert output.outputs[0].token_ids == wanted
    assert cached == [0, 0, 32, 0, 32, 32]
    *_, streamed = llm.stream({"prompt_token_ids": prompt, "cache_salt": "salt-c"}, SHORT)
    assert streamed.num_cached_tokens == 0


def test_a_request_may_leave_the_prefix_cache_alone(llm: LLM) -> None:
    prompt = [5 + position * position % 1999 for position in range(40)]
    cached: list[int] = []
    for skips in (True, False, True, None):
        params = replace(SHORT, skip_reading_prefix_cache=skips)
        (output,) = llm.generate({"prompt_token_ids": prompt}, params)
        cached.append(output.num_cached_tokens)
    assert cached == [0, 32, 0, 32]


@pytest.mark.parametrize("prompts", [["x"], [[1, 2]], [{"prompt": "x"}]])
def test_a_list_of_prompts_where_one_is_taken_is_refused_as_that(llm: LLM, prompts: Any) -> None:
    for call in (lambda: list(llm.stream(prompts, SHORT)), lambda: llm.generate([prompts], SHORT)):
        with pytest.raises(RequestError, match=r"prompt=\[.*is a list of prompts.*`LLM.generate` takes a list"):
            call()
    assert not llm.session.has_unfinished


@pytest.mark.parametrize("wrong", [7, None, {"prompt": 3}, {"prompt_embeds": [1.0]}])
def test_of_several_prompts_only_the_one_of_another_shape_is_refused(llm: LLM, wrong: Any) -> None:
    outputs = llm.generate(["x", wrong, "z"], SHORT)
    assert [output.error is None for output in outputs] == [True, False, True]
    assert all(len(output.outputs[0].token_ids) == 5 for output in (outputs[0], outputs[2]))


@pytest.mark.parametrize("messages", [None, 3, "Hello", [3], ["Hello"], [["Hello"]], [[]], [TURN, 3], [[TURN, 3]]])
def test_conversations_of_other_shapes_are_refused(llm: LLM, messages: Any) -> None:
    with pytest.raises(RequestError, match="messages=.* must be a list of messages"):
        llm.chat(messages, SHORT)
    assert not llm.session.has_unfinished


def test_the_model_is_the_first_argument(llm: LLM, tmp_path: Path) -> None:
    assert llm.config.model == "demo"
    with pytest.raises(ConfigError, match="model='demo': give settings or config, not both"):
        LLM("demo", config=EngineConfig(model="demo"))
    with pytest.raises(ConfigError, match="model is required"):
        LLM()
    with pytest.raises(TypeError, match="multiple values for argument 'model'"):
        LLM("demo", model="demo")  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_defaults_in_docstrings_are_those_of_the_parameters(kind: type) -> None:
    found: set[str] = set()
    for name, method in inspect.getmembers(kind, inspect.isfunction):
        for parameter, value in re.findall(r"(?m)^ +(\w+): .*defaults to (\w+)\.$", method.__doc__ or ""):
            assert str(inspect.signature(method).parameters[parameter].default) == value, (name, parameter)
            found.add(parameter)
    assert found >= ({"num_replays", "use_tqdm", "seed"} if kind is LLM else {"priority"})
