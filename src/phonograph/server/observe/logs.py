"""Logs of the server's and the engine's process: as text or as JSON, with the id of the request in each line."""

from __future__ import annotations

import copy
import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from phonograph.config.server_config import ServerConfig
from phonograph.errors import shortened

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the request that the running task answers."""
QUIET_PATHS = frozenset({"/health", "/load", "/metrics", "/ping", "/ready", "/v1/graphs"})
"""Paths that monitors poll; the access log leaves them out."""
MAX_PATH = 200
"""Maximum characters of a path in the access log."""
ACCESS = ("client", "method", "path", "http_version", "status")
"""Arguments of uvicorn's access records."""


def route_path(path: str, root_path: str) -> str:
    """Return the path of a request without the one that a proxy puts before it, as routes have it."""
    return path[len(root_path) :] if path.startswith(f"{root_path}/") else path


class AccessLogFilter(logging.Filter):
    """Filter of uvicorn's access records of a server behind `root_path`."""

    def __init__(self, root_path: str = "") -> None:
        super().__init__()
        self._root_path = root_path

    def filter(self, record: logging.LogRecord) -> bool:
        arguments = _access(record)
        if arguments is None:
            return True
        client, method, path, *rest = arguments
        record.args = (client, method, shortened(str(path), MAX_PATH), *rest)
        return route_path(str(path).partition("?")[0], self._root_path) not in QUIET_PATHS


class RequestIdFilter(logging.Filter):
    """Filter that adds `request_id` to records, and `request`, the id for lines of text. It passes all."""

    def filter(self, record: logging.LogRecord) -> bool:
        name = getattr(record, "request_id", None) or REQUEST_ID.get()
        record.request_id = name
        record.request = f"[{name}] " if name else ""
        return True


class JsonFormatter(logging.Formatter):
    """Formatter of one JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (name := getattr(record, "request_id", None)) is not None:
            line["request_id"] = name
        if (arguments := _access(record)) is not None:
            line |= dict(zip(ACCESS, arguments, strict=True))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def engine_logging(config: ServerConfig) -> dict[str, Any]:
    """Return the logging configuration of the engine's process, for `logging.config.dictConfig`."""
    text = {"format": "%(levelname)s:     %(message)s"}
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"default": {"()": JsonFormatter} if config.log_format == "json" else text},
        "handlers": {"default": {"class": "logging.StreamHandler", "formatter": "default"}},
        "loggers": {"phonograph": {"handlers": ["default"], "level": config.log_level.upper(), "propagate": False}},
    }


def server_logging(config: ServerConfig) -> dict[str, Any]:
    """Return the logging configuration of the server's process, uvicorn's with more."""
    # Imported late: the engine's process imports this module too.
    from uvicorn.config import LOGGING_CONFIG

    settings = copy.deepcopy(LOGGING_CONFIG)
    access = {"()": AccessLogFilter, "root_path": config.root_path or ""}
    settings["filters"] = {"access": access, "request": {"()": RequestIdFilter}}
    if config.log_format == "json":
        settings["formatters"] = {name: {"()": JsonFormatter} for name in settings["formatters"]}
    else:
        for formatter in settings["formatters"].values():
            formatter["fmt"] = formatter["fmt"].replace("%(levelprefix)s ", "%(levelprefix)s %(request)s")
    for handler in settings["handlers"].values():
        handler["filters"] = ["request"]
    loggers = settings["loggers"]
    loggers["uvicorn.access"]["filters"] = ["access"]
    loggers["phonograph"] = {"handlers": ["default"], "level": config.log_level.upper(), "propagate": False}
    # Its exporters log every attempt at a collector that is down; `SpanExport` warns once.
    loggers["opentelemetry"] = {"level": "CRITICAL"}
    return settings


def _access(record: logging.LogRecord) -> tuple[object, ...] | None:
    """Return the arguments of an access record; None for another one."""
    arguments = record.args
    if record.name != "uvicorn.access" or not isinstance(arguments, tuple) or len(arguments) != len(ACCESS):
        return None
    return arguments
