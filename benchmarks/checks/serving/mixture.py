"""Streams of every sort that the server has, at random, each with what has to hold of its answer."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from phonograph.bench.serving.connection import Recording
from phonograph.bench.serving.events import BrokenStream, chunks

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"
NAMES = ("Tom", "Mia", "Sam", "Ada", "Ben", "Eva", "Max", "Lea")
THINGS = ("apples", "books", "coins", "cards", "pens", "stamps")
STOPS = (".", " has ", "\n", "es")
REGEX = r"[0-9]{3}-[a-z]{2,6}"
NUM_PREFIXES = 4
NUM_SCHEMAS = 128
"""Few enough that each is asked for often, and that keeping them all is no growth after the first minutes."""
LENGTHS = (1, 300)
"""Tokens of an answer at most, drawn evenly."""


@dataclass(slots=True)
class Choice:
    """One choice of an answer, from its chunks."""

    text: str = ""
    arguments: str = ""
    num_logprobs: int = 0
    ends: list[str] = field(default_factory=list[str])


Check = Callable[[Choice], str | None]
"""Check of a choice of a complete answer: returns a problem, or None."""


@dataclass(frozen=True, slots=True)
class Stream:
    """A request, how many choices its answer has, and what each has to be."""

    kind: str
    path: str
    body: dict[str, Any]
    num_choices: int = 1
    check: Check = lambda choice: None


class Mixture:
    """Draws streams. Prompts share a few long beginnings, schemas a few forms; the same seed draws the same."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._prefixes = [self._story(length) for length in range(20, 20 + 20 * NUM_PREFIXES, 20)]
        self._schemas = [self._schema() for _ in range(NUM_SCHEMAS)]

    def draw(self) -> Stream:
        rng = self._rng
        make = rng.choice(
            (self._plain, self._stops, self._samples, self._logprobs, self._prompts, self._regex)
            if rng.random() < 0.5
            else (self._chat, self._chat_samples, self._chat_schema, self._chat_schema, self._chat_tools)
        )
        stream = make()
        common = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": rng.randint(*LENGTHS)}
        common |= rng.choice(({"temperature": 0}, {}, {"seed": rng.randrange(1000)}, {"top_p": 0.9, "top_k": 40}))
        return Stream(stream.kind, stream.path, common | stream.body, stream.num_choices, stream.check)

    def _plain(self) -> Stream:
        return Stream("completion", COMPLETIONS, {"prompt": self._prompt(), "ignore_eos": True})

    def _stops(self) -> Stream:
        stops = self._rng.sample(STOPS, 2)

        def check(choice: Choice) -> str | None:
            return f"a stop string is in {choice.text!r}" if any(stop in choice.text for stop in stops) else None

        return Stream("completion, stop", COMPLETIONS, {"prompt": self._prompt(), "stop": stops}, check=check)

    def _samples(self) -> Stream:
        return Stream("completion, n=2", COMPLETIONS, {"prompt": self._prompt(), "n": 2}, 2)

    def _logprobs(self) -> Stream:
        body = {"prompt": self._prompt(), "logprobs": 3, "ignore_eos": True}
        return Stream("completion, logprobs", COMPLETIONS, body, check=_has_logprobs)

    def _prompts(self) -> Stream:
        return Stream("completion, 3 prompts", COMPLETIONS, {"prompt": [self._prompt() for _ in range(3)]}, 3)

    def _regex(self) -> Stream:
        def check(choice: Choice) -> str | None:
            ended = choice.ends == ["stop"]
            return f"{choice.text!r} does not match" if ended and not re.fullmatch(REGEX, choice.text) else None

        body = {"prompt": self._prompt(), "structured_outputs": {"regex": REGEX}}
        return Stream("completion, regex", COMPLETIONS, body, check=check)

    def _chat(self) -> Stream:
        return Stream("chat", CHAT, {"messages": self._messages()})

    def _chat_samples(self) -> Stream:
        body = {"messages": self._messages(), "n": 2, "logprobs": True, "top_logprobs": 2}
        return Stream("chat, n=2, logprobs", CHAT, body, 2, _has_logprobs)

    def _chat_schema(self) -> Stream:
        schema = self._rng.choice(self._schemas)

        def check(choice: Choice) -> str | None:
            return _json_problem(choice.text, schema) if choice.ends == ["stop"] else None

        asked = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        return Stream("chat, json_schema", CHAT, {"messages": self._messages(), "response_format": asked}, check=check)

    def _chat_tools(self) -> Stream:
        schema = self._rng.choice(self._schemas[:8])

        def check(choice: Choice) -> str | None:
            whole = choice.ends in (["tool_calls"], ["stop"])
            return _json_problem(choice.arguments, schema) if whole else None

        tool = {"type": "function", "function": {"name": "count", "parameters": schema}}
        body = {"messages": self._messages(), "tools": [tool], "tool_choice": tool | {"function": {"name": "count"}}}
        return Stream("chat, tool", CHAT, body, check=check)

    def _prompt(self) -> str:
        """Return a shared beginning, sometimes cut at a random place, with an end of its own."""
        prefix = self._rng.choice(self._prefixes)
        cut = len(prefix) if self._rng.random() < 0.7 else self._rng.randrange(len(prefix))
        return prefix[:cut] + self._story(self._rng.randrange(1, 8))

    def _messages(self) -> list[dict[str, str]]:
        system = {"role": "system", "content": self._rng.choice(self._prefixes)}
        asked = {"role": "user", "content": self._story(self._rng.randrange(1, 8)) + " How many does he have?"}
        return [system, asked] if self._rng.random() < 0.7 else [asked]

    def _story(self, sentences: int) -> str:
        rng = self._rng
        return " ".join(f"{rng.choice(NAMES)} has {rng.randrange(100)} {rng.choice(THINGS)}." for _ in range(sentences))

    def _schema(self) -> dict[str, Any]:
        rng = self._rng
        kinds: tuple[dict[str, Any], ...] = (
            {"type": "integer", "minimum": 0, "maximum": 99},
            {"type": "boolean"},
            {"enum": list(NAMES)},
            {"type": "array", "items": {"enum": list(THINGS)}, "maxItems": 3},
        )
        names = [f"{rng.choice(THINGS)}_{number}" for number in range(rng.randint(1, 4))]
        properties = {name: rng.choice(kinds) for name in names}
        return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def problem_of(stream: Stream, recording: Recording, *, aborted: bool) -> str | None:
    """Return the problem of an answer, or None. An aborted answer may be incomplete."""
    if aborted:
        if recording.status not in (None, 200):
            return f"HTTP {recording.status}: {recording.body[:200]!r}"
        if b'"error":{' in recording.body:
            return f"an error before the abort: {recording.body[-300:]!r}"
        return None
    if recording.error is not None:
        return recording.error
    choices: dict[int, Choice] = {}
    usage: dict[str, Any] | None = None
    try:
        for _, chunk in chunks(recording):
            usage = chunk.get("usage") or usage
            for part in chunk["choices"]:
                _grow(choices.setdefault(part["index"], Choice()), part)
    except BrokenStream as broken:
        return str(broken)
    except (KeyError, TypeError, AttributeError) as error:
        return f"an event is not in OpenAI's form ({type(error).__name__}: {error})"
    if not recording.body.endswith(DONE):
        return "the stream ended without [DONE]"
    if usage is None:
        return "the stream has no usage"
    if sorted(choices) != list(range(stream.num_choices)):
        return f"choices {sorted(choices)} of {stream.num_choices}"
    for index, choice in choices.items():
        if len(choice.ends) != 1:
            return f"choice {index} ended {len(choice.ends)} times"
        problem = stream.check(choice)
        if problem is not None:
            return problem
    return None


def _grow(choice: Choice, part: dict[str, Any]) -> None:
    delta = part.get("delta")
    if delta is None:
        choice.text += part["text"]
    else:
        choice.text += delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            choice.arguments += call["function"].get("arguments") or ""
    logprobs = part.get("logprobs") or {}
    choice.num_logprobs += len(logprobs.get("content") or logprobs.get("tokens") or ())
    if part.get("finish_reason") is not None:
        choice.ends.append(part["finish_reason"])


def _has_logprobs(choice: Choice) -> str | None:
    return None if choice.num_logprobs or not choice.text else f"no log-probabilities beside {choice.text!r}"


def _json_problem(text: str, schema: dict[str, Any]) -> str | None:
    """Check everything that the schemas here require, except ranges of values, which the tests of grammars check."""
    try:
        value = json.loads(text)
    except ValueError:
        return f"no JSON: {text!r}"
    return None if isinstance(value, dict) and value.keys() == schema["properties"].keys() else f"not asked for: {text}"
