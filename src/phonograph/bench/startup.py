"""Time from the start of a process to an engine that is ready, and where it goes.

Each start is a process of its own, as a user's would be. The first has an empty cache of compiled kernels, the second
finds what the first left. A start ends when the engine says that it is ready; the first tokens follow, timed apart, so
that work put off until the first request shows.
"""

from __future__ import annotations

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
from phonograph.errors import PhonographError

CASES = ("first", "second")
TIMEOUT_SECONDS = 600
FIRST_TOKENS, FIRST_PROMPT = 8, 16


class PhaseClock:
    """Notes when phases begin; time is that of the wall, which parent and child processes share."""

    def __init__(self) -> None:
        self._starts: dict[str, float] = {}

    def begin(self, phase: str) -> None:
        """The phase before ends here. Begun again, a phase goes on."""
        self._starts.setdefault(phase, time.time())

    def seconds(self, end: float) -> dict[str, float]:
        """Duration of each phase, the last one up to `end`."""
        starts = [*self._starts.values(), end]
        return {
            phase: round(late - early, 3) for phase, early, late in zip(self._starts, starts, starts[1:], strict=False)
        }


def start_once(config: EngineConfig, clock: PhaseClock) -> dict[str, Any]:
    """In the child: starts an engine, answers one request, and tells when each of it began and ended."""
    from phonograph.core.sampling_params import SamplingParams
    from phonograph.engine.llm import LLM

    clock.begin("configuration")
    llm = LLM(config=config, progress=lambda phase, done, total: clock.begin(phase))
    ready = time.time()
    llm.generate([list(range(FIRST_PROMPT))], SamplingParams(temperature=0.0, max_tokens=FIRST_TOKENS, ignore_eos=True))
    return {
        "ready": ready,
        "phases": clock.seconds(ready),
        "engine_seconds": round(llm.start_seconds, 3),
        "first_tokens_seconds": round(time.time() - ready, 3),
        "graphs": len(llm.plan.captures.largest_first()),
        "attention_backend": llm.plan.selection.capabilities.label,
        "mode": llm.plan.resolution.mode.value,
    }


def bench_startup(config: EngineConfig, progress: BenchProgress) -> list[Row]:
    """Seconds from process start to ready, with nothing compiled and with everything.

    Raises:
        PhonographError: a child failed; with the last line it said.
    """
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="phonograph-startup-") as folder:
        # JSON is YAML; what was given, not what follows from it, as the child decides the rest anew.
        file = Path(folder) / "config.yaml"
        file.write_text(config.model_dump_json(exclude_unset=True), encoding="utf-8")
        for done, case in enumerate(CASES):
            progress("starts", done, len(CASES))
            rows.append(Row(suite="startup", case=case, facts=_start(file, Path(folder))))
    return rows


def _start(config_file: Path, folder: Path) -> dict[str, Any]:
    # Settings come from the file alone: the environment was read when the configuration was made.
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    environ |= {"TRITON_CACHE_DIR": str(folder / "triton"), "CUDA_CACHE_PATH": str(folder / "cuda")}
    command = [sys.executable, "-m", "phonograph", "bench", "startup", "--once", "--config", str(config_file)]
    started = time.time()
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise PhonographError(f"an engine did not start within {TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise PhonographError(f"an engine did not start: {said[-1] if said else f'exit code {done.returncode}'}")
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    seconds = facts.pop("ready") - started
    phases: dict[str, float] = facts.pop("phases")
    interpreter = round(seconds - sum(phases.values()), 3)
    return {"seconds": round(seconds, 3), "phases": {"interpreter": interpreter, **phases}, **facts}
