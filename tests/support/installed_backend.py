"""The example backend, installed as an installer does: its module and its entry point."""

from __future__ import annotations

from pathlib import Path

import pytest
from installed_package import install

EXAMPLE = Path(__file__).parents[2] / "examples" / "out_of_tree_backend"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the example's module and entry point; return the backend's name."""
    source = (EXAMPLE / "phonograph_dense.py").read_text()
    project = (EXAMPLE / "pyproject.toml").read_text()
    group, _, rest = project.partition('[project.entry-points."')[2].partition('"]\n')
    name, _, target = rest.splitlines()[0].partition(" = ")
    install(tmp_path, monkeypatch, "phonograph-dense", source, group, {name: target.strip('"')})
    return name
