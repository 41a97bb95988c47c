"""Rewriting of a JSON schema for the grammar compiler.

Rewrites keywords that the compiler lacks in terms of others, and rejects or drops those that it cannot enforce. The
result allows the same values or fewer. Other keywords are left to the compiler, which reports those it does not know.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any, TypeGuard
from urllib.parse import urljoin

from phonograph.core.grammar import GrammarError
from phonograph.errors import shortened
from phonograph.structured.formats import BY_LIBRARY, LONGEST, PATTERNS, noted
from phonograph.structured.names import without_nul, write_names
from phonograph.structured.places import MAX_DEPTH, NEUTRAL, Schema, at_pointer, inner, resolved, schemas
from phonograph.structured.unions import require_tag, values_of, write_unions

MOST_MULTIPLE = 1024
"""Largest `multipleOf`: the library's time to compile grows with its square, without a limit."""
MOST_PATTERNS = 10
"""Most distinct patterns in merged schemas: the time of their intersection grows exponentially, without a limit."""
MOST_LISTS = 400
"""Most lists that `uniqueItems` expands to."""
_EXACT = 2**53
"""Largest magnitude at which integers are exact in floating point, the type of the library's numbers."""
_STEP = 1e-9
"""Distance to an exclusive bound below which a number counts as equal to it."""
_NEVER = 2**31
"""Length or count that no output reaches."""
_BOUNDS = {"minimum": max, "exclusiveMinimum": max, "maximum": min, "exclusiveMaximum": min}
_MERGING = frozenset({"$ref", "allOf", "anyOf", "oneOf"})
_OPEN = _MERGING | {
    *("$dynamicRef", "additionalProperties", "patternProperties", "propertyNames", "unevaluatedProperties"),
    *("if", "dependentSchemas", "dependencies"),
}
"""Keywords that describe properties; an object that has one stays open."""
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$"
"""pydantic's pattern of a Decimal, and an equivalent without lookahead."""


def prepared(value: Any, *, closes: bool, refuses_regex: Callable[[str], bool] | None) -> tuple[Schema, list[str]]:
    """Rewrite a schema in place; return it with a warning for each constraint that was dropped.

    Args:
        value: the schema, or a boolean.
        closes: close objects that only list properties. JSON Schema allows any others, and weak models never end them.
        refuses_regex: None rejects what cannot be enforced. Else it is dropped, as is each pattern that this refuses.

    Raises:
        GrammarError: a constraint cannot be enforced.
    """
    if value is False:
        raise GrammarError("the schema `false` allows nothing")
    root: Schema = {} if value is True else value
    found = _Prepass(root, closes, refuses_regex)
    try:
        found.run()
    except (AttributeError, TypeError) as error:
        raise GrammarError(f"a keyword of the schema has a value of a wrong type ({error})") from None
    return root, list(dict.fromkeys(found.warnings))


class _Prepass:
    def __init__(self, root: Schema, closes: bool, refuses_regex: Callable[[str], bool] | None) -> None:
        self._root = root
        self._closes = closes
        self._refuses_regex = refuses_regex
        self._floors: set[int] = set()
        self.warnings: list[str] = []

    def run(self) -> None:
        found = self._walk()
        for schema, resource, _ in found:
            require_tag(schema, resource)
        write_unions(found)
        self.warnings += write_names(found)
        found = self._walk()
        addresses = {_name_of(self._root, resource) for _, resource, _ in found}
        bounds = [schema[key] for schema, _, _ in found for key in _BOUNDS if _is_number(schema.get(key))]
        self._floors = {math.floor(bound) for bound in bounds if bound % 1}
        merged = _merged(self._root)
        multiples: list[int] = []
        for schema, resource, _ in found:
            self._write_numbers(schema, multiples)
            self._write_texts(schema)
            self._write_unique(schema, resource)
            _write_conditions(schema)
            if self._closes and id(schema) not in merged:
                _close(schema)
            self._check_counts(schema)
            reference = schema.get("$ref", "")
            if _name_of(self._root, resource, reference) not in addresses:
                self._drop(schema, "$ref", f"the reference {shortened(reference, 100)}, which leads elsewhere,")
        self._check_patterns([schema for schema, _, _ in found if id(schema) in merged])
        # The library combines the multiples of merged schemas.
        if merged and math.lcm(1, *multiples) > MOST_MULTIPLE:
            raise GrammarError(f"several multipleOf whose common multiple is above {MOST_MULTIPLE} cannot be enforced")

    def _walk(self) -> list[tuple[Schema, Schema, int]]:
        found = list(schemas(self._root))
        if found[-1][2] > MAX_DEPTH:
            raise GrammarError(f"its schemas are nested more than {MAX_DEPTH} deep")
        return found

    def _check_patterns(self, merged: list[Schema]) -> None:
        patterns = {schema["pattern"] for schema in merged if "pattern" in schema}
        patterns |= {name for schema in merged for name in schema.get("patternProperties", ())}
        if len(patterns) > MOST_PATTERNS:
            for schema in merged:
                for key in schema.keys() & {"pattern", "patternProperties"}:
                    self._drop(schema, key, f"more than {MOST_PATTERNS} patterns in schemas that are merged")

    def _drop(self, schema: Schema, key: str, what: str) -> None:
        if self._refuses_regex is None:
            raise GrammarError(f"{what} cannot be enforced")
        del schema[key]
        self.warnings.append(f"{what} cannot be enforced")

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
            # The library includes an integer exclusive bound if the other bound is less than 1 away.
            if _is_number(bound := schema.get(key)) and bound - (side < 0) in self._floors:
                schema[key] = bound + side * max(_STEP, math.ulp(bound))
        for key in ("const", "enum"):
            # The library would write the nearest number in floating point, and crash near -2^63.
            if any(abs(one) > _EXACT for one in _integers(schema.get(key))):
                raise GrammarError(f"{key} has an integer beyond 2^53; write it as a string")
        unit = schema.get("multipleOf")
        if _is_number(unit) and unit:  # the library takes -3 for 3, and refuses 0
            multiples.append(Fraction(repr(abs(unit))).numerator)
            if multiples[-1] > MOST_MULTIPLE:
                self._drop(schema, "multipleOf", f"multipleOf {shortened(str(unit), 30)}, above {MOST_MULTIPLE},")
                multiples.pop()

    def _write_texts(self, schema: Schema) -> None:
        for key in ("format", "contentEncoding", "contentMediaType"):
            form = schema.get(key)
            if form in LONGEST:
                schema["maxLength"] = min(schema.get("maxLength", LONGEST[form]), LONGEST[form])
            if isinstance(form, str) and (key != "format" or form not in BY_LIBRARY):
                del schema[key]
                if form in PATTERNS:
                    together = schema.setdefault("allOf", []) if "pattern" in schema else None
                    text = {"pattern": f"^({PATTERNS[form]})$"}
                    schema.update(text) if together is None else together.append(text)
                elif "string" in str(schema.get("type", "string")):
                    self.warnings += noted(key, form)
        pattern = schema.get("pattern")
        if pattern == _DECIMAL[0]:
            schema["pattern"] = _DECIMAL[1]
        elif isinstance(pattern, str):
            schema["pattern"] = without_nul(pattern)
            if self._refuses_regex is not None and self._refuses_regex(pattern):
                self._drop(schema, "pattern", f"the pattern {shortened(pattern, 100)}")
        named = schema.get("patternProperties")
        if isinstance(named, dict):
            for name in filter(self._refuses_regex, list(named)) if self._refuses_regex is not None else ():
                self._drop(named, name, f"the pattern {shortened(name, 100)} of names")
            schema["patternProperties"] = {without_nul(name): one for name, one in named.items()}

    def _write_unique(self, schema: Schema, resource: Schema) -> None:
        """Expand `uniqueItems` of an enum: all lists without repetition, or only those in the enum's order."""
        if (
            not schema.get("uniqueItems")
            or schema.get("maxItems") in (0, 1)
            or "array" not in schema.get("type", "array")
        ):
            schema.pop("uniqueItems", None)
            return
        items = schema.get("items")
        items = resolved(items, resource) if isinstance(items, dict) and items.keys() == {"$ref"} else items
        items = items if isinstance(items, dict) else {}
        values = values_of(items)
        if values is None or schema.get("type") != "array" or schema.keys() & {"prefixItems", "contains", "enum"}:
            return
        counts = range(schema.get("minItems", 0), min(schema.get("maxItems", len(values)), len(values)) + 1)
        for choose, number_of in ((itertools.permutations, math.perm), (itertools.combinations, math.comb)):
            if sum(number_of(len(values), count) for count in counts) <= MOST_LISTS:
                schema["enum"] = [list(one) for count in counts for one in choose(values, count)]
                del schema["uniqueItems"]
                kinds = {items.get("type", kind) == kind for kind in (_TYPES.get(type(one)) for one in values)}
                if kinds <= {True} and items.keys() <= NEUTRAL | {"enum", "const"}:
                    del schema["items"]  # redundant, and slow to check against each list
                return

    def _check_counts(self, schema: Schema) -> None:
        """Check counts of properties. The library may repeat an unlisted name and does not count optional ones."""
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
                del schema[key]  # implied by the names
            elif (optional and (is_open or count != needed + 1)) or (
                key == "minProperties" and is_open and count > needed + 1
            ):
                self._drop(schema, key, f"{key} where names are {'open' if is_open else 'optional'}")


def _write_conditions(schema: Schema) -> None:
    """Rewrite keywords that require names if others are present: a choice of not having one and having all."""
    choices: list[Schema] = []
    for key in ("dependentRequired", "dependencies"):
        dependencies = schema.get(key)
        if isinstance(dependencies, dict) and all(isinstance(names, list) for names in dependencies.values()):
            choices += [{"anyOf": [_without(name), {"required": names}]} for name, names in dependencies.items()]
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


def _without(name: str) -> Schema:
    return {"properties": {name: False}}


def _close(schema: Schema) -> None:
    """Forbid properties that are not listed, unless something requires or describes others."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or _OPEN & schema.keys() or not isinstance(required, list):
        return
    least = schema.get("minProperties", 0)
    if all(name in properties for name in required) and _is_number(least) and least <= len(properties):
        schema["additionalProperties"] = False


def _merged(root: Schema) -> set[int]:
    """Return the ids of schemas that are combined with others. Closing these could leave no value."""
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
        said, resource = schema.keys() - NEUTRAL, schema if "$id" in schema else resource
        target = at_pointer(resource, schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
        for key, one in (*inner(schema), ("$ref", target)):
            beside = key in _MERGING and (len(said) > 1 or (key == "allOf" and len(schema["allOf"]) > 1))
            patterns = key in ("properties", "patternProperties") and {"properties", "patternProperties"} <= said
            pending.append((one, resource, merged or beside or patterns))
    return found


def _name_of(root: Schema, resource: Schema, reference: str = "") -> str:
    """Return the address of a resource, or of a reference's target in it; empty for a root without an `$id`."""
    root_id, name = (one.get("$id", one.get("id", "")) for one in (root, resource))
    known = [one for one in (root_id, name, reference) if isinstance(one, str)]
    return functools.reduce(urljoin, known, "").partition("#")[0]


def _integers(value: Any) -> Iterator[int]:
    """Yield all integers in a value."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list | dict):
            pending += one if isinstance(one, list) else one.values()
        elif isinstance(one, int) or (isinstance(one, float) and one.is_integer()):
            yield int(one)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
