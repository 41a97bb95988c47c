"""Rewriting of `propertyNames`, and of patterns that match few names, as lists of names.

The library excludes listed names from a pattern of names. If no other name matches, it still allows a comma, and no
token can follow. It also lets a name of a pattern occur twice.
"""

from __future__ import annotations

import json
import re
from functools import cache, lru_cache
from typing import Any

import numpy as np

from phonograph.core.grammar import Grammar, GrammarError
from phonograph.errors import shortened
from phonograph.structured.formats import PATTERNS, noted
from phonograph.structured.matcher import LlguidanceLibrary
from phonograph.structured.places import NEUTRAL, Schema, resolved
from phonograph.structured.unions import values_of
from phonograph.structured.vocabulary import Vocabulary

MOST_NAMES = 100
"""Most names that a pattern becomes, unless the whole schema lists more."""
MOST_COPIED = 200_000
"""Characters of schemas that are written again, once for each further name of a pattern."""
_LONGEST = 300
"""Bytes of a name in JSON, beyond which a pattern does not count as finite."""
_REPEATED = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|([*+]|\{\d+,\})", re.DOTALL)
_END = 256


def write_names(found: list[tuple[Schema, Schema, int]]) -> list[str]:
    """Rewrite the names of schemas, in place; return a warning for each format of names that is not enforced.

    Each schema comes with its resource and its depth.

    Raises:
        GrammarError: a pattern whose names are all listed would become too large.
    """
    listed: set[str] = set()
    for schema, _, _ in found:
        listed |= {one for key in ("properties", "required") for one in schema.get(key) or () if isinstance(one, str)}
    most, copied, warnings = max(MOST_NAMES, len(listed)), 0, list[str]()
    for schema, resource, _ in sorted(found, key=lambda one: -one[2]):  # the innermost first: they are copied
        if not all(isinstance(schema.get(key, {}), dict) for key in ("properties", "patternProperties")):
            continue
        if "propertyNames" in schema:
            more, known = schema.get("additionalProperties", True), schema.get("properties", {}).keys()
            warnings += _write_rule(schema, resource, most)
            copied += len(json.dumps(more)) * max(0, len(schema.get("properties", {}).keys() - known) - 1)
            if copied > MOST_COPIED:
                raise GrammarError(f"propertyNames with a schema of {len(json.dumps(more))} characters is too large")
        for pattern, one in [*schema.get("patternProperties", {}).items()]:
            names, properties = names_of(pattern, most), schema.get("properties", {})
            if names is None:
                continue
            size, is_listed = len(json.dumps(one)) * max(0, len(names) - 1), listed.issuperset(names)
            fits = copied + size <= MOST_COPIED
            # The library counts the properties of a pattern, but not optional ones.
            if is_listed and not fits:
                raise GrammarError(f"the pattern {shortened(pattern, 100)} of {len(names)} names is too large")
            if is_listed or (fits and len(names) <= MOST_NAMES and "maxProperties" not in schema):
                copied += size
                del schema["patternProperties"][pattern]
                schema["properties"] = properties | {name: _both(properties.get(name, True), one) for name in names}
                schema.setdefault("additionalProperties", True)  # else it would be closed
    return warnings


def _write_rule(schema: Schema, resource: Schema, most: int) -> list[str]:
    """Rewrite `propertyNames` as `properties`, or as `patternProperties` of a closed object, where they express it."""
    rule, more = schema["propertyNames"], schema.get("additionalProperties", True)
    if isinstance(rule, dict) and rule.keys() - NEUTRAL == {"$ref"}:
        rule = resolved(rule, resource)
    if not isinstance(rule, dict | bool):
        return []
    if rule is False or (rule is not True and "string" not in str(rule.get("type", "string"))):
        rule = {"enum": []}  # no name matches
    rule = {} if rule is True else {key: value for key, value in rule.items() if key not in NEUTRAL}
    form = str(rule.get("format", ""))
    warnings = noted("format", form) if form and form not in PATTERNS and rule.pop("format") else []
    if "maxLength" not in rule and rule.get("minLength") == 1:
        del rule["minLength"]
        schema["properties"] = {**schema.get("properties", {}), "": False}
        schema.setdefault("additionalProperties", True)  # else it would be closed
    properties, named = schema.get("properties", {}), schema.get("patternProperties", {})
    pattern, names = "", values_of(rule) if rule.keys() <= {"enum", "const"} else None
    if rule.keys() in ({"pattern"}, {"format"}):
        pattern = str(rule.get("pattern", f"^({PATTERNS.get(form)})$"))
    elif rule and rule.keys() <= {"minLength", "maxLength"}:
        pattern = rf"^[\s\S]{{{rule.get('minLength', 0)},{rule.get('maxLength', '')}}}$"
    elif rule and names is None:
        return []
    names = names_of(pattern, most) if pattern else names
    if names is not None:
        schema["properties"] = {name: _value(schema, name) for name in names if isinstance(name, str)}
        schema.pop("patternProperties", None)
        schema["additionalProperties"] = False
    elif pattern:
        is_described = any(one is not False for one in properties.values())
        if named or (is_described and more is not True) or matches(pattern, "") is None:
            return []  # `more` would apply to what is described too
        schema["properties"] = {name: one if matches(pattern, name) else False for name, one in properties.items()}
        schema["patternProperties"] = {pattern: more}
        schema["additionalProperties"] = False
    del schema["propertyNames"]
    return warnings


def _value(schema: Schema, name: str) -> Any:
    """Return the schema of a property's value."""
    described = [one for pattern, one in schema.get("patternProperties", {}).items() if matches(pattern, name)]
    described += [schema["properties"][name]] if name in schema.get("properties", {}) else []
    value: Any = True if described else schema.get("additionalProperties", True)
    for one in described:
        value = _both(one, value)
    return value


def _both(one: Any, other: Any) -> Any:
    return other if one in (True, {}) else one if other in (True, {}) else {"allOf": [one, other]}


def matches(pattern: str, name: str) -> bool | None:
    """Return True if a name matches a pattern; None if the library cannot compile the pattern."""
    tokens = [*json.dumps(name, ensure_ascii=False).encode("utf-8", "replace"), _END]
    try:
        return _grammar(pattern).matcher().validate(tokens) == len(tokens)
    except GrammarError:
        return None


@lru_cache(1024)
def names_of(pattern: str, most: int) -> tuple[str, ...] | None:
    """Return all names that a pattern matches; None if there are more than `most`, or the library cannot compile it."""
    # A walk through the names takes 30 ms, so patterns that match names of any length are recognized before. Patterns
    # with a class of no characters match nothing.
    if "[^" not in pattern and (not {"^", "$"} <= {*pattern} or any(_REPEATED.findall(pattern))):
        return None
    found: list[bytes] = []
    mask_RW = np.zeros((1, _END // 32 + 1), np.int32)
    try:
        pending = [(_grammar(pattern).matcher(), b"")]
        while pending:
            matcher, text = pending.pop()
            matcher.fill(mask_RW, 0)
            following = np.flatnonzero(np.unpackbits(mask_RW.view(np.uint8), bitorder="little")).tolist()
            # Each token that can follow begins another name.
            if len(found) + len(pending) + len(following) > most or len(text) > _LONGEST:
                return None
            for token in following:
                if token == _END:
                    found.append(text)
                else:
                    pending.append((matcher.copy(), text + bytes([token])))
                    pending[-1][0].accept(token)
    except GrammarError as error:
        return () if "Regex is empty" in str(error) else None
    return tuple(sorted((json.loads(text) for text in found), key=lambda name: (len(name), name)))


def without_nul(pattern: str) -> str:
    r"""Remove NUL from classes. The library adds `"` and `\` to a class that has all control characters."""

    def changed(found: re.Match[str]) -> str:
        if found[0].startswith("[^"):
            return r"[^\x00" + found[0][2:]
        return re.sub(r"\\(x00|u0000|0)-", r"\\x01-", found[0]) if found[0].startswith("[") else found[0]

    return re.sub(r"\\.|\[(\\.|[^\]\\])*\]", changed, pattern, flags=re.DOTALL)


@lru_cache(256)
def _grammar(pattern: str) -> Grammar:
    schema = {"type": "string", "pattern": without_nul(pattern)}
    return _library().of_json_schema(schema, any_whitespace=False, lenient=False)


@cache
def _library() -> LlguidanceLibrary:
    return LlguidanceLibrary(
        Vocabulary([*(bytes([byte]) for byte in range(_END)), b"<end>"], frozenset(), (_END,), _END + 1)
    )
