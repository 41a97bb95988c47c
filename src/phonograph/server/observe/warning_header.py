"""The header `warning`: fields without effect, dropped fields, and rules that a grammar does not enforce."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

from phonograph.engine.process.calls import Call

MAX_CHARACTERS = 2000


def field_warnings(no_effect: Iterable[str], dropped: Iterable[str]) -> dict[str, str]:
    """Return the header for fields of a request, or no header without any."""
    found = (("no effect", list(no_effect)), ("dropped, as this endpoint has no such field", list(dropped)))
    values = [_value(f"{said}: {', '.join(names)}") for said, names in found if names]
    return {"warning": ", ".join(values)} if values else {}


def with_no_effect(headers: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return headers that also list fields without effect."""
    added = field_warnings(names, ())
    return {**headers, **{key: ", ".join(filter(None, (headers.get(key), value))) for key, value in added.items()}}


def with_grammar_warnings(headers: Mapping[str, str], call: Call) -> dict[str, str]:
    """Return headers that also list what the grammar of a call does not enforce."""
    warnings = dict.fromkeys(itertools.chain.from_iterable(prompt.warnings for prompt in call.prompts))
    if not warnings:
        return dict(headers)
    return {**headers, "warning": ", ".join(filter(None, (headers.get("warning"), _value("; ".join(warnings)))))}


def _value(text: str) -> str:
    shown = text.encode("ascii", "backslashreplace").decode()[:MAX_CHARACTERS]
    shown = re.sub(r"[\x00-\x1f\x7f]", "?", shown)
    return '299 - "' + re.sub(r'(["\\])', r"\\\1", shown) + '"'
