"""Form of the lab notebook: each entry is short and has the date of one of its records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted((ROOT / "docs" / "notebook").glob("*.md"))
MOST_LINES = 12


def dates_of_records(entry: str) -> set[str]:
    """Return the dates of the records that an entry names; some of the oldest records have none."""
    found: set[str] = set()
    for name in re.findall(r"`(\w+\.jsonl?)`", entry):
        found |= set(re.findall(r'"date": "(\d{4}-\d\d-\d\d)', (RESULTS / name).read_text(encoding="utf-8")))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem)
def test_each_entry_has_the_date_of_a_record_and_at_most_12_lines(page: Path) -> None:
    _, *entries = re.split(r"^## ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert entries
    for entry in entries:
        heading, *lines = entry.splitlines()
        assert re.match(r"20\d\d-\d\d-\d\d · \S", heading), heading
        assert len([line for line in lines if line]) <= MOST_LINES, heading
        if dates := dates_of_records(entry):
            assert heading[:10] in dates, f"{heading}: its records are of {sorted(dates)}"


def test_the_index_names_each_page() -> None:
    index = (PAGES[0].parent / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\((\S+\.md)\)", index)) >= {page.name for page in PAGES if page.stem != "index"}
