"""Sleep on a CPU: memory is given back, weights of every form come back, and verbs while asleep."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import eagle_heads
import psutil
import pytest
import torch
from checkpoints import make_checkpoint
from drafted_requests import shallow_demo
from gguf_files import write_gguf
from quantized_checkpoints import FORMATS, quantize_checkpoint
from safetensors.torch import save_file

from phonograph import LLM, AsyncLLM, SamplingParams
from phonograph.core.host_resources import FreeMemory
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.process.messages import PauseMode
from phonograph.engine.process.process_client import ProcessClient
from phonograph.engine.process.thread_client import ThreadClient
from phonograph.engine.startup import sleeper as sleeper_module
from phonograph.engine.startup import static_memory
from phonograph.engine.startup.platform import DraftModelParts, ModelParts
from phonograph.engine.startup.static_memory import HostMemory
from phonograph.errors import ConfigError, EngineUnavailable, MemoryLimitError, RequestError
from phonograph.models.heads.eagle import read_eagle
from phonograph.models.heads.shared_weights import share
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import begin_loading

DEMO = str(shallow_demo())
SETTINGS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 2,
    "num_kv_blocks": 100,
    "cudagraph_capture_sizes": [1, 2, 16],
    "enable_sleep_mode": True,
    "seed": 0,
}
SHORT = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
LONG = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
PROMPT = [3 + place * place % 40 for place in range(40)]


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate([PROMPT], SHORT)
    return output.outputs[0].token_ids


def resident() -> int:
    return psutil.Process().memory_info().rss


def test_pages_are_given_back_and_neighbours_stay() -> None:
    memory, size = HostMemory(), 64 << 20
    whole = torch.full((size + 8192,), 7, dtype=torch.uint8)
    inner = torch.frombuffer(whole.numpy(), dtype=torch.uint8, count=size, offset=1000)
    before = resident()
    memory.release([inner.untyped_storage()], keep=True)
    assert resident() > before - (1 << 20) and bool((whole == 7).all())
    memory.release([inner.untyped_storage()], keep=False)
    assert resident() < before - size + (2 << 20)
    assert bool((whole[:1000] == 7).all()) and bool((whole[1000 + size :] == 7).all())
    assert int(whole[size // 2]) == 0
    memory.claim()


class PoisonedMemory(HostMemory):
    """Memory whose contents are of no use after a sleep, also in parts of pages."""

    num_released = 0

    def release(self, storages: Iterable[torch.UntypedStorage], *, keep: bool) -> None:
        storages = list(storages)
        super().release(storages, keep=keep)
        if not keep:
            for storage in storages:
                PoisonedMemory.num_released += 1
                torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)


def checkpoint(kind: str, folder: Path) -> Path:
    """Write a checkpoint of a family, of a quantized format, or a GGUF file; return its path."""
    family, _, form = kind.partition(": ")
    sizes = {"hidden_size": 128, "intermediate_size": 128} if form else {}
    make_checkpoint(family, folder, **sizes)
    if form == "gguf":
        write_gguf(folder / "model.gguf", folder, lambda _: "Q8_0")
        return folder / "model.gguf"
    if form:
        quantize_checkpoint(folder, FORMATS[form])
    return folder


@pytest.mark.parametrize(
    ("kind", "products"),
    [
        ("gemma3", "auto"),
        ("gpt_oss", "auto"),
        ("qwen2: gptq", "int4"),
        ("qwen2: packed 8 bits", "float32"),
        ("qwen2: awq", "float32"),
        ("qwen2: int8 channel", "int4"),
        ("qwen2: fp8", "float32"),
        ("qwen2: gguf", "int4"),
        ("qwen2: gguf", "float32"),
    ],
)
def test_weights_of_every_form_come_back(
    kind: str, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phonograph.engine.startup.cpu_platform.HostMemory", PoisonedMemory)
    with LLM(str(checkpoint(kind, tmp_path)), dtype="float32", cpu_products=products, **SETTINGS) as llm:
        expected = tokens(llm)
        sleeper: Any = llm.engine.sleeper
        released = {one.data_ptr() for one in sleeper_module._storages(sleeper_module._tensors(sleeper._models))}
        assert {one.untyped_storage().data_ptr() for one in sleeper._models[0].parameters} <= released
        for level in (1, 2, 2):
            before = PoisonedMemory.num_released
            llm.sleep(level)
            assert PoisonedMemory.num_released - before > (len(released) if level == 2 else 0)
            llm.wake_up()
            assert tokens(llm) == expected
        report = llm.verify(num_replays=2)
        assert report.ok, report.mismatches
        assert tokens(llm) == expected


def test_a_draft_model_sleeps_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its own draft model the model drafts right, before and after."""
    monkeypatch.setattr("phonograph.engine.startup.cpu_platform.HostMemory", PoisonedMemory)
    speculation = {"method": "draft_model", "model": DEMO, "num_speculative_tokens": 3, "adaptive_depth": False}
    with LLM(DEMO, **SETTINGS, speculative_config=speculation) as llm:
        expected = tokens(llm)
        for level in (1, 2, 2):
            before = llm.engine.core.scheduler.stats.drafts
            llm.sleep(level)
            llm.wake_up()
            assert tokens(llm) == expected
            after = llm.engine.core.scheduler.stats.drafts
            assert after.verified - before.verified == after.accepted - before.accepted > 0


@pytest.mark.parametrize("owns_embedding", [True, False])
def test_a_head_comes_back_beside_its_target(owns_embedding: bool, tmp_path: Path) -> None:
    """A head may have the embedding of its target, which comes back once."""
    make_checkpoint("llama_bias", tmp_path / "target", num_hidden_layers=8)
    spec = read_model_spec(tmp_path / "target")
    folder = tmp_path / "head"
    folder.mkdir()
    sizes = {"hidden_size": spec.hidden_size, "head_dim": spec.hidden_size // 4, "vocab_size": spec.vocab_size}
    config = eagle_heads.HEAD | sizes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = eagle_heads.head_tensors(config, "midlayer", owns_embedding=owns_embedding, states=3)
    save_file(tensors, folder / "model.safetensors")
    head = read_eagle(folder, spec, method="eagle3", tensors=tensors)
    loads = [
        partial(begin_loading, model, path, dtype=torch.float32, device=torch.device("cpu"))
        for model, path in ((spec, tmp_path / "target"), (head.model, folder))
    ]
    memory = PoisonedMemory()
    models: list[Transformer] = []
    for load in loads:
        with load(make_empty=memory.empty) as loading:
            loading.finish()
            models.append(loading.model)
    share(models[1], models[0])
    found = [*sleeper_module._tensors(models)]
    expected = [one.clone() for one in found]
    backend: Any = None
    draft = DraftModelParts(model=models[1], backend=backend, layers=[], kv_caches=[])
    sleeper = sleeper_module.Sleeper(memory, PoisonedMemory(), loads)
    sleeper.start(ModelParts(model=models[0], backends=[], layers=[], kv_caches=[], draft=draft), None, zeroes=False)
    features = models[1].features
    assert features is not None and {id(one) for one in features.norms.values()} <= {id(one) for one in found}
    for _ in range(2):
        sleeper.sleep(2)
        sleeper.wake_up()
        assert all(map(torch.equal, found, expected))
    assert (features.embedding_VE is models[0].embedding_VE) == (not owns_embedding)


def test_the_demo_model_sleeps_often_in_the_same_memory() -> None:
    with LLM("demo", **{**SETTINGS, "num_kv_blocks": 400}) as llm:
        expected = tokens(llm)
        sizes: list[int] = []
        for level in (1, 2) * 4:
            llm.sleep(level)
            llm.wake_up()
            (output,) = llm.generate([PROMPT], SHORT)
            assert output.outputs[0].token_ids == expected and output.num_cached_tokens == 0
            sizes.append(resident())
        assert max(sizes) < min(sizes) + (48 << 20), "a copy of the weights a round would be 180 MB"


def test_verbs_while_asleep() -> None:
    with LLM(DEMO, **SETTINGS) as llm:
        expected = tokens(llm)
        assert not llm.is_sleeping()
        llm.wake_up()
        llm.sleep()
        calls: list[Callable[[], object]] = [
            lambda: llm.generate([PROMPT], SHORT),
            lambda: llm.generate([PROMPT, PROMPT], SHORT),
            lambda: llm.enqueue([PROMPT], SHORT),
            lambda: next(iter(llm.stream(PROMPT, SHORT))),
            lambda: llm.chat([{"role": "user", "content": "a"}], SHORT),
            lambda: llm.verify(num_replays=1),
        ]
        for call in calls:
            with pytest.raises(EngineUnavailable, match=r"the engine sleeps; wake_up\(\) lets it continue") as caught:
                call()
            assert caught.value.code == "asleep"
        assert not llm.session.has_unfinished and llm.reset_prefix_cache() and llm.get_metrics()
        llm.sleep(1)
        llm.wake_up(["weights"])
        with pytest.raises(EngineUnavailable, match="sleeps"):
            tokens(llm)
        llm.sleep(2)
        llm.wake_up(["kv_cache"])
        assert llm.is_sleeping()
        llm.wake_up(("weights",))
        llm.wake_up()
        assert not llm.is_sleeping() and tokens(llm) == expected
        llm.sleep(2)


def test_other_levels_are_refused() -> None:
    levels: list[Any] = [0, 3, "1", True, None, [1]]
    with LLM(DEMO, **SETTINGS) as llm:
        for level in levels:
            with pytest.raises(RequestError, match="level=.*must be 1, .* or 2"):
                llm.sleep(level)
        assert not llm.is_sleeping()


def test_wrong_sleeps_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(DEMO, **{**SETTINGS, "enable_sleep_mode": False}) as llm:
        for verb in (llm.sleep, llm.wake_up):
            with pytest.raises(ConfigError, match=r"enable_sleep_mode=False: sleep and wake_up need .* at the start"):
                verb()
    with LLM(DEMO, **SETTINGS) as llm:
        expected = tokens(llm)
        for tags in ("weights", ["scheduling"], [1], 3):
            with pytest.raises(RequestError, match="tags=.*must be a list of weights and kv_cache"):
                llm.wake_up(tags)  # pyright: ignore[reportArgumentType]
        stream = llm.stream(PROMPT, LONG)
        next(stream)
        with pytest.raises(RequestError, match="sleep='now': requests are in flight"):
            llm.sleep()
        *_, last = stream
        assert len(last.outputs[0].token_ids) == 120
        llm.sleep(2)
        monkeypatch.setattr(static_memory, "free_memory", lambda: FreeMemory(1))
        with pytest.raises(
            MemoryLimitError, match=r"no memory to wake up: \d+ bytes are needed, and 1 are free of this machine"
        ):
            llm.wake_up()
        assert llm.is_sleeping()
        monkeypatch.undo()
        llm.wake_up()
        assert tokens(llm) == expected
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.sleep()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ConfigError, match="enable_sleep_mode=True: needs Linux on a CPU; this is win32"):
        HostMemory()


async def final(outputs: AsyncGenerator[RequestOutput]) -> RequestOutput:
    return [output async for output in outputs][-1]


def run(work: Callable[[AsyncLLM], Coroutine[Any, Any, None]], client: Any = ThreadClient, **settings: Any) -> None:
    async def whole() -> None:
        async with AsyncLLM(DEMO, client=client, **{**SETTINGS, **settings}) as llm:
            await work(llm)
            assert (await final(llm.generate(PROMPT, SHORT))).outputs[0].finish_reason == "length"

    asyncio.run(asyncio.wait_for(whole(), 120))


async def until_running(llm: AsyncLLM) -> None:
    while not llm.stats.num_running:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize(("client", "num_ranks"), [(ThreadClient, 1), (ProcessClient, 1), (ProcessClient, 2)])
def test_sleep_under_load(client: Any, num_ranks: int) -> None:
    """Requests in progress end, or are computed again; those that come meanwhile wait."""

    async def sleep_once(llm: AsyncLLM, mode: PauseMode, whole: list[int]) -> None:
        running = [asyncio.create_task(final(llm.generate(PROMPT, LONG))) for _ in range(3)]
        await until_running(llm)
        await asyncio.sleep(0.02)
        await llm.sleep(2, mode)
        assert await llm.is_sleeping() and llm.asleep == {"weights", "kv_cache"}
        assert llm.stats.blocks_used == 0 and llm.stats.num_running == 0
        late = asyncio.create_task(final(llm.generate(PROMPT, SHORT)))
        await asyncio.sleep(0.05)
        assert not late.done()
        await llm.wake_up(["kv_cache"])
        await asyncio.sleep(0.05)
        assert await llm.is_sleeping() and not late.done()
        await llm.wake_up()
        assert not await llm.is_sleeping()
        outputs = [(await one).outputs[0] for one in running]
        assert (await late).outputs[0].token_ids == whole[:6]
        if mode == "abort":
            assert {one.finish_reason for one in outputs} == {"abort"}
            assert all(one.token_ids == whole[: len(one.token_ids)] for one in outputs)
        else:
            assert [one.token_ids for one in outputs] == [whole] * 3

    async def work(llm: AsyncLLM) -> None:
        whole = (await final(llm.generate(PROMPT, LONG))).outputs[0].token_ids
        for mode in ("abort", "wait", "keep"):
            await sleep_once(llm, mode, whole)

    run(work, client, tensor_parallel_size=num_ranks)


def test_pause_and_sleep_are_apart() -> None:
    async def work(llm: AsyncLLM) -> None:
        expected = (await final(llm.generate(PROMPT, SHORT))).outputs[0].token_ids
        await llm.pause_generation()
        await llm.sleep()
        with pytest.raises(RequestError, match="resume='now': the engine sleeps; wake_up lets it continue"):
            await llm.resume_generation()
        assert await llm.is_paused()
        await llm.wake_up()
        late = asyncio.create_task(final(llm.generate(PROMPT, SHORT)))
        await asyncio.sleep(0.05)
        assert not late.done()
        await llm.resume_generation()
        assert (await late).outputs[0].token_ids == expected
        await llm.sleep()
        await llm.sleep(2)
        assert await llm.reset_prefix_cache()
        await llm.pause_generation(mode="wait")
        await llm.wake_up()
        await llm.wake_up()
        await llm.resume_generation()

    run(work)


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
def test_kept_requests_do_not_run_during_a_second_sleep_or_pause(mode: PauseMode) -> None:
    async def work(llm: AsyncLLM) -> None:
        whole = (await final(llm.generate(PROMPT, LONG))).outputs[0].token_ids
        running = asyncio.create_task(final(llm.generate(PROMPT, LONG)))
        await until_running(llm)
        await llm.sleep(1, "keep")
        steps = llm.num_steps
        await asyncio.wait_for(llm.sleep(2, mode), 20)
        await asyncio.wait_for(llm.pause_generation(mode=mode), 20)
        await asyncio.sleep(0.05)
        assert llm.num_steps == steps and llm.sleep_level == 2
        await llm.wake_up()
        await asyncio.sleep(0.05)
        assert llm.num_steps == steps, "the pause is left"
        await llm.resume_generation()
        (sample,) = (await running).outputs
        assert sample.token_ids == whole[: len(sample.token_ids)]
        assert sample.finish_reason == ("abort" if mode == "abort" else "length")

    run(work)


def test_a_wake_up_ends_the_wait_of_a_sleep() -> None:
    async def work(llm: AsyncLLM) -> None:
        running = asyncio.create_task(final(llm.generate(PROMPT, LONG)))
        await until_running(llm)
        sleeping = asyncio.create_task(llm.sleep(1, "wait"))
        await asyncio.sleep(0)
        await llm.wake_up()
        with pytest.raises(RequestError, match="sleep='now': the engine was woken up before its requests had ended"):
            await sleeping
        assert not await llm.is_sleeping() and len((await running).outputs[0].token_ids) == 120

    run(work)


def test_a_failed_sleep_leaves_requests_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(llm: AsyncLLM) -> None:
        running = asyncio.create_task(final(llm.generate(PROMPT, LONG)))
        await until_running(llm)
        with pytest.raises(MemoryLimitError, match="no host memory"):
            await llm.sleep(1, "keep")
        assert not await llm.is_sleeping() and len((await running).outputs[0].token_ids) == 120

    def release(*_: object, **__: object) -> None:
        raise MemoryLimitError("no host memory")

    monkeypatch.setattr(HostMemory, "release", release)
    run(work)


@pytest.mark.parametrize("client", [ThreadClient, ProcessClient])
def test_wrong_verbs_leave_requests_alone(client: Any) -> None:
    async def work(llm: AsyncLLM) -> None:
        running = asyncio.create_task(final(llm.generate(PROMPT, LONG)))
        await until_running(llm)
        with pytest.raises(ConfigError, match="enable_sleep_mode=False"):
            await llm.sleep()
        with pytest.raises(ConfigError, match="enable_sleep_mode=False"):
            await llm.wake_up()
        with pytest.raises(RequestError, match="level="):
            await llm.sleep(3)
        with pytest.raises(RequestError, match="mode="):
            await llm.sleep(1, "stop")  # pyright: ignore[reportArgumentType]
        with pytest.raises(RequestError, match="tags="):
            await llm.wake_up(["all"])
        assert len((await running).outputs[0].token_ids) == 120

    run(work, client, enable_sleep_mode=False)
