"""Verbs of the engine over HTTP: what they do, and that nothing but their own key reaches them."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from servers import EngineThread, Server, serving

from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError, MemoryLimitError, WeightError
from phonograph.server.http.admin import PATHS, check_admin

KEY = {"authorization": "Bearer admin"}
LONG = {"prompt": "Tom has", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
SHORT = {"prompt": "Tom has", "max_tokens": 3, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def shared(engine_thread: EngineThread) -> Iterator[Server]:
    with serving(engine_thread, ServerConfig(enable_admin=True, admin_api_key=("admin", "other"))) as server:
        yield server


@pytest.fixture
def admin(shared: Server) -> Iterator[Server]:
    yield shared
    assert shared.get("/is_paused", headers=KEY).json() == {"is_paused": False}
    shared.wait_until_idle()


class Posted:
    """A request on a thread."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.answers: list[httpx.Response] = []
        self._thread = threading.Thread(target=lambda: self.answers.append(server.post("/v1/completions", body)))
        self._thread.start()

    def answer(self) -> dict[str, Any]:
        self._thread.join(60)
        (answer,) = self.answers
        assert answer.status_code == 200, answer.text
        return answer.json()


def test_a_pause_holds_requests_until_the_resume(admin: Server) -> None:
    expected = admin.post("/v1/completions", SHORT).json()["choices"]
    running = Posted(admin, LONG)
    admin.wait_until(lambda engine: engine.stats.num_running == 1)
    assert admin.post("/pause", params={"mode": "keep"}, headers=KEY).json() == {"status": "paused"}
    assert admin.get("/is_paused", headers=KEY).json() == {"is_paused": True}
    late = Posted(admin, SHORT)
    admin.wait_until(lambda engine: engine.num_open == 2)
    assert admin.get("/health").status_code == 200 and not running.answers and not late.answers
    assert admin.post("/resume", headers=KEY).json() == {"status": "resumed"}
    assert running.answer()["choices"][0]["finish_reason"] == "length"
    assert late.answer()["choices"] == expected


def test_a_pause_ends_requests_by_default(admin: Server) -> None:
    running = Posted(admin, LONG)
    admin.wait_until(lambda engine: engine.stats.num_running == 1)
    assert admin.post("/pause", headers=KEY).json() == {"status": "paused"}
    answer = running.answer()
    assert answer["choices"][0]["finish_reason"] == "abort" and answer["usage"]["completion_tokens"] < 500
    admin.post("/resume", headers=KEY)


def test_requests_are_aborted_by_the_ids_of_their_answers(admin: Server) -> None:
    named, other = Posted(admin, {**LONG, "request_id": "mine"}), Posted(admin, LONG)
    admin.wait_until(lambda engine: engine.stats.num_running == 2)
    aborted = admin.post("/abort_requests", {"request_ids": ["mine", "unknown"]}, headers=KEY)
    assert aborted.json() == {"status": "aborted", "num_aborted": 1}
    assert named.answer()["choices"][0]["finish_reason"] == "abort"
    assert other.answer()["choices"][0]["finish_reason"] == "length"
    with httpx.stream("POST", f"{admin.url}/v1/completions", json={**LONG, "stream": True}, timeout=30) as stream:
        lines = stream.iter_lines()
        name = next(lines).partition('"id":"')[2].partition('"')[0]
        assert name.startswith("cmpl-")
        found = admin.post("/abort_requests", {"request_ids": [name]}, headers=KEY).json()["num_aborted"]
        *_, last, done = filter(None, lines)
        assert found == 1 and '"finish_reason":"abort"' in last and done == "data: [DONE]"


def test_a_beam_search_is_aborted_by_its_id(admin: Server) -> None:
    search = Posted(admin, {**LONG, "request_id": "beams", "use_beam_search": True, "n": 2})
    # Between two steps the search has no request in the engine.
    while not admin.post("/abort_requests", {"request_ids": ["beams"]}, headers=KEY).json()["num_aborted"]:
        assert not search.answers
    assert [choice["finish_reason"] for choice in search.answer()["choices"]] == ["abort", "abort"]


def test_the_prefix_cache_is_forgotten(admin: Server) -> None:
    body = {**SHORT, "prompt": list(range(5, 105))}

    def cached() -> int:
        return admin.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() > 0
    assert admin.post("/reset_prefix_cache", headers=KEY).json() == {"success": True}
    assert cached() == 0


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces") / "profiles"


@pytest.fixture(scope="module")
def sleeper(profiles: Path) -> Iterator[Server]:
    """Server of an engine that may sleep and write profiles."""
    config = ServerConfig(enable_admin=True, admin_api_key=("admin",))
    with EngineThread(enable_sleep_mode=True, profile_dir=str(profiles)) as thread, serving(thread, config) as server:
        yield server


def test_an_engine_sleeps_until_it_is_woken_up(sleeper: Server) -> None:
    server = sleeper
    expected = server.post("/v1/completions", SHORT).json()["choices"]
    running = Posted(server, LONG)
    server.wait_until(lambda engine: engine.stats.num_running == 1)
    assert server.post("/sleep", params={"level": 2}, headers=KEY).json() == {"status": "asleep"}
    assert running.answer()["choices"][0]["finish_reason"] == "abort"
    assert server.get("/is_sleeping", headers=KEY).json() == {"is_sleeping": True}
    states = {
        'engine_sleep_state{model_name="demo",sleep_state="awake"} 0.0',
        'engine_sleep_state{model_name="demo",sleep_state="weights_offloaded"} 0.0',
        'engine_sleep_state{model_name="demo",sleep_state="discard_all"} 1.0',
    }
    assert all(state in server.get("/metrics").text for state in states)
    late = Posted(server, SHORT)
    server.wait_until(lambda engine: engine.num_open == 1)
    answer = server.post("/resume", headers=KEY)
    assert answer.status_code == 400 and "the engine sleeps" in answer.json()["error"]["message"]
    answer = server.post("/wake_up", params={"tags": ["kv_cache"]}, headers=KEY)
    assert answer.json() == {"status": "asleep", "asleep": ["weights"]} and not late.answers
    answer = server.post("/wake_up?tags=weights&tags=kv_cache", headers=KEY)
    assert answer.json() == {"status": "awake", "asleep": []}
    assert late.answer()["choices"] == expected
    assert server.get("/is_sleeping", headers=KEY).json() == {"is_sleeping": False}
    assert 'sleep_state="awake"} 1.0' in server.get("/metrics").text
    server.post("/sleep", headers=KEY)
    assert 'sleep_state="weights_offloaded"} 1.0' in server.get("/metrics").text
    server.post("/wake_up", headers=KEY)


@pytest.mark.parametrize("error", [MemoryLimitError("no memory to wake up"), WeightError("no memory to wake up")])
def test_what_keeps_an_engine_asleep_is_told(
    error: Exception, sleeper: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wake_up(tags: object) -> None:
        raise error

    monkeypatch.setattr(sleeper.engine, "wake_up", wake_up)
    answer = sleeper.post("/wake_up", headers=KEY)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "not_awake"
    assert answer.json()["error"]["message"] == "no memory to wake up"


def test_profiles_are_written(sleeper: Server, profiles: Path) -> None:
    server = sleeper
    for _ in range(2):
        assert server.post("/start_profile", headers=KEY).json() == {"status": "started"}
        answer = server.post("/start_profile", headers=KEY)
        assert answer.status_code == 400 and "a profile is running" in answer.json()["error"]["message"]
        server.post("/v1/completions", SHORT)
        answer = server.post("/stop_profile", headers=KEY).json()
        with gzip.open(answer["file"]) as file:
            names = {event["name"] for event in json.load(file)["traceEvents"]}
        assert answer["status"] == "stopped" and {"aten::mm", "aten::addmm_"} & names
    answer = server.post("/stop_profile", headers=KEY)
    assert answer.status_code == 400 and "no profile is running" in answer.json()["error"]["message"]
    assert len(list(profiles.iterdir())) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/sleep", None, 400, "enable_sleep_mode=False: sleep and wake_up need enable_sleep_mode=True"),
        ("/wake_up", None, 400, "enable_sleep_mode=False: sleep and wake_up need enable_sleep_mode=True"),
        ("/sleep?level=3", None, 400, "level='3': must be 1"),
        ("/sleep?level=x", None, 400, "level: "),
        ("/sleep?mode=stop", None, 400, "mode: Input should be 'abort', 'wait' or 'keep'"),
        ("/wake_up?tags=all", None, 400, "tags=\"['all']\": must be a list of weights and kv_cache"),
        ("/start_profile", None, 400, "profile_dir=None: start_profile needs the folder"),
        ("/stop_profile", None, 400, "no profile is running"),
        ("/pause?mode=stop", None, 400, "mode: Input should be 'abort', 'wait' or 'keep'"),
        ("/pause?clear_cache=x", None, 400, "clear_cache: "),
        ("/abort_requests", None, 400, "the body must be a JSON object"),
        ("/abort_requests", {}, 400, "request_ids: Field required"),
        ("/abort_requests", {"request_ids": "a"}, 400, "must be a list of texts"),
        ("/abort_requests", {"request_ids": [1]}, 400, "must be a list of texts"),
        ("/abort_requests", {"request_ids": [], "more": 1}, 400, "unknown field 'more'"),
    ],
)
def test_wrong_verbs_are_refused(admin: Server, path: str, body: Any, status: int, says: str) -> None:
    answer = admin.post(path, body, headers=KEY)
    assert answer.status_code == status and says in answer.json()["error"]["message"]


def method_of(path: str) -> str:
    return "GET" if path.startswith("/is_") else "POST"


def test_the_endpoints_need_their_own_key(serve_with: Callable[..., Server]) -> None:
    server = serve_with(enable_admin=True, admin_api_key=["admin"], api_key=["user"], root_path="/llm")
    keys = {"none": {}, "user": {"authorization": "Bearer user"}, "other": {"authorization": "Bearer admi"}}
    for path in PATHS:
        for prefix in ("", "/llm"):
            for headers in keys.values():
                url = f"{server.url}{prefix}{path}"
                answer = httpx.request(method_of(path), url, headers=headers, content=b"{" * 100)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), (url, headers)
                assert answer.headers["www-authenticate"] == "Bearer"
    assert server.get("/is_paused", headers=KEY).json() == {"is_paused": False}
    assert server.get("/v1/models", headers=KEY).status_code == 401, "the admin key opens nothing else"
    assert server.get("/v1/models", headers=keys["user"]).status_code == 200


def test_without_the_setting_there_are_no_such_endpoints(server: Server) -> None:
    for path in PATHS:
        assert httpx.request(method_of(path), f"{server.url}{path}", headers=KEY).status_code == 404
    assert not PATHS & server.get("/openapi.json").json()["paths"].keys()


def test_the_document_has_the_endpoints(admin: Server) -> None:
    assert admin.get("/openapi.json").json()["paths"].keys() > PATHS


def test_a_server_needs_a_key_for_the_endpoints() -> None:
    with pytest.raises(ConfigError, match="enable_admin=True: needs admin_api_key"):
        check_admin(ServerConfig(enable_admin=True))
    with pytest.raises(ConfigError, match="admin_api_key='...': needs enable_admin"):
        check_admin(ServerConfig(admin_api_key=("a",)))
    check_admin(ServerConfig())
