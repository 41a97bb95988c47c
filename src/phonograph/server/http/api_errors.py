"""Errors in OpenAI's format: an HTTP status and {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
