"""Errors of requests: an HTTP status and an object in the form of the endpoint's protocol.

OpenAI's is {"error": {message, type, param, code}}, also of endpoints that it does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from phonograph.errors import EngineUnavailable, RequestError, RequestFailure, shortened

CLIENT_GONE = 499
"""Status of a request whose client has disconnected. It appears in logs only."""
MAX_MESSAGE = 1000
"""Maximum number of characters of a message, because messages quote values of the request."""


class ErrorDetail(BaseModel):
    """Message, type of error, field of the request, and a code for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """Body of every error response, for the OpenAPI document."""

    error: ErrorDetail


class MessagesErrorDetail(BaseModel):
    """Type of error and message."""

    type: str
    message: str


class MessagesErrorAnswer(BaseModel):
    """Body of an error response in Anthropic's form, for the OpenAPI document."""

    type: Literal["error"]
    error: MessagesErrorDetail


class OllamaErrorAnswer(BaseModel):
    """Body of an error response in Ollama's form, for the OpenAPI document."""

    error: str


MESSAGES_PATH = "/v1/messages"
"""Beginning of the paths of Anthropic's protocol."""
MESSAGES_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": MessagesErrorAnswer, "description": "An error in Anthropic's form."} for status in ("4XX", "5XX")
}
"""Error responses of Anthropic's endpoints, for the OpenAPI document."""
OLLAMA_PATH = "/api/"
"""Beginning of the paths of Ollama's protocol."""
OLLAMA_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": OllamaErrorAnswer, "description": "An error in Ollama's form."} for status in ("4XX", "5XX")
}
"""Error responses of Ollama's endpoints, for the OpenAPI document."""
_KINDS = {
    **{401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"},
    **{429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"},
}
"""Anthropic's types of errors by status."""


class ApiError(Exception):
    """Error of a request, before or during its answer.

    status: HTTP status, if the answer has not begun
    kind:   OpenAI's `type`, such as "invalid_request_error"
    code:   code for programs
    param:  field of the request that is wrong
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.message = _printable(shortened(message, MAX_MESSAGE))
        self.kind = kind
        self.code = code
        self.param = None if param is None else _printable(shortened(param))
        self.headers = headers
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Return the body of an error response, in the form that clients of a path expect."""
    if path.startswith(OLLAMA_PATH):
        return ollama_error(error)
    return messages_error(error) if path.startswith(MESSAGES_PATH) else error.body()


def ollama_error(error: ApiError) -> dict[str, Any]:
    """Return an error in Ollama's form."""
    return {"error": error.message}


def messages_error(error: ApiError) -> dict[str, Any]:
    """Return an error in Anthropic's form.

    The message of a prompt that is too long begins as Anthropic's does, because agents shorten their conversation then.
    """
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def invalid(param: str | None, message: str, *, code: str | None = None) -> ApiError:
    """Return the error of a request that is wrong (400)."""
    return ApiError(400, message, param=param, code=code)


def queue_full(message: str) -> ApiError:
    """Return the error of a request for which there is no room now (429). Clients retry after a second."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": "1"})


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Return the API error for an error of the engine.

    Args:
        error: a refusal, a failure, an unavailable engine, or an ApiError, which is returned unchanged.
        names: the request's names of engine parameters, where they differ.

    Raises:
        Exception: `error` itself, if it is none of these.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        # This process does not recover.
        return ApiError(503, error.problem, kind="server_error", code=error.code)
    if isinstance(error, RequestFailure):
        return failed(str(error), code="request_failed")
    if not isinstance(error, RequestError):
        raise error
    name = (names or {}).get(error.parameter, error.parameter)
    return invalid(name, str(RequestError(name, error.value, error.problem)))


def failed(message: str, *, code: str) -> ApiError:
    """Return the error of a valid request that the server could not answer (500)."""
    return ApiError(500, message, kind="server_error", code=code)


def client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "the client has disconnected", code="client_gone")


def _printable(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
