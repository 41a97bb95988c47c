"""A package installed as an installer does: its module and its entry points. And the guide's example of formats."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "structured-output.md"
(LINE_CALLS,) = (
    block
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    if "class LineCalls" in block
)
"""Module with the guide's formats, a `ToolFormat` LINES and `ReasoningMarkers` THOUGHT."""


def install(
    folder: Path, monkeypatch: pytest.MonkeyPatch, package: str, source: str, group: str, entries: dict[str, str]
) -> None:
    """Install a module with entry points of one group until the end of the test.

    Args:
        folder: an empty folder, or one of other packages.
        monkeypatch: that of the test.
        package: name of the package; the module has it with underscores.
        source: text of the module.
        group: group of the entry points.
        entries: target of each entry point by its name.
    """
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    metadata = folder / f"{module}-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1.0\n")
    lines = [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    importlib.invalidate_caches()
