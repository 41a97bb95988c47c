"""The page at /docs: endpoints and fields of the OpenAPI document. FastAPI's own loads scripts from other hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import HTMLResponse

from phonograph.server.http.page import HEADERS

PATH = "/docs"
METHODS = ("get", "post", "put", "delete")
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Phonograph: endpoints</title>
<link rel="stylesheet" href="page/page.css">
</head>
<body>
"""

router = APIRouter(include_in_schema=False)


@router.get(PATH)
def docs(request: Request) -> HTMLResponse:
    """Return the page."""
    app: FastAPI = request.app
    return HTMLResponse(api_page(app.openapi()), headers=HEADERS)


def api_page(document: Mapping[str, Any]) -> str:
    """Return an OpenAPI document as HTML without scripts."""
    return _HEAD + "\n".join(_lines(document)) + "\n</body>\n</html>\n"


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h1>{escape(document['info']['title'])} {escape(document['info']['version'])}</h1>"
    yield '<p>Endpoints of this server; the same as <a href="openapi.json">JSON</a>.</p>'
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                yield from _operation(f"{method.upper()} {path}", operations[method])
    for name, schema in document.get("components", {}).get("schemas", {}).items():
        yield f'<h2 id="{escape(name)}">{escape(name)}</h2>'
        yield _paragraphs(schema)
        required = schema.get("required", ())
        yield from _table((field, one, field in required) for field, one in schema.get("properties", {}).items())


def _operation(title: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"<h2>{escape(title)}</h2>"
    yield _paragraphs(operation)
    for content in operation.get("requestBody", {}).get("content", {}).values():
        yield f"<p>Body: {_kind(content['schema'])}</p>"
    parameters = operation.get("parameters", ())
    yield from _table(
        (f"{one['name']} ({one['in']})", {**one, **one["schema"]}, one.get("required", False)) for one in parameters
    )


def _paragraphs(described: Mapping[str, Any]) -> str:
    return "".join(f"<p>{escape(text)}</p>" for text in described.get("description", "").split("\n\n") if text)


def _table(fields: Iterator[tuple[str, Mapping[str, Any], bool]]) -> Iterator[str]:
    rows = [
        f"<tr><td><code>{escape(name)}</code></td><td>{_kind(schema)}{' (required)' if required else ''}</td>"
        f"<td>{_default(schema)}</td><td>{escape(schema.get('description', ''))}</td></tr>"
        for name, schema, required in fields
    ]
    if rows:
        yield "<table><thead><tr><th>field</th><th>type</th><th>default</th><th></th></tr></thead><tbody>"
        yield from rows
        yield "</tbody></table>"


def _default(schema: Mapping[str, Any]) -> str:
    return f"<code>{escape(str(schema['default']))}</code>" if schema.get("default") is not None else ""


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of values as HTML, with links to the objects."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(str(value))}</code>" for value in schema["enum"])
    kind = escape(str(schema.get("type", "any")))
    if kind == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    bounds = [f"{sign} {schema[key]}" for key, sign in (("minimum", "&ge;"), ("maximum", "&le;")) if key in schema]
    return " ".join([kind, *bounds])
