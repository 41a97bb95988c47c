"""Phonograph beside vLLM on one GPU: the same model, the same workloads, one after the other, and the ratios.

    python benchmarks/vs_vllm.py --model DIR --peer-scripts DIR --peer-site DIR --folder RUNS --output RESULT.json

DIR of --model needs a config.json only: both sides make random weights, or with --load-format auto read the files of
`random_checkpoint.py`. --peer-scripts holds `vllm_anchor.py`, which runs vLLM on these workloads (LOAD_FORMAT in its
environment says how it loads), and --peer-site vLLM itself (it becomes PYTHONPATH; where ours is to run a backend, it
follows ours, for the kernels that vLLM brings). Every run is a process of its own
with a time limit; it leaves its rows, its log and what became of it in RUNS, so that --skip-existing goes on after an
interruption, and a peer that fails costs only its own column. The result has the lines of the peer's log that name
kernels, attention backend and graph mode; a run of a quantized model whose log names no kernel of quantized weights
fails, and its rows are left out. --modes compares our own graph modes on the mixed workload.

A run is written as NAME=SUITE,SUITE: `ours=decode,latency`, `ours:FULL=mixed` (a graph mode of ours),
`ours@flash_attn:3:FULL=decode` (also a backend of ours, with or without version and mode; one for each part is
`ours@prefill=flash_attn,decode=triton=decode`), `FLASH_ATTN/FULL_AND_PIECEWISE=decode` (backend and mode of vLLM) or
`FLASH_ATTN/FULL/16=mixed` (with graphs captured up to 16 tokens). All ratios say how many times as fast we are: above 1
is faster than the peer. Bars are for `ours` alone; beside a backend of ours, * marks peers that run the same library.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.result_files import output_file, read_records, write_result
from checks.bench_versus import OURS, backend_of, compare, summarise
from checks.peer_log import missing_kernel, peer_choices
from checks.processes import end_group, gpu_uuid, leave_at_sigterm, portable
from phonograph.bench.records.record import provenance
from phonograph.graphs.modes import GraphMode

METRICS = {"decode": "itl_ms", "latency": "ms", "mixed": "s", "throughput": "out_tok_s", "startup": "seconds"}
MODES = ("FULL", "FULL_AND_PIECEWISE", "NONE")
DEFAULT_RUNS = (
    "ours=decode,latency,throughput",
    "ours=mixed",
    "ours=startup",
    "FLASH_ATTN/FULL_AND_PIECEWISE=decode,latency,throughput",
    "FLASH_ATTN/FULL_AND_PIECEWISE=mixed",
    "FLASH_ATTN/FULL/16=mixed",
    "FLASHINFER/FULL_AND_PIECEWISE=decode,latency",
    "FLASHINFER/FULL_AND_PIECEWISE=mixed",
    "TRITON_ATTN/FULL_AND_PIECEWISE=decode",
    "TRITON_ATTN/FULL=mixed",
)
PEER_STARTED = '"suite": "startup"'


@dataclass(frozen=True, slots=True)
class Run:
    """One process; what its system does not say is common to all.

    system: "ours[@BACKEND[:VERSION]][:MODE]" or, of the peer, "BACKEND/MODE[/CAPTURE_MAX]"
    """

    system: str
    suites: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Run:
        # From the right: a backend of ours for each part has this sign in its name.
        system, _, suites = text.rpartition("=")
        run = cls(system, tuple(suites.split(",")))
        well_named = run.is_well_named_ours if run.is_ours else system.count("/") in (1, 2)
        if not well_named or not set(run.suites) <= set(METRICS) or ("mixed" in run.suites and len(run.suites) > 1):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SUITE,SUITE (mixed alone); see --help")
        return run

    @classmethod
    def parse_all(cls, text: str) -> list[Run]:
        """As `parse`, but where mixed has company it gets a process of its own, since it needs other limits."""
        system, _, suites = text.rpartition("=")
        names = suites.split(",")
        groups = [
            group for group in ([name for name in names if name != "mixed"], ["mixed"]) if set(group) & set(names)
        ]
        return [cls.parse(f"{system}={','.join(group)}") for group in groups or [names]]

    @property
    def is_ours(self) -> bool:
        return re.split("[:@]", self.system, maxsplit=1)[0] == OURS

    @property
    def backend(self) -> str | None:
        """Our backend without the version, or None if the system names none."""
        return backend_of(self.system)

    @property
    def is_well_named_ours(self) -> bool:
        words = self.system.split(":")[1:]
        versions = [word for word in words if word.isdecimal()]
        modes = [word for word in words if word in GraphMode.__members__]
        return words == [*versions, *modes] and len(modes) <= 1 and len(versions) <= (self.backend is not None)

    @property
    def our_flags(self) -> list[str]:
        """Flags of our engine that the system's name stands for."""
        flags = ["--backend", self.backend] if self.backend else []
        for word in self.system.split(":")[1:]:
            flags += ["--flash-attn-version" if word.isdecimal() else "--cudagraph-mode", word]
        return flags

    @property
    def name(self) -> str:
        """As a file's name."""
        return re.sub("[/:@=,]", "-", f"{self.system}-{'-'.join(self.suites)}")


@dataclass(frozen=True, slots=True)
class Settings:
    model: str
    peer_scripts: Path
    peer_site: Path | None
    folder: Path
    dtype: str
    max_model_len: int | None
    our_flags: tuple[str, ...]
    timeout: float
    load_format: str = "dummy"
    peer_arguments: dict[str, Any] | None = None
    adapt_peer: bool = False

    def command(self, run: Run, rows: Path) -> list[str]:
        if not run.is_ours:
            backend, mode, *_ = run.system.split("/")
            if self.peer_arguments is not None:
                script = self.peer_scripts / "vllm_features.py"
                common = {"attention_backend": backend, "compilation_config": {"cudagraph_mode": mode}}
                common |= {"max_model_len": self.max_model_len} if self.max_model_len else {}
                arguments = json.dumps({**common, **self.peer_arguments})
                return [sys.executable, str(script), self.model, run.system, str(rows), arguments]
            script = self.peer_scripts / "vllm_anchor.py"
            return [sys.executable, str(script), self.model, backend, mode, ",".join(run.suites), str(rows)]
        what = ["startup"] if run.suites == ("startup",) else ["suite", "--suites", ",".join(run.suites)]
        command = [sys.executable, "-m", "bench", *what, "--model", self.model, "--json"]
        command += ["--load-format", self.load_format, "--dtype", self.dtype, "--output", str(rows), *self.our_flags]
        command += run.our_flags
        return command + (["--max-model-len", str(self.max_model_len)] if self.max_model_len else [])

    def environment(self, run: Run) -> dict[str, str]:
        environment = dict(os.environ)
        if run.is_ours:
            # The libraries that the peer brings come after everything that we run with.
            site = str(self.peer_site) if run.backend is not None and self.peer_site is not None else None
            paths = str(Path(__file__).parent), environment.get("PYTHONPATH"), site
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            return environment
        if self.peer_site is not None:
            environment["PYTHONPATH"] = str(self.peer_site)
        if self.adapt_peer:
            adapted = str(Path(__file__).parent / "checks" / "peer_site")
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (adapted, environment.get("PYTHONPATH"))))
        if self.max_model_len:
            environment["MAX_MODEL_LEN"] = str(self.max_model_len)
        environment["LOAD_FORMAT"] = self.load_format
        if run.system.count("/") == 2:
            environment["CAPTURE_MAX"] = run.system.split("/")[2]
        return environment


def execute(run: Run, settings: Settings, *, skip_existing: bool) -> dict[str, Any]:
    """Run a process, or find its earlier result; return the outcome."""
    rows, log, record = (settings.folder / f"{run.name}.{kind}" for kind in ("jsonl", "log", "run.json"))
    if skip_existing and record.exists():
        known = json.loads(record.read_text())
        if known["ok"]:
            return known
    settings.folder.mkdir(parents=True, exist_ok=True)
    rows.unlink(missing_ok=True)
    began = time.time()
    with log.open("w") as text:
        process = subprocess.Popen(
            settings.command(run, rows),
            env=settings.environment(run),
            stdout=subprocess.PIPE,
            stderr=text,
            text=True,
            start_new_session=True,
        )
        stamps: list[float] = []
        reader = threading.Thread(target=_follow, args=(process, text, stamps), daemon=True)
        reader.start()
        try:
            code = process.wait(settings.timeout)
            problem = None if code == 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            problem = f"more than {settings.timeout:g} s"
        # A peer's engine may live in processes of its own, and the next run needs their memory.
        end_group(process)
        reader.join(10)
    choices = [] if run.is_ours else peer_choices(log)
    unquantized = None if run.is_ours else missing_kernel(settings.model, choices)
    if unquantized is not None and rows.exists():
        rows.rename(rows.with_suffix(".refused"))
    problem = problem or unquantized
    result = {
        "system": run.system,
        "suites": list(run.suites),
        "file": rows.name,
        "began": began,
        "seconds": round(time.time() - began, 1),
        "ok": problem is None,
        "problem": problem,
        **({} if run.is_ours else {"choices": choices}),
        "process_start_to_ready": round(stamps[0] - began, 2) if stamps and not run.is_ours else None,
        "gpu": gpu_uuid(),
    }
    record.write_text(json.dumps(result) + "\n")
    return result


def read_rows(folder: Path, runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every row measured, as {system, suite, case, value, ...}; those of a run that failed half-way count too."""
    found: list[dict[str, Any]] = []
    starts: dict[str, int] = {}
    for run in sorted(runs, key=lambda run: run["began"]):
        for record in read_records([folder / run["file"]]):
            for figures in record.get("rows", [record]):
                row = figures
                if row["suite"] == "startup" and "engine" in row:
                    # vLLM's figure leaves the imports out; ours does not, so neither does this.
                    seconds = run["process_start_to_ready"] or row["seconds"]
                    number = starts[run["system"]] = starts.get(run["system"], 0) + 1
                    row = {**row, "seconds": seconds, "case": "first" if number == 1 else "second"}
                extra = {name: row[name] for name in ("steps", "mixed_steps", "floor_ms") if name in row}
                value = row[METRICS[row["suite"]]]
                found.append(
                    {"system": run["system"], "suite": row["suite"], "case": case_of(row), "value": value, **extra}
                )
    return found


def case_of(row: dict[str, Any]) -> str:
    """One name for a case, whichever side wrote it."""
    if row["suite"] == "decode":
        return f"{row['bs']}x{row['ctx']}"
    if row["suite"] == "startup":
        return row["case"]
    return str(
        {"latency": row.get("input_len"), "mixed": row.get("ctx"), "throughput": row.get("reqs", 256)}[row["suite"]]
    )


def show(table: list[dict[str, Any]], rows: list[dict[str, Any]], runs: list[dict[str, Any]]) -> None:
    console = Console(width=max(Console().width, 140))
    for suite, metric in METRICS.items():
        of_suite = [row for row in table if row["suite"] == suite]
        peers = list(dict.fromkeys(peer for row in of_suite for peer in row["peers"]))
        if not of_suite:
            continue
        several = {row["system"] for row in of_suite} != {OURS}
        named = ["system"] if several else []
        shown = Table(f"{suite}, {metric}", *named, OURS, *peers, "bars (times as fast as, at least)")
        for row in of_suite:
            cells = [
                f"{row['peers'][peer]:g} ({row['speedups'][peer]:.2f}x{'*' if peer in row['same_kind'] else ''})"
                if peer in row["peers"]
                else ""
                for peer in peers
            ]
            bars = [f"{'pass' if bar['pass'] else 'FAIL'} {bar['least']:.3g} {bar['against']}" for bar in row["bars"]]
            own = [row["system"]] if several else []
            shown.add_row(row["case"], *own, f"{row['ours']:g}", *cells, "\n".join(bars))
        console.print(shown, markup=False)
    modes = [row for row in rows if row["suite"] == "mixed" and row["system"].startswith(OURS)]
    if len({row["system"] for row in modes}) > 1:
        shown = Table("mixed, s", "long prompt", "seconds", "mixed steps", "what ran")
        for row in modes:
            ran = " + ".join(f"{count} {label}" for label, count in row.get("steps", {}).items())
            shown.add_row(row["system"], row["case"], f"{row['value']:g}", str(row.get("mixed_steps", "")), ran)
        console.print(shown, markup=False)
    for run in runs:
        if not run["ok"]:
            print(f"{run['system']} ({', '.join(run['suites'])}) failed: {run['problem']}; its log is beside its rows")


def _follow(process: subprocess.Popen[str], log: Any, stamps: list[float]) -> None:
    """Copy the output of a process into its log, and note the time of its message that it has started."""
    assert process.stdout is not None
    for line in process.stdout:
        if PEER_STARTED in line:
            stamps.append(time.time())
        log.write(line)
        log.flush()


def main(tokens: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--peer-scripts", type=Path, required=True)
    parser.add_argument("--peer-site", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="where the runs leave their rows and logs")
    parser.add_argument("--output", type=output_file, required=True)
    runs_default = [Run.parse_all(text) for text in DEFAULT_RUNS]
    parser.add_argument("--runs", type=Run.parse_all, nargs="+", default=runs_default, metavar="NAME=SUITE,SUITE")
    parser.add_argument("--modes", action="store_true", help="also our modes FULL, FULL_AND_PIECEWISE, NONE on mixed")
    parser.add_argument("--dtype", default="bfloat16", help="of our side; vLLM's script has bfloat16")
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument(
        "--load-format", choices=("dummy", "auto"), default="dummy", help="auto reads the model's files"
    )
    parser.add_argument("--our-flags", type=shlex.split, default=[], help="further flags of the engine, in one string")
    peer_help = "arguments of vLLM's LLM as JSON, such as a speculative_config; its script is then vllm_features.py"
    parser.add_argument("--peer-arguments", type=json.loads, help=peer_help)
    parser.add_argument("--adapt-peer", action="store_true", help="change vLLM's process as checks/peer_site says")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a run may take")
    parser.add_argument("--skip-existing", action="store_true", help="keep runs that ended well before")
    arguments = parser.parse_args(tokens)
    origin = {
        **provenance(),
        "command": portable(["python", *(sys.argv if tokens is None else [sys.argv[0], *tokens])]),
    }
    settings = Settings(
        model=arguments.model,
        peer_scripts=arguments.peer_scripts,
        peer_site=arguments.peer_site,
        folder=arguments.folder,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        our_flags=tuple(arguments.our_flags),
        timeout=arguments.timeout,
        load_format=arguments.load_format,
        peer_arguments=arguments.peer_arguments,
        adapt_peer=arguments.adapt_peer,
    )
    wanted: list[Run] = [
        *itertools.chain(*arguments.runs),
        *(Run(f"{OURS}:{mode}", ("mixed",)) for mode in MODES if arguments.modes),
    ]
    runs: list[dict[str, Any]] = []
    for run in wanted:
        print(f"{run.system}: {', '.join(run.suites)} ...", flush=True)
        runs.append(execute(run, settings, skip_existing=arguments.skip_existing))
        print(f"  {'ended well' if runs[-1]['ok'] else runs[-1]['problem']} after {runs[-1]['seconds']} s", flush=True)
    rows = read_rows(settings.folder, runs)
    table = compare(rows)
    show(table, rows, runs)
    gpus = {run["gpu"] for run in runs}
    result = {
        "model": Path(settings.model).name,
        "same_gpu": None if None in gpus else len(gpus) == 1,
        **summarise(table),
        "comparison": table,
        "rows": rows,
        "runs": [{key: value for key, value in run.items() if key not in ("gpu", "file", "began")} for run in runs],
    }
    write_result(arguments.output, origin, result)
    print(json.dumps({"output": arguments.output.name, "same_gpu": result["same_gpu"], **summarise(table)}))


if __name__ == "__main__":
    leave_at_sigterm()
    main()
