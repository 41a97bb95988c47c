"""The example backend, installed as an installer does: its module and its entry point."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "out_of_tree_backend"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the example's module and entry point; return the backend's name."""
    (tmp_path / "phonograph_dense.py").write_text((EXAMPLE / "phonograph_dense.py").read_text())
    folder = tmp_path / "phonograph_dense-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: phonograph-dense\nVersion: 0.1.0\n")
    project = (EXAMPLE / "pyproject.toml").read_text()
    group, _, rest = project.partition('[project.entry-points."')[2].partition('"]\n')
    name, _, target = rest.splitlines()[0].partition(" = ")
    (folder / "entry_points.txt").write_text(f"[{group}]\n{name} = {target.strip(chr(34))}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    return name
