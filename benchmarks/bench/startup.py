"""Time from the start of a process to a ready engine, by phase.

Each start is a process of its own. The first has an empty cache of compiled kernels; the second finds the kernels of
the first. A start ends when the engine is ready. The first tokens are timed apart, so that work deferred to the first
request shows.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from phonograph.bench.records.results import BenchProgress, Row
from phonograph.config.engine_config import EngineConfig
from phonograph.config.sources import ENVIRONMENT_PREFIX
from phonograph.engine.startup.early_start import start_early
from phonograph.errors import PhonographError

CASES = ("first", "second")
BENCHMARKS = Path(__file__).parents[1]
TIMEOUT_SECONDS = 600
FIRST_TOKENS, FIRST_PROMPT = 8, 16


def start_once(config: EngineConfig) -> dict[str, Any]:
    """Start an engine in this process, answer one request, and return the seconds of each phase."""
    # The wall clock, which parent and child processes share.
    starts = {"imports": time.time()}
    from phonograph.core.sampling_params import SamplingParams
    from phonograph.engine.llm import LLM

    starts["configuration"] = time.time()

    def begin(phase: str, done: int, total: int) -> None:
        starts.setdefault(phase, time.time())

    llm = LLM(config=config, progress=begin)
    ready = time.time()
    seconds = (end - start for start, end in itertools.pairwise([*starts.values(), ready]))
    phases = {phase: round(duration, 3) for phase, duration in zip(starts, seconds, strict=True)}
    llm.generate([list(range(FIRST_PROMPT))], SamplingParams(temperature=0.0, max_tokens=FIRST_TOKENS, ignore_eos=True))
    return {
        "ready": ready,
        "phases": phases,
        "engine_seconds": round(llm.start_seconds, 3),
        "first_tokens_seconds": round(time.time() - ready, 3),
        "graphs": len(llm.plan.captures.largest_first()),
        "attention_backend": llm.plan.selection.capabilities.label,
        "mode": llm.plan.resolution.mode.value,
    }


def bench_startup(config: EngineConfig, progress: BenchProgress) -> list[Row]:
    """Measure the seconds from process start to ready, without compiled kernels and with them.

    Raises:
        PhonographError: a child failed; the message ends with its last line.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="phonograph-startup-") as folder:
        # JSON is YAML. Only explicit settings: the child derives the others.
        file = Path(folder) / "config.yaml"
        file.write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")
        for done, case in enumerate(CASES):
            progress("starts", done, len(CASES))
            rows.append(Row(suite="startup", case=case, facts=_start(file, Path(folder))))
    return rows


def _start(config_file: Path, folder: Path) -> dict[str, Any]:
    # Settings come from the file alone: the environment was read when the configuration was made.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(BENCHMARKS), environ.get("PYTHONPATH")]))
    environ |= {"TRITON_CACHE_DIR": str(folder / "triton"), "CUDA_CACHE_PATH": str(folder / "cuda")}
    command = [sys.executable, "-m", "bench.startup", str(config_file)]
    started = time.time()
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise PhonographError(f"an engine did not start within {TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        raise PhonographError(f"an engine did not start: {lines[-1] if lines else f'exit code {done.returncode}'}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = facts.pop("ready") - started
    phases: dict[str, float] = facts.pop("phases")
    interpreter = round(seconds - sum(phases.values()), 3)
    return {"seconds": round(seconds, 3), "phases": {"interpreter": interpreter, **phases}, **facts}


if __name__ == "__main__":  # a child of `bench_startup`, which starts as the `phonograph` command does
    start_early()
    print(json.dumps(start_once(EngineConfig.load(flags={}, config_file=Path(sys.argv[1]), environ={}))))
