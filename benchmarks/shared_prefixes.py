"""Sequences that share a prefix, with and without attending it once, and vLLM beside them: one session on one GPU.

    python benchmarks/shared_prefixes.py MODEL_DIR --output RUNS/shared.json \\
        --peer-python VENV/bin/python --peer-script ../shared/peers/shared_prefix.py

MODEL_DIR holds a config.json; weights are random. Each engine has a process of its own, one after the other, and each
leaves rows in RUNS/shared.jsonl as it goes, so that --parts continues a session that was cut off:

- decode:  ms between tokens of S sequences with a common prefix and tokens of their own, and with none;
- samples: seconds to the second token of n samples of an uncached prompt, beside one sample of another prompt;
- agents:  agents in turns, with a system prompt of all and a longer prefix of some;
- random:  ms between tokens of batches of which a share has one of three prefixes, with a plot beside the output;
- fp8:     the decodes with an FP8 cache;
- short:   short prefixes, for each --min-shared;
- server:  `phonograph serve`, and vLLM's server, under open streams with a shared prefix;
- peer:    the decodes in vLLM, by the script of --peer-script.

--dry-run runs all parts but the peer's on a CPU, with the demo model and small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.result_files import output_file, read_records, write_result
from checks.processes import ServerProcess, free_port, leave_at_sigterm

Row = dict[str, Any]
CHILD = "--child"
PARTS = ("decode", "samples", "agents", "random", "fp8", "short", "server", "peer")
DECODE = ((1, 0, 1024), (8, 0, 1024), (32, 0, 1024), (128, 0, 576), (32, 8192, 64), (128, 2048, 64), (128, 8192, 64),
          (8, 32000, 64), (64, 32000, 64))  # fmt: skip
"""Sequences, tokens of the shared prefix, tokens of their own: the issue's table, and decodes that share nothing."""
SHORT = tuple((seqs, shared, 512) for seqs in (8, 32, 128) for shared in (64, 128, 256, 512, 1024, 2048))
SAMPLES = tuple((count, length) for length in (1024, 8192, 32000) for count in (8, 32, 128))
TOKENS = 48
"""Tokens of an answer that is timed."""
SHARES = tuple(range(0, 101, 10))
STREAMS, STREAM_PROMPTS, STREAM_PREFIX, STREAM_OWN, STREAM_TOKENS = 256, 768, 8192, 320, 256
START_SECONDS = 600.0


class Bench:
    """One engine, and what it is timed with.

    Args:
        settings: of the engine.
        scale: divisor of all sizes, 1 but in a dry run.
    """

    def __init__(self, settings: Row, scale: int) -> None:
        from phonograph import LLM

        self._llm = LLM(**settings)
        self._rng, self._scale, self._count = random.Random(0), scale, max(4, TOKENS // scale)
        self._vocab = self._llm.plan.model.vocab_size
        self._records: list[Any] = []
        self._llm.engine.core.on_step = self._records.append

    def tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(5, self._vocab - 5) for _ in range(count)]

    def seconds(self, prompts: Sequence[list[int]], count: int, **params: Any) -> float:
        """Return the seconds until all prompts have so many tokens. `_records` are then the steps of this call."""
        from phonograph import SamplingParams

        self._records.clear()
        chosen = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, **{"temperature": 0.0, **params})
        began = time.perf_counter()
        self._llm.generate(list(prompts), chosen, use_tqdm=False)
        return time.perf_counter() - began

    def itl(self, prompts: Sequence[list[int]]) -> Row:
        """Return ms between tokens of prompts that are cached by then, the best of three, and the units of a step."""
        self.seconds(prompts, 1)
        rows: list[Row] = []
        for _ in range(3):
            self.seconds(prompts, 1 + self._count)
            rows.append(self._between_tokens(len(prompts)))
        return min(rows, key=lambda row: row["itl_ms"])

    def _between_tokens(self, seqs: int) -> Row:
        """Return ms between the ends of the latest call's steps that decoded all sequences and nothing else.

        The time of the whole call would have that of the prompts' ends in it, which differs by more than a step.
        """
        steps = [record for record in self._records if record.num_decodes == seqs and not record.prefill_lens]
        itl = (steps[-1].ended - steps[0].ended) / (len(steps) - 1) * 1e3
        return {
            "itl_ms": round(itl, 4),
            "shared_units": steps[-1].shared_units,
            "own_units": steps[-1].own_units,
        }

    def prompts(self, seqs: int, shared: int, own: int) -> list[list[int]]:
        """Return prompts with a common prefix, which is cached by now."""
        prefix = self.tokens(shared)
        if shared:
            self.seconds([[*prefix, *self.tokens(1)]], 1)
        return [[*prefix, *self.tokens(own)] for _ in range(seqs)]

    def decode(self, cases: Sequence[tuple[int, int, int]] = DECODE) -> Iterator[Row]:
        for case in cases:
            seqs, shared, own = (max(1, size // self._scale) if size else 0 for size in case)
            name = f"{case[0]} x ({case[1]} + {case[2]})"
            yield {"case": name, **self.itl(self.prompts(seqs, shared, own))}

    def short(self) -> Iterator[Row]:
        yield from self.decode(SHORT)

    def samples(self) -> Iterator[Row]:
        for count, length in SAMPLES:
            size, n = max(8, length // self._scale), max(2, count // self._scale)
            self.seconds([self.tokens(size)], 2)  # of a prompt that is not asked for again
            one = min(self.seconds([self.tokens(size)], 2) for _ in range(3))
            found = [(self.seconds([self.tokens(size)], 2, n=n, temperature=1.0), self._computed()) for _ in range(3)]
            best, computed = min(found)
            prompt = self.tokens(size)
            self.seconds([prompt], 2 + self._count, n=n, temperature=1.0)
            yield {
                "case": f"{count} samples of {length}",
                "ratio": round(best / one, 4),
                "one_ms": round(one * 1e3, 3),
                "all_ms": round(best * 1e3, 3),
                "computed": computed,
                "itl_ms": self._between_tokens(n)["itl_ms"],
            }

    def _computed(self) -> int:
        return sum(sum(record.prefill_lens) for record in self._records)

    def agents(self) -> Iterator[Row]:
        """Time 16 agents: a system prompt of 6K of all, tools of 4K of each four, and four turns."""
        scale = self._scale
        system, kinds = self.tokens(6144 // scale), [self.tokens(4096 // scale) for _ in range(4)]
        histories = [[*system, *kinds[agent % 4], *self.tokens(256 // scale)] for agent in range(16)]
        for turn in range(4):
            self.seconds(histories, 1)
            row = self.itl(histories)
            yield {"case": f"16 agents, turn {turn}", **row}
            histories = [[*one, *self.tokens(512 // scale)] for one in histories]

    def random(self) -> Iterator[Row]:
        """Time batches whose prefixes are drawn. The order of arrival is random too."""
        for share in SHARES:
            rng = random.Random(share)
            seqs = max(4, 64 // self._scale)
            prefixes = [self.tokens(rng.randint(512, 6144) // self._scale) for _ in range(3)]
            for prefix in prefixes:
                self.seconds([[*prefix, *self.tokens(1)]], 1)
            prompts: list[list[int]] = []
            for index in range(seqs):
                prefix = rng.choice(prefixes)
                if index * 100 >= share * seqs:
                    prefix = self.tokens(len(prefix))
                prompts.append([*prefix, *self.tokens(max(1, rng.randint(16, 1024) // self._scale))])
            rng.shuffle(prompts)
            yield {"case": f"{share}% share", "share": share, **self.itl(prompts)}


def child(work: Row) -> int:
    """Run parts on one engine in this process, and append their rows."""
    if work["min_shared"] is not None:
        # The kernels and the rule of `explain` read it when they are imported.
        from phonograph.kernels import attention_scratch

        attention_scratch.MIN_SHARED = work["min_shared"]
    bench = Bench(work["settings"], work["scale"])
    parts = {"decode": bench.decode, "samples": bench.samples, "agents": bench.agents, "random": bench.random}
    parts |= {"fp8": bench.decode, "short": bench.short}
    for part in work["parts"]:
        for row in parts[part]():
            _append(Path(work["output"]), {"part": part, "engine": work["engine"], **row})
    return 0


def _append(path: Path, row: Row) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def serve(arguments: argparse.Namespace, rows: Path) -> None:
    """Load our server with and without sharing, and vLLM's, with one file of prompts."""
    from checks.serving.generated import make_model_folder

    folder, scale, rng = rows.parent, arguments.scale, random.Random(1)
    model = "demo" if arguments.dry_run else str(make_model_folder(Path(arguments.model), folder / "model"))
    prefix = [rng.randrange(5, 250) for _ in range(STREAM_PREFIX // scale)]
    prompts = folder / "prompts.jsonl"
    with prompts.open("w") as file:
        for _ in range(STREAM_PROMPTS // scale + 8):
            own = [rng.randrange(5, 250) for _ in range(STREAM_OWN // scale)]
            file.write(json.dumps({"prompt": prefix + own, "max_tokens": STREAM_TOKENS // scale}) + "\n")
    flags = [*_flags(arguments), "--max-num-seqs", str(STREAMS // scale)]
    ours = [sys.executable, "-m", "phonograph", "serve", model]
    servers = {"ours": ours, "ours, off": [*ours, "--cascade-attention", "off"]}
    if arguments.peer_python is not None:
        servers["vllm"] = [arguments.peer_python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    for name, command in servers.items():
        port = free_port()
        address = ["--host", "127.0.0.1", "--port", str(port)]
        server = ServerProcess(
            name,
            [*command, *address, *flags],
            url=f"http://127.0.0.1:{port}",
            log=folder / f"{name}.log",
            environment=_peer_environment() if name == "vllm" else dict(os.environ),
        )
        try:
            server.wait_until_ready(START_SECONDS, print)
            load = [sys.executable, "-m", "phonograph", "bench", "serve", "--base-url", server.url, "--json"]
            load += ["--dataset-name", "jsonl", "--dataset-path", str(prompts), "--ignore-eos", "--num-warmups", "8"]
            load += ["--num-prompts", str(STREAM_PROMPTS // scale), "--max-concurrency", str(STREAMS // scale)]
            done = subprocess.run(load, stdout=subprocess.PIPE, text=True, check=True)
            record = json.loads(done.stdout.splitlines()[-1])
            names = ("output_throughput", "median_ttft_ms", "median_itl_ms", "completed", "failed")
            _append(rows, {"part": "server", "engine": name, "case": "streams", **{key: record[key] for key in names}})
        finally:
            server.stop()


def _flags(arguments: argparse.Namespace) -> list[str]:
    """Return flags of both servers."""
    if arguments.dry_run:
        return ["--device", "cpu", "--max-model-len", "1024"]
    return ["--load-format", "dummy", "--max-model-len", "34000", "--gpu-memory-utilization", "0.85"]


def _peer_environment() -> dict[str, str]:
    return {**os.environ, "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def peer(arguments: argparse.Namespace, rows: Path) -> None:
    """Run the decodes of the issue's table in vLLM."""
    if arguments.peer_python is None or arguments.peer_script is None:
        print("peer: left out, without --peer-python and --peer-script")
        return
    found = rows.with_suffix(".peer.jsonl")
    found.unlink(missing_ok=True)
    command = [arguments.peer_python, arguments.peer_script, "vllm", arguments.model, str(found)]
    subprocess.run(command, env=_peer_environment(), check=True)
    for row in read_records([found]):
        name = f"{row['bs']} x ({row['shared']} + {row['own']})"
        _append(rows, {"part": "decode", "engine": "vllm", "case": name, "itl_ms": row["itl_ms"]})


def children(arguments: argparse.Namespace, parts: Sequence[str]) -> Iterator[Row]:
    """Yield the work of each engine of ours."""
    settings = {"model": arguments.model, "load_format": "dummy", "max_model_len": 34000, "max_num_seqs": 128}
    settings |= {"gpu_memory_utilization": 0.85, "seed": 0, "max_num_batched_tokens": 8192}
    if arguments.dry_run:
        settings = {"model": "demo", "device": "cpu", "max_num_seqs": 16, "max_num_batched_tokens": 512}
        settings["num_kv_blocks"] = 512
    common = [part for part in parts if part in ("decode", "samples", "agents", "random")]
    off = {"cascade_attention": "off"}
    fp8 = {"kv_cache_dtype": "fp8"}
    work: list[tuple[str, Sequence[str], Row, int | None]] = []
    if common:
        work += [("auto", common, {}, None), ("off", common, off, None)]
    if "fp8" in parts:
        work += [("auto, fp8", ["fp8"], fp8, None), ("off, fp8", ["fp8"], fp8 | off, None)]
    if "short" in parts:
        work += [(f"from {least} keys", ["short"], {}, least) for least in arguments.min_shared]
        work += [("off", ["short"], off, None)]
    for engine, names, changes, least in work:
        yield {"engine": engine, "parts": names, "settings": settings | changes, "min_shared": least}


def show(rows: Sequence[Row]) -> None:
    """Print a table for each part: a line for each case, a column for each engine."""
    for part in dict.fromkeys(row["part"] for row in rows):
        of_part = [row for row in rows if row["part"] == part]
        figure = {"samples": "ratio", "server": "output_throughput"}.get(part, "itl_ms")
        engines = list(dict.fromkeys(row["engine"] for row in of_part))
        table = Table(f"{part}: {figure}", *engines, "shared units")
        for case in dict.fromkeys(row["case"] for row in of_part):
            found = {row["engine"]: row for row in of_part if row["case"] == case}
            cells = [f"{found[engine][figure]:g}" if engine in found else "" for engine in engines]
            table.add_row(case, *cells, str(max(row.get("shared_units", 0) for row in found.values())))
        Console(width=110).print(table)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw times with sharing over those without, by the share of sequences that share."""
    times: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["part"] == "random":
            times.setdefault(row["engine"], {})[row["share"]] = row["itl_ms"]
    if not {"auto", "off"} <= times.keys():
        return
    try:
        from checks.bench_plots import line_chart, save
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    # The axis is logarithmic.
    line = [
        (max(share, 1), times["auto"][share] / times["off"][share]) for share in times["off"] if share in times["auto"]
    ]
    title = "64 decodes, prefixes attended once"
    save(
        line_chart(
            title, "percent of sequences that share a prefix", "time over that without", {"ms between tokens": line}
        ),
        path,
    )


def main() -> int:
    if sys.argv[1:2] == [CHILD]:
        return child(json.loads(sys.argv[2]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="folder with a config.json; demo in a dry run")
    parser.add_argument("--output", type=output_file, required=True, help="JSON file; rows lie beside it")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--min-shared", default="64,128,256,512", help="keys of the shortest prefix, for `short`")
    parser.add_argument("--peer-python", help="Python that has vLLM")
    parser.add_argument("--peer-script", help="script that times vLLM's decodes: SCRIPT vllm MODEL OUT.jsonl")
    parser.add_argument("--dry-run", action="store_true", help="small sizes of the demo model on a CPU")
    arguments = parser.parse_args()
    parts = arguments.parts.split(",")
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"--parts has {', '.join(unknown)}; known are {', '.join(PARTS)}")
    if arguments.model is None and not arguments.dry_run:
        parser.error("MODEL_DIR is required, or --dry-run")
    arguments.model = arguments.model or "demo"
    arguments.scale = 64 if arguments.dry_run else 1
    arguments.min_shared = [int(least) for least in arguments.min_shared.split(",")]
    from phonograph.bench.records.record import provenance

    origin, rows = provenance(), arguments.output.with_suffix(".jsonl").absolute()
    failed = 0
    for work in children(arguments, parts):
        whole = {**work, "scale": arguments.scale, "output": str(rows)}
        failed += subprocess.run([sys.executable, __file__, CHILD, json.dumps(whole)], check=False).returncode != 0
    if "server" in parts:
        serve(arguments, rows)
    if "peer" in parts:
        peer(arguments, rows)
    found = read_records([rows])
    write_result(arguments.output, origin, {"rows": found})
    show(found)
    plot(found, arguments.output.with_suffix(".svg"))
    return int(failed > 0)


if __name__ == "__main__":
    leave_at_sigterm()
    sys.exit(main())
