"""Pre-pass over a JSON schema: keywords that the library lacks are written in others, or named as not held.

What comes out means the same, or allows less. Keywords that are not here are left to the library, which names those
that it does not know.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, TypeGuard
from urllib.parse import urljoin

from phonograph.core.grammar import GrammarError
from phonograph.errors import shortened
from phonograph.structured.formats import BY_LIBRARY, PATTERNS
from phonograph.structured.places import MAX_DEPTH, Schema, at_pointer, inner, schemas

MOST_MULTIPLE = 1024
"""What `multipleOf` may count to: the library's time to compile grows with its square, and has no limit of its own."""
MOST_PATTERNS = 10
"""Different patterns in schemas that are merged: what several allow together takes the library time without a limit,
0.05 s for ten hostile ones, 0.6 s for twelve and 6 s for fourteen."""
MOST_LISTS = 400
"""Lists that `uniqueItems` may be written as."""
_EXACT = 2**53
"""Integers up to here are exact in floating point, which the library's bounds are."""
_STEP = 1e-9
"""Distance of a number from an exclusive bound that is taken as none."""
_NEVER = 2**31
"""A length or a count that no output reaches."""
_BOUNDS = {"minimum": max, "exclusiveMinimum": max, "maximum": min, "exclusiveMaximum": min}
_MERGING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_OPEN = _MERGING | {
    *("$dynamicRef", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
    *("if", "dependentSchemas", "dependencies"),
}
"""Keywords that describe properties, beside which an object stays open."""
_ALONE = frozenset(
    {
        *("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "id", "$anchor", "$defs", "definitions"),
    }
)
"""Keywords that leave a schema the only one that speaks of its values."""
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"
"""pydantic's pattern of a Decimal, and what it means without looking ahead."""


def prepared(value: Any, *, closes: bool, leaves_out: Callable[[str], bool] | None) -> tuple[Schema, list[str]]:
    """Changes a schema in place; returns it, and a warning for each thing that it does not hold any more.

    closes:     objects that only list properties get no others. JSON Schema allows any, and weak models never end them.
    leaves_out: None where all has to be held. Else what cannot be held is left out, patterns too for which this is True

    Raises:
        GrammarError: there is something that cannot be held.
    """
    if value is False:
        raise GrammarError("the schema `false` allows nothing")
    root: Schema = {} if value is True else value
    found = _Prepass(root, closes, leaves_out)
    try:
        found.run()
    except (AttributeError, TypeError) as error:
        raise GrammarError(f"a keyword of the schema has a value of a wrong type ({error})") from None
    return root, list(dict.fromkeys(found.warnings))


class _Prepass:
    def __init__(self, root: Schema, closes: bool, leaves_out: Callable[[str], bool] | None) -> None:
        self._root = root
        self._closes = closes
        self._leaves_out = leaves_out
        self._floors: set[int] = set()
        self.warnings: list[str] = []

    def run(self) -> None:
        found = list(schemas(self._root))
        if found[-1][2] > MAX_DEPTH:
            raise GrammarError(f"its schemas lie more than {MAX_DEPTH} deep in each other")
        names = {_name_of(self._root, resource) for _, resource, _ in found}
        bounds = [schema[key] for schema, _, _ in found for key in _BOUNDS if _is_number(schema.get(key))]
        self._floors = {math.floor(bound) for bound in bounds if bound % 1}
        merged = _merged(self._root)
        multiples: list[int] = []
        for schema, resource, _ in found:
            schema.pop("discriminator", None)  # OpenAPI's, beside which the library refuses references that recur
            self._write_numbers(schema, multiples)
            self._write_texts(schema)
            self._write_unique(schema, resource)
            self._write_names(schema)
            _write_conditions(schema)
            if self._closes and id(schema) not in merged:
                _close(schema)
            self._check_counts(schema)
            reference = schema.get("$ref")
            if isinstance(reference, str) and _name_of(self._root, resource, reference) not in names:
                self._drop(schema, "$ref", f"the reference {shortened(reference, 100)}, which leads elsewhere,")
        self._check_patterns([schema for schema, _, _ in found if id(schema) in merged])
        # Where schemas are merged, their multiples are counted together.
        if merged and math.lcm(1, *multiples) > MOST_MULTIPLE:
            raise GrammarError(f"several multipleOf whose common multiple is above {MOST_MULTIPLE} are not held")

    def _check_patterns(self, merged: list[Schema]) -> None:
        patterns = {schema["pattern"] for schema in merged if "pattern" in schema}
        patterns |= {name for schema in merged for name in schema.get("patternProperties", ())}
        if len(patterns) > MOST_PATTERNS:
            for schema in merged:
                for key in schema.keys() & {"pattern", "patternProperties"}:
                    self._drop(schema, key, f"more than {MOST_PATTERNS} patterns in schemas that are merged")

    def _drop(self, schema: Schema, key: str, what: str) -> None:
        if self._leaves_out is None:
            raise GrammarError(f"{what} is not held")
        del schema[key]
        self.warnings.append(f"{what} is not held")

    def _write_numbers(self, schema: Schema, multiples: list[int]) -> None:
        for key in ("maxLength", "maxItems", "maxProperties"):
            if _is_number(schema.get(key)) and schema[key] >= _NEVER:
                del schema[key]
        for key, inner_of in _BOUNDS.items():
            bound = schema.get(key)
            if _is_number(bound) and abs(bound) > _EXACT:
                if (bound > 0) == (inner_of is max):
                    self._drop(schema, key, f"{key} beyond 2^53")
                else:
                    del schema[key]
                    inclusive, limit = ("minimum", -_EXACT) if inner_of is max else ("maximum", _EXACT)
                    schema[inclusive] = inner_of(limit, schema.get(inclusive, limit))
        for key, side in (("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            # The library takes a whole exclusive bound itself if the other bound is less than 1 away.
            if _is_number(bound := schema.get(key)) and bound % 1 == 0 and bound - (side < 0) in self._floors:
                schema[key] = bound + side * max(_STEP, math.ulp(bound))
        for key in ("const", "enum"):
            if any(not -(2**63) <= one < 2**64 for one in _integers(schema.get(key))):
                raise GrammarError(f"{key} has an integer beyond 64 bits; write it as a string")
        unit = schema.get("multipleOf")
        if _is_number(unit) and unit > 0:
            multiples.append(Fraction(repr(unit)).numerator)
            if multiples[-1] > MOST_MULTIPLE:
                self._drop(schema, "multipleOf", f"multipleOf {shortened(str(unit), 30)}, above {MOST_MULTIPLE},")
                multiples.pop()

    def _write_texts(self, schema: Schema) -> None:
        form = schema.get("format")
        if isinstance(form, str) and form not in BY_LIBRARY:
            del schema["format"]  # JSON Schema defines no other: a note, not a rule
            if form in PATTERNS:
                together = schema.setdefault("allOf", []) if "pattern" in schema else None
                text = {"pattern": f"^({PATTERNS[form]})$"}
                schema.update(text) if together is None else together.append(text)
        pattern = schema.get("pattern")
        if pattern == _DECIMAL[0]:
            schema["pattern"] = _DECIMAL[1]
        elif isinstance(pattern, str):
            schema["pattern"] = _without_nul(pattern)
            if self._leaves_out is not None and self._leaves_out(pattern):
                self._drop(schema, "pattern", f"the pattern {shortened(pattern, 100)}")
        named = schema.get("patternProperties")
        if isinstance(named, dict):
            for name in filter(self._leaves_out, list(named)) if self._leaves_out is not None else ():
                self._drop(named, name, f"the pattern {shortened(name, 100)} of names")
            schema["patternProperties"] = {_without_nul(name): one for name, one in named.items()}

    def _write_unique(self, schema: Schema, resource: Schema) -> None:
        """`uniqueItems` of an enum: all lists of its values without a repetition, or those in the enum's order."""
        if (
            not schema.get("uniqueItems")
            or schema.get("maxItems") in (0, 1)
            or "array" not in schema.get("type", "array")
        ):
            schema.pop("uniqueItems", None)
            return
        items = schema.get("items")
        if isinstance(items, dict) and isinstance(items.get("$ref"), str) and len(items) == 1:
            items = at_pointer(resource, items["$ref"])
        items = items if isinstance(items, dict) else {}
        values = _values(items)
        if values is None or schema.get("type") != "array" or schema.keys() & {"prefixItems", "contains", "enum"}:
            return
        counts = range(schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values)) + 1)
        for choose, number_of in ((itertools.permutations, math.perm), (itertools.combinations, math.comb)):
            if sum(number_of(len(values), count) for count in counts) <= MOST_LISTS:
                schema["enum"] = [list(one) for count in counts for one in choose(values, count)]
                del schema["uniqueItems"]
                kinds = {items.get("type", kind) == kind for kind in (_TYPES.get(type(one)) for one in values)}
                if kinds <= {True} and items.keys() <= _ALONE | {"enum", "const"}:
                    del schema["items"]  # says no more, and to hold each list against it takes long
                return

    def _write_names(self, schema: Schema) -> None:
        """`propertyNames` as `properties` or `patternProperties`, and no others."""
        names = schema.get("propertyNames")
        properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
        if not isinstance(names, dict) or not isinstance(properties, dict) or "patternProperties" in schema:
            return
        if "string" not in str(names.get("type", "string")):
            return  # no name can be that
        said = names.keys() - _ALONE
        if said <= {"enum", "const"} and (values := _values(names)) is not None:
            schema["properties"] = {name: properties.get(name, more) for name in values if isinstance(name, str)}
        elif (said and said <= {"minLength", "maxLength"}) or said == {"pattern"}:
            if properties and more is not True:
                return  # what `additionalProperties` says would be said of the properties too
            lengths = rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
            pattern = names.get("pattern", lengths)
            try:
                schema["properties"] = {
                    name: one if re.search(pattern, name) else False for name, one in properties.items()
                }
            except (re.error, TypeError):
                return
            schema["patternProperties"] = {_without_nul(pattern): more}
        elif said:
            return
        del schema["propertyNames"]
        if said:
            schema["additionalProperties"] = False

    def _check_counts(self, schema: Schema) -> None:
        """A name that is in no schema can come twice in the library's grammars, and optional names are not counted."""
        required, named = schema.get("required", []), schema.get("properties", {})
        if not isinstance(required, list) or not isinstance(named, dict):
            return
        needed, optional = len({*map(str, required)}), named.keys() - {*map(str, required)}
        is_open = schema.get("additionalProperties", True) is not False or "patternProperties" in schema
        for key in ("minProperties", "maxProperties"):
            count = schema.get(key)
            if not _is_number(count):
                continue
            if count <= needed if key == "minProperties" else count >= len(named) and not is_open:
                del schema[key]  # says no more than the names do
            elif (optional and (is_open or count != needed + 1)) or (
                key == "minProperties" and is_open and count > needed + 1
            ):
                self._drop(schema, key, f"{key} where names are {'open' if is_open else 'optional'}")


def _write_conditions(schema: Schema) -> None:
    """Keywords that ask for names where others are: each becomes a choice between not having one and having all."""
    choices: list[Schema] = []
    for key in ("dependentRequired", "dependencies"):
        asked = schema.get(key)
        if isinstance(asked, dict) and all(isinstance(names, list) for names in asked.values()):
            choices += [{"anyOf": [_without(name), {"required": names}]} for name, names in asked.items()]
            del schema[key]
    none_of = schema.get("not")
    if isinstance(none_of, dict) and none_of.keys() | {"type"} == {"type", "required"}:
        kind = none_of.get("type")
        if kind in (None, "object") and isinstance(none_of.get("required"), list):
            choice: Schema = {"anyOf": [_without(name) for name in none_of["required"]]}
            choices.append(choice if kind else {"type": "object", **choice})
            del schema["not"]
    if choices:
        schema["allOf"] = [*schema.get("allOf", []), *choices]


def _without_nul(pattern: str) -> str:
    r"""Takes NUL from classes: to one that has all control characters, the library adds `"` and `\`."""

    def changed(found: re.Match[str]) -> str:
        if found[0].startswith("[^"):
            return r"[^\x00" + found[0][2:]
        return re.sub(r"\\(x00|u0000|0)-", r"\\x01-", found[0]) if found[0].startswith("[") else found[0]

    return re.sub(r"\\.|\[(\\.|[^\]\\])*\]", changed, pattern, flags=re.DOTALL)


def _without(name: str) -> Schema:
    return {"properties": {name: False}}


def _close(schema: Schema) -> None:
    """Forbids other properties than those listed, where nothing needs or describes others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or _OPEN & schema.keys() or not isinstance(required, list):
        return
    least = schema.get("minProperties", 0)
    if all(name in properties for name in required) and _is_number(least) and least <= len(properties):
        schema["additionalProperties"] = False


def _merged(root: Schema) -> set[int]:
    """Returns the ids of the schemas of which others say something too: to close these could leave nothing."""
    found: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    pending: list[tuple[Any, Schema, bool]] = [(root, root, False)]
    while pending:
        schema, resource, merged = pending.pop()
        if not isinstance(schema, dict) or (id(schema), merged) in seen:
            continue
        seen.add((id(schema), merged))
        if merged:
            found.add(id(schema))
        said, resource = schema.keys() - _ALONE, schema if "$id" in schema else resource
        target = at_pointer(resource, schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
        for key, one in (*inner(schema), ("$ref", target)):
            beside = key in _MERGING and (len(said) > 1 or (key == "allOf" and len(schema["allOf"]) > 1))
            patterns = key in ("properties", "patternProperties") and {"properties", "patternProperties"} <= said
            pending.append((one, resource, merged or beside or patterns))
    return found


def _name_of(root: Schema, resource: Schema, reference: str = "") -> str:
    """Returns the address of a resource, or of what a reference in it leads to; that of a root without one is empty."""
    own, name = (one.get("$id", one.get("id", "")) for one in (root, resource))
    known = [one for one in (own, name, reference) if isinstance(one, str)]
    return functools.reduce(urljoin, known, "").partition("#")[0]


def _values(schema: Schema) -> list[Any] | None:
    """Returns the values of a `const` or `enum`, each once as JSON Schema compares them: 1 is 1.0, True is not 1."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return None
    return list({_identity(one): one for one in values}.values())


def _identity(value: Any) -> Any:
    if isinstance(value, list):
        return "list", *map(_identity, value)
    if isinstance(value, dict):
        return "dict", frozenset((name, _identity(one)) for name, one in value.items())
    return isinstance(value, bool), value


def _integers(value: Any) -> Iterator[int]:
    """All integers in a value."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list | dict):
            pending += one if isinstance(one, list) else one.values()
        elif isinstance(one, int) or (isinstance(one, float) and one.is_integer()):
            yield int(one)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
