"""Texts of transcripts while their parts grow in any order: their order, the space between them, and failures."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.process.calls import Call, Prompt, Sample
from phonograph.errors import RequestFailure
from phonograph.files.model_files import model_path
from phonograph.server.speech.transcript_answer import TranscriptAnswer
from phonograph.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load(model_path("demo"))
HEAD = {"id": "transcribe-1", "object": "transcription.chunk"}


def answer_to(*texts: str, separator: str = " ", **settings: Any) -> tuple[TranscriptAnswer, list[Sample], list[Any]]:
    """Return the answer to a call with a part for each text, its empty samples, and the tokens of the texts."""
    samples = [Sample(index, TOKENIZER, SamplingParams(max_tokens=500), []) for index in range(len(texts))]
    prompts = [Prompt(number, [1, 2], [sample], num_growing=1) for number, sample in enumerate(samples)]
    call = Call(prompts, streams=True, end=lambda _: None)
    tokens = [TOKENIZER.encode(text, add_special_tokens=False) for text in texts]
    return TranscriptAnswer(call, HEAD, seconds=31.6, separator=separator, **settings), samples, tokens


def read(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event[6:]) for event in data.decode().split("\n\n") if event.startswith("data: {")]


def deltas(data: bytes) -> str:
    events = read(data)
    assert all(one["type"] == "transcript.text.delta" and one["delta"] for one in events)
    assert all(one["choices"] == [{"delta": {"content": one["delta"]}}] for one in events)
    return "".join(one["delta"] for one in events)


def test_a_part_waits_for_those_before_it() -> None:
    answer, (first, second), (ids, later) = answer_to(" Tom has", " twelve apples")
    second.grow(later, None, "stop", None)
    assert answer.write([second]) == b""
    first.grow(ids[:-1], None, None, None)
    found = deltas(answer.write([first]))
    assert found and "Tom has".startswith(found) and found != "Tom has"
    first.grow(ids[-1:], None, "stop", None)
    found += deltas(answer.write([first]))
    assert found == "Tom has twelve apples"
    (done,) = read(answer.end())
    assert (done["type"], done["text"], done["id"]) == ("transcript.text.done", found, "transcribe-1")
    assert done["choices"] == [{"delta": {"content": ""}, "finish_reason": "stop"}]
    count = len(ids) + len(later)
    assert (done["usage"]["input_tokens"], done["usage"]["output_tokens"], done["usage"]["total_tokens"]) == (
        4,
        count,
        4 + count,
    )


@pytest.mark.parametrize("separator", [" ", ""])
@pytest.mark.parametrize("seed", range(20))
def test_deltas_are_the_joined_text_whatever_grows_when(seed: int, separator: str) -> None:
    rng = random.Random(seed)
    pieces = (" Tom", " has", "  ", "\n", " é", "日本", "12", ".", " ", "")
    texts = ["".join(rng.choices(pieces, k=rng.randrange(8))) for _ in range(rng.randrange(1, 6))]
    answer, samples, tokens = answer_to(*texts, separator=separator)
    found, growing = "", set(range(len(texts)))
    while growing:
        index = rng.choice(sorted(growing))
        taken, tokens[index] = tokens[index][:2], tokens[index][2:]
        samples[index].grow(taken, None, None if tokens[index] else "stop", None)
        if not tokens[index]:
            growing.remove(index)
        found += deltas(answer.write([samples[index]]))
    parts = [sample.text.strip() for sample in samples]
    assert found == separator.join(filter(None, parts)) == read(answer.end())[-1]["text"]
    whole, others, _ = answer_to(*texts, separator=separator)
    for sample, other in zip(samples, others, strict=True):
        other.grow(sample.token_ids, None, "stop", None)
    assert whole.whole() == {"text": found, "usage": {"type": "duration", "seconds": 32}} and whole.text == found


def test_the_end_for_clients_of_vllm() -> None:
    answer, (first, second), tokens = answer_to(" Tom", " has", ends_without_choices=True, continuous_usage=True)
    first.grow(tokens[0], None, "length", None)
    second.grow(tokens[1], None, "stop", None)
    (chunk,) = read(answer.write([first, second]))
    assert chunk["delta"] == "Tom has" and chunk["usage"]["prompt_tokens"] == 4
    data = answer.end()
    last, done = read(data)
    assert data.endswith(b"data: [DONE]\n\n")
    assert last["choices"] == [{"delta": {"content": ""}, "finish_reason": "length"}] and last["delta"] == ""
    assert done["choices"] == [] and done["usage"]["completion_tokens"] == len(tokens[0]) + len(tokens[1])


def test_a_part_that_the_engine_ends_early() -> None:
    answer, (first, second), tokens = answer_to(" Tom", " has")
    first.grow(tokens[0], None, "abort", None)
    second.grow(tokens[1], None, "stop", None)
    assert deltas(answer.write([first, second])) == "Tom"
    (event,) = read(answer.end())
    assert event["error"]["type"] == "server_error" and "was aborted" in event["error"]["message"]
    with pytest.raises(RequestFailure, match="was aborted"):
        answer.whole()
