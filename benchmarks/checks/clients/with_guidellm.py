"""guidellm: a benchmark of a few requests."""

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


@call("`benchmark run`")
def benchmark() -> None:
    with tempfile.TemporaryDirectory() as folder:
        data = "prompt_tokens=32,output_tokens=8"
        words = ["benchmark", "run", "--target", DEMO, "--model", MODEL, "--processor", FOLDER, "--data", data]
        words += ["--profile", "synchronous", "--max-requests", "3", "--output-dir", folder, "--outputs", "json"]
        subprocess.run([f"{sys.prefix}/bin/guidellm", *words], check=True, timeout=300)
        (report,) = Path(folder).glob("*.json")
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 3, totals


run("guidellm")
