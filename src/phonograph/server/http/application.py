"""The application: endpoints, guards, and errors in OpenAI's format."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Match, Route

from phonograph import __version__
from phonograph.errors import EngineUnavailable, RequestError, shortened
from phonograph.server.chat.serving import Serving
from phonograph.server.http import admin, page
from phonograph.server.http.api_errors import ApiError, ErrorAnswer, api_error, failed, invalid
from phonograph.server.http.api_keys import ApiKeys, error_response
from phonograph.server.http.body_guard import BodyGuard
from phonograph.server.http.error_count import ErrorCount
from phonograph.server.http.request_ids import HEADER, RequestIds
from phonograph.server.http.stream import DirectSend
from phonograph.server.messages import create_message
from phonograph.server.observe import api_page, graphs, metrics, status
from phonograph.server.observe.load_report import LoadReports
from phonograph.server.observe.logs import REQUEST_ID
from phonograph.server.ollama import ollama_chat, ollama_models
from phonograph.server.openai import chat_completions, completions, invocations, tokens
from phonograph.server.pooling import cohere, embeddings, scores
from phonograph.server.responses import create_response, response_store
from phonograph.server.speech import transcriptions

ROUTERS = (
    completions.router,
    chat_completions.router,
    embeddings.router,
    create_response.router,
    response_store.router,
    create_message.router,
    ollama_chat.router,
    ollama_models.router,
    invocations.router,
    tokens.router,
    cohere.router,
    scores.router,
    transcriptions.router,
    status.router,
    graphs.router,
    metrics.router,
    page.router,
    api_page.router,
)

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request is wrong, or too much at this time."},
    "5XX": {"model": ErrorAnswer, "description": "The server or its engine failed, or shuts down."},
}
"""Error responses of every endpoint, for the OpenAPI document."""


def make_app(serving: Serving) -> FastAPI:
    """Make the application of one server. Several applications may share an engine."""
    config = serving.config
    # FastAPI's documentation pages load scripts from other hosts; `api_page` does not.
    app = FastAPI(
        title="Phonograph",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
    )
    # As an argument it is deprecated. uvicorn's setting expects a proxy that removes the path.
    app.root_path = config.root_path or ""
    app.state.serving = serving
    app.state.responses = response_store.ResponseStore(config.max_stored_responses)
    for router in ROUTERS:
        app.include_router(router)
    if config.enable_admin:
        app.include_router(admin.router)
    app.add_exception_handler(ApiError, _on_error)
    app.add_exception_handler(RequestError, _on_error)
    app.add_exception_handler(EngineUnavailable, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_bug)
    # Requests pass the middleware added last first.
    app.add_middleware(LoadReports, engine=serving.engine)
    app.add_middleware(BodyGuard, config=config)
    if config.api_key:
        app.add_middleware(ApiKeys, keys=config.api_key, open_paths=admin.PATHS if config.enable_admin else ())
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
            allow_credentials=config.allow_credentials,
        )
    app.add_middleware(ErrorCount, counts=serving.errors)
    app.add_middleware(RequestIds)
    # Around the framework's own layer too, which would wrap `send` once more.
    app.middleware_stack = DirectSend(app.build_middleware_stack())
    return app


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(api_error(error), path=request.scope["path"])


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    """Answer with the first validation error of a body."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    path = [shortened(str(part)) for part in first["loc"] if part != "body"]
    if first["loc"][0] == "query":
        name = str(first["loc"][-1])
        return error_response(invalid(name, f"{name}: {first['msg']}"), path=request.scope["path"])
    if not isinstance(error.body, dict):
        return error_response(
            invalid(None, "the body must be a JSON object, sent as application/json"), path=request.scope["path"]
        )
    if not path:
        return error_response(invalid(None, f"the body: {first['msg']}"), path=request.scope["path"])
    name, problem = ".".join(path), first["msg"].removeprefix("Value error, ")
    return error_response(invalid(name, f"{name}: {problem}"), path=request.scope["path"])


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer an error of the framework: an unknown path, a wrong method, a body that cannot be parsed."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {shortened(request.url.path)}: {error.detail}"
    headers = error.headers
    if error.status_code == 405:
        # The framework names the methods of the first route only; a path may have several routes.
        headers = {"allow": ", ".join(sorted(_methods(request)))}
    return error_response(ApiError(error.status_code, message, headers=headers), path=request.scope["path"])


def _methods(request: Request) -> set[str]:
    """Return the methods of all routes of the request's path."""
    serving: Serving = request.app.state.serving
    routers = (*ROUTERS, admin.router) if serving.config.enable_admin else ROUTERS
    routes = [route for router in routers for route in router.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is Match.PARTIAL]
    return {method for route in matching for method in route.methods or ()}


async def _on_bug(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception. The framework raises it again afterwards, and the log gets its traceback."""
    error_text = failed("internal error; the server's log has the details", code="internal_error")
    # The framework answers outside of all middleware.
    return error_response(error_text, {HEADER: REQUEST_ID.get() or ""}, path=request.scope["path"])
