"""`phonograph serve` beside vLLM's server on one GPU: the same model, client and requests, one server after the other.

    python benchmarks/serve_vs_vllm.py --model DIR --peer-site SITE OURS --folder RUNS --output RESULT.json --checks

DIR needs a config.json only: weights are random, the tokenizer is made here (`benchmarks/checks/serving/generated.py`).
--peer-site are folders that become vLLM's PYTHONPATH: itself first, then whatever else it needs (uvloop, say).
--peer-command has any other server in its place, with {model} and {port} in it.

Each server starts in a process of its own. One client process asks it for a burst to warm up; for the published serving
table, several times (figures are medians over these runs); and for a sweep with so many requests open all the time.
Ours also gets many streams at once, which its engine then runs offline, and with --checks faults
(`checks/serving/faults.py`). What the sides leave is in RUNS, so that --skip-existing goes on with those that
have not ended well.

All ratios say how many times as good we are: above 1 is better than the other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.result_files import output_file, read_records, write_result
from checks.peer_log import missing_kernel, peer_choices
from checks.processes import ServerProcess, free_port, gpu_memory_mib, gpu_uuid, leave_at_sigterm, portable
from checks.serving import faults, versus
from checks.serving.generated import make_model_folder
from phonograph.bench.records.record import provenance
from phonograph.bench.serving import load
from phonograph.bench.serving.connection import Target
from phonograph.errors import EndpointError

OURS, PEER = "ours", "peer"
CLIENT = "--client"
SERVED_NAME = "bench"
PEER_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
"""As in the anchors, unless it is set already. Greedy sampling uses no sampler of FlashInfer's."""
DRAIN_SECONDS = 5
FREE_SECONDS = 30.0
_REPEATED = ("command", "commit", "hardware", "versions", "threads", "load_average")
"""Keys that all records of a client share, which the result has once."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of the comparison, and the commands that follow from them.

    config:    the folder with config.json alone, which our engine runs offline, where it makes no text
    our_flags: of our server and of our engine offline alike
    """

    config: Path
    folder: Path
    dtype: str
    max_model_len: int
    gpu_memory_utilization: float
    our_flags: tuple[str, ...]
    peer_flags: tuple[str, ...]
    peer_command: tuple[str, ...]
    peer_site: tuple[Path, ...]
    table_prompts: int
    table_rate: float
    repeats: int
    concurrencies: tuple[int, ...]
    prompts_per_stream: int
    temperature: float
    streams: int
    stream_lens: tuple[int, int]
    checks: bool
    start_timeout: float
    client_timeout: float

    @property
    def model(self) -> Path:
        """The folder that has a tokenizer too."""
        return self.folder / "model"

    @property
    def common_flags(self) -> list[str]:
        return [
            *("--load-format", "dummy", "--dtype", self.dtype, "--max-model-len", str(self.max_model_len)),
            *("--gpu-memory-utilization", str(self.gpu_memory_utilization)),
        ]

    def server_command(self, side: str, port: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", SERVED_NAME]
        if side == OURS:
            drain = ["--shutdown-timeout", str(DRAIN_SECONDS)]
            command = [sys.executable, "-m", "phonograph", "serve", str(self.model), *address, *drain]
            return [*command, *self.common_flags, *self.our_flags]
        if self.peer_command:
            here = {"{model}": str(self.model), "{port}": str(port)}
            return [re.sub(r"\{(model|port)\}", lambda found: here[found[0]], word) for word in self.peer_command]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.model), *address]
        return [*command, *self.common_flags, "--attention-backend", "FLASH_ATTN", *self.peer_flags]

    def environment(self, side: str) -> dict[str, str]:
        if side == OURS:
            return dict(os.environ)
        environment = {**PEER_ENVIRONMENT, **os.environ}
        if self.peer_site:
            environment["PYTHONPATH"] = os.pathsep.join(str(folder.absolute()) for folder in self.peer_site)
        return environment

    def jobs(self, side: str) -> list[list[str]]:
        """Return the flags of `bench serve`, a list for each run. A seed is used once: its prompts are then cached."""
        sharegpt = ["--dataset-name", "sharegpt-like", "--temperature", str(self.temperature)]
        most = max((*self.concurrencies, self.streams, self.table_prompts))
        jobs = [[*sharegpt, "--num-prompts", str(most), "--label", versus.WARM_UP, "--seed", "0"]]
        for number in range(1, self.repeats + 1):
            rate = ["--num-prompts", str(self.table_prompts), "--request-rate", str(self.table_rate)]
            jobs.append([*sharegpt, *rate, "--label", f"{versus.TABLE} {number}", "--seed", str(number)])
        for count in self.concurrencies:
            open_at_once = ["--num-prompts", str(count * self.prompts_per_stream), "--max-concurrency", str(count)]
            jobs.append([*sharegpt, *open_at_once, "--label", f"{versus.SWEEP} {count}", "--seed", str(100 + count)])
        if side == OURS and self.streams:
            for number in range(1, self.repeats + 1):
                lens = self._stream_flags
                jobs.append([*lens, "--label", f"{versus.STREAMS} {number}", "--seed", str(10_000 + number)])
        return jobs

    @property
    def offline_command(self) -> list[str]:
        """Our engine without a server, with what the streams ask for."""
        command = [sys.executable, "-m", "phonograph", "bench", "throughput", "--model", str(self.config), "--json"]
        return [*command, *self._stream_flags, *self.common_flags, *self.our_flags]

    @property
    def _stream_flags(self) -> list[str]:
        input_len, output_len = map(str, self.stream_lens)
        return ["--num-prompts", str(self.streams), "--input-len", input_len, "--output-len", output_len]


def run_client(*, url: str, model: str, jobs: list[list[str]], output: str) -> int:
    """Run `phonograph bench serve` for each job in the client's process, with a line about each."""
    from phonograph.cli.app import main as phonograph

    for flags in jobs:
        command = ["bench", "serve", "--base-url", url, "--tokenizer", model, *flags]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = phonograph([*command, "--json", "--output", output])
        if code == 2:
            return code
        record = json.loads(printed.getvalue().splitlines()[-1])
        figures = {name: record[name] for name in ("output_throughput", "median_ttft_ms", "median_itl_ms")}
        shown = ", ".join(f"{name} {'-' if value is None else format(value, '.2f')}" for name, value in figures.items())
        print(f"  {record['label']}: {record['completed']} in {record['duration']:.1f} s, {shown}", flush=True)
    return 0


def run_side(side: str, settings: Settings, *, skip_existing: bool) -> dict[str, Any]:
    """Start a server, load it and end it, or find an earlier record; return the record, with its problems."""
    path = settings.folder / f"{side}.json"
    if skip_existing and path.exists() and not (known := json.loads(path.read_text()))["problems"]:
        return known
    began = time.monotonic()
    result: dict[str, Any] = {"problems": [], "gpu": gpu_uuid(), "checks": {}}
    (settings.folder / f"{side}.log").unlink(missing_ok=True)
    idle_mib = gpu_memory_mib()
    server, target = _start(side, settings, result)
    try:
        result["start_seconds"] = round(server.wait_until_ready(settings.start_timeout, _say), 2)
        _say(f"{side}: ready after {result['start_seconds']} s")
        result["version"] = server.version()
        result["records"] = _load(side, server.url, settings, result["problems"])
        if side == OURS and settings.checks:
            _check(result, "disconnect", faults.try_disconnect(target))
            _check(result, "drain", faults.try_drain(server, target, idle_mib=idle_mib))
    except EndpointError as error:
        result["problems"].append(str(error))
    finally:
        result["exit_code"] = server.stop()
    if side != OURS and not settings.peer_command:
        result["choices"] = peer_choices(settings.folder / f"{side}.log")
        problem = missing_kernel(str(settings.model), result["choices"])
        result["problems"] += [problem] if problem else []
    _wait_until_free(idle_mib)
    if side == OURS and not result["problems"]:
        if settings.streams:
            result["offline"] = _offline(settings, result["problems"])
        if settings.checks:
            _try_kill(settings, result)
    result["seconds"] = round(time.monotonic() - began, 1)
    _say(f"{side}: {'; '.join(result['problems']) or 'ended well'} after {result['seconds']} s")
    path.write_text(json.dumps(result) + "\n")
    return result


def _start(side: str, settings: Settings, result: dict[str, Any]) -> tuple[ServerProcess, Target]:
    port = free_port()
    command = settings.server_command(side, port)
    result["command"] = portable(command)
    url = f"http://127.0.0.1:{port}"
    log = settings.folder / f"{side}.log"
    server = ServerProcess(side, command, url=url, log=log, environment=settings.environment(side))
    return server, Target.parse(url)


def _load(side: str, url: str, settings: Settings, problems: list[str]) -> list[dict[str, Any]]:
    """Run the client in its process; return its records."""
    output = settings.folder / f"{side}.jsonl"
    output.unlink(missing_ok=True)
    asked = {"url": url, "model": str(settings.model), "jobs": settings.jobs(side), "output": str(output)}
    command = [sys.executable, __file__, CLIENT, json.dumps(asked)]
    with (settings.folder / f"{side}.client.log").open("w") as log:
        try:
            code = subprocess.run(command, stderr=log, timeout=settings.client_timeout, check=False).returncode
            if code:
                problems.append(f"the client ended with {code}; {side}.client.log says why")
        except subprocess.TimeoutExpired:
            problems.append(f"the client took more than {settings.client_timeout:g} s")
    records = read_records([output])
    problems += [f"{record['label']}: {record['failed']} requests failed" for record in records if record["failed"]]
    return [_without_places(record) for record in records]


def _without_places(record: dict[str, Any]) -> dict[str, Any]:
    """Return a client's record without the parts that the result has once, and without paths of this machine."""
    server = {name: value for name, value in record["server"].items() if name != "root"}
    kept = {name: value for name, value in record.items() if name not in _REPEATED}
    return {**kept, "tokenizer_id": Path(record["tokenizer_id"]).name, "server": server}


def _offline(settings: Settings, problems: list[str]) -> dict[str, Any] | None:
    """Measure our engine without a server; the figures have the names of a server's."""
    with (settings.folder / "offline.log").open("w") as log:
        try:
            done = subprocess.run(
                settings.offline_command,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                timeout=settings.client_timeout,
                check=False,
            )
            (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
        except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError) as error:
            problems.append(f"the engine offline gave no figures ({error!r:.100}); offline.log says why")
            return None
    figures = {"output_throughput": row["out_tok_s"], "median_itl_ms": row["itl_seconds"]["p50"] * 1e3}
    return {"command": portable(settings.offline_command), **figures, "row": row}


def _try_kill(settings: Settings, result: dict[str, Any]) -> None:
    """Start another server, whose start is then the second one on this machine."""
    idle_mib = gpu_memory_mib()
    server, target = _start(OURS, settings, result)
    try:
        result["second_start_seconds"] = round(server.wait_until_ready(settings.start_timeout, _say), 2)
        _check(result, "kill", faults.try_kill(server, target, idle_mib=idle_mib))
    except EndpointError as error:
        result["problems"].append(str(error))
    finally:
        server.stop()


def _check(result: dict[str, Any], name: str, work: Any) -> None:
    """Run an experiment; one that raises has failed, without an effect on the others."""
    try:
        seen = load.run(work)
    except Exception as error:
        seen = {"problems": [f"the check broke: {error!r}"]}
    result["checks"][name] = seen
    _say(f"  {name}: {'; '.join(seen['problems']) or 'passed'}")


def _wait_until_free(idle_mib: int | None) -> None:
    """Wait until the memory of the last server is free, since the next one measures it."""
    until = time.monotonic() + FREE_SECONDS
    while idle_mib is not None and time.monotonic() < until:
        if (gpu_memory_mib() or 0) <= idle_mib + faults.FREE_MIB:
            break
        time.sleep(0.5)


def _say(line: str) -> None:
    print(line, flush=True)


def compare(sides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows: both servers' workloads, and ours beside its engine."""
    rows: list[dict[str, Any]] = []
    runs = {side: {record["label"]: record for record in result.get("records", ())} for side, result in sides.items()}
    ours, peer = runs.get(OURS, {}), runs.get(PEER, {})
    tables = [[run for label, run in of.items() if label.startswith(f"{versus.TABLE} ")] for of in (ours, peer)]
    rows += versus.compare(versus.TABLE, "", *map(versus.medians, tables))
    for label in ours:
        workload, _, case = label.partition(" ")
        if workload == versus.SWEEP and label in peer:
            rows += versus.compare(workload, case, ours[label], peer[label])
    offline = sides.get(OURS, {}).get("offline")
    if offline is not None:
        streams = [run for label, run in ours.items() if label.startswith(f"{versus.STREAMS} ")]
        rows += versus.compare(versus.STREAMS, "offline", versus.medians(streams), offline)
    return rows


def show(rows: list[dict[str, Any]], sides: dict[str, dict[str, Any]]) -> list[str]:
    """Print the table and its caveats; return the caveats."""
    shown = Table("workload", "figure", "ours", "the other", "times as good", "bar")
    for row in rows:
        bar = f"{'pass' if row['pass'] else 'FAIL'} {row['least']:g}" if "pass" in row else ""
        cells = f"{row['ours']:g}", f"{row['other']:g}", f"{row['ratio']:.3f}", bar
        shown.add_row(f"{row['workload']} {row['case']}", row["figure"], *cells)
    Console(width=max(Console().width, 110)).print(shown, markup=False)
    notes: list[str] = []
    for side, result in sides.items():
        notes += versus.caveats(side, result.get("records", ()))
        notes += [f"{side}: {problem}" for problem in result["problems"]]
        for name, seen in result["checks"].items():
            notes += [f"check {name}: {problem}" for problem in seen["problems"]]
    for note in notes:
        print(note)
    return notes


def main(tokens: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, dest="config", help="folder with a config.json")
    parser.add_argument("--folder", type=Path, required=True, help="where the sides leave their records and logs")
    parser.add_argument("--output", type=output_file, required=True)
    parser.add_argument("--sides", nargs="+", choices=(OURS, PEER), default=[OURS, PEER])
    parser.add_argument("--peer-site", type=Path, nargs="+", default=[])
    parser.add_argument("--peer-flags", type=shlex.split, default=[], help="further flags of vLLM, in one string")
    parser.add_argument("--peer-command", type=shlex.split, default=[], help="another server, with {model} and {port}")
    parser.add_argument("--our-flags", type=shlex.split, default=[], help="further flags of our engine, in one string")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85)
    parser.add_argument("--table-prompts", type=int, default=100)
    parser.add_argument("--table-rate", type=float, default=50, help="requests a second")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the table, and of the streams")
    parser.add_argument("--concurrencies", type=int, nargs="*", default=[32, 64, 128, 256], help="of the sweep")
    parser.add_argument("--prompts-per-stream", type=int, default=6, help="of the sweep")
    parser.add_argument("--temperature", type=float, default=0, help="of all but the streams at once")
    parser.add_argument("--streams", type=int, default=256, help="at once, beside the engine offline; 0: none")
    parser.add_argument("--stream-lens", type=int, nargs=2, default=[512, 256], help="tokens in and out")
    parser.add_argument("--checks", action="store_true", help="also what faults do to our server")
    parser.add_argument("--start-timeout", type=float, default=300, help="seconds")
    parser.add_argument("--client-timeout", type=float, default=300, help="seconds")
    parser.add_argument("--skip-existing", action="store_true", help="keep sides that ended well before")
    given = vars(parser.parse_args(tokens))
    origin = {
        **provenance(),
        "command": portable(["python", *(sys.argv if tokens is None else [sys.argv[0], *tokens])]),
    }
    output, names, skip_existing = given.pop("output"), given.pop("sides"), given.pop("skip_existing")
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    settings = Settings(**{**given, "folder": given["folder"].absolute()})
    make_model_folder(settings.config, settings.model)
    sides = {side: run_side(side, settings, skip_existing=skip_existing) for side in names}
    rows = compare(sides)
    notes = show(rows, sides)
    gpus = {result.pop("gpu") for result in sides.values()}
    same_gpu = None if None in gpus else len(gpus) == 1
    checks = sides.get(OURS, {}).get("checks", {})
    counts = {**versus.summarise(rows), "checks": {name: not seen["problems"] for name, seen in checks.items()}}
    result = {"model": settings.config.name, "same_gpu": same_gpu, **counts}
    write_result(output, origin, {**result, "notes": notes, "comparison": rows, "sides": sides})
    print(json.dumps({"output": output.name, "same_gpu": same_gpu, **counts}))


if __name__ == "__main__":
    leave_at_sigterm()
    # Ended from outside, it still ends its servers, which would keep the GPU's memory.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if sys.argv[1:2] == [CLIENT]:
        sys.exit(run_client(**json.loads(sys.argv[2])))
    main()
