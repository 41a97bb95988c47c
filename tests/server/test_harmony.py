"""Harmony, by its publisher's library with the vocabulary of gpt-oss: prompts, and answers cut in every way."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.process.calls import Delta, Sample
from phonograph.errors import ConfigError
from phonograph.server.chat import harmony as module
from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.chat.harmony import HARMONY_FORMATS, MOST_CHARACTERS, Harmony, check_harmony, load_harmony
from phonograph.server.chat.serving import Serving
from phonograph.server.chat.tools import read_tools
from phonograph.server.http.api_errors import ApiError
from phonograph.server.openai.chat_completions import ChatAnswer
from phonograph.server.openai.chat_message import delta_of, message_of
from phonograph.server.openai.chat_translation import chat_request
from phonograph.server.openai.protocol import ChatBody

pytest.importorskip("openai_harmony")
VOCAB_SIZE = 201_088
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [{"type": "function", "function": one} for one in (WEATHER, {"name": "now"})]
END, CALL, RETURN = "<|end|><|start|>assistant", "<|call|>", "<|return|>"
THINK = "<|channel|>analysis<|message|>Let me think… 𓀀🧑🏽‍🚀" + END
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
PLACE = '{"city": "Ürümqi 𓀀"}'
ANSWERS: list[tuple[str, str | None, str | None, list[tuple[str, str]]]] = [
    (f"{THINK}<|channel|>final<|message|>Hi 𓀀!{RETURN}", "Let me think… 𓀀🧑🏽‍🚀", "Hi 𓀀!", []),
    (f"{THINK}{TO_WEATHER}{PLACE}{CALL}", "Let me think… 𓀀🧑🏽‍🚀", None, [("weather", PLACE)]),
    # A preamble, then two calls, one without arguments.
    (
        f"<|channel|>commentary<|message|>I look.{END}{TO_WEATHER}{PLACE}{END}"
        f"<|channel|>commentary to=functions.now<|message|>{CALL}",
        None,
        "I look.",
        [("weather", PLACE), ("now", "")],
    ),
    # The recipient before the channel, as the model writes it too.
    (f" to=functions.now<|channel|>commentary json<|message|>{{}}{CALL}", None, None, [("now", "{}")]),
    # Cut in the arguments, in reasoning, and in a header.
    (f'{TO_WEATHER}{{"city": "R', None, None, [("weather", '{"city": "R')]),
    ("<|channel|>analysis<|message|>Let", "Let", "", []),
    (f"{THINK}<|channel|>fin", "Let me think… 𓀀🧑🏽‍🚀", "", []),
    # A function that the request has not.
    (f"<|channel|>commentary to=functions.rain<|message|>{{}}{CALL}", None, "{}", []),
    # Other forms are content: no header, and text between messages.
    ("Just text 𓀀.", None, "Just text 𓀀.", []),
    (f"<|channel|>final<|message|>One<|end|>two 𓀀 <|message|>three{RETURN}", None, "Onetwo 𓀀 three", []),
]


@pytest.fixture(scope="module")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Harmony:
    pytest.importorskip("bpe_openai")  # takes a second: most workers run none of these tests
    from harmony_vocabulary import write_vocabulary

    folder = tmp_path_factory.mktemp("vocabulary")
    write_vocabulary(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(folder))
        return load_harmony(VOCAB_SIZE)


def token_ids(harmony: Harmony, text: str) -> list[int]:
    return harmony.encoding.encode(text, allowed_special="all")


def flat(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), ANSWERS)
def test_an_answer_at_once_and_in_pieces(
    harmony: Harmony, text: str, reasoning: str | None, content: str | None, calls: list[tuple[str, str]]
) -> None:
    ids = token_ids(harmony, text)
    reader = harmony.reader(("weather", "now"), parallel=True)
    message = message_of(reader.read(ids, ended=True))
    assert message.get("reasoning_content") == reasoning and message["content"] == content
    assert flat(message.get("tool_calls", [])) == calls and reader.has_calls == bool(calls)
    for seed in range(8):
        rng = random.Random(seed)
        cuts = sorted({0, len(ids), *(rng.randrange(len(ids) + 1) for _ in range(seed * 3))})
        reader = harmony.reader(("weather", "now"), parallel=True)
        pieces = [ids[first:last] for first, last in itertools.pairwise(cuts)]
        deltas = [delta_of(reader.read(piece, ended=False)) for piece in pieces]
        deltas.append(delta_of(reader.read([], ended=True)))
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
        assert "".join(delta.get("content", "") for delta in deltas) == (content or "")
        found: list[list[str]] = []
        for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
            if "id" in call:
                assert call["index"] == len(found)
                found.append([call["function"]["name"], ""])
            found[call["index"]][1] += call["function"]["arguments"]
        assert [tuple(call) for call in found] == calls


def test_one_call_where_one_is_wanted(harmony: Harmony) -> None:
    text, *_ = ANSWERS[2]
    reader = harmony.reader(("weather", "now"), parallel=False)
    message = message_of(reader.read(token_ids(harmony, text), ended=True))
    assert flat(message["tool_calls"]) == [("weather", PLACE)]


def test_a_prompt_has_all_parts(harmony: Harmony) -> None:
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": "Weather? <|end|>"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "A call.",
            "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": {"city": "Ürümqi"}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
    ]
    ids = harmony.encode(messages, tools=TOOLS, effort="high")
    text = harmony.encoding.decode(ids)
    for part in ("Reasoning: high", "Be kind.\n\nBe short.", "// Weather of a city\ntype weather", "type now"):
        assert part in text
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>A call.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Ürümqi"}'
        "<|call|><|start|>functions.weather to=assistant<|channel|>commentary<|message|>Sun<|end|><|start|>assistant"
    )
    # The text of a user does not end a message.
    (end,) = token_ids(harmony, "<|end|>")
    assert ids.count(end) == 6 and text.count("<|end|>") == 7
    # The reasoning of an answered turn is left out.
    again = harmony.encode([*messages, {"role": "assistant", "content": "Sunny."}, {"role": "user", "content": "Ok"}])
    assert "A call." not in harmony.encoding.decode(again)
    closed = harmony.encode([{"role": "user", "content": "Hi"}], begins=False)
    assert harmony.encoding.decode(closed).endswith("Hi<|end|>")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "system", "content": "late"}, r"chat_format=harmony takes system and developer messages before all"),
        ({"role": "function", "content": "x"}, "no function messages"),
        ({"role": "tool", "content": "x", "tool_call_id": "c9"}, "tool_call_id='c9' is not the id of an earlier"),
        ({"role": "tool", "content": "x"}, "tool_call_id=None is not the id of an earlier"),
    ],
)
def test_refused_messages(harmony: Harmony, message: dict[str, Any], problem: str) -> None:
    with pytest.raises(ApiError, match=problem) as caught:
        harmony.encode([{"role": "user", "content": "Hi"}, message])
    assert caught.value.param is not None and caught.value.param.startswith("messages[1].")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "none"}, "reasoning_effort"),
        ({"stop": ["x"]}, "stop"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "low", "tools": TOOLS, "response_format": {"type": "text"}}, None),
    ],
)
def test_fields_that_the_format_restricts(fields: dict[str, Any], param: str | None) -> None:
    request = chat_request(ChatBody(messages=[{"role": "user", "content": "Hi"}], **fields), ServerConfig())
    if param is None:
        check_harmony(request)
        return
    with pytest.raises(ApiError) as caught:
        check_harmony(request)
    assert caught.value.param == param


def test_answers_of_the_endpoint(harmony: Harmony) -> None:
    """A chunk a step, and the finish reason of calls."""
    serving: Any = SimpleNamespace(
        names=("m",), harmony=harmony, config=ServerConfig(), texts=None, formats=HARMONY_FORMATS
    )
    text, reasoning, _, calls = ANSWERS[1]
    body = ChatBody(messages=[{"role": "user", "content": "Hi"}], stream=True)
    for stream in (True, False):
        sample = Sample(0, None, SamplingParams(detokenize=False), [1])
        call: Any = SimpleNamespace(samples=[sample])
        parts = ChatParts(call, HARMONY_FORMATS, harmony, read_tools(TOOLS, None, None))
        answer = ChatAnswer(serving, parts, body)
        answer.usage = dict  # type: ignore[method-assign]
        ids = token_ids(harmony, text)
        chunks: list[dict[str, Any]] = []
        for token_id in ids:
            sample.grow([token_id], None, "stop" if token_id == ids[-1] else None, None)
            if stream:
                chunks += answer.choices(sample, Delta("", [token_id], []))
        if not stream:
            (choice,) = answer.whole()["choices"]
            message = choice["message"]
            assert message["reasoning_content"] == reasoning and flat(message["tool_calls"]) == calls
            assert choice["finish_reason"] == "tool_calls"
            continue
        shown = [chunk["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in shown) == reasoning
        arguments = (call["function"]["arguments"] for delta in shown for call in delta.get("tool_calls", []))
        assert "".join(arguments) == calls[0][1] and chunks[-1]["finish_reason"] == "tool_calls"
    # The end of an answer without channels is what shows that it has none.
    sample = Sample(0, None, SamplingParams(detokenize=False), [1])
    call = SimpleNamespace(samples=[sample])
    answer = ChatAnswer(serving, ChatParts(call, HARMONY_FORMATS, harmony, None), body)
    ids = token_ids(harmony, "Just text")
    sample.grow(ids, None, "length", None)
    *_, last = answer.choices(sample, Delta("", ids, []))
    assert last["delta"] == {"content": "Just text"} and last["finish_reason"] == "length"


def test_a_conversation_for_the_engine(harmony: Harmony) -> None:
    """The limits of the server hold without a template."""
    limits = SimpleNamespace(max_request_depth=99, max_request_fields=99, max_request_token_ids=10**6)
    engine = SimpleNamespace(facts=SimpleNamespace(context_len=100))
    for text, problem in (("Hi", None), ("Hi " * 100, "more than 100 tokens"), ("x" * 101 * MOST_CHARACTERS, "more")):
        serving: Any = SimpleNamespace(harmony=harmony, config=limits, engine=engine)
        for name in ("_encode_chat", "_encode_harmony", "_check_length"):
            setattr(serving, name, getattr(Serving, name).__get__(serving))
        body = ChatBody(messages=[{"role": "user", "content": text}], reasoning_effort="low")
        request = chat_request(body, ServerConfig())
        if problem is None:
            found = Serving.encode_chat(serving, request)
            assert "Reasoning: low" in harmony.encoding.decode(found)
            continue
        with pytest.raises(ApiError, match=problem):
            Serving.encode_chat(serving, request)
    body = ChatBody(messages=[{"role": "user", "content": "Hi"}], chat_template_kwargs={"a": 1})
    with pytest.raises(ApiError, match="chat_template_kwargs is not supported with chat_format=harmony"):
        Serving.encode_chat(serving, chat_request(body, ServerConfig()))


def test_what_a_start_refuses(harmony: Harmony, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(ConfigError, match=rf"no vocabulary from TIKTOKEN_ENCODINGS_BASE={tmp_path}.*o200k_base"):
        load_harmony(VOCAB_SIZE)
    monkeypatch.setattr("openai_harmony.load_harmony_encoding", lambda name: harmony.encoding)
    with pytest.raises(ConfigError, match="has tokens up to 200012, and the model has 1024; it is the format of gpt"):
        load_harmony(1024)
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'needs openai-harmony: pip install "phonograph\[harmony\]"'):
        load_harmony(VOCAB_SIZE)
