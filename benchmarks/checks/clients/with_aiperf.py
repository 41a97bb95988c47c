"""aiperf: a profile of a few streamed chats."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import DEMO, MODEL, call, run


def cache_of_hub(folder: str) -> dict[str, str]:
    """Write a cache of the hub with the tokenizer as `local/demo`, since aiperf takes names alone."""
    repository = Path(folder) / "hub" / "models--local--demo"
    shutil.copytree(os.environ["MODEL_FOLDER"], repository / "snapshots" / "0")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    return {**os.environ, "HF_HOME": folder}


@call("`profile`")
def profile() -> None:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        words = ["profile", "--model", MODEL, "--url", DEMO, "--endpoint-type", "chat", "--streaming", "--ui", "none"]
        words += [
            "--tokenizer",
            "local/demo",
            "--request-count",
            "4",
            "--concurrency",
            "2",
            "--isl",
            "32",
            "--osl",
            "8",
        ]
        command = [f"{sys.prefix}/bin/aiperf", *words, "--artifact-dir", folder]
        subprocess.run(command, check=True, timeout=300, env=cache_of_hub(cache))
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        assert json.loads(report.read_text())["request_count"]["avg"] == 4


run("aiperf")
