"""aiperf: a profile of a few streamed chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from calls import DEMO, MODEL, call, run

FOLDER = os.environ["MODEL_FOLDER"]
"""Folder of the model, for its tokenizer."""


@call("`profile`")
def profile() -> None:
    with tempfile.TemporaryDirectory() as folder:
        words = ["profile", "--model", MODEL, "--url", DEMO, "--endpoint-type", "chat", "--streaming", "--ui", "none"]
        words += ["--tokenizer", FOLDER, "--request-count", "4", "--concurrency", "2", "--isl", "32", "--osl", "8"]
        subprocess.run([f"{sys.prefix}/bin/aiperf", *words, "--artifact-dir", folder], check=True, timeout=300)
        (report,) = Path(folder).rglob("profile_export_aiperf.json")
        assert json.loads(report.read_text())["request_count"]["avg"] == 4


run("aiperf")
