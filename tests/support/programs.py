"""Programs that tests run in processes of their own: what they tell torch or Triton has to come before the import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def report_of(script: Path, *arguments: str, **environ: str) -> Any:
    """Return the JSON on the last line that a Python program printed; the program must succeed."""
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
