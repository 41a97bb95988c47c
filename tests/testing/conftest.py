"""The sample backend of examples/ is imported from where it lies, as if it were installed."""

from __future__ import annotations

import sys
from pathlib import Path

from installed_backend import installed  # noqa: F401 - a fixture

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "out_of_tree_backend"))
