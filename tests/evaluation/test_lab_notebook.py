"""Entries of the lab notebook have a date and are short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "notebook").glob("*.md"))
MOST_LINES = 12


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem)
def test_each_entry_has_a_date_and_at_most_12_lines(page: Path) -> None:
    _, *entries = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert entries
    for entry in entries:
        heading, *lines = entry.splitlines()
        assert re.match(r"20\d\d-\d\d-\d\d · \S", heading), heading
        assert len([line for line in lines if line]) <= MOST_LINES, heading


def test_the_index_names_each_page() -> None:
    index = (PAGES[0].parent / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\S+\.md)\)", index)) >= {page.name for page in PAGES if page.stem != "index"}
