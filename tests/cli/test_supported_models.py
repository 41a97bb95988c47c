"""README's tables of models and hardware are those that the registries give."""

from __future__ import annotations

import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "supported_models.py"


def test_readme_has_the_tables_of_the_registries() -> None:
    script = runpy.run_path(str(SCRIPT))
    text = script["README"].read_text(encoding="utf-8")
    written = text.partition(f"{script['BEGIN']}\n")[2].partition(f"\n{script['END']}")[0]
    assert written == script["markdown"](), "python scripts/supported_models.py --write"
