"""Steps of the check scripts, each of which tests a part of the engine on this machine: programs, results, output.

For `scripts/gpu-checks` and `scripts/backend-checks`. It works in a checkout, whose sources the programs run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checks.processes import python_path

ROOT = Path(__file__).resolve().parents[2]
STEP_SECONDS = 900


@dataclass(kw_only=True)
class Result:
    """ok: None where the step was left out."""

    name: str
    ok: bool | None
    text: str
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: float = 0.0

    def __str__(self) -> str:
        state = {True: "ok", False: "FAILED", None: "left out"}[self.ok]
        return f"{self.name:<28} {state:<8} {self.seconds:6.1f} s  {self.text}"


@dataclass(kw_only=True)
class Finished:
    """A program that has ended. code: None where it did not in time; last_words: of both streams, in one line."""

    code: int | None
    out: str
    last_words: str


Step = tuple[str, Callable[[], Result | Iterator[Result]]]
"""Its name, for where it raises before it has a result, and what it does."""


def run(*command: str, limit: float = STEP_SECONDS, environment: Mapping[str, str] | None = None) -> Finished:
    """Run a program in the checkout with its sources in front, one thread each for torch, and no network."""
    path = python_path(*(ROOT / folder for folder in ("src", "benchmarks", "training")))
    settings = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=settings, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return Finished(code=None, out="", last_words=f"no end within {limit:g} s")
    lines = [line for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    return Finished(code=done.returncode, out=done.stdout, last_words=" | ".join(lines[-4:])[-2000:])


def command_of(*arguments: str, program: str = "phonograph") -> list[str]:
    """Return a command of the package, or of another program, that prints JSON."""
    return [sys.executable, "-m", program, *arguments, "--json"]


def run_json(command: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[Finished, dict[str, Any]]:
    """Run a program whose last line of JSON is its result; that is empty where it did not print one."""
    done = run(*command, environment=environment)
    for line in reversed(done.out.splitlines()):
        try:
            return done, json.loads(line)
        except ValueError:
            continue
    return done, {}


def run_step(step: Step) -> list[Result]:
    """Run a step and print its result; a step that raises has failed."""
    name, do = step
    results: list[Result] = []
    began = time.perf_counter()
    try:
        got = do()
        for result in [got] if isinstance(got, Result) else got:
            result.seconds = round(time.perf_counter() - began, 1)
            began = time.perf_counter()
            results.append(result)
            print(result, flush=True)
    except Exception as error:  # the other steps still run
        text = f"{type(error).__name__}: {error}"
        results.append(Result(name=name, ok=False, text=text, seconds=round(time.perf_counter() - began, 1)))
        print(results[-1], flush=True)
    return results


def verified(name: str, done: Finished, facts: dict[str, Any]) -> Result:
    """Return the result of `phonograph verify`: ok if a graph was replayed and none differed from eager."""
    if "ok" not in facts:
        return Result(name=name, ok=False, text=done.last_words)
    drawn = facts["batches"]
    text = (
        f"{facts['replays']} replays of {facts['num_graphs']} graphs, {facts['num_mismatches']} unlike eager; "
        f"{drawn['mixed']} mixed batches, {drawn['skewed']} skewed, longest sequence {drawn['longest_sequence']}"
    )
    kept = {**facts, "mismatches": facts["mismatches"][:10]}
    del kept["graphs"]
    ok = done.code == 0 and facts["ok"] and facts["num_graphs"] > 0
    return Result(name=name, ok=ok, text=f"{text} ({_mode_text(facts)})", facts=kept)


def evaluated(name: str, done: Finished, facts: dict[str, Any]) -> Result:
    """Return the result of `python -m demo_evaluation`."""
    if "tasks" not in facts:
        return Result(name=name, ok=False, text=done.last_words)
    text = ", ".join(f"{task['correct']} of {task['count']} {task['task']} right" for task in facts["tasks"])
    return Result(name=name, ok=done.code == 0, text=f"{text} ({_mode_text(facts)})", facts=facts)


def _mode_text(facts: dict[str, Any]) -> str:
    mode = facts["mode"]
    if mode["asked"] in (None, mode["resolved"]):
        return f"ran as {mode['resolved']}"
    return f"asked {mode['asked']}, ran as {mode['resolved']}: {mode['reasons'][-1]}"


def outcome_of(results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """All steps as JSON holds them, and whether none failed."""
    steps = [
        {"step": one.name, "ok": one.ok, "seconds": one.seconds, "result": one.text, "facts": one.facts}
        for one in results
    ]
    return {"ok": all(result.ok is not False for result in results), "seconds": seconds, "steps": steps}
