"""Structured output of requests: OpenAI's response_format and vLLM's fields."""

from __future__ import annotations

from typing import Any, get_args

from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import Kind, Strictness, StructuredOutputs
from phonograph.errors import RequestError
from phonograph.server.chat.fields import Body, Choices
from phonograph.server.http.api_errors import invalid

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""vLLM's older fields, with their names in structured_outputs."""
FORMAT = "response_format"
PARAMETERS: tuple[str, ...] = (
    "structured_outputs",
    "disable_any_whitespace",
    "disable_additional_properties",
    "strictness",
    *get_args(Kind),
)
"""Parameters that engine errors about structured output can name."""


class StructuredFields(Body):
    """Fields of a body that define structured output."""

    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    structured_outputs_strictness: Strictness | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None


def structured_outputs(body: StructuredFields) -> StructuredOutputs | None:
    """Return the structured output of a request, or None.

    Raises:
        ApiError: a field is wrong, or two fields contradict each other.
        RequestError: a schema, expression or grammar is invalid.
    """
    requested: dict[str, StructuredOutputs | None] = {}
    if body.response_format is not None:
        kind, about = body.response_format.get("type"), body.response_format.get("json_schema")
        requested[FORMAT] = of_format(kind, about, FORMAT, f"{FORMAT}.json_schema")
    if body.structured_outputs is not None:
        params = SamplingParams(structured_outputs=body.structured_outputs)  # pyright: ignore[reportArgumentType]
        requested["structured_outputs"] = params.structured_outputs
    for name, kind in GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            try:
                requested[name] = StructuredOutputs(**{kind: value})
            except RequestError as error:
                raise invalid(name, f"{name}: {error.problem}") from None
    found = {name: structured for name, structured in requested.items() if structured is not None}
    if len(found) > 1:
        first, second, *_ = found
        raise invalid(second, f"{second} contradicts {first}; give one of them")
    return next(iter(found.values()), None)


def field_of(body: StructuredFields) -> str | None:
    """Return the first field that defines structured output, or None."""
    if body.response_format is not None and body.response_format.get("type") != "text":
        return FORMAT
    return next((name for name in ("structured_outputs", *GUIDED) if getattr(body, name) is not None), None)


def of_format(kind: Any, about: Any, field: str, where: str) -> StructuredOutputs | None:
    """Return the form of content that OpenAI's formats define; None for text.

    Args:
        kind: type of the format.
        about: name, schema, description and strictness of the type json_schema.
        field: name of the format in the request.
        where: place of `about` in the request.

    Raises:
        ApiError: the format is wrong.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputs(json_object=True)
    if kind != "json_schema":
        raise invalid(field, f"{field}.type must be text, json_object or json_schema, not {str(kind)[:50]!r}")
    if not isinstance(about, dict) or not isinstance(about.get("name"), str):
        raise invalid(field, f"{where} must be an object with a name and a schema")
    for key in about:
        if key not in ("name", "description", "schema", "strict"):
            raise invalid(field, f"{where}: unknown key {key[:50]!r}")
    if about.get("schema") is None:
        return StructuredOutputs(json_object=True)
    if not isinstance(about["schema"], dict):
        raise invalid(field, f"{where}.schema must be an object")
    return StructuredOutputs(json=about["schema"], strictness="strict" if about.get("strict") is True else None)
