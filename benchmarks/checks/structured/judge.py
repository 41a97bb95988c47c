"""Judge of texts under a JSON schema: jsonschema, made exact where it is not.

Patterns are ECMAScript's, which `regex` runs after a translation; `multipleOf` is computed in fractions; formats are
those of JSON Schema 2020-12, with every package installed that jsonschema asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import jsonschema_specifications
import regex
from jsonschema import Draft202012Validator, FormatChecker, ValidationError
from jsonschema.validators import extend, validator_for

_MAX_EXPONENT = 400
"""Exponents beyond those of a double count as this one, which changes no divisibility."""
_OUTSIDE = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[A-Za-z0-9_]", r"\W": "[^A-Za-z0-9_]", "$": r"\Z"}
_INSIDE = {r"\d": "0-9", r"\w": "A-Za-z0-9_"}


class Fault(NamedTuple):
    """Reason why a text is not valid.

    keyword: keyword that fails; `JSON` if the text is not JSON
    message: the validator's words, shortened
    """

    keyword: str
    message: str


class Judge:
    """Judge of texts under one schema. Keywords in `without` are not judged; `oneOf` among them is taken as `anyOf`.

    Raises an exception of jsonschema or `regex` for a schema that they cannot read.

    formats: checks of formats; by default those of the packages that are installed
    """

    def __init__(
        self,
        schema: Any,
        without: Collection[str] = (),
        formats: FormatChecker = Draft202012Validator.FORMAT_CHECKER,
    ) -> None:
        any_of = Draft202012Validator.VALIDATORS["anyOf"]
        checked = extend(validator_for(schema, Draft202012Validator), _EXACT)
        for name in without:
            checked.VALIDATORS.pop(name, None)
        if "oneOf" in without:
            checked.VALIDATORS["oneOf"] = any_of
        # With a registry of its own the validator downloads nothing.
        self._validator = checked(schema, format_checker=formats, registry=jsonschema_specifications.REGISTRY)

    def fault(self, text: bytes) -> Fault | None:
        """Return the first fault of a text, or None if it is valid."""
        try:
            value = json.loads(text.decode(), parse_float=_Number, parse_constant=_refuse_constant)
        except ValueError as error:
            return Fault("JSON", str(error)[:200])
        error = next(iter(self._validator.iter_errors(value)), None)
        return None if error is None else Fault(str(error.validator), error.message[:200])


class _Number(float):
    """A number that keeps its digits, of which a double would lose some."""

    def __new__(cls, text: str) -> _Number:
        number = super().__new__(cls, text)
        number.digits = text
        return number

    digits: str

    def is_integer(self) -> bool:
        return _fraction(self).denominator == 1


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _fraction(number: Any) -> Fraction:
    text = number.digits if isinstance(number, _Number) else repr(number)
    digits, _, exponent = text.lower().partition("e")
    return Fraction(f"{digits}e{min(max(int(exponent or 0), -_MAX_EXPONENT), _MAX_EXPONENT)}")


def _check_multiple(validator: Any, unit: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "number") and _fraction(instance) % _fraction(unit):
        yield ValidationError(f"{instance!r} is not a multiple of {unit}")


def _check_pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not ecma_pattern(pattern).search(instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _check_pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if ecma_pattern(pattern).search(name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _check_additional(validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "object"):
        for name in instance.keys() - schema.get("properties", {}).keys():
            if not any(ecma_pattern(pattern).search(name) for pattern in schema.get("patternProperties", ())):
                if inner is False:
                    yield ValidationError(f"additional property {name!r}")
                else:
                    yield from validator.descend(instance[name], inner, path=name)


_EXACT: dict[str, Any] = {
    "additionalProperties": _check_additional,
    "multipleOf": _check_multiple,
    "pattern": _check_pattern,
    "patternProperties": _check_pattern_properties,
}


@cache
def ecma_pattern(pattern: str) -> Any:
    r"""Compile an ECMAScript pattern: `\d` and `\w` are ASCII there, and `$` is the end alone."""
    inside = False

    def translated(found: re.Match[str]) -> str:
        nonlocal inside
        part = found[0]
        if part in ("[", "]"):
            inside = part == "["
        return (_INSIDE if inside else _OUTSIDE).get(part, part)

    # The library matches any character by this class, which has none.
    pattern = pattern.replace(r"[^\s\S]", "(?!)")
    return regex.compile(re.sub(r"\\.|[\[\]$]", translated, pattern, flags=re.DOTALL))
