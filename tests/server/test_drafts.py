"""Speculation in a server: its metrics, its facts in /v1/graphs, and the field of a request that switches it off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import EngineThread, Server, serving

from phonograph.config.server_config import ServerConfig

NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    settings = NGRAM | {"adaptive_depth": False}
    with EngineThread(speculative_config=settings) as thread, serving(thread, ServerConfig()) as server:
        yield server


def metrics(server: Server) -> dict[tuple[str, str], float]:
    """Return the values of counters of drafts by name and label."""
    return {
        (sample.name.removeprefix("vllm:spec_decode_num_"), label): sample.value
        for family in text_string_to_metric_families(server.get("/metrics").text)
        for sample in family.samples
        for label in [sample.labels.get("position") or sample.labels.get("reason") or ""]
        if "spec_decode" in sample.name or "draft" in sample.name
    }


def complete(server: Server, **more: Any) -> list[int]:
    body = {"prompt": [5, 6, 7] * 6, "max_tokens": 40, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    answer = server.post("/v1/completions", body | more)
    assert answer.status_code == 200, answer.text
    server.wait_until_idle()
    return answer.json()["choices"][0]["token_ids"]


def test_drafts_are_counted(drafting: Server) -> None:
    complete(drafting)
    found = metrics(drafting)
    decodes, drafts = found["drafts_total", ""], found["draft_tokens_total", ""]
    by_position = [found["accepted_tokens_per_pos_total", position] for position in ("0", "1")]
    assert 0 < decodes <= drafts <= 2 * decodes
    assert 0 < found["accepted_tokens_total", ""] == sum(by_position) and by_position == sorted(by_position)[::-1]
    assert found["phonograph:draft_choices_total", "fixed"] > 0
    facts = drafting.get("/v1/graphs").json()
    assert facts["engine"]["drafts"] == {
        "decodes": decodes,
        "verified": drafts,
        "accepted": sum(by_position),
        "accepted_by_position": by_position,
        "choices": {
            reason: count for (name, reason), count in found.items() if name == "phonograph:draft_choices_total"
        },
    }
    assert any("speculation: 0 to 2 drafts a decode" in note for note in facts["notes"])


def test_a_request_without_speculation(drafting: Server) -> None:
    tokens, before = complete(drafting), metrics(drafting)
    assert complete(drafting, speculate=True) == tokens
    with_drafts = metrics(drafting)
    assert complete(drafting, speculate=False) == tokens
    after = metrics(drafting)
    assert after["draft_tokens_total", ""] == with_drafts["draft_tokens_total", ""] > before["draft_tokens_total", ""]


def test_a_switch_that_is_none(drafting: Server) -> None:
    answer = drafting.post("/v1/completions", {"prompt": [5], "speculate": "sometimes"})
    assert answer.status_code == 400 and "speculate" in answer.json()["error"]["message"]
