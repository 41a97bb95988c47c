"""The measurement of `scripts/hostile-bodies`, on the server that tests share."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import Any

import pytest
from servers import Server

from checks.serving import hostile
from checks.serving.hostile_bodies import BODIES
from phonograph.config.server_config import ServerConfig
from phonograph.server.http.json_meter import JsonMeter


def test_bodies_are_sent_beside_a_stream(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "STREAM", {**hostile.STREAM, "max_tokens": 900})
    process: Any = SimpleNamespace(url=server.url, pid=os.getpid())
    names = ["a header of 1 MB", "2,000 prompts of 1,024 samples"]
    shown: list[str] = []
    seen = hostile.try_bodies(
        process, names=names, repeats=1, rest_seconds=0.1, settle_seconds=0, progress=lambda name, _: shown.append(name)
    )
    assert shown == names
    assert [seen["bodies"][name]["status"] for name in names] == [431, 400]
    assert "max_queued_requests" in seen["bodies"][names[1]]["message"]
    assert all(0 < body["gap_ms"] < 20_000 for body in seen["bodies"].values())


def test_each_problem_is_found() -> None:
    fine = {"gap_above_rest_ms": 149, "seconds": 1.9, "status": 400, "message": "too long"}
    assert hostile.problems_of(fine) == []
    for wrong, says in [
        ({"gap_above_rest_ms": 151}, "stood still 151 ms"),
        ({"seconds": 2.1}, "took 2.1 s"),
        ({"status": 500}, "was 500"),
        ({"status": None, "message": "reset"}, "was None: reset"),
    ]:
        assert says in hostile.problems_of(fine | wrong)[0]


JUST_BELOW_THE_LIMITS = ("130,000 unknown fields", "500,000 token ids", "2,000 prompts", "100,000 template arguments")


def test_bodies_just_below_the_limits_pass_the_meter() -> None:
    """Else they would not reach what they are there to measure."""
    config = ServerConfig()
    for name in JUST_BELOW_THE_LIMITS:
        JsonMeter(config).check(content := BODIES[name].make())
        fields = content.count(b'"') // 2 / config.max_request_fields
        ids = content.count(b",") / config.max_request_token_ids
        prompts = content.count(b"Tom") / config.max_request_prompts
        assert max(fields, ids, prompts) > 0.75, name


def test_bodies_are_below_the_limit_of_bytes() -> None:
    for name in (
        *JUST_BELOW_THE_LIMITS,
        "450,000 empty messages",
        "one key 2,500,000 times",
        "10 tools of 400 fields",
        "a role of 15 MB",
    ):
        content = BODIES[name].make()
        assert len(content) < 16 * 2**20
        json.loads(content)
