"""The access log without what monitors ask every second, and with short paths."""

from __future__ import annotations

import logging

from phonograph.errors import shortened

QUIET_PATHS = frozenset({"/health", "/metrics", "/v1/graphs"})
MAX_PATH = 200


class AccessLogFilter(logging.Filter):
    """A filter of uvicorn's access records, whose arguments are client, method, path, HTTP version and status."""

    def filter(self, record: logging.LogRecord) -> bool:
        if not isinstance(record.args, tuple) or len(record.args) != 5:
            return True
        client, method, path, *rest = record.args
        record.args = (client, method, shortened(str(path), MAX_PATH), *rest)
        return str(path).partition("?")[0] not in QUIET_PATHS
