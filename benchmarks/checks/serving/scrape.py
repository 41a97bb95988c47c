"""Values of a server's /metrics, read without the server's packages."""

from __future__ import annotations

import re
from collections import defaultdict

from phonograph.bench.serving.connection import Target, exchange

_LINE = re.compile(r"^([a-z_:]+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)
_REASON = re.compile(r'finished_reason="(\w+)"')


async def read_metrics(target: Target) -> dict[str, float]:
    """Return values by name, added over labels; those with a finished_reason by name and reason.

    Raises:
        RuntimeError: there is no answer.
    """
    answer = await exchange(target, "GET", "/metrics", b"", headers={}, timeout=30)
    if answer.error is not None:
        raise RuntimeError(f"/metrics: {answer.error}")
    found = defaultdict[str, float](float)
    for name, labels, value in _LINE.findall(answer.body.decode()):
        reason = _REASON.search(labels)
        found[f"{name} {reason[1]}" if reason else name] += float(value)
    return dict(found)
