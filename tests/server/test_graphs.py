"""/v1/graphs: the resolution, the capture list and the latest steps, as the engine's process reported them."""

from __future__ import annotations

import time
from typing import Any

import pytest
from servers import Server

from phonograph.engine.metrics.step_log import KEPT, StepLog
from phonograph.engine.metrics.step_record import StepRecord


def steps_after(server: Server, number: int) -> list[dict[str, Any]]:
    return server.get("/v1/graphs", params={"after": number, "last": KEPT}).json()["steps"]


def test_the_resolution_and_the_graphs(server: Server) -> None:
    answer = server.get("/v1/graphs").json()
    assert answer["model"] == "demo" and answer["device"] == "cpu" and answer["attention_backend"] == "reference"
    (group,) = answer["kv_groups"]
    assert group["layers"] == list(range(8)) and group["window"] is None and group["backend"] == "reference"
    assert group["block_size"] == answer["engine"]["kv_block_size"] and group["reasons"]
    assert answer["support"]["level"] == "ALWAYS" and answer["support"]["reason"]
    resolution = answer["resolution"]
    assert resolution["asked"] is None and resolution["mode"] == "FULL"
    (reason,) = resolution["reasons"]
    assert reason["from"] is None and reason["to"] == "FULL" and "ALWAYS" in reason["why"]
    graphs = answer["captures"]["graphs"]
    sizes = {name: [graph["tokens"] for graph in graphs if graph["set"] == name] for name in ("decode", "mixed")}
    assert sizes == {"decode": [1, 2, 4], "mixed": [1, 2, 4, 16]}
    assert len(graphs) == 7 and answer["captures"]["memory_bytes"] > 0 and answer["captures"]["seconds"] > 0
    assert answer["captures"]["retries"] == [] and answer["sums_over_ranks"] == []
    assert any("no decode graph of 16 tokens" in note for note in answer["notes"])
    assert answer["engine"]["up"] and answer["engine"]["max_num_seqs"] == 4


def test_each_step_with_its_decision(server: Server) -> None:
    before = server.get("/v1/graphs").json()
    body = {"prompt": [[51] * 20, [52, 53]], "max_tokens": 3, "ignore_eos": True}
    began = time.time()
    assert server.post("/v1/completions", body).status_code == 200
    server.wait_until_idle()
    after = server.get("/v1/graphs", params={"after": before["num_steps"]}).json()
    steps = after["steps"]
    assert [step["number"] for step in steps] == list(range(before["num_steps"] + 1, after["num_steps"] + 1))
    assert sum(sum(step["prefills"]) for step in steps) == 22 and {step["kind"] for step in steps} >= {"decode"}
    assert sum(step["tokens"] for step in steps) == 22 + 4
    # The backend of a CPU shares no prefix.
    assert after["attention_units"] == {"shared": 0, "own": 0}
    for step in steps:
        assert step["attention_units"] == {"shared": 0, "own": 0}
        assert step["tokens"] == step["decodes"] + sum(step["prefills"])
        assert step["padded_tokens"] == step["graph_tokens"] - step["tokens"] >= 0
        assert began - 1 < step["time"] < time.time() + 1 and 0 < step["seconds"] < 20
        if step["tokens"] > 16:
            assert (step["mode"], step["graph"], step["padded_tokens"]) == ("NONE", "eager", 0)
            assert step["reason"] == f"{step['tokens']} tokens are more than the largest graph holds (16)"
        else:
            assert step["mode"] == "FULL" and step["graph"] == ("full decode" if not step["prefills"] else "full mixed")
    assert any(step["mode"] == "NONE" for step in steps), "the long prompt ran eagerly"
    seconds = sum(step["seconds"] for step in steps)
    counted = sum(one["seconds"] for one in after["decisions"]) - sum(one["seconds"] for one in before["decisions"])
    assert counted == pytest.approx(seconds)
    assert sum(one["steps"] for one in after["decisions"]) == after["num_steps"]
    assert after["engine"]["generation_tokens"] - before["engine"]["generation_tokens"] == 6


def test_how_many_are_shown(server: Server) -> None:
    server.post("/v1/completions", {"prompt": [5], "max_tokens": 6, "ignore_eos": True})
    server.wait_until_idle()
    newest = server.get("/v1/graphs").json()["num_steps"]
    shown = server.get("/v1/graphs", params={"last": 2}).json()["steps"]
    assert [step["number"] for step in shown] == [newest - 1, newest]
    assert steps_after(server, newest) == [] and len(steps_after(server, newest - 4)) == 4
    assert server.get("/v1/graphs", params={"last": 0}).json()["steps"] == []
    for name, value in (("last", KEPT + 1), ("last", "many"), ("after", -1)):
        answer = server.get("/v1/graphs", params={name: value})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == name and error["message"].startswith(f"{name}: ")


def record(number: int, *, num_decodes: int = 1) -> StepRecord:
    return StepRecord(
        float(number), 0.5, num_decodes, num_decodes, [], "full decode", "FULL", 4, 4, "a cause", "a reason", 8, number
    )


def test_the_latest_steps_are_kept() -> None:
    log = StepLog()
    assert log.since(0, 10) == []
    log.take([record(number) for number in range(1, 4)])
    assert (log.shared_units, log.own_units) == (24, 1 + 2 + 3)
    assert [number for number, _ in log.since(0, 10)] == [1, 2, 3]
    assert [number for number, _ in log.since(1, 10)] == [2, 3] and log.since(3, 10) == log.since(99, 10) == []
    log.take([record(number) for number in range(4, KEPT + 11)])
    found = log.since(0, KEPT)
    assert [number for number, _ in found] == list(range(11, KEPT + 11)) and len(found) == KEPT
    assert all(step.ended == number for number, step in found)
    (tally,) = log.tallies
    assert (tally.num_steps, tally.num_tokens, tally.num_padded) == (KEPT + 10, KEPT + 10, 3 * (KEPT + 10))
    assert tally.seconds.total == (KEPT + 10) / 2
