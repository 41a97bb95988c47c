"""Values against the types of clients' packages, more closely than the packages do: no coercion and no unknown key."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pydantic

SENT = frozenset(
    {
        *("Response.store", "ResponseFunctionCallArgumentsDoneEvent.name"),
        *("Logprob.bytes", "LogprobTopLogprob.bytes", "ResponseCustomToolCall.status"),
    }
)
"""Keys that the installed types do not name. Older versions need `name`; other items of the API have the others."""


def check_type(kind: Any, value: Any) -> None:
    """Check that a value is of a type of `openai` or `anthropic`, and that the type knows all of its keys.

    Args:
        kind: a model, or a union of models.
        value: JSON, as the server sends it.
    """
    found = _adapter(kind).validate_python(value, strict=True)
    unknown = {*_unknown(found)} - SENT
    assert not unknown, f"{unknown} in {value}"


@cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(kind)


def _unknown(value: Any) -> Iterator[str]:
    """Yield the keys of models that their types do not name, each after the name of the type."""
    if isinstance(value, pydantic.BaseModel):
        yield from (f"{type(value).__name__}.{key}" for key in value.model_extra or ())
        for name in type(value).model_fields:
            yield from _unknown(getattr(value, name, None))
    elif isinstance(value, list):
        for one in value:
            yield from _unknown(one)
