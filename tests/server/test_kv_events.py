"""KV events of an engine: its settings, what it publishes, and where routers are sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph import LLM
from phonograph.config.engine_config import EngineConfig
from phonograph.config.kv_events_config import KVEventsConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.async_llm import AsyncLLM
from phonograph.errors import ConfigError
from phonograph.server.observe.status import kv_event_sources

ON = {"enable_kv_cache_events": True}


def test_vllms_defaults_and_the_addresses_of_several_engines() -> None:
    assert EngineConfig(model="demo", kv_events_config={"publisher": "zmq"}).kv_events is None
    config = EngineConfig(
        model="demo", kv_events_config='{"enable_kv_cache_events": true, "max_queue_size": 5}'
    ).kv_events
    assert config == KVEventsConfig("tcp://*:5557", None, 10_000, 100_000, "")
    moved = config._replace(replay_endpoint="ipc:///run/replay").of_engine(2)
    assert (moved.endpoint, moved.replay_endpoint) == ("tcp://*:5559", "ipc:///run/replay_dp2")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"hmw": 5},
            "kv_events_config.hmw='5': is not known; the keys are enable_kv_cache_events, publisher, endpoint",
        ),
        ({"enable_kv_cache_events": "maybe"}, "kv_events_config.enable_kv_cache_events='maybe': must be true or false"),
        ({"publisher": "nats"}, "kv_events_config.publisher='nats': must be zmq, or null for none"),
        (
            {**ON, "publisher": "null"},
            "kv_events_config.publisher='None': is null, so that nothing is published; zmq wor",
        ),
        ({"buffer_steps": 0}, "kv_events_config.buffer_steps='0': must be a whole number >= 1"),
        ({"endpoint": "localhost:5557"}, "kv_events_config.endpoint='localhost:5557': must be an address such as tcp:"),
        ({"endpoint": "tcp://*:99999"}, "kv_events_config.endpoint='tcp://*:99999': must be an address such as tcp:"),
        ({"replay_endpoint": "tcp://*:5557"}, "kv_events_config.endpoint='None': must be an address, and another one"),
        ({"topic": 5}, "kv_events_config.topic='5': must be text"),
    ],
)
def test_wrong_keys_are_refused_by_name(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig(model="demo", kv_events_config=keys)
    assert str(error.value).startswith(message)


def test_events_need_the_prefix_cache_and_a_server() -> None:
    with pytest.raises(ConfigError, match="contradicts enable_prefix_caching=False"):
        EngineConfig(model="demo", kv_events_config=ON, enable_prefix_caching=False)
    with pytest.raises(ConfigError, match="an LLM publishes no events, phonograph serve and AsyncLLM do"):
        LLM("demo", kv_events_config=ON)


def test_the_blocks_of_a_prompt_and_a_reset_are_published(tmp_path: Path) -> None:
    msgpack = pytest.importorskip("msgspec.msgpack", reason="needs msgspec of the extra kv-events")
    zmq = pytest.importorskip("zmq")
    config = {**ON, "endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}
    prompt = list(range(5, 45))
    params = SamplingParams(max_tokens=9, ignore_eos=True, temperature=0)

    async def run() -> list[int]:
        settings = {"device": "cpu", "max_model_len": 128, "max_num_seqs": 2, "block_size": 16, "enforce_eager": True}
        async with AsyncLLM("demo", kv_events_config={**config, "max_queue_size": 1}, **settings) as llm:
            assert f"KV events: published at {config['endpoint']}" in llm.facts.notes
            assert any("max_queue_size has no effect" in note for note in llm.facts.notes)
            async for output in llm.generate(prompt, params):
                token_ids = output.outputs[0].token_ids
            await llm.reset_prefix_cache()
            # A subscriber that comes late asks for all batches.
            with zmq.Context() as context, context.socket(zmq.DEALER) as requester:
                requester.connect(config["replay_endpoint"])
                requester.send_multipart([b"", (0).to_bytes(8, "big")])
                while (frames := await asyncio.to_thread(requester.recv_multipart))[2]:
                    batches.append(msgpack.decode(frames[2]))
        return [*prompt, *token_ids]

    batches: list[Any] = []
    known = asyncio.run(run())
    first, second, last = [event for _, events, rank in batches for event in events if rank == 0]
    assert first["token_ids"] == known[:32] and first["parent_block_hash"] is None
    assert second["token_ids"] == known[32:48] and second["parent_block_hash"] == first["block_hashes"][1]
    assert last == {"type": "AllBlocksCleared"}


def test_an_engine_that_cannot_publish_does_not_start() -> None:
    pytest.importorskip("msgspec", reason="needs msgspec of the extra kv-events")

    async def start() -> None:
        async with AsyncLLM("demo", kv_events_config={**ON, "endpoint": "ipc:///none/events"}, enforce_eager=True):
            pass

    with pytest.raises(ConfigError, match=r"kv_events_config.endpoint='ipc:///none/events': cannot be used"):
        asyncio.run(start())


@pytest.mark.parametrize(("keys", "endpoint"), [({}, None), ({**ON, "endpoint": "tcp://*:7000"}, "tcp://box:7000")])
def test_routers_are_sent_to_the_name_that_they_used(keys: dict[str, Any], endpoint: str | None) -> None:
    engine = SimpleNamespace(config=EngineConfig(model="demo", kv_events_config=keys))
    app = SimpleNamespace(state=SimpleNamespace(serving=SimpleNamespace(engine=engine)))
    request: Any = SimpleNamespace(app=app, url=SimpleNamespace(hostname="box"))
    found = asyncio.run(kv_event_sources(request))
    expected = {"data_parallel_rank": 0, "endpoint": endpoint, "replay_endpoint": None, "topic": ""}
    assert found == ([] if endpoint is None else [expected])
