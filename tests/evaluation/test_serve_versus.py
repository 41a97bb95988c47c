"""The comparison of servers: what both are given, how they are run, and what is made of their records."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

from checks.processes import ServerProcess, free_port, portable
from checks.serving import faults, versus
from checks.serving.generated import make_model_folder, make_tokenizer
from phonograph.bench.serving import load
from phonograph.bench.serving.connection import Recording, Target
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import EndpointError, ModelError
from phonograph.text.tokenizer import load_tokenizer

Load = Callable[[str], ModuleType]

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 1200,
    "bos_token_id": 1000,
    "eos_token_id": [1001, 1008],
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


# What both are given


def test_every_token_of_a_made_tokenizer_is_text_of_its_own(config: Path, tmp_path: Path) -> None:
    (config / "config.json").write_text(
        json.dumps({**TINY, "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": 128009})
    )
    folder = make_model_folder(config, tmp_path / "made")
    made = load_tokenizer(EngineConfig(model=str(folder)))
    assert made is not None and made.vocab_size == len(made.hugging_face) == 128256
    assert (made.bos_token_id, made.eos_token_id, made.special_token_ids) == (128000, 128009, {128000, 128009})
    plain = [one for one in range(128256) if one not in made.special_token_ids]
    texts = [made.decode([one]) for one in plain]
    assert len(set(texts)) == len(plain) and all(text.isascii() and text for text in texts)
    # None waits for the next one.
    stream = made.stream(skip_special_tokens=True)
    assert "".join(stream.push(one) for one in plain[::7]) == "".join(texts[::7])
    assert all(stream.push(one) for one in plain[3::11])
    # Words are read as they were written.
    words = plain[-1000::13]
    assert made.encode(made.decode(words), add_special_tokens=False) == words
    again = make_model_folder(config, tmp_path / "again")
    assert (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_several_ends_of_sequence_and_vocabularies_that_cannot_be(config: Path, tmp_path: Path) -> None:
    made = load_tokenizer(EngineConfig(model=str(make_model_folder(config, tmp_path / "made"))))
    assert made is not None and (made.eos_token_id, made.special_token_ids) == (1001, {1000, 1001, 1008})
    for vocab_size, special in ((90, {}), (1200, {1200: "<end>"}), (2_000_000, {})):
        with pytest.raises(ModelError, match=f"vocab_size={vocab_size}"):
            make_tokenizer(vocab_size, special)
    (config / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="no configuration of a model with a vocab_size"):
        make_model_folder(config, tmp_path / "made")


# How they are run


def _server(tmp_path: Path, program: str) -> ServerProcess:
    port = free_port()
    command = [sys.executable, "-c", program, str(port)]
    url = f"http://127.0.0.1:{port}"
    return ServerProcess("it", command, url=url, log=tmp_path / "log", environment=os.environ)


def test_a_failed_start_is_reported_with_the_end_of_the_log(tmp_path: Path) -> None:
    ended = _server(tmp_path, "print('no kernel image\\n'); raise SystemExit(3)")
    with pytest.raises(EndpointError, match="it ended with 3 while it started; its log ends: no kernel image"):
        ended.wait_until_ready(30, print)
    assert ended.stop() == 3
    hangs = _server(tmp_path, "import time; print('loading', flush=True); time.sleep(60)")
    with pytest.raises(EndpointError, match="it was not ready after 1 s; its log ends: loading"):
        hangs.wait_until_ready(1, print)
    assert hangs.stop() == -signal.SIGTERM


def test_child_processes_end_with_their_server(tmp_path: Path) -> None:
    program = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"])
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
    server = _server(tmp_path, program)
    assert 0 < server.wait_until_ready(30, print) < 30 and server.health() == 200
    (child,) = psutil.Process(server.pid).children()
    assert server.stop() == -signal.SIGTERM and server.health() is None
    until = time.monotonic() + 10
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)


def test_commands_have_no_paths_of_this_machine() -> None:
    assert portable(["/usr/bin/python3", "-m", "x", "/tmp/a b/model", "--n", "1"]) == "python3 -m x model --n 1"


def _settings(script: ModuleType, tmp_path: Path, **changes: Any) -> Any:
    values: dict[str, Any] = {
        "config": Path("tiny"),
        "folder": tmp_path,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "gpu_memory_utilization": 0.85,
        "our_flags": ("--max-num-seqs", "8"),
        "peer_flags": ("--attention-backend", "TRITON_ATTN"),
        "peer_command": (),
        "peer_site": (Path("/vllm"), Path("/ours")),
        "table_prompts": 100,
        "table_rate": 50.0,
        "repeats": 3,
        "concurrencies": (32, 256),
        "prompts_per_stream": 6,
        "temperature": 0,
        "streams": 256,
        "stream_lens": (512, 256),
        "checks": True,
        "start_timeout": 60,
        "client_timeout": 60,
    }
    return script.Settings(**{**values, **changes})


def test_both_sides_get_the_same(benchmark_script: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    script = benchmark_script("serve_vs_vllm")
    settings = _settings(script, tmp_path)
    ours, peer = (settings.server_command(side, 8123) for side in ("ours", "peer"))
    common = "--load-format dummy --dtype bfloat16 --max-model-len 4096 --gpu-memory-utilization 0.85"
    address = "--host 127.0.0.1 --port 8123 --served-model-name bench"
    assert " ".join(ours[1:]).startswith(f"-m phonograph serve {tmp_path}/model {address} ")
    assert " ".join(ours).endswith(f"{common} --max-num-seqs 8")
    model = f"-m vllm.entrypoints.openai.api_server --model {tmp_path}/model"
    # The last one counts, so what is asked for goes before the default.
    chosen = "--attention-backend FLASH_ATTN --attention-backend TRITON_ATTN"
    assert " ".join(peer[1:]) == f"{model} {address} {common} {chosen}"
    environment = settings.environment("peer")
    assert environment["PYTHONPATH"] == "/vllm:/ours" and environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment["HF_HUB_OFFLINE"] == "0" and "VLLM_NO_USAGE_STATS" not in settings.environment("ours")
    other = _settings(script, tmp_path, peer_command=("serve", "{model}", "--port={port}", '{"a": 1}'))
    assert other.server_command("peer", 1) == ["serve", f"{tmp_path}/model", "--port=1", '{"a": 1}']

    jobs, theirs = settings.jobs("ours"), settings.jobs("peer")
    labels = [job[job.index("--label") + 1] for job in jobs]
    tables, streams = ([f"{name} {number}" for number in (1, 2, 3)] for name in ("table", "streams"))
    assert labels == ["warm-up", *tables, "sweep 32", "sweep 256", *streams]
    assert theirs == jobs[: len(theirs)] and len(theirs) == len(jobs) - 3
    seeds = [job[job.index("--seed") + 1] for job in jobs]
    assert len(set(seeds)) == len(seeds), "a prompt asked for twice is cached"
    assert " ".join(jobs[1]).startswith(
        "--dataset-name sharegpt-like --temperature 0 --num-prompts 100 --request-rate 50.0"
    )
    assert "--num-prompts 1536 --max-concurrency 256" in " ".join(jobs[5])
    asked = "--num-prompts 256 --input-len 512 --output-len 256"
    assert " ".join(jobs[-1]).startswith(asked) and f"--model tiny --json {asked}" in " ".join(settings.offline_command)


STUB = """
import json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        say = {"/version": {"version": "9.9"}, "/v1/models": {"data": [{"id": "bench", "max_model_len": 2048}]}}
        self.answer(json.dumps(say.get(self.path, {})))

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count = asked["max_tokens"]
        def choice(end=None):
            return {"choices": [{"index": 0, "text": " x", "finish_reason": end}]}
        chunks = [choice()] * (count - 1) + [choice("length")]
        chunks.append({"choices": [], "usage": {"prompt_tokens": len(asked["prompt"]), "completion_tokens": count}})
        self.answer("".join(f"data: {json.dumps(chunk)}\\n\\n" for chunk in chunks) + "data: [DONE]\\n\\n")

    def answer(self, text):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass

ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.long
def test_servers_are_run_and_compared(
    benchmark_script: Load, config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ours with all its checks, beside a stub that computes nothing; then again, from what they left."""
    script = benchmark_script("serve_vs_vllm")
    (tmp_path / "stub.py").write_text(STUB)
    small = "--max-num-seqs 4 --cudagraph-capture-sizes 1,4,16"
    flags = ["--model", str(config), "--folder", str(tmp_path / "runs"), "--output", str(tmp_path / "result.json")]
    flags += ["--dtype", "float32", "--max-model-len", "16384", "--our-flags", small, "--table-prompts", "6"]
    flags += ["--repeats", "1", "--concurrencies", "2", "--prompts-per-stream", "2"]
    flags += ["--streams", "4", "--stream-lens", "16", "8", "--checks"]
    script.main([*flags, "--peer-command", f"{sys.executable} {tmp_path}/stub.py {{port}}"])
    result = json.loads((tmp_path / "result.json").read_text())
    assert {"date", "commit", "hardware", "versions", "command"} < result.keys()
    assert str(tmp_path) not in json.dumps(result) and result["model"] == "tiny"
    ours, peer = result["sides"]["ours"], result["sides"]["peer"]
    assert ours["problems"] == peer["problems"] == [] and peer["version"] == "9.9"
    assert result["checks"] == {"disconnect": True, "drain": True, "kill": True}, ours["checks"]
    assert ours["checks"]["drain"]["exit_code"] == 0 and ours["checks"]["kill"]["exit_code"] == 1
    assert ours["start_seconds"] > peer["start_seconds"] > 0 and ours["second_start_seconds"] > 0
    assert [record["label"] for record in peer["records"]] == ["warm-up", "table 1", "sweep 2"]
    for own, theirs in zip(ours["records"], peer["records"], strict=False):
        same = ("label", "seed", "total_input_tokens", "total_output_tokens", "completed")
        assert [own[name] for name in same] == [theirs[name] for name in same]
    assert {"date", "label", "p99_itl_ms", "max_concurrent_requests"} < peer["records"][1].keys()
    rows = {(row["workload"], row["figure"]): row for row in result["comparison"]}
    assert rows["sweep", "output_throughput"]["least"] == 1.1 and not rows["sweep", "output_throughput"]["pass"]
    assert rows["streams", "output_throughput"]["other"] == pytest.approx(ours["offline"]["output_throughput"], abs=0.1)
    assert result["bars"] == sum("pass" in row for row in result["comparison"])
    capfd.readouterr()

    # A side that ended well is kept; one that fails costs only its own.
    (tmp_path / "runs" / "peer.json").unlink()
    script.main([*flags, "--skip-existing", "--peer-command", f"{sys.executable} -c 'raise SystemExit(7)'"])
    again = json.loads((tmp_path / "result.json").read_text())
    kept = {name: value for name, value in ours.items()}
    assert again["sides"]["ours"] == kept and "peer ended with 7" in again["sides"]["peer"]["problems"][0]
    assert {row["workload"] for row in again["comparison"]} == {"streams"}
    assert "peer: peer ended with 7 while it started" in capfd.readouterr().out


# What is made of their records


def test_ratios_and_bars() -> None:
    peer = {"duration": 10.0, "output_throughput": 1000.0, "median_itl_ms": 11.0, "p99_itl_ms": 40.0, "p99_tpot_ms": 9}
    ours = {"duration": 9.9, "output_throughput": 1099.0, "median_itl_ms": 10.0, "p99_itl_ms": 41.0, "p99_tpot_ms": 10}
    table = {row["figure"]: row for row in versus.compare(versus.TABLE, "", ours, peer)}
    assert {name: row["pass"] for name, row in table.items()} == {
        **{"duration": True, "output_throughput": True, "median_itl_ms": True},
        **{"p99_itl_ms": False, "p99_tpot_ms": False},
    }
    assert table["median_itl_ms"]["ratio"] == table["median_itl_ms"]["least"] == 1.1
    assert table["output_throughput"]["ratio"] == 1.099
    assert not versus.compare(versus.TABLE, "", {**ours, "median_itl_ms": 10.02}, peer)[2]["pass"]
    sweep = {row["figure"]: row for row in versus.compare(versus.SWEEP, "32", ours, peer)}
    assert (sweep["output_throughput"]["pass"], sweep["median_itl_ms"]["pass"]) == (False, True)
    assert "pass" not in sweep["p99_tpot_ms"] and "pass" not in sweep["duration"]
    assert versus.summarise(sweep.values()) == {"bars": 3, "passed": 1}
    for loss, passes in ((0.05, True), (0.06, False)):
        slower = {"output_throughput": 1000 * (1 - loss), "median_itl_ms": 11 * (1 + loss), "duration": 99.0}
        found = versus.compare(versus.STREAMS, "offline", slower, peer)
        assert [row["pass"] for row in found] == [passes, passes]
    assert versus.compare(versus.SWEEP, "1", {"duration": None}, peer) == []


def test_repeated_runs_count_by_their_medians() -> None:
    runs = [{"duration": seconds, "p99_itl_ms": itl} for seconds, itl in ((3.0, 9.0), (1.0, None), (2.0, 7.0))]
    assert versus.medians(runs) == {"duration": 2.0}
    assert versus.medians(runs[::2]) == {"duration": 2.5, "p99_itl_ms": 8.0} and versus.medians([]) == {}


def test_caveats_are_listed() -> None:
    clean = {"error_counts": {}, "chunks_per_output_token": 1.01, "client_cpu_share": 0.3, "total_cached_tokens": 0}
    assert versus.caveats("ours", [{**clean, "label": "table 1"}]) == []
    record = {**clean, "label": "sweep 32", "chunks_per_output_token": 0.5, "client_cpu_share": 0.9}
    notes = versus.caveats("peer", [{**record, "error_counts": {"HTTP 500: no": 2}, "total_cached_tokens": 64}])
    assert notes[0] == "peer, sweep 32: 2 failed: HTTP 500: no" and "0.500 chunks" in notes[1]
    assert "90%" in notes[2] and "64 prompt tokens came from the prefix cache" in notes[3]


class Blocks:
    """Observations of a server whose cut streams give their blocks back `late` steps after the abort."""

    def __init__(self, late: int, leak: int = 0) -> None:
        self.late, self.leak = late, leak
        self.open: list[int] = []
        self.cut = 0
        self.step = 100
        self.steps: list[dict[str, float]] = []

    async def post(self, _: Target, *, prompt_len: int = 16, output_len: int) -> Recording:
        self.open.append(prompt_len)
        if prompt_len > 16:
            try:
                await faults.asyncio.sleep(60)
            finally:
                self.cut += 1
        while not self.cut:
            await faults.asyncio.sleep(0.001)
        self.open.clear()
        usage = {"prompt_tokens": 16, "completion_tokens": output_len}
        chunks = [{"choices": [{"text": " x", "finish_reason": "length"}]}, {"choices": [], "usage": usage}]
        pieces = [f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks]
        return Recording(start=0.0, status=200, times=[1.0, 1.0], pieces=pieces)

    async def metrics(self, _: Target) -> dict[str, float]:
        if self.cut:
            self.step += 1
            self.steps.append({"time": time.time(), "decodes": 4 if self.step - 102 < self.late else 1})
        await faults.asyncio.sleep(0)
        back = self.cut and self.step - 101 >= self.late
        used = 2 + (self.leak if back else 3 * 64)
        return {"usage": used / 1000, "steps": self.step, "aborted": self.cut}

    async def graphs(self, _: Target, *, last: int) -> dict[str, Any]:
        if self.cut:
            self.step += 5
        await faults.asyncio.sleep(0)
        running = 0 if self.cut and not self.open else len(self.open)
        engine = {"kv_block_size": 16, "kv_blocks": 1000, "max_num_seqs": 4, "running": running}
        steps = [{"time": 0.0, "decodes": len(self.open)}, *self.steps]
        return {"engine": {**engine, "kv_blocks_used": self.leak if self.cut else 2}, "steps": steps}


@pytest.mark.parametrize(
    ("late", "leak", "says"),
    [(0, 0, None), (2, 0, None), (3, 0, "3 steps after the abort"), (1, 5, "5 blocks are in use without a request")],
)
def test_blocks_that_come_back_late_are_found(
    late: int, leak: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(late, leak)
    monkeypatch.setattr(faults, "_post", blocks.post)
    monkeypatch.setattr(faults, "_metrics", blocks.metrics)
    monkeypatch.setattr(faults, "_graphs", blocks.graphs)
    seen = load.run(faults.try_disconnect(Target.parse("http://127.0.0.1:1"), prompt_len=1024, output_len=900))
    assert seen["streams_cut"] == 3 and seen["steps_from_abort_to_blocks"] == late
    assert [says in problem for problem in seen["problems"]] == [True] if says else seen["problems"] == []


@pytest.mark.parametrize(
    ("long_enough", "error", "scale", "says"),
    [
        (300, None, 4, []),
        (3000, None, 8, ["streams ended before all decoded: ['complete']"]),
        (300, "refused", 1, ["streams ended before all decoded: ['refused']"]),
    ],
)
def test_streams_that_end_unseen_are_started_again(
    long_enough: int, error: str | None, scale: int, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that sees the engine only after short streams have ended starts them again, with more tokens."""
    running, started = list[int](), list[int]()

    async def post(_: Target, *, prompt_len: int, output_len: int) -> Recording:
        started.append(output_len)
        if output_len < long_enough:
            return Recording(error=error)
        running.append(prompt_len)
        try:
            await faults.asyncio.sleep(60)
        finally:
            running.remove(prompt_len)
        return Recording()

    async def graphs(_: Target, *, last: int) -> dict[str, Any]:
        await faults.asyncio.sleep(0.001)
        engine = {"running": len(running), "waiting": 0, "kv_blocks_used": len(running)}
        return {"engine": engine, "steps": [{"decodes": len(running)}]}

    monkeypatch.setattr(faults, "_post", post)
    monkeypatch.setattr(faults, "_graphs", graphs)
    problems: list[str] = []

    async def start() -> tuple[list[bool], int]:
        target = Target.parse("http://127.0.0.1:1")
        streams, scale = await faults.start_together(target, lambda scale: [(16, 100 * scale), (32, 5000)], problems)
        return [one.done() for one in streams], scale

    assert load.run(start()) == ([says != [], False], scale) and problems == says
    attempts = [1, 2, 4, 8][: scale.bit_length()]
    assert started == [length for attempt in attempts for length in (100 * attempt, 5000)]


def test_a_server_ends_with_a_program_that_a_time_limit_ends(tmp_path: Path) -> None:
    program = """
import os, sys, time
from pathlib import Path
from checks.processes import ServerProcess, leave_at_sigterm
leave_at_sigterm()
server = ServerProcess("it", ["sleep", "60"], url="", log=Path(sys.argv[1]), environment=os.environ)
try:
    print(server.pid, flush=True)
    time.sleep(60)
finally:
    server.stop()
"""
    path = f"{Path(__file__).parents[2] / 'benchmarks'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", program, str(tmp_path / "log")]
    environment = {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        parent.terminate()
        assert parent.wait(30) == 128 + signal.SIGTERM
    assert not server.is_running()
