"""Planting of faults in a copy of the repository, and the tests that run there until one fails."""

from __future__ import annotations

import compileall
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from py_compile import PycInvalidationMode

import pytest

from checks.mutants import forked
from checks.mutants.coverage_map import PYTEST_OPTIONS, Record, load, record
from checks.mutants.rooms import own_tests
from checks.mutants.rules import Fault

_QUICK_SECONDS = 10.0
_LEAST_SECONDS = 30.0
_SLOWER = 8.0
"""Seconds that tests may take for each second that they took without a fault; a test that ends late is a failure."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a fault.

    Attributes:
        end: "killed" by tests of the room, "killed elsewhere", "survived", or "not run" by any test's process.
        by: the test that failed, or the reason of another end.
        seconds: time that the tests took.
    """

    end: str
    by: str
    seconds: float


class Trial:
    """A copy of the repository whose tests run for one fault at a time."""

    def __init__(self, root: Path, folder: Path, *, seconds: float) -> None:
        self._root = root
        self._records = root / "build" / "mutants"
        self._copy = folder / "copy"
        self._log = folder / "log"
        self._seconds = seconds
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (root / name).is_file():
                (self._copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, self._copy / name)
        # Compiled files are checked by the contents of their source, whose time and size a fault may leave as they are.
        mode = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self._copy / "src", quiet=1, workers=1, invalidation_mode=mode)
        forked.prepare()

    def records(self, modules: Iterable[str], sources: Iterable[str]) -> dict[str, Record]:
        """Return the records of test modules; those older than the module or the sources are made again.

        A module that fails without a fault is left out.
        """
        sources, found = list(sources), dict[str, Record]()
        for module in modules:
            path = self._records / f"{module.replace('/', '.')}.json"
            if not path.exists() or not (old := load(path)).is_valid(self._root, [module, *sources]):
                print(f"records the lines that {module} runs", flush=True)
                status = self._run(partial(record, self._copy, module, path), 1800)
                if status not in (0, 5):
                    path.unlink(missing_ok=True)
                    print(f"{module} fails without a fault, and is left out: {self._log.read_text()[-2000:]}")
                    continue
                old = load(path)
            found[module] = old
        return found

    def run(self, room: str, source: str, fault: Fault, records: dict[str, Record]) -> Result:
        """Plant a fault, and run the tests of its statement: the room's first, the fastest of them at the head."""
        file = self._copy / source
        original = file.read_text()
        own = set(own_tests(self._root, room, source))
        tests = {module: one.tests_of(source, fault.span) for module, one in records.items()}
        reached = any(tests.values())
        if fault.at_import or not reached:  # a module's own statement, or one that only a child process runs
            tests = {module: list(one.seconds) for module, one in records.items() if one.lines.get(source)}
        seconds = {module: sum(records[module].seconds[test] for test in some) for module, some in tests.items()}
        order = sorted((module for module, some in tests.items() if some), key=lambda module: seconds[module])
        start = time.monotonic()
        file.write_text(fault.planted(original))
        try:
            for stage, modules in _stages(order, own, seconds):
                left = self._seconds - (time.monotonic() - start)
                if left <= 0:
                    return Result(end="survived", by=f"tests that ran for {self._seconds:.0f} s", seconds=self._seconds)
                expected = sum(seconds[module] for module in modules)
                limit = max(_LEAST_SECONDS, _SLOWER * expected)
                status = self._run(partial(_pytest, [t for module in modules for t in tests[module]]), limit)
                if status == 4:  # names of cases changed, or a module cannot be imported, which is a failure
                    status = self._run(partial(_pytest, modules), max(limit, self._seconds))
                log = self._log.read_text()
                # What a conftest imports may fail too.
                if status == 5 or (status == 4 and "not found: " in log):
                    raise RuntimeError(f"pytest does not find {modules}: {log[-2000:]}")
                if status:
                    failed = _FAILED.search(log)
                    by = "time" if status == forked.TIMED_OUT else failed[1] if failed else f"exit status {status}"
                    return Result(end=stage, by=by, seconds=time.monotonic() - start)
        finally:
            file.write_text(original)
        end = "survived" if reached else "not run"
        return Result(end=end, by=f"{len(order)} test modules", seconds=time.monotonic() - start)

    def _run(self, function: partial[int], seconds: float) -> int:
        return forked.run(self._copy, function, seconds=seconds, log=self._log)


def _pytest(tests: list[str]) -> int:
    return int(pytest.main([*tests, "-x", "-q", *PYTEST_OPTIONS]))


def _stages(order: list[str], own: set[str], seconds: dict[str, float]) -> list[tuple[str, list[str]]]:
    """Return groups of test modules: the quick ones of the room, each other one of it, and those of other rooms."""
    quick: list[str] = []
    for module in order:
        if module in own and sum(seconds[one] for one in (*quick, module)) <= _QUICK_SECONDS:
            quick.append(module)
    slow = [module for module in order if module in own and module not in quick]
    others = [module for module in order if module not in own]
    groups = [("killed", quick), *(("killed", [module]) for module in slow)]
    groups += [("killed elsewhere", [module]) for module in others]
    return [group for group in groups if group[1]]
