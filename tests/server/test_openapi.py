"""The OpenAPI document says what the server does: `scripts/fuzz-server` holds it to that, with many more requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
from servers import Server

from phonograph.server.chat.fields import NO_EFFECT

BODIES = (
    *("CompletionBody", "ChatBody", "ResponseBody", "MessageBody", "CountBody", "TokenizeBody", "DetokenizeBody"),
    *("EmbeddingBody", "PoolingBody", "ClassifyBody", "ScoreBody", "RerankBody"),
    *("OllamaChatBody", "GenerateBody", "Options", "ShowBody"),
)
FORMS = {"/v1/messages": "MessagesErrorAnswer", "/api/": "OllamaErrorAnswer"}


@pytest.fixture
def document(server: Server) -> dict[str, Any]:
    return server.get("/openapi.json").json()


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def test_errors_match_the_openapi_document(server: Server, document: dict[str, Any]) -> None:
    for name, operation in operations(document).items():
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}, name
        for status in ("4XX", "5XX"):
            schema = operation["responses"][status]["content"]["application/json"]["schema"]
            form = next((form for path, form in FORMS.items() if f" {path}" in name), "ErrorAnswer")
            assert schema == {"$ref": f"#/components/schemas/{form}"}
    answers = [
        server.post("/v1/completions", {"prompt": 5}),
        server.post("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "a"}]}),
        server.post("/tokenize"),
        server.get("/v1/graphs?last=-1"),
        server.get("/v1/models/other"),
        server.post("/v1/models"),
    ]
    assert [answer.status_code for answer in answers] == [400, 404, 400, 400, 404, 405]
    for answer in answers:
        jsonschema.validate(answer.json(), {**document, "$ref": "#/components/schemas/ErrorAnswer"})
    for answer in (server.post("/v1/messages", {}), server.post("/v1/messages/count_tokens", {"x": 1})):
        assert answer.status_code == 400
        jsonschema.validate(answer.json(), {**document, "$ref": "#/components/schemas/MessagesErrorAnswer"})
    for answer in (server.post("/api/chat", {}), server.get("/api/pull")):
        assert answer.is_client_error
        jsonschema.validate(answer.json(), {**document, "$ref": "#/components/schemas/OllamaErrorAnswer"})


def test_a_wrong_method_gets_all_methods_of_the_path(
    server: Server, serve_with: Callable[..., Server], document: dict[str, Any]
) -> None:
    for path, methods in document["paths"].items():
        answer = httpx.options(f"{server.url}{path}")
        assert answer.status_code == 405, path
        assert {method.upper() for method in methods} <= {*answer.headers["allow"].split(", ")}, path
    # Also behind a proxy, and for paths that only some servers have.
    url = f"{serve_with(enable_admin=True, admin_api_key=['k'], root_path='/llm').url}/llm/pause"
    answer = httpx.put(url, headers={"authorization": "Bearer k"})
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert httpx.put(f"{server.url}/pause").status_code == 404


@pytest.mark.parametrize(("path", "servers"), [(None, None), ("/llm", [{"url": "/llm"}])])
def test_the_document_names_the_path_behind_a_proxy(
    serve_with: Callable[..., Server], path: str | None, servers: list[dict[str, str]] | None
) -> None:
    assert serve_with(root_path=path).get("/openapi.json").json().get("servers") == servers


def test_bodies_have_no_other_fields(server: Server, document: dict[str, Any]) -> None:
    fine: dict[str, Any] = {"prompt": "Tom", "max_tokens": 1, **dict.fromkeys(NO_EFFECT, "x")}
    for body, valid in ((fine, True), ({**fine, "max_token": 1}, False)):
        checker = jsonschema.Draft202012Validator({**document, "$ref": "#/components/schemas/CompletionBody"})
        assert checker.is_valid(body) == valid
        assert server.post("/v1/completions", body).is_success == valid
    assert all(document["components"]["schemas"][name]["additionalProperties"] is False for name in BODIES)


def test_types_of_answers(server: Server, document: dict[str, Any]) -> None:
    found = operations(document)
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        content = found[f"post {path}"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "text/event-stream"}
    for path in ("/api/chat", "/api/generate"):
        content = found[f"post {path}"]["responses"]["200"]["content"]
        assert set(content) == {"application/json", "application/x-ndjson"}
    for path, kinds in (("/health", set()), ("/metrics", {"text/plain"}), ("/version", {"application/json"})):
        assert set(found[f"get {path}"]["responses"]["200"].get("content", {})) == kinds
        answer = server.get(path)
        assert {answer.headers.get("content-type", "").partition(";")[0]} - {""} == kinds
