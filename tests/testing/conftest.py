"""The sample backend of examples/ is imported from where it lies, as if it were installed."""

from __future__ import annotations

import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "out_of_tree_backend"
sys.path.insert(0, str(EXAMPLE))
