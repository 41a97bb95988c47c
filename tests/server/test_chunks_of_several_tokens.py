"""Streams whose updates have several tokens: all chunks together are the answer of single tokens."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.config.server_config import ServerConfig
from phonograph.core.batch import TokenLogprobs
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.process.calls import Call, Prompt, Sample
from phonograph.files.model_files import model_path
from phonograph.server.chat.chat_parts import ChatParts
from phonograph.server.openai.chat_completions import ChatAnswer
from phonograph.server.openai.completion_logprobs import TokenTexts
from phonograph.server.openai.completions import CompletionAnswer
from phonograph.server.openai.protocol import ChatBody, CompletionBody
from phonograph.text.formats.find_formats import Formats
from phonograph.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(model_path("demo"))
IDS = TOKENIZER.encode("Tom has 12 é😀 apples and 7 pears. #### 19", add_special_tokens=False)
KEPT = len(TOKENIZER.encode("Tom has 12 é😀 apples and 7", add_special_tokens=False))


def streamed(kind: str, ends: list[int]) -> list[dict[str, Any]]:
    """Return the choices of all chunks. `ends` are the numbers of tokens after each update of the engine."""
    params = SamplingParams(max_tokens=90, stop=[" 7"], logprobs=1)
    sample = Sample(0, TOKENIZER, params, [5, 6])
    call = Call([Prompt(0, [5, 6], [sample], num_growing=1)], streams=True, end=lambda _: None)
    serving: Any = SimpleNamespace(names=["m"], tokenizer=TOKENIZER, texts=TokenTexts(TOKENIZER), harmony=None)
    serving.config, serving.formats = ServerConfig(), Formats(None, None, ())
    answer: Any
    if kind == "chat":
        messages = [{"role": "user", "content": "x"}]
        body = ChatBody.model_validate({"messages": messages, "stream": True, "logprobs": True, "top_logprobs": 1})
        answer = ChatAnswer(serving, ChatParts(call, serving.formats, None, None), body)
    else:
        answer = CompletionAnswer(serving, call, CompletionBody(prompt="x", stream=True, logprobs=1))
    choices: list[dict[str, Any]] = []
    start = 0
    for end in ends:
        positions = [TokenLogprobs([IDS[at], 9], [-0.25 * at, -9.0], [1, 2]) for at in range(start, end)]
        sample.grow(IDS[start:end], positions, "length" if end == len(IDS) else None, None)
        choices += answer.choices(sample, sample.take())
        start = end
        if sample.finish_reason is not None:
            break
    assert answer.usage()["completion_tokens"] == KEPT
    return choices


def merged(kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    text = "".join(one["delta"].get("content", "") if kind == "chat" else one["text"] for one in choices)
    fields = ("content",) if kind == "chat" else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    entries = {name: [each for one in choices for each in (one["logprobs"] or {name: []})[name]] for name in fields}
    assert [one["finish_reason"] for one in choices[:-1]] == [None] * (len(choices) - 1)
    return {"text": text, "finish": choices[-1]["finish_reason"], "stop": choices[-1]["stop_reason"], **entries}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_chunks_of_several_tokens_are_those_of_single_tokens(kind: str) -> None:
    expected = merged(kind, streamed(kind, [*range(1, len(IDS) + 1)]))
    assert (expected["text"], expected["finish"], expected["stop"]) == ("Tom has 12 é😀 apples and", "stop", " 7")
    assert all(len(found) == KEPT for found in expected.values() if isinstance(found, list))
    rng = random.Random(7)
    for count in (0, 1, 2, 3, 3, 4, 5, 8):
        ends = sorted({*rng.sample(range(1, len(IDS)), count), len(IDS)})
        assert merged(kind, streamed(kind, ends)) == expected, ends
