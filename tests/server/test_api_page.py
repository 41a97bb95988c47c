"""The page at /docs has every endpoint and field of the OpenAPI document, and nothing from another host."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from html.parser import HTMLParser

from servers import Server

from phonograph.server.observe.api_page import api_page

VOID = {"meta", "link"}


class Balance(HTMLParser):
    """Elements that are open at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_it_has_every_endpoint_and_field(server: Server) -> None:
    document = server.get("/openapi.json").json()
    answer = server.get("/docs")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            title = f"<h2>{method.upper()} {path}</h2>"
            assert title in answer.text
            if text := operation.get("description"):
                assert html.escape(text.split("\n\n")[0]) in answer.text.partition(title)[2]
    for name, schema in document["components"]["schemas"].items():
        part = answer.text.partition(f'<h2 id="{name}">')[2].partition("<h2")[0]
        assert [field for field in schema["properties"] if f"<code>{field}</code>" not in part] == []
    links = set(re.findall(r'href="#(\w+)"', answer.text))
    assert links and links <= document["components"]["schemas"].keys()


def test_it_has_no_scripts_and_no_other_host(server: Server) -> None:
    answer = server.get("/docs")
    assert set(re.findall(r'(?:href|src)="([^#"]*)"', answer.text)) == {"page/page.css", "openapi.json"}
    assert "<script" not in answer.text and "style=" not in answer.text
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_it_needs_the_key_as_the_document_does(serve_with: Callable[..., Server]) -> None:
    server = serve_with(api_key="secret")
    assert server.get("/docs").status_code == 401
    assert server.get("/docs", headers={"authorization": "Bearer secret"}).status_code == 200


def test_text_is_escaped_and_elements_are_closed(server: Server) -> None:
    hostile = "<b>&\"'"
    schema = {
        "description": hostile,
        "required": [hostile],
        "properties": {hostile: {"enum": [hostile], "default": hostile, "description": hostile}},
    }
    parameter = {"name": hostile, "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 9}}
    operation = {"description": f"{hostile}\n\n{hostile}", "parameters": [parameter]}
    made = api_page(
        {
            "info": {"title": hostile, "version": hostile},
            "paths": {f"/{hostile}": {"get": operation}},
            "components": {"schemas": {hostile: schema}},
        }
    )
    assert "<b>" not in made and made.count(html.escape(hostile)) == 13
    assert "integer &ge; 1 &le; 9" in made and "(required)" in made
    for text in (made, server.get("/docs").text):
        parser = Balance()
        parser.feed(text)
        assert parser.open == []
