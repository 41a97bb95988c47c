"""References within a schema: found, or refused by name, and written as the library takes them.

The library follows `#` and plain JSON pointers only. `#name` becomes any value, escapes and places in lists an error,
and what stands where no schema does would be read by nobody before.
"""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple
from urllib.parse import unquote

from phonograph.engine.grammars.places import DATA, MAX_DEPTH, SCHEMA_LISTS, SCHEMA_MAPS, SCHEMAS, schemas
from phonograph.errors import shortened

KEYWORDS = ("$ref", "$dynamicRef", "$recursiveRef")
ANCHORS = ("$anchor", "$dynamicAnchor")
_PLAIN = re.compile(r"#/(\$defs|definitions)/[A-Za-z0-9_.-]+")
"""What the library reads as it is meant."""
_INDEX = re.compile("0|[1-9][0-9]*")


class SchemaError(ValueError):
    """Why a schema cannot be held by a grammar."""


class Reference(NamedTuple):
    """A reference: the schema that has it, under which keyword, and the schema that is meant."""

    holder: dict[str, Any]
    keyword: str
    target: dict[str, Any] | bool

    @property
    def text(self) -> str:
        return self.holder[self.keyword]


class References:
    """The references of a whole schema.

    schemas: all in it, and those that are meant by one and stand where JSON Schema has none, as in `components`

    Raises:
        SchemaError: schemas lie too deep in each other; a reference leads nowhere, out of the schema, to no schema or
            back to itself; or what it means depends on more than the schema's places and names.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: list[Reference] = []
        self.schemas: list[dict[str, Any]] = []
        if isinstance(root, dict):
            self._search(root)

    def _search(self, root: dict[str, Any]) -> None:
        known = self.schemas = _inner_schemas(root)
        seen = {id(schema) for schema in known}
        anchors = _anchors(known)
        for schema in known:  # which grows
            if schema is not root:
                _refuse_base(schema)
            for keyword in KEYWORDS:
                if keyword not in schema:
                    continue
                target = _target(root, anchors, keyword, schema[keyword])
                self._found.append(Reference(schema, keyword, target))
                if isinstance(target, dict) and id(target) not in seen:
                    inner = [one for one in _inner_schemas(target) if id(one) not in seen]
                    seen.update(map(id, inner))
                    known += inner
        _refuse_circles(known, self._found)
        if not isinstance(root.get("$defs", {}), dict):
            raise SchemaError("'$defs' must be an object")

    def write(self) -> None:
        """Has every reference lead to the root or to a plainly named place in its `$defs`, to which schemas move."""
        names: dict[int, str] = {}
        prefix = "moved"
        while any(name.startswith(prefix) for name in self._root.get("$defs", ())):
            prefix += "_"
        for holder, keyword, target in self._found:
            text = holder.pop(keyword)
            if target is self._root:
                text = "#"
            elif not _PLAIN.fullmatch(text):
                text = "#/$defs/" + names.setdefault(id(target), f"{prefix}{len(names)}")
            holder["$ref"] = text
        # All are written by now: a schema that moves may have references too, or be in another that does.
        for _, _, target in self._found:
            name = names.pop(id(target), None)
            if name is None:
                continue
            places = self._root.setdefault("$defs", {})
            places[name] = target
            if isinstance(target, dict):
                places[name] = target.copy()
                target.clear()
                target["$ref"] = f"#/$defs/{name}"


def _inner_schemas(schema: dict[str, Any]) -> list[dict[str, Any]]:
    found = list(schemas(schema))
    if found[-1][1] > MAX_DEPTH:
        raise SchemaError(f"schemas lie more than {MAX_DEPTH} deep in each other")
    return [inner for inner, _ in found]


def _anchors(known: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    anchors: dict[str, dict[str, Any]] = {}
    for schema in known:
        for name in (schema.get(keyword) for keyword in ANCHORS):
            if isinstance(name, str) and anchors.setdefault(name, schema) is not schema:
                raise SchemaError(f"two schemas have the anchor {shortened(name)!r}")
    return anchors


def _refuse_base(schema: dict[str, Any]) -> None:
    """Below an `$id` references start anew, so one that stands there means something else than it says here."""
    name = schema.get("$id")
    if name is not None and any(key in one for one, _ in schemas(schema) for key in (*KEYWORDS, *ANCHORS)):
        raise SchemaError(f"the $id {shortened(str(name))!r} changes what references within mean; leave it out")


def _target(root: dict[str, Any], anchors: dict[str, Any], keyword: str, text: Any) -> dict[str, Any] | bool:
    """The schema that a reference means.

    With one base for all `$dynamicRef` and `$recursiveRef` mean what `$ref` does.
    """
    if not isinstance(text, str):
        raise SchemaError(f"{keyword} {shortened(str(text))!r} is no reference")
    what = f"the reference {shortened(text)!r}"
    if not text.startswith("#"):
        raise SchemaError(f"{what} leads elsewhere; put what it means into $defs")
    fragment = unquote(text[1:], errors="replace")
    if not fragment.startswith("/"):
        target = anchors.get(fragment) if fragment else root
        if target is None:
            raise SchemaError(f"{what} leads nowhere: no schema has this $anchor")
        return target
    return _pointed(root, fragment, what)


def _pointed(root: dict[str, Any], pointer: str, what: str) -> dict[str, Any] | bool:
    place: Any = root
    kind = "schema"  # of what the place is; "other" is what JSON Schema knows nothing of
    for token in pointer[1:].split("/"):
        key = token.replace("~1", "/").replace("~0", "~")
        if kind == "schema":
            kind = _kind_under(key)
        elif kind != "other":
            kind = "schema"
        if isinstance(place, list) and _INDEX.fullmatch(key) and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, dict) and key in place:
            place = place[key]
        else:
            raise SchemaError(f"{what} leads nowhere: there is no {shortened(key)!r}")
        if kind == "data":
            break
    if kind not in ("schema", "other") or not isinstance(place, dict | bool):
        raise SchemaError(f"{what} leads to something that is no schema")
    return place


def _kind_under(keyword: str) -> str:
    if keyword in DATA:
        return "data"
    if keyword in SCHEMA_MAPS | SCHEMA_LISTS:
        return "several"
    return "schema" if keyword in SCHEMAS else "other"


def _refuse_circles(known: list[dict[str, Any]], references: list[Reference]) -> None:
    """Ways from a schema to itself that go through nothing that has a value: such a schema says nothing."""
    graph: dict[int, list[int]] = {}
    for schema in known:
        parts = [part for key in ("anyOf", "oneOf", "allOf") for part in _listed(schema.get(key))]
        graph[id(schema)] = [id(part) for part in parts if isinstance(part, dict)]
    for reference in references:
        if isinstance(reference.target, dict):
            graph[id(reference.holder)].append(id(reference.target))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        circle = set(error.args[1])
        text = next(one.text for one in references if id(one.holder) in circle)
        raise SchemaError(f"the reference {shortened(text)!r} leads back to itself, never to a value") from None


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
