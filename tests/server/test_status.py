"""Endpoints for operators: probes, load, settings without their secrets, and the tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from openai import OpenAI
from servers import Server

from phonograph import __version__
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.demo import MODEL_DIRECTORY
from phonograph.errors import EngineUnavailable
from phonograph.server.http.api_keys import OPEN_PATHS
from phonograph.server.observe.status import SECRETS, health, ready
from phonograph.text.tokenizer import Tokenizer

ENDLESS = {"ignore_eos": True}
"""A field of requests whose samples must not end before a test has looked."""


async def status(probe: Any, *, death: str | None, draining: bool) -> int:
    problem = EngineUnavailable(death or "the engine is shutting down", "x") if death or draining else None
    serving = SimpleNamespace(engine=SimpleNamespace(death=death, problem=problem))
    try:
        return (await probe(SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(serving=serving))))).status_code
    except Exception as error:
        return error.status  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ({"death": None, "draining": False}, (200, 200)),
        ({"death": None, "draining": True}, (200, 503)),
        ({"death": "killed", "draining": False}, (503, 503)),
        ({"death": "killed", "draining": True}, (503, 503)),
    ],
)
def test_a_server_that_drains_lives_and_is_not_ready(state: Any, expected: tuple[int, int]) -> None:
    assert (asyncio.run(status(health, **state)), asyncio.run(status(ready, **state))) == expected


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
def test_probes_need_no_key(path: str, serve_with: Callable[..., Server]) -> None:
    server = serve_with(api_key="secret")
    answer = server.get(path)
    assert answer.status_code == 200 and answer.content == b""
    assert server.get("/load").status_code == server.get("/server_info").status_code == 401
    assert server.get("/load", headers={"authorization": "Bearer secret"}).json() == {"server_load": 0}


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
def test_open_paths_need_no_key_behind_a_proxy(path: str, serve_with: Callable[..., Server]) -> None:
    server = serve_with(api_key="secret", root_path="/llm")
    assert server.get(f"/llm{path}").status_code == server.get(path).status_code == 200
    for other in (f"/llm/llm{path}", f"/llmx{path}", f"{path}/llm", f"/other{path}", "/llm", "/llm/load"):
        assert server.get(other).status_code == 401, other


def test_ping_is_posted_too(server: Server) -> None:
    assert server.post("/ping").status_code == 200


def test_the_load_is_the_number_of_samples_in_progress(server: Server, client: OpenAI) -> None:
    with client.completions.create(
        model="demo", prompt="a", n=3, max_tokens=900, stream=True, extra_body=ENDLESS
    ) as stream:
        next(iter(stream))
        assert server.get("/load").json() == {"server_load": 3}
    server.wait_until_idle()
    assert server.get("/load").json() == {"server_load": 0}


def test_the_settings_of_a_server_are_told_without_secrets(serve_with: Callable[..., Server]) -> None:
    settings = {"max_logprobs": 7, "otlp_traces_endpoint": "http://user:pass@host", "enable_admin": True}
    server = serve_with({"top_p": 0.5}, api_key="secret", admin_api_key="secrecy", **settings)
    answer = server.get("/server_info", headers={"authorization": "Bearer secret"})
    assert "secre" not in answer.text and "pass" not in answer.text.replace("passthrough", "")
    found = answer.json()
    assert found["version"] == __version__ and found["model"] == "demo"
    assert found["engine"].keys() == EngineConfig(model="demo").model_dump().keys()
    assert found["server"].keys() == ServerConfig.model_fields.keys() - set(SECRETS)
    assert found["server"]["max_logprobs"] == 7 and found["sampling_defaults"] == {"top_p": 0.5}
    assert found["max_model_len"] == 1024 and found["cudagraph_mode"] == "FULL" and found["device"] and found["notes"]
    assert serve_with().get("/server_info").json()["server"].keys() == ServerConfig.model_fields.keys()


def test_every_setting_that_holds_a_secret_is_known() -> None:
    named = {name for name in ServerConfig.model_fields if name.endswith(("_key", "_token"))} - {"reasoning_key"}
    assert named <= set(SECRETS)


def test_the_tokenizer_is_told(server: Server, serve_with: Callable[..., Server]) -> None:
    tokenizer = Tokenizer.load(MODEL_DIRECTORY)
    answer = server.get("/tokenizer_info")
    assert answer.status_code == 404 and "--enable-tokenizer-info-endpoint" in answer.json()["error"]["message"]
    told = partial(serve_with, enable_tokenizer_info_endpoint=True)
    found = told().get("/tokenizer_info").json()
    assert found["chat_template"] == tokenizer.chat_template and found["vocab_size"] == tokenizer.vocab_size
    assert found["eos_token_id"] == tokenizer.eos_token_id is not None
    tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": found["eos_token"]}).json()["tokens"]
    assert found["eos_token_id"] in tokens
    assert told(chat_template="{{ messages }}").get("/tokenizer_info").json()["chat_template"] == "{{ messages }}"
