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


@call("`run`")
def benchmark() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = {
            "backend": f"kind=openai_http,target={DEMO},model={MODEL}",
            "profile": "kind=synchronous",
            "constraint": "kind=max_requests,count=3",
            "tokenizer": f"kind=hf_auto,model={FOLDER}",
            "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
            "output": f"kind=json,path={report}",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        command = [f"{sys.prefix}/bin/guidellm", "run", *words, "--disable-progress"]
        subprocess.run(command, check=True, timeout=300)
        totals = json.loads(report.read_text())["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 3, totals


run("guidellm")
