"""Where a figure comes from: date, hardware, versions, command and commit, for every result file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from phonograph import __version__
from phonograph.bench.records.output import writing
from phonograph.core.device import num_cores

_LIBRARIES = ("transformers", "numpy")
_CODE = (":/src", ":/benchmarks/*.py")
"""What runs when something is measured, from the top of the repository."""


def provenance() -> dict[str, Any]:
    """What a reader needs to repeat a measurement, as JSON can hold it.

    To be taken before measuring: the commit is then that of the code which runs, and the load is that of others, so
    that a figure taken beside other work says so.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*_program(Path(sys.argv[0])), *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": {
            "phonograph": __version__,
            "python": platform.python_version(),
            # Its own word for it says which build it is; the package's may not.
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        },
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def write_result(path: Path, origin: dict[str, Any], result: dict[str, Any]) -> None:
    """Writes a result with its provenance, `origin`, in front, readable and fit for a diff.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**origin, **result}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _program(path: Path) -> list[str]:
    """How the program is started again; where it lies on this machine is nobody's business."""
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name]
    if path.suffix != ".py":
        return [path.name]
    here, path = Path.cwd(), path.resolve()
    return ["python", str(path.relative_to(here)) if path.is_relative_to(here) else path.name]


def _hardware() -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": _cpu_name(), "cores": num_cores()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def _commit() -> dict[str, Any] | None:
    """The commit of this checkout, and whether its code was changed; None where the package is no checkout."""
    folder = Path(__file__).parent
    head = _git(folder, "rev-parse", "HEAD")
    if head is None or _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    return {"id": head, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no", "--", *_CODE))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
