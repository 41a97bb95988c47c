"""`suffix` of completions and of Ollama's prompts: the answer is the text of a gap.

The demo model fills no gaps. Tokens of its vocabulary stand for the markers.
"""

from __future__ import annotations

from typing import Any

import pytest
from servers import QUESTION, Server

from phonograph.text import infill
from phonograph.text.infill import Infill

MARKERS = ("<|user|>", "<|system|>", "<|assistant|>")
ASK: dict[str, Any] = {"prompt": QUESTION, "suffix": " The end.", "temperature": 0, "max_tokens": 20}


@pytest.fixture
def markers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infill, "FORMS", (("<no>", "<such>", "<token>"), MARKERS))


def token_ids(server: Server, text: str, **more: Any) -> list[int]:
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False, **more}).json()["tokens"]


@pytest.mark.usefixtures("markers")
def test_the_parts_of_a_prompt_with_a_gap(server: Server) -> None:
    begin, after, middle = (token_ids(server, marker)[0] for marker in MARKERS)
    before = token_ids(server, "", add_special_tokens=True)
    prefix, suffix = token_ids(server, QUESTION), token_ids(server, " The end.")
    whole = [*before, begin, *prefix, after, *suffix, middle]
    plain = server.post("/v1/completions", {**ASK, "prompt": whole, "suffix": None, "stop_token_ids": [begin]}).json()
    for prompt in (QUESTION, prefix):
        found = server.post("/v1/completions", {**ASK, "prompt": prompt, "return_token_ids": True}).json()
        assert found["choices"][0]["prompt_token_ids"] == whole
        assert found["choices"][0]["text"] == plain["choices"][0]["text"]
    several = server.post("/v1/completions", {**ASK, "prompt": [QUESTION, "a"]}).json()
    assert len(several["choices"]) == 2 and several["choices"][0]["text"] == plain["choices"][0]["text"]
    body = {"model": "demo", "prompt": QUESTION, "suffix": " The end.", "stream": False}
    ollama = server.post("/api/generate", {**body, "options": {"temperature": 0, "num_predict": 20}}).json()
    assert ollama["response"] == plain["choices"][0]["text"] and ollama["prompt_eval_count"] == len(whole)


@pytest.mark.usefixtures("markers")
def test_markers_end_the_answer(server: Server) -> None:
    marker = token_ids(server, MARKERS[0])[0]
    for path, body in (
        ("/v1/completions", {**ASK, "allowed_token_ids": [marker], "min_tokens": 0}),
        ("/v1/completions", {**ASK, "logit_bias": {str(marker): 100}}),
    ):
        (choice,) = server.post(path, body).json()["choices"]
        assert choice["finish_reason"] == "stop" and choice["text"] == ""


def test_orders_of_the_parts() -> None:
    assert Infill((1, 2, 3), ()).prompt([7, 8], [9]) == [1, 7, 8, 2, 9, 3]
    assert Infill((1, 2), ()).prompt([7, 8], [9]) == [2, 9, 1, 7, 8]


def test_a_model_without_the_tokens(server: Server) -> None:
    for path, body in (("/v1/completions", ASK), ("/api/generate", {"model": "demo", "prompt": "a", "suffix": "b"})):
        answer = server.post(path, body)
        assert answer.status_code == 400 and "suffix needs tokens such as <|fim_prefix|>" in answer.text
    assert server.post("/v1/completions", {**ASK, "suffix": ""}).status_code == 200


@pytest.mark.usefixtures("markers")
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"suffix": 5}, "suffix"),
        ({"suffix": "a " * 3000}, "suffix"),
        ({"suffix": "a " * 600, "prompt": "a " * 600}, "max_tokens"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_wrong_suffixes(server: Server, change: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", {**ASK, **change})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param
