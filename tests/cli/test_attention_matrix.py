"""The matrix of backends and modes: what it says, and that the document says the same."""

from __future__ import annotations

import runpy
from pathlib import Path

from phonograph.cli.attention_matrix import BATCHES, make_matrix
from phonograph.core.device import known_device
from phonograph.graphs.modes import GraphMode, GraphSupport

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "attention_matrix.py"))
DOCUMENTED = SCRIPT["DOCUMENTED"]
DECODE, DRAFTS, MIXED = BATCHES


def test_the_document_is_current() -> None:
    document = ROOT / "docs" / "attention-matrix.md"
    assert document.read_text(encoding="utf-8") == SCRIPT["markdown"](), "run scripts/attention-matrix"


def test_contents_of_the_matrix() -> None:
    matrix = {rows.backend: rows for rows in make_matrix(DOCUMENTED, known_device("h200"))}
    ours = {row.asked: row for row in matrix["triton"].modes}
    assert ours[None].resolved is GraphMode.FULL
    assert set(ours[None].batches.values()) == {"full graph"}
    assert ours[GraphMode.PIECEWISE].batches == dict.fromkeys(BATCHES, "pieces")
    both = ours[GraphMode.FULL_AND_PIECEWISE].batches
    assert (both[DECODE], both[MIXED]) == ("full graph", "pieces")
    assert ours[GraphMode.FULL_DECODE_ONLY].batches[MIXED] == "eager"

    reference = matrix["reference"]
    assert reference.support is not None and reference.support.level is GraphSupport.NEVER
    refused = next(row for row in reference.modes if row.asked is GraphMode.FULL)
    assert refused.resolved is None and "supports no graph" in refused.reasons[-1]


def test_refusals_have_no_modes() -> None:
    matrix = {rows.backend: rows for rows in make_matrix(DOCUMENTED, known_device("a100-80gb"))}
    rows = matrix["flash_attn 3"]
    assert rows.refusals and rows.support is None and not rows.modes
