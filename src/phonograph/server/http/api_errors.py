"""Errors as OpenAI's clients read them: an HTTP status and {"error": {message, type, param, code}}."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from phonograph.errors import EngineUnavailable, RequestError, RequestFailure, shortened

CLIENT_GONE = 499
"""Status of a request whose client has gone away. Only logs have it."""
MAX_MESSAGE = 1000
"""Characters of a message at most: a value that is wrong may be long."""


class ErrorDetail(BaseModel):
    """What is wrong, whose fault it is, which field of the request it is about, and a word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """The body of every answer that is an error, for the OpenAPI document."""

    error: ErrorDetail


class ApiError(Exception):
    """A request that is not answered, or not to its end.

    status: of HTTP, if the answer has not begun
    kind:   OpenAI's `type`: whose fault it is
    code:   a word for programs
    param:  the field of the request that is at fault
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
    """The request is wrong, whoever sends it and whenever."""
    return ApiError(400, message, param=param, code=code)


def queue_full(message: str) -> ApiError:
    """The refusal of a request for which there is no room now; clients try again after a second."""
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", headers={"retry-after": "1"})


def api_error(error: Exception, names: Mapping[str, str] | None = None) -> ApiError:
    """Make the answer to a client of an error of the engine: a refusal, a failure, or an engine that is not there.

    names: what the client calls parameters, where that is something else

    Raises:
        Exception: `error` itself, if it is none of these.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EngineUnavailable):
        # Not now, and not by this process again.
        return ApiError(503, error.problem, kind="server_error", code=error.code)
    if isinstance(error, RequestFailure):
        return failed(str(error), code="request_failed")
    if not isinstance(error, RequestError):
        raise error
    name = (names or {}).get(error.parameter, error.parameter)
    return invalid(name, str(RequestError(name, error.value, error.problem)))


def failed(message: str, *, code: str) -> ApiError:
    """The request was fine, and the server could not answer it."""
    return ApiError(500, message, kind="server_error", code=code)


def client_gone() -> ApiError:
    return ApiError(CLIENT_GONE, "the client has gone away", code="client_gone")


def _printable(text: str) -> str:
    """Without halves of surrogate pairs, which JSON may bring in and UTF-8 does not let out."""
    return text.encode("utf-8", "replace").decode("utf-8")
