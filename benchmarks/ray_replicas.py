"""Replicas of the demo model on a Ray cluster: a kill, a rolling update, a scale-down, throughput, Ray's own times.

Needs the extra `ray` and a cluster of its own with 8 CPUs or more:

    ray start --head --num-cpus 8
    python benchmarks/ray_replicas.py --output benchmarks/results/ray_replicas.json

Parts of it by their names: kill, update, scale-down, scale-up, drain, conversations, throughput, overhead.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import ray
import yaml
from ray import serve

from phonograph.bench.records.record import provenance
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.server.cluster import ray_deployment

ROOT = Path(__file__).resolve().parents[1]
PORT, DIRECT_PORT = 8123, 8124
URL = f"http://127.0.0.1:{PORT}"
NAME = "phonograph"
SETTINGS: dict[str, Any] = {
    **{"device": "cpu", "max_num_seqs": 8, "num_kv_blocks": 512, "max_model_len": 1024},
    "cudagraph_capture_sizes": (1, 2, 4, 8),
}
STREAMS = 18
NUM_REQUESTS = 1000
STEP_SECONDS = 0.3
"""Sleep of each step of an engine that sleeps."""


class SleepingReplica(ray_deployment.Replica):
    """Replica whose steps sleep, so that replicas on few cores do not wait for each other."""

    async def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        from phonograph.engine.process.thread_client import ThreadClient
        from phonograph.runner.runner import Runner
        from phonograph.server.http import run

        submit = Runner.submit

        def sleep_and_submit(runner: Runner, batch: Any) -> Any:
            time.sleep(STEP_SECONDS)
            return submit(runner, batch)

        Runner.submit = sleep_and_submit
        run.start_processes = lambda config, log_settings: ThreadClient(config)
        await super().__init__(engine, server)


def deploy(replicas: str, **settings: Any) -> None:
    """Run or update the application, and wait until it is ready."""
    server = {name: settings.pop(name) for name in list(settings) if name in ServerConfig.model_fields}
    engine = EngineConfig(**{"model": "demo", **SETTINGS, **settings})
    serve.run(ray_deployment.make_application(engine, ServerConfig(**server), replicas), name=NAME, route_prefix="/")


def actors() -> dict[str, tuple[Any, int]]:
    """Return handle and process of each replica."""
    from ray.util.state import list_actors

    found = list_actors(filters=[("state", "=", "ALIVE")], detail=True)
    replicas = {one.name: one.pid for one in found if one.class_name.startswith(f"ServeReplica:{NAME}")}
    return {name: (ray.get_actor(name, namespace="serve"), pid) for name, pid in replicas.items()}


async def complete(client: httpx.AsyncClient, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """Return the last chunk of a stream; raise an error if it has no end or another one than the usual."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    last, ended = {}, False
    async with client.stream("POST", f"{URL}/v1/completions", json={**body, **options, **more}) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                last = json.loads(line[6:])
                if "error" in last:
                    raise RuntimeError(last["error"]["message"])
    if not ended or last["usage"]["completion_tokens"] != max_tokens:
        raise RuntimeError("the stream ended early")
    return last


async def load(
    number: int, streams: int, max_tokens: int, meanwhile: Callable[[], Awaitable[Any]] | None = None
) -> dict[str, Any]:
    """Complete prompts, some at a time, and more while something runs that begins after a quarter of them."""
    failed: list[str] = []
    done: list[int] = []
    left = itertools.count()
    quarter, ended = asyncio.Event(), asyncio.Event()
    began = time.monotonic()

    async def work(client: httpx.AsyncClient) -> None:
        for index in left:
            if index >= number // 4:
                quarter.set()
            if index >= number and ended.is_set():
                return
            try:
                await complete(client, f"{index} apples and {index * 7} pears are", max_tokens)
            except (httpx.HTTPError, RuntimeError) as error:
                failed.append(f"{type(error).__name__}: {error}")
            done.append(index)

    async def act() -> Any:
        await quarter.wait()
        if meanwhile is None:
            ended.set()
            return {}
        before, names = len(done), set(actors())
        try:
            found = await meanwhile()
        finally:
            ended.set()
        gone = len(names - set(actors()))
        return {**(found or {}), "done_before": before, "done_until_its_end": len(done), "replicas_gone": gone}

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as client:
        *_, found = await asyncio.gather(*(work(client) for _ in range(streams)), act())
    seconds = time.monotonic() - began
    facts = {"requests": len(done), "failed": len(failed), "seconds": round(seconds, 2), **found}
    return {**facts, "errors": sorted(set(failed)), "tokens_per_second": round(len(done) * max_tokens / seconds, 1)}


def kill() -> dict[str, Any]:
    """Kill one of three replicas under load: streams of others must end as usual."""
    deploy("3")

    async def act() -> dict[str, int]:
        await asyncio.sleep(1)
        replicas = actors()
        open_requests = {name: ray.get(one.get_num_ongoing_requests.remote()) for name, (one, _) in replicas.items()}
        name = max(open_requests, key=open_requests.__getitem__)
        os.kill(replicas[name][1], signal.SIGKILL)
        return {"open_on_killed": open_requests[name], "open": sum(open_requests.values())}

    found = asyncio.run(load(150, STREAMS, 200, act))
    until = time.monotonic() + 90
    while len(actors()) < 3 and time.monotonic() < until:
        time.sleep(1)
    return {**found, "replicas_after": len(actors())}


def update() -> dict[str, Any]:
    """Replace all of three replicas under load."""
    deploy("3")
    return asyncio.run(load(NUM_REQUESTS, STREAMS, 24, lambda: asyncio.to_thread(deploy, "3", max_logprobs=5)))


def deploy_file(replicas: int) -> None:
    """Run the application by `serve deploy`, or change the number of its replicas, which keeps the others."""
    file = yaml.safe_load((ROOT / "deploy/ray-serve.yaml").read_text(encoding="utf-8"))
    file["http_options"] = {"host": "127.0.0.1", "port": PORT}
    file["applications"][0]["args"] = {"model": "demo", **SETTINGS}
    file["applications"][0]["deployments"] = [{"name": NAME, "num_replicas": replicas}]
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as written:
        json.dump(file, written)
        written.flush()
        subprocess.run(["serve", "deploy", written.name], check=True, capture_output=True)
    until = time.monotonic() + 120
    while time.monotonic() < until:
        status = serve.status().applications.get(NAME)
        if status is not None and status.status == "RUNNING" and len(actors()) == replicas:
            return
        time.sleep(0.5)
    raise RuntimeError(f"{replicas} replicas do not run: {serve.status()}")


def scale_down() -> dict[str, Any]:
    """Remove two of three replicas under load."""
    deploy_file(3)
    return asyncio.run(load(NUM_REQUESTS, STREAMS, 24, lambda: asyncio.to_thread(deploy_file, 1)))


def scale_up() -> dict[str, Any]:
    """Load one of one to three replicas with more requests than slots. Ray waits 30 s before it starts others."""
    deploy("1-3")
    began = time.monotonic()

    async def act() -> dict[str, Any]:
        while len(await asyncio.to_thread(actors)) < 3 and time.monotonic() < began + 120:
            await asyncio.sleep(1)
        return {"seconds_until_three": round(time.monotonic() - began, 1)}

    return asyncio.run(load(300, STREAMS, 200, act))


def drain() -> dict[str, Any]:
    """Replace a replica whose stream outlasts the grace period: it must end with an error."""
    deploy("1", shutdown_timeout=1)
    began = time.monotonic()

    async def stream() -> str:
        async with httpx.AsyncClient(timeout=300) as client:
            update = asyncio.create_task(asyncio.to_thread(deploy, "1", shutdown_timeout=1, max_logprobs=5))
            ends: list[str] = []
            while not update.done() and not ends:
                try:
                    await complete(client, "Tom has 12 apples.", 950)
                except (httpx.HTTPError, RuntimeError) as error:
                    ends.append(f"{type(error).__name__}: {error}")
            await update
            return ", ".join(ends)

    return {"error": asyncio.run(stream()), "seconds": round(time.monotonic() - began, 1)}


def conversations() -> dict[str, Any]:
    """Share of prompt tokens of 12 conversations of 4 turns that the replicas have cached; at most 3 of 4 turns."""
    deploy("3")

    async def talk() -> tuple[int, int]:
        cached = tokens = 0
        async with httpx.AsyncClient(timeout=300) as client:
            for turn in range(1, 5):
                texts = [f"Conversation {number} counts apples. " * 8 * turn for number in range(12)]
                for last in await asyncio.gather(*(complete(client, text, 4) for text in texts)):
                    cached += last["usage"]["prompt_tokens_details"]["cached_tokens"]
                    tokens += last["usage"]["prompt_tokens"]
        return cached, tokens

    cached, tokens = asyncio.run(talk())
    return {"cached": cached, "tokens": tokens, "share": round(cached / tokens, 3)}


def throughput() -> dict[str, Any]:
    """Tokens a second of one and of three replicas whose steps sleep."""
    usual, ray_deployment.Replica = ray_deployment.Replica, SleepingReplica
    try:
        rates = {}
        for replicas in (1, 3):
            deploy(str(replicas), seed=replicas)
            asyncio.run(load(replicas * 8, replicas * 8, 4))
            rates[replicas] = asyncio.run(load(replicas * 16, replicas * 8, 24))["tokens_per_second"]
    finally:
        ray_deployment.Replica = usual
    return {"one": rates[1], "three": rates[3], "ratio": round(rates[3] / rates[1], 2)}


def overhead() -> dict[str, Any]:
    """Latencies of a replica behind Ray's proxy, and of a server with equal settings, in turns."""
    deploy("1")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items() if not isinstance(value, tuple)]
    words += ["--cudagraph-capture-sizes=1,2,4,8", f"--port={DIRECT_PORT}"]
    server = subprocess.Popen([sys.executable, "-m", "phonograph", "serve", "demo", *words])
    times: dict[str, dict[str, list[float]]] = {}
    try:
        while True:
            try:
                httpx.get(f"http://127.0.0.1:{DIRECT_PORT}/health").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.5)
        for streams in (1, 8):
            for _ in range(5):
                for name, port in (("direct", DIRECT_PORT), ("ray", PORT)):
                    run = [sys.executable, "-m", "phonograph", "bench", "serve", f"--port={port}", "--json"]
                    run += [f"--max-concurrency={streams}", f"--num-prompts={streams * 20}", "--input-len=64"]
                    done = subprocess.run([*run, "--output-len=32"], check=True, capture_output=True, text=True)
                    record = json.loads(done.stdout.splitlines()[-1])
                    for key in ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"):
                        times.setdefault(f"{name} {streams}", {}).setdefault(key, []).append(record[key])
    finally:
        server.terminate()
        server.wait()
    return {
        run: {key: round(statistics.median(values), 2) for key, values in found.items()} for run, found in times.items()
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "kill": kill,
    "update": update,
    "scale-down": scale_down,
    "scale-up": scale_up,
    "drain": drain,
    "conversations": conversations,
    "throughput": throughput,
    "overhead": overhead,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="parts to run; default: all")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    origin = provenance()
    origin["versions"]["ray"] = ray.__version__
    ray.init(address="auto", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    found: dict[str, Any] = {}
    for name in arguments.parts or PARTS:
        found[name] = PARTS[name]()
        print(name, json.dumps(found[name]), flush=True)
    serve.shutdown()
    if arguments.output is not None:
        arguments.output.write_text(json.dumps({**origin, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
