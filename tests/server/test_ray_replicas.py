"""Replicas on Ray, with stand-ins for Ray's modules. `benchmarks/ray_replicas.py` runs them on a cluster."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections import Counter, deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError, PhonographError
from phonograph.server.cluster import ray_deployment
from phonograph.server.http import run

DEPLOY = Path(__file__).parents[2] / "deploy"
SETTINGS: dict[str, Any] = {"model": "demo", "device": "cpu"}


class FakeRequestRouter:
    """Base class of request routers."""

    def __init__(self) -> None:
        self.initialize_state()  # pyright: ignore[reportAttributeAccessIssue]

    def update_replicas(self, replicas: list[Any]) -> None:
        self.replicas = replicas

    def on_replica_actor_died(self, replica_id: Any) -> None:
        self.replicas = [one for one in self.replicas if one.replica_id != replica_id]


class FakeServe(ModuleType):
    """Ray Serve that keeps the options of a deployment."""

    def deployment(self, **options: Any) -> Any:
        return lambda cls: SimpleNamespace(bind=lambda *args: SimpleNamespace(cls=cls, args=args, **options))

    def ingress(self) -> Any:
        return lambda cls: cls


@pytest.fixture
def actor() -> SimpleNamespace:
    """The actor of this process: a proxy, or a replica."""
    return SimpleNamespace(http_proxy=SimpleNamespace(asgi_receive_queues={}))


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch, actor: SimpleNamespace) -> ModuleType:
    modules = {name: ModuleType(name) for name in ("ray", "ray._private", "ray._private.worker")}
    modules["ray.serve"] = FakeServe("ray.serve")
    modules["ray.serve.request_router"] = ModuleType("ray.serve.request_router")
    vars(modules["ray"])["__version__"] = f"{ray_deployment.RAY}.3"
    vars(modules["ray._private.worker"])["global_worker"] = SimpleNamespace(actors={7: actor}, actor_id=7)
    vars(modules["ray.serve.request_router"])["RequestRouter"] = FakeRequestRouter
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules["ray"]


@pytest.fixture
def router(ray: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    name = "phonograph.server.cluster.prefix_router"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.0)
    return module.PrefixRouter()


def replica(number: int, **stats: int) -> SimpleNamespace:
    return SimpleNamespace(replica_id=f"replica {number}", routing_stats=stats)


class Requests:
    """Sends requests by a router, whose proxy has their bodies."""

    def __init__(self, router: Any, actor: SimpleNamespace) -> None:
        self.router, self.queues, self.number = router, actor.http_proxy.asgi_receive_queues, 0

    async def send(self, text: str, *, whole: bool = True) -> tuple[str, str]:
        """Return the id of a request, and that of its replica."""
        self.number += 1
        key = str(self.number)
        body = json.dumps({"model": "demo", "prompt": text}).encode()
        messages = [{"type": "http.request", "body": body[:9], "more_body": True}]
        messages += [{"type": "http.request", "body": body[9:]}] if whole else []
        self.queues[key] = SimpleNamespace(_message_queue=deque(messages))
        pending = SimpleNamespace(metadata=SimpleNamespace(internal_request_id=key), future=asyncio.Future[Any]())
        (chosen,), others = await self.router.choose_replicas(self.router.replicas, pending)
        assert {one.replica_id for one in (chosen, *others)} == {one.replica_id for one in self.router.replicas}
        pending.future.set_result(chosen)
        self.router.on_request_routed(pending, chosen.replica_id, None)
        return key, chosen.replica_id

    def open(self) -> list[int]:
        return [engine.num_open for engine in self.router._router._engines.values()]


def test_conversations_keep_their_replica_and_are_spread(router: Any, actor: SimpleNamespace) -> None:
    async def talk() -> None:
        router.update_replicas([replica(number) for number in range(3)])
        requests = Requests(router, actor)
        places: dict[int, str] = {}
        for turn in range(1, 4):
            keys = []
            for number in range(6):
                key, place = await requests.send(f"Conversation {number} has many words. " * 4 * turn)
                assert places.setdefault(number, place) == place
                keys.append((key, place))
            assert requests.open() == [2, 2, 2]
            for key, place in keys:
                router.on_request_completed(place, key)
            assert requests.open() == [0, 0, 0]
        assert Counter(places.values()) == {f"replica {number}": 2 for number in range(3)}
        # A body that has not come is routed by load.
        assert {(await requests.send("x" * 200, whole=False))[1] for _ in range(3)} == set(places.values())

    asyncio.run(talk())


def test_refusals_and_clients_that_leave_are_not_counted(router: Any, actor: SimpleNamespace) -> None:
    async def send() -> None:
        router.update_replicas([replica(0), replica(1)])
        requests = Requests(router, actor)
        pending = SimpleNamespace(metadata=SimpleNamespace(internal_request_id="a"), future=asyncio.Future[Any]())
        await router.choose_replicas(router.replicas, pending)
        await router.choose_replicas(router.replicas, pending)
        assert sum(requests.open()) == 1, "a second choice replaces the first"
        first = router._chosen["a"]
        router.on_request_routed(pending, f"replica {1 - first}", None)
        assert requests.open() == [first, 1 - first]
        router.on_request_completed(f"replica {first}", "a")  # the one that has refused it
        assert sum(requests.open()) == 1
        router.on_request_completed(f"replica {1 - first}", "a")
        pending.future = asyncio.Future()
        await router.choose_replicas(router.replicas, pending)
        pending.future.cancel()
        await asyncio.sleep(0)
        assert requests.open() == [0, 0] and router._chosen == {}

    asyncio.run(send())


def test_replicas_come_and_go(router: Any, actor: SimpleNamespace) -> None:
    async def send() -> None:
        router.update_replicas([replica(0), replica(1)])
        requests = Requests(router, actor)
        key, place = await requests.send("y" * 300)
        router.on_replica_actor_died(place)
        assert (await requests.send("y" * 300))[1] != place
        router.update_replicas([replica(2)])
        assert (await requests.send("y" * 300))[1] == "replica 2"
        router.on_request_completed(place, key)
        assert len(router._sent) == len(router._numbers) == 1 and key not in router._chosen
        # One that has no blocks left is passed over.
        full = replica(2, num_waiting=3, blocks_used=99, num_blocks=100, kv_tokens=1600)
        router.update_replicas([full, replica(3)])
        assert (await requests.send("y" * 300))[1] == "replica 3"

    asyncio.run(send())


def test_the_oldest_bodies_are_forgotten(router: Any, actor: SimpleNamespace) -> None:
    async def send() -> None:
        # 4 blocks of 64 bytes.
        one = replica(0, num_waiting=0, blocks_used=0, num_blocks=4, kv_tokens=64)
        router.update_replicas([one])
        requests = Requests(router, actor)
        for text in ("a" * 200, "b" * 200):
            await requests.send(text)
        (blocks,) = [engine.blocks for engine in router._router._engines.values()]
        assert len(blocks) == 4 and blocks == set(router._sent[0])

    asyncio.run(send())


def test_replicas_of_files_and_flags(ray: ModuleType) -> None:
    made = ray_deployment.build({**SETTINGS, "replicas": "1-4", "max_num_seqs": 8, "shutdown_timeout": 5})
    assert made.ray_actor_options == {"num_cpus": 1} and made.max_ongoing_requests == 16
    assert made.autoscaling_config["min_replicas"] == 1 and made.autoscaling_config["max_replicas"] == 4
    assert made.graceful_shutdown_timeout_s == 15 and made.args[1].shutdown_timeout == 5
    made = ray_deployment.build({"model": "demo", "tensor_parallel_size": 2, "data_parallel_size": 2})
    assert made.ray_actor_options == {"num_gpus": 4} and made.num_replicas == 1
    for policy in (made.request_router_config["request_router_class"], "ray_deployment:scale"):
        module, _, name = policy.rpartition(".")[2].partition(":")
        assert f"{name}" in (Path(ray_deployment.__file__).parent / f"{module}.py").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"replicas": "0-2"}, r"replicas='0-2': must be a number of replicas, or a range"),
        ({"replicas": "3-2"}, r"replicas='3-2'"),
        ({"port": 9000}, r"port=9000: is for a server without Ray; http_options"),
        ({"max_seqs": 9}, r"max_seqs"),
    ],
)
def test_wrong_settings_are_refused(args: dict[str, Any], words: str, ray: ModuleType) -> None:
    with pytest.raises(ConfigError, match=words):
        ray_deployment.build({**SETTINGS, **args})


def test_a_missing_ray_and_another_version(
    monkeypatch: pytest.MonkeyPatch, ray: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    vars(ray)["__version__"] = "2.61.0"
    with pytest.raises(ConfigError, match=r"ray 2.61.0.*is not Ray 2.60, whose alpha interfaces.*RequestRouter"):
        ray_deployment.build(SETTINGS)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["deploy", "demo", "--device", "cpu", "--replicas", "2"]) == 2
    assert "pip install 'phonograph[ray]'" in capsys.readouterr().err


def test_scaling_by_requests_and_kv_caches() -> None:
    def context(requests: float, **stats: dict[str, float]) -> SimpleNamespace:
        return SimpleNamespace(total_num_requests=requests, aggregated_metrics=stats)

    slots = {"a": 8.0, "b": 8.0}
    assert ray_deployment.scale(context(0, slots=slots, kv_use={"a": 0.0, "b": 0.0})) == (0, {})
    assert ray_deployment.scale(context(20, slots=slots, kv_use={"a": 0.1, "b": 0.1})) == (4, {})
    assert ray_deployment.scale(context(2, slots=slots, kv_use={"a": 0.9, "b": 0.9})) == (3, {})
    assert ray_deployment.scale(context(205)) == (2, {}), "no replica has reported yet"


def test_a_replica_ends_its_streams_before_ray_kills_it(
    ray: ModuleType, actor: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    async def drain(seconds: float) -> None:
        done.append(seconds)

    stats = SimpleNamespace(num_waiting=1, blocks_used=3, num_blocks=12)
    facts = SimpleNamespace(block_size=16, max_num_seqs=4)
    engine = SimpleNamespace(death=None, stats=stats, facts=facts, drain=drain)

    @asynccontextmanager
    async def started_server(*_: Any) -> AsyncGenerator[Any]:
        yield SimpleNamespace(engine=engine, config=ServerConfig(shutdown_timeout=0))
        done.append("closed")

    monkeypatch.setattr(run, "started_server", started_server)
    monkeypatch.setattr(ray_deployment, "DRAIN_POLL_SECONDS", 0.001)
    end = ray_deployment.Replica.__del__
    monkeypatch.delattr(ray_deployment.Replica, "__del__")  # a coroutine, which Ray awaits
    actor._replica_impl = SimpleNamespace(_shutting_down=False)

    async def live() -> None:
        one: Any = ray_deployment.Replica.__new__(ray_deployment.Replica)
        await one.__init__(EngineConfig(**SETTINGS), ServerConfig())
        await one.check_health()
        kv_tokens = {"num_waiting": 1, "blocks_used": 3, "num_blocks": 12, "kv_tokens": 192}
        assert await one.record_routing_stats() == kv_tokens
        assert await one.record_autoscaling_stats() == {"slots": 4, "kv_use": 0.25}
        await asyncio.sleep(0.01)
        assert done == []
        actor._replica_impl._shutting_down = True
        await asyncio.wait_for(one._ending, 5)
        assert done == [0]
        engine.death = "the engine's process ended by SIGKILL"
        with pytest.raises(PhonographError, match="SIGKILL"):
            await one.check_health()
        await end(one)
        assert done == [0, "closed"]

    asyncio.run(live())


@pytest.mark.parametrize("name", ["ray-serve.yaml", "kuberay.yaml"])
def test_files_have_settings_that_exist(name: str, ray: ModuleType) -> None:
    document = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    config = yaml.safe_load(document["spec"]["serveConfigV2"]) if "spec" in document else document
    (application,) = config["applications"]
    module, _, function = application["import_path"].partition(":")
    made = getattr(importlib.import_module(module), function)(application["args"])
    assert made.autoscaling_config["max_replicas"] == 4
