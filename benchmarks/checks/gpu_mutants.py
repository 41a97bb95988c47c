"""Plants faults in the kernels that only a GPU runs, one at a time, and tells which test notices each.

    PYTHONPATH=src:benchmarks python -m checks.gpu_mutants --output gpu_mutants.json

Each fault of `checks.kernel_faults` gets a copy of the sources and a cache of compiled kernels, which begins with that
of the control: the same tests without a fault, which must pass. Its narrow tests run first, the broad ones if those
pass, and with `--verify` the demo model's graphs against eager if those pass too. A fault is noticed by a test that
fails or does not end in time. The exit code is 1 if a fault survives or a test does not run. Times are no measurements,
because faults run side by side. `--list` prints the faults and checks that each can be planted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from xml.etree import ElementTree

from checks.checks import ROOT
from checks.kernel_faults import FAULTS, KERNELS, Fault

CONTROL = "control"
_VERIFY = ("verify", "--model", "demo", "--device", "cuda", "--num-kv-blocks", "2000", "--replays", "50")
_BROAD_PROCESSES = 3
_COPIED = "src", "tests"
_LINKED = "benchmarks", "docs", "examples", "scripts", "pyproject.toml", "README.md"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a fault. state: "killed", "survived" or "not run"; by: the test or the program that noticed it."""

    name: str
    state: str
    by: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.state:<8} {self.seconds:6.1f} s  {self.name}\n{'':20}{self.by}"


class Copy:
    """A copy of the repository in which programs run, with a cache of compiled kernels."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder, self._cache = folder, cache
        for name in _COPIED:
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in _LINKED:
            (folder / name).symlink_to(ROOT / name)

    def run(self, *command: str, limit: float) -> tuple[int | None, str]:
        """Run Python with the arguments. Return the exit code, None if it took too long, and its last line."""
        settings = {
            **os.environ,
            "PYTHONPATH": str(self._folder / "src"),
            "TRITON_CACHE_DIR": str(self._cache),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self._folder,
            env=settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return None, ""
        lines = [line for line in out.splitlines() if line.strip()]
        return process.returncode, lines[-1] if lines else ""

    def test(self, tests: Sequence[str], *, limit: float, processes: int = 0) -> tuple[str, str]:
        """Run tests up to the first failure. Return a state of `Outcome`, and the failed test or why none ran.

        Args:
            tests: arguments of pytest.
            limit: in seconds. With `processes`, tests that take longer have found nothing; without, they hang.
            processes: number of processes that share the tests; 0 is this one alone.
        """
        report = self._folder / "report.xml"
        report.unlink(missing_ok=True)
        options = ["-x", "-q", "--tb=line", "-p", "no:cacheprovider", f"--junitxml={report}"]
        # That plugin warns beside xdist, and a warning is an error.
        options += ["-p", "no:benchmark", "-n", str(processes)] if processes else []
        code, last = self.run("-m", "pytest", *options, *tests, limit=limit)
        if code is None:
            return "survived" if processes else "killed", f"no end within {limit:g} s: {' '.join(tests)}"
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
        for case in cases:
            if case.find("failure") is not None or case.find("error") is not None:
                return "killed", f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}"
        if code == 0 and any(case.find("skipped") is None for case in cases):
            return "survived", last
        # A crashed process leaves no report; pytest's codes of a wrong call and of no tests are 2 to 5.
        return ("killed", f"the process ended with code {code}: {last}") if code < 0 else ("not run", last)


def try_fault(fault: Fault, cache: Path, folder: Path, *, limits: tuple[float, float], verify: bool) -> Outcome:
    """Plant a fault in a copy in `folder` and run its tests, narrow and broad ones within their limits in seconds.

    The compiled kernels begin with those in `cache`.
    """
    began = time.monotonic()
    copy = Copy(folder, folder / "kernels")
    # Compiled files are not changed in place, so that links serve.
    shutil.copytree(cache, folder / "kernels", copy_function=os.link)
    fault.plant(folder)
    state, by = copy.test(fault.narrow, limit=limits[0])
    if state == "survived":
        state, by = copy.test(fault.broad, limit=limits[1], processes=_BROAD_PROCESSES)
    if state == "survived" and verify:
        code, last = copy.run("-m", "phonograph", *_VERIFY, limit=limits[1])
        state, by = ("survived", by) if code == 0 else ("killed", f"verify: {last}")
    shutil.rmtree(folder)
    return Outcome(name=fault.name, state=state, by=by, seconds=time.monotonic() - began)


def try_control(faults: Sequence[Fault], folder: Path, cache: Path, *, at_once: int, limit: float) -> list[str]:
    """Run all narrow tests without a fault, which fills `cache`. Return those that did not pass, and why."""
    cache.mkdir()
    runs = sorted({fault.narrow for fault in faults})

    def one(number: int) -> str | None:
        began = time.monotonic()
        state, by = Copy(folder / str(number), cache).test(runs[number], limit=limit)
        print(f"{CONTROL}: {time.monotonic() - began:6.1f} s  {' '.join(runs[number])}: {by}", flush=True)
        return None if state == "survived" else f"{' '.join(runs[number])}: {by}"

    with ThreadPoolExecutor(at_once) as pool:
        return [failure for failure in pool.map(one, range(len(runs))) if failure is not None]


def list_faults() -> int:
    """Print the faults. Return the number of those that cannot be planted."""
    wrong = 0
    for number, fault in enumerate(FAULTS, 1):
        count = (ROOT / KERNELS / fault.file).read_text().count(fault.old)
        wrong += count != 1
        print(f"{number:3}  {fault.name}\n     {fault.file}: {count} times; {' '.join(fault.narrow)}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=6, help="faults that are tried side by side")
    parser.add_argument("--only", default="", help="try only faults with this text in their name")
    parser.add_argument("--seconds", type=float, nargs=2, default=(150, 180), help="limits of narrow and broad tests")
    parser.add_argument("--verify", action="store_true", help="run `phonograph verify` on faults that tests pass")
    parser.add_argument("--output", type=Path, help="JSON file for the outcomes")
    parser.add_argument("--list", action="store_true", help="print the faults, check their texts, and end")
    arguments = parser.parse_args()
    if arguments.list:
        return int(list_faults() > 0)
    faults = [fault for fault in FAULTS if arguments.only in fault.name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gpu_mutants_") as name:
        folder = Path(name)
        cache = folder / "kernels"
        limit = 2 * arguments.seconds[0]
        failures = try_control(faults, folder / CONTROL, cache, at_once=arguments.at_once, limit=limit)
        print(f"control: {'; '.join(failures) or 'passed'}, {time.monotonic() - began:.0f} s", flush=True)
        if failures:
            return 1

        def one(number: int) -> Outcome:
            place, limits = folder / str(number), tuple(arguments.seconds)
            outcome = try_fault(faults[number], cache, place, limits=limits, verify=arguments.verify)
            print(outcome, flush=True)
            return outcome

        with ThreadPoolExecutor(arguments.at_once) as pool:
            outcomes = list(pool.map(one, range(len(faults))))
    killed = sum(outcome.state == "killed" for outcome in outcomes)
    print(f"{killed} of {len(outcomes)} faults noticed, {time.monotonic() - began:.0f} s")
    for outcome in outcomes:
        if outcome.state != "killed":
            print(f"{outcome.state}: {outcome.name}")
    if arguments.output:
        arguments.output.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    return int(killed < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
