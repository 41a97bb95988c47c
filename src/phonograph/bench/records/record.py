"""Provenance of a measurement: date, hardware, versions, command and commit, for every result file."""

from __future__ import annotations

import importlib.metadata
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
from phonograph.core.host_resources import num_cores

_LIBRARIES = ("transformers", "numpy")
_CODE = (":/src", ":/benchmarks/*.py")
"""Code that runs in a measurement, from the top of the repository."""


def provenance() -> dict[str, Any]:
    """Return the JSON facts that a reader needs to repeat a measurement.

    Call it before measuring: then the commit is that of the running code, and the load that of other processes.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([*_program(Path(sys.argv[0])), *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": _hardware(),
        "versions": {
            "phonograph": __version__,
            "python": platform.python_version(),
            # Names the build too, which the version of the package may not.
            "torch": torch.__version__,
            **{name: importlib.metadata.version(name) for name in _LIBRARIES},
        },
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
    }


def _program(path: Path) -> list[str]:
    """Return the words that start the program, without its path on this machine."""
    if path.name == "__main__.py":
        return ["python", "-m", path.parent.name]
    if path.suffix != ".py":
        return [path.name]
    here, path = Path.cwd(), path.resolve()
    return ["python", str(path.relative_to(here)) if path.is_relative_to(here) else path.name]


def _hardware() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    cpu = match[1] if match else platform.processor() or platform.machine()
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {"cpu": cpu, "cores": num_cores(), **gpu}


def _commit() -> dict[str, Any] | None:
    """Return the commit of this checkout and True if its code was changed; None outside of a checkout."""
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
