"""`AsyncLLM` on the demo model: outputs of the offline API, requests that end early, and engines that end or fail."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from phonograph.engine.build import Engine
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.process.framed_socket import ServerSocket, framed
from phonograph.engine.process.messages import Report
from phonograph.engine.process.process_client import ProcessClient
from phonograph.engine.process.thread_client import ThreadClient
from phonograph.engine.startup import start
from phonograph.errors import ConfigError, EngineUnavailable, PhonographError, RequestError, RequestFailure

SETTINGS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "enforce_eager": True, "seed": 0}
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0)
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
CASES: list[tuple[Any, SamplingParams]] = [
    (QUESTION, SamplingParams(max_tokens=20, temperature=0, logprobs=2, prompt_logprobs=1)),
    ([5, 6, 7], SamplingParams(max_tokens=9, n=3, seed=4)),
    ({"prompt": QUESTION}, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, stop=["a", "1"])),
    ({"prompt_token_ids": [8, 9]}, SamplingParams(max_tokens=5, temperature=0, detokenize=False)),
    (QUESTION, SamplingParams(max_tokens=9, temperature=0, structured_outputs=StructuredOutputs(regex="[ab]{3}"))),
    (QUESTION * 12, SamplingParams(max_tokens=3, temperature=0)),
    ("To" * 3000, LONG),  # too long, and tokenized in a thread
    ("", LONG),
    ([5000], LONG),
    ([5], SamplingParams(max_tokens=5, min_tokens=5, stop_token_ids=[5001])),
]


class Loop:
    """An `AsyncLLM` and the event loop that uses it."""

    def __init__(self, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self.llm = AsyncLLM("demo", **{**SETTINGS, **settings})

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._runner.run(asyncio.wait_for(work, 60))

    def close(self) -> None:
        self.run(self.llm.close())
        self._runner.close()

    async def until_idle(self) -> None:
        """Wait until no request is open and no block is held, as the engine reports it."""
        while self.llm.num_open or self.llm.stats.num_running or self.llm.stats.blocks_used:
            await asyncio.sleep(0.01)


@pytest.fixture(scope="module", params=[ThreadClient, ProcessClient])
def loop(request: pytest.FixtureRequest) -> Iterator[Loop]:
    loop = Loop(client=request.param)
    loop.run(loop.llm.start())
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM("demo", **SETTINGS)


async def last(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    found = None
    async for output in outputs:
        assert found is None or output is found, "it is one object that grows"
        found = output
        text = output.outputs[0].text
        assert output.outputs[0].text_from(3) == text[3:]
    assert found is not None and found.finished
    return found


def test_outputs_are_those_of_the_offline_api(loop: Loop, offline: LLM) -> None:
    refused = 0
    for number, (prompt, params) in enumerate(CASES):
        # One by one: sums of floating-point numbers depend on the batch.
        try:
            (expected,) = offline.generate(prompt, params)
        except RequestError as error:
            refused += 1
            with pytest.raises(RequestError) as caught:
                loop.run(last(loop.llm.generate(prompt, params)))
            assert str(caught.value) == str(error)
            continue
        found = loop.run(last(loop.llm.generate(prompt, params, f"case-{number}")))
        assert found.request_id == f"case-{number}" and found.outputs == expected.outputs
        for field in ("prompt", "prompt_token_ids", "prompt_logprobs", "warnings"):
            assert getattr(found, field) == getattr(expected, field)
    assert refused == 4
    loop.run(loop.until_idle())


def test_each_token_can_be_seen_and_so_can_the_end(loop: Loop) -> None:
    async def watch(pause: float) -> list[int]:
        seen = []
        async for output in loop.llm.generate([5, 6], SamplingParams(max_tokens=20, ignore_eos=True)):
            seen.append(len(output.outputs[0].token_ids))
            await asyncio.sleep(pause)
        assert output.finished
        return seen

    seen = loop.run(watch(0))
    assert seen == sorted(set(seen)) and seen[-1] == 20 and len(seen) > 2
    assert len(loop.run(watch(0.5))) < 20, "tokens that came meanwhile are one piece"


async def leave(llm: AsyncLLM) -> None:
    async for _ in llm.generate([5, 6], LONG):
        break


async def close(llm: AsyncLLM) -> None:
    async with aclosing(llm.generate([5, 6], LONG)) as outputs:
        await anext(outputs)


async def cancel(llm: AsyncLLM) -> None:
    task = asyncio.create_task(last(llm.generate([5, 6], LONG)))
    while not llm.num_open:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(llm: AsyncLLM) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await last(llm.generate([5, 6], SamplingParams(max_tokens=200, n=4, ignore_eos=True)))


@pytest.mark.parametrize("end", [leave, close, cancel, time_out])
def test_a_request_that_is_left_ends_and_no_other(
    loop: Loop, end: Callable[[AsyncLLM], Coroutine[Any, Any, None]]
) -> None:
    async def body() -> None:
        aborted = loop.llm.requests.num_ended["abort"]
        other = asyncio.create_task(last(loop.llm.generate([7, 8], LONG)))
        await end(loop.llm)
        output = await other
        assert len(output.outputs[0].token_ids) == 200 and output.outputs[0].finish_reason == "length"
        assert loop.llm.requests.num_ended["abort"] > aborted
        await loop.until_idle()

    loop.run(body())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (([5], "greedy"), "must be SamplingParams"),
        (([5], None, ""), "must be a string of 1 to 256 characters"),
        (({"text": "a"},), "is not supported"),
        (({"prompt": "a", "cache_salt": ""},), "cache_salt=.*non-empty"),
    ],
)
def test_arguments_that_make_no_request_are_refused(loop: Loop, arguments: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        loop.run(last(loop.llm.generate(*arguments)))
    assert loop.llm.num_open == 0


def test_an_engine_takes_requests_from_start_to_close_only() -> None:
    async def body() -> None:
        llm = AsyncLLM("demo", **SETTINGS)
        with pytest.raises(EngineUnavailable, match="has not started"):
            await last(llm.generate([5]))
        async with llm:
            assert llm.facts.vocab_size == 2048 and llm.tokenizer is not None
            with pytest.raises(PhonographError, match="starts once"):
                await llm.start()
            waiting = asyncio.create_task(last(llm.generate([5], LONG)))
            while not llm.num_steps:
                await asyncio.sleep(0)
        with pytest.raises(EngineUnavailable, match="shut down before the answer was complete"):
            await waiting
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await last(llm.generate([5]))
        await llm.close()
        with pytest.raises(PhonographError, match="starts once"):
            await llm.start()

    asyncio.run(body())


def test_settings_are_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        AsyncLLM("demo", max_num_seqs=0)
    with pytest.raises(ConfigError, match="give speculative_config"):
        AsyncLLM("demo", num_speculative_tokens=2)


@pytest.mark.parametrize("client", [ThreadClient, ProcessClient])
def test_a_start_that_fails_raises_its_reason(client: Any) -> None:
    llm = AsyncLLM("demo", client=client, max_model_len=9_999_999)
    with pytest.raises(ConfigError, match="exceeds the model's context length"):
        asyncio.run(llm.start())


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("planted")


def test_a_start_that_meets_a_bug_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "build_engine", broken)
    with pytest.raises(PhonographError, match="thread ended by ZeroDivisionError: planted while it started"):
        asyncio.run(AsyncLLM("demo", **SETTINGS).start())


def test_a_start_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    clients: list[ThreadClient] = []

    def client(config: Any) -> ThreadClient:
        clients.append(ThreadClient(config))
        return clients[-1]

    build = start.build_engine

    def build_when_closed(*args: Any) -> Engine:
        """A start of a machine whose caches are warm can be over before the time is up."""
        while not clients or not clients[0]._channel.closed:
            time.sleep(0.01)
        return build(*args)

    monkeypatch.setattr(start, "build_engine", build_when_closed)

    async def body() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await AsyncLLM("demo", client=client, **SETTINGS).start()

    asyncio.run(body())
    clients[0]._thread.join(20)
    assert not clients[0]._thread.is_alive()


def test_a_step_that_fails_ends_the_engine_and_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[Engine] = []
    build = start.build_engine
    monkeypatch.setattr(start, "build_engine", lambda *args: engines.append(build(*args)) or engines[-1])

    async def body() -> None:
        async with AsyncLLM("demo", **SETTINGS) as llm:
            asked = [asyncio.create_task(last(llm.generate([5, 6], LONG))) for _ in range(2)]
            while not llm.num_steps:
                await asyncio.sleep(0)
            engines[0].core.runner.submit = broken
            for error in await asyncio.gather(*asked, return_exceptions=True):
                assert isinstance(error, EngineUnavailable) and "ZeroDivisionError: planted" in str(error)
                assert error.code == "engine_died"
            await asyncio.wait_for(llm.died.wait(), 10)
            with pytest.raises(EngineUnavailable, match="planted"):
                await last(llm.generate([5]))

    asyncio.run(body())


def test_a_request_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from phonograph.sampling.sampler import Sampler

    load = Sampler.load

    def load_all_but(self: Sampler, slot: int, params: SamplingParams, *rest: Any) -> None:
        assert params.seed != 666
        load(self, slot, params, *rest)

    monkeypatch.setattr(Sampler, "load", load_all_but)

    async def body() -> None:
        async with AsyncLLM("demo", **SETTINGS) as llm:
            good, bad = await asyncio.gather(
                last(llm.generate([5], SamplingParams(max_tokens=9, ignore_eos=True))),
                last(llm.generate([5], SamplingParams(max_tokens=9, seed=666))),
                return_exceptions=True,
            )
            assert isinstance(bad, RequestFailure) and len(good.outputs[0].token_ids) == 9

    asyncio.run(body())


def test_the_example_needs_no_package_of_the_server() -> None:
    example = Path(__file__).parents[2] / "examples" / "async_llm.py"
    program = (
        "import runpy, sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'uvloop', 'httptools', 'prometheus_client'):\n"
        "    sys.modules[name] = None\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    result = subprocess.run([sys.executable, "-c", program, example], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and not result.stderr, result.stderr
    lines = result.stdout.splitlines()
    texts = ["".join(eval(line[3:]) for line in lines if line.startswith(f"{number}: ")) for number in (0, 1)]
    assert "19" in texts[0] and "26" in texts[1]


def test_other_tasks_run_while_many_calls_get_their_tokens() -> None:
    """After each 32 calls, and without a delay."""
    seen: list[int] = []
    moments: list[int] = []

    class Client:
        async def receive(self) -> list[Any]:
            if moments:
                raise RuntimeError("there is no more")
            return [{number: SimpleNamespace(on_change=lambda: seen.append(1)) for number in range(70)}]

    async def note() -> None:
        while True:
            moments.append(len(seen))
            await asyncio.sleep(0)

    async def run() -> None:
        llm: Any = AsyncLLM("demo", **SETTINGS)
        llm._take = lambda report, changed: changed.update(report)
        receiving = asyncio.create_task(llm._receive(Client()))
        noting = asyncio.create_task(note())
        await asyncio.wait_for(receiving, 0.9)
        noting.cancel()
        assert llm.death is not None and "there is no more" in llm.death

    asyncio.run(run())
    assert sorted({*moments}) == [32, 64, 70]


def socket_of(messages: list[Any]) -> ServerSocket:
    connection = ServerSocket()
    connection.data_received(b"".join(map(framed, messages)))
    return connection


def queue_of(messages: list[Any]) -> asyncio.Queue[Any]:
    queue: asyncio.Queue[Any] = asyncio.Queue()
    for message in messages:
        queue.put_nowait(message)
    return queue


@pytest.mark.parametrize(
    ("client", "name", "messages_of"),
    [(ThreadClient, "_messages", queue_of), (ProcessClient, "_connection", socket_of)],
)
@pytest.mark.parametrize("count", [1, 7, 8, 9, 20])
def test_a_client_returns_eight_reports_at_once(client: Any, name: str, messages_of: Any, count: int) -> None:
    """More would keep the event loop from other tasks, however many the engine has sent."""
    connection = object.__new__(client)
    stats: Any = None
    setattr(connection, name, messages_of([Report(stats, number) for number in range(count)]))
    reports = asyncio.run(connection.receive())
    assert [report.num_steps for report in reports] == list(range(min(count, 8)))
