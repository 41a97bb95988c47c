"""Compiles structured outputs in a child process with limits of time and memory, and steps through them."""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from checks.structured.fuzz_cases import Case
from phonograph.core.grammar import GrammarError
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError
from phonograph.structured import compiler
from phonograph.structured.vocabulary import Vocabulary

SECONDS = 10.0
"""CPU time of a case, after which it is ended."""
MEMORY = 1 << 30
"""Address space that a case may add."""
TOKENS = 64
SLOW_COMPILE_MS, SLOW_STEP_MS = 150, 50
MOST_COMPILE_MS, MOST_STEP_MS, MOST_MIB = 2000, 500, 256
"""Limits above which a case is a finding."""

Outcome = dict[str, Any]


class Trial:
    """A child process that tries cases. It is replaced after it ended, so that one case cannot spoil the next."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._context = get_context("fork")
        self._start()

    def _start(self) -> None:
        self._pipe, there = self._context.Pipe()
        self._process = self._context.Process(target=_serve, args=(self._vocabulary, there), daemon=True)
        self._process.start()
        there.close()
        self._pipe.recv()

    def run(self, case: Case, seed: int) -> Outcome:
        """Return CPU times in ms, memory in MiB, and an `end`: refused, limit, ended, tokens, panic, died or time."""
        pid = self._process.pid
        assert pid is not None
        start, wall = _cpu_seconds(pid), time.monotonic()
        outcome: Outcome = {}
        try:
            self._pipe.send((case, seed))
            while "end" not in outcome:
                if self._pipe.poll(0.1):
                    outcome |= self._pipe.recv()
                elif _cpu_seconds(pid) - start > SECONDS or time.monotonic() - wall > 10 * SECONDS:
                    outcome["end"] = "time"
        except (EOFError, ConnectionError):
            self._process.join()
            outcome["end"] = f"died ({self._process.exitcode})"
        if outcome["end"] == "time" or outcome["end"].startswith("died"):
            self.close()
            self._start()
        return outcome

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def problem(outcome: Outcome) -> str:
    """Return the limit that a case broke, or an empty text."""
    if outcome["end"] in ("time", "panic") or outcome["end"].startswith("died"):
        return f"{outcome['end'].split(' ')[0]} while {'stepping' if outcome.get('compiled') else 'compiling'}"
    if outcome.get("compile_ms", 0) > MOST_COMPILE_MS:
        return "compile"
    if max(outcome.get("fill_ms", 0), outcome.get("accept_ms", 0)) > MOST_STEP_MS:
        return "step"
    return "memory" if outcome.get("mib", 0) > MOST_MIB else ""


def is_slow(outcome: Outcome) -> bool:
    steps = max(outcome.get("fill_ms", 0), outcome.get("accept_ms", 0))
    return outcome.get("compile_ms", 0) > SLOW_COMPILE_MS or steps > SLOW_STEP_MS


def shrunk(case: Case, breaks: Callable[[Case], bool], seconds: float) -> Case:
    """Return a smaller case that still breaks, found within the time."""
    end = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < end:
        progress = False
        for smaller in ({**case, key: one} for key in case for one in _smaller(case[key])):
            if time.monotonic() > end:
                break
            if breaks(smaller):
                case, progress = smaller, True
                break
    return case


def _smaller(value: Any) -> Iterator[Any]:
    """Yield simpler values, the much simpler first."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        size = len(keys)
        while size:
            for start in range(0, len(keys), size):
                cut = set(keys[start : start + size])
                if isinstance(value, dict):
                    yield {key: one for key, one in value.items() if key not in cut}
                else:
                    yield [one for index, one in enumerate(value) if index not in cut]
            size //= 2
        for key in keys:
            if isinstance(value[key], dict):
                yield value[key]
            for smaller in _smaller(value[key]):
                yield {**value, key: smaller} if isinstance(value, dict) else [*value[:key], smaller, *value[key + 1 :]]
    elif isinstance(value, str) and value:
        size = (len(value) + 1) // 2
        while size:
            for start in range(0, len(value), size):
                yield value[:start] + value[start + size :]
            size //= 2
    elif isinstance(value, int | float) and not isinstance(value, bool) and value not in (0, 1):
        yield from (1, int(value / 2), int(value) - 1) if abs(value) < 1e15 else (1, int(value / 2))


def _serve(vocabulary: Vocabulary, pipe: Any) -> None:
    compiler.CACHE_SIZE = 0  # else the memory of one case would be counted for others
    made = compiler.GrammarCompiler(lambda: vocabulary, vocabulary.eos)
    made.request(StructuredOutputs(regex="a")).result()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pipe.send("ready")
    while True:
        case, seed = pipe.recv()
        try:
            _try(made, vocabulary, case, random.Random(seed), pipe)
        except BaseException as error:  # a panic of the library is no Exception
            pipe.send({"end": "panic" if "Panic" in type(error).__name__ else "invalid", "error": repr(error)[:500]})


def _try(made: compiler.GrammarCompiler, vocabulary: Vocabulary, case: Case, rng: random.Random, pipe: Any) -> None:
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    memory, start = _memory_mib("VmRSS"), time.process_time()
    try:
        grammar = made.request(StructuredOutputs(**case)).result()
    except RequestError as error:
        cost = {"compile_ms": 1000 * (time.process_time() - start), "mib": _memory_mib("VmHWM") - memory}
        pipe.send({"end": "panic" if "Panic" in str(error) else "refused", "error": str(error)[-300:], **cost})
        return
    pipe.send({"compiled": True, "compile_ms": 1000 * (time.process_time() - start)})
    matcher = grammar.matcher()
    row = np.zeros((1, (vocabulary.size + 31) // 32), np.int32)
    times: dict[str, float] = {"fill_ms": 0, "accept_ms": 0}
    end, error, count = "tokens", "", 0
    try:
        while count < TOKENS:
            start = time.process_time()
            matcher.fill(row, 0)
            times["fill_ms"] = max(times["fill_ms"], 1000 * (time.process_time() - start))
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            others = allowed[~np.isin(allowed, vocabulary.eos)]
            if not len(others):
                end = "ended" if len(allowed) else "nothing allowed"
                break
            start = time.process_time()
            matcher.accept(int(others[rng.randrange(len(others))]))
            times["accept_ms"] = max(times["accept_ms"], 1000 * (time.process_time() - start))
            count += 1
    except GrammarError as limit:
        end, error = "limit", str(limit)[:300]
    pipe.send({"end": end, "error": error, "tokens": count, "mib": _memory_mib("VmHWM") - memory, **times})


def _memory_mib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) // 1024


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
