"""Errors and growth as the soak counts them, and a short soak from the start of the server to its end."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripted_server import DONE, events, usage

from checks.serving.mixture import CHAT, COMPLETIONS, Choice, Mixture, Stream, problem_of
from checks.serving.soak import MIB, MOST_GROWTH, growth
from phonograph.bench.serving.connection import Recording

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak"


def recorded(body: bytes, *, status: int = 200, error: str | None = None) -> Recording:
    return Recording(status=status, times=[1.0], pieces=[body], error=error)


def part(index: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": reason}]}


def no_b(choice: Choice) -> str | None:
    return "has a b" if "b" in choice.text else None


def test_problems_of_an_answer() -> None:
    stream = Stream("two", COMPLETIONS, {}, 2, no_b)
    whole = [part(0, "a"), part(1, "c", "stop"), part(0, "d", "length"), usage(3, 3)]
    error = {"error": {"message": "engine gone", "type": "server_error"}}
    cases: list[tuple[Recording, bool, str | None]] = [
        (recorded(events(*whole) + DONE), False, None),
        (recorded(events(*whole)), False, "without [DONE]"),
        (recorded(events(*whole[:-1]) + DONE), False, "no usage"),
        (recorded(events(whole[0], whole[2], whole[3]) + DONE), False, "choices [0] of 2"),
        (recorded(events(*whole[:2], whole[3]) + DONE), False, "ended 0 times"),
        (recorded(events(whole[1], *whole) + DONE), False, "ended 2 times"),
        (recorded(events(part(0, "b"), *whole) + DONE), False, "has a b"),
        (recorded(events(whole[0], error) + DONE), False, "engine gone"),
        (recorded(events({"choices": [{}]}) + DONE), False, "KeyError"),
        (recorded(b"", error="HTTP 429: full"), False, "429"),
        # Cut in the middle.
        (recorded(events(*whole[:2])), True, None),
        (Recording(), True, None),
        (recorded(b"data: " + json.dumps(error, separators=(",", ":")).encode()), True, "before the abort"),
        (recorded(b"full", status=503), True, "503"),
    ]
    for recording, aborted, says in cases:
        problem = problem_of(stream, recording, aborted=aborted)
        assert problem is None if says is None else says in (problem or ""), (recording, problem)


def test_streams_of_every_sort_are_checked() -> None:
    mixture = Mixture(0)
    streams = {stream.kind: stream for stream in (mixture.draw() for _ in range(400))}
    assert len(streams) == 10 and {stream.path for stream in streams.values()} == {COMPLETIONS, CHAT}
    assert {stream.num_choices for stream in streams.values()} == {1, 2, 3}
    assert Mixture(5).draw().body == Mixture(5).draw().body != Mixture(6).draw().body
    stop = streams["completion, stop"]
    assert stop.check(Choice(text=f"a{stop.body['stop'][1]}b")) and not stop.check(Choice(text="q"))
    logprobs = streams["chat, n=2, logprobs"].check
    assert logprobs(Choice(text="a")) and not logprobs(Choice(text="a", num_logprobs=1))
    regex = streams["completion, regex"].check
    assert regex(Choice(text="12-ab", ends=["stop"])) and not regex(Choice(text="12", ends=["length"]))
    schema = streams["chat, json_schema"]
    names = schema.body["response_format"]["json_schema"]["schema"]["required"]
    for text, fine in ((json.dumps(dict.fromkeys(names, 1)), True), ("{}", False), ("{", False)):
        assert (schema.check(Choice(text=text, ends=["stop"])) is None) == fine
    assert streams["chat, tool"].check(Choice(arguments="{", ends=["tool_calls"]))


def test_growth_is_that_of_the_second_half() -> None:
    noise = random.Random(0)
    times = [5.0 * step for step in range(121)]
    filled = [(at, 500 * MIB + int(min(at, 200) * MIB + noise.uniform(-1, 1) * MIB)) for at in times]
    assert abs(growth(filled)["growth_in_10_min"]) < MOST_GROWTH / 2
    leaky = [(at, size + int(at / 600 * 10 * MIB)) for at, size in filled]
    assert growth(leaky)["growth_in_10_min"] == pytest.approx(10 / 705, abs=0.003) and MOST_GROWTH < 10 / 705
    assert growth(filled[:1])["growth_in_10_min"] == 0


@pytest.mark.long
def test_a_short_soak(tmp_path: Path) -> None:
    output = tmp_path / "soak.json"
    command = [sys.executable, str(SCRIPT), "--minutes", "0.03", "--streams", "8", "--abort-share", "0.5"]
    served = ["--", "demo", "--max-num-seqs", "4", "--num-kv-blocks", "128", "--max-model-len", "1024"]
    served += ["--cudagraph-capture-sizes", "1,2,4,64"]
    done = subprocess.run(
        [*command, "--output", str(output), *served], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert result["problems"] == [] and result["streams"]["wrong"] == 0
    assert result["streams"]["complete"] >= 1 <= result["streams"]["aborted"]
    assert result["seen"]["waiting"]["most"] > 0 and result["end"] | {"seconds": 0} == {
        "exit_code": 0,
        "seconds": 0,
        "processes_left": 0,
    }
    assert result["memory"]["judged"] is False and result["commit"]
