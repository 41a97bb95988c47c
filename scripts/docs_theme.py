"""Hook of MkDocs: what the theme does not do by itself.

Links to the repository come from pyproject.toml. Charts are put into the pages, where their text takes the colours of
the theme. Cells of wide tables get the names of their columns, which phones show. The script for diagrams is loaded by
the pages that have one.
"""

from __future__ import annotations

import html
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHART = re.compile(r'<p><img alt="([^"]*)" src="[^"]*plots/(\w+)\.svg" ?/?></p>')
TABLE = re.compile(r"<table>\n<thead>.*?</table>", flags=re.DOTALL)
RECORDS = ("notebook/", "performance", "evaluation", "roadmap", "changelog", "contributing", "design/", "architecture")
"""Pages that a search shows after those for users."""
NARROW = 3
"""Columns of a table that a phone shows as it is."""


def on_config(config: Any) -> Any:
    """Set the links to the repository, if pyproject.toml has its address."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    found = {name.lower(): url for name, url in urls.items()}
    url = next((found[name] for name in ("repository", "source", "source code") if name in found), None)
    if url is not None:
        config.repo_url = url.rstrip("/")
        config.repo_name = config.repo_url.rpartition("/")[2]
        config.edit_uri = config.repo_url + "/edit/main/docs/"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lower the rank of a page of records in a search."""
    if page.file.src_uri.startswith(RECORDS):
        page.meta.setdefault("search", {"boost": 0.1})
    return markdown


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Put charts into the page, and mark its wide tables."""
    if page.file.generated_by is not None:
        page.edit_url = None
    return TABLE.sub(lambda match: labelled(match[0]), CHART.sub(lambda match: inlined(match[2], match[1]), content))


def on_post_page(output: str, **_: Any) -> str:
    """Remove the script for diagrams from pages without one."""
    if 'class="mermaid"' in output:
        return output
    return re.sub(r'\s*<script src="[^"]*mermaid\.tiny\.js"></script>', "", output)


def inlined(name: str, description: str) -> str:
    """Return a chart of docs/plots as part of a page. Its ids get the name of the chart, as a page may have several."""
    text = (ROOT / "docs" / "plots" / f"{name}.svg").read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r'<style id="standalone">.*?</style>', "", text, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)
    return f'<figure class="plot" role="img" aria-label="{html.escape(html.unescape(description))}">{text}</figure>'


def labelled(table: str) -> str:
    """Return a table of more than `NARROW` columns with the name of its column in each cell."""
    names = [re.sub(r"<[^>]*>", "", cell) for cell in re.findall(r"<th[^>]*>(.*?)</th>", table, flags=re.DOTALL)]
    if len(names) <= NARROW:
        return table

    def row(match: re.Match[str]) -> str:
        cells = re.split(r"(?=<td)", match[0])
        for place, name in enumerate(names):
            if place and name and place + 1 < len(cells):
                cells[place + 1] = cells[place + 1].replace("<td", f'<td data-label="{html.escape(name)}"', 1)
        return "".join(cells)

    return re.sub(r"<tr>\n<td.*?</tr>", row, table.replace("<table>", "<table data-wide>", 1), flags=re.DOTALL)
