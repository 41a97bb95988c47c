"""Memory on virtual addresses, with a driver that makes released memory useless; no GPU takes part."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, without_norms
from fake_memory_driver import FakeMemoryDriver

from phonograph import LLM, SamplingParams
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.host_resources import FreeMemory
from phonograph.engine.plan import make_plan
from phonograph.engine.startup import cuda_memory_driver, host_copy
from phonograph.engine.startup import start as start_module
from phonograph.engine.startup.cpu_platform import CpuPlatform
from phonograph.engine.startup.virtual_memory import CHUNK_BYTES, VirtualMemory
from phonograph.errors import MemoryLimitError, PhonographError, WeightError
from phonograph.models.spec import read_model_spec

CHUNK = 4096
SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((7,), torch.float32),
    ((3, 1000), torch.bfloat16),
    ((0, 4), torch.float32),
    ((2, 3000), torch.float8_e4m3fn),
    ((1,), torch.int64),
]


def filled(memory: VirtualMemory) -> list[torch.Tensor]:
    tensors = [memory.empty(shape, dtype=dtype) for shape, dtype in SHAPES]
    for number, tensor in enumerate(tensors, 1):
        tensor.view(torch.uint8).fill_(number)
    return tensors


def contents(tensors: list[torch.Tensor]) -> list[set[int]]:
    return [set(tensor.view(torch.uint8).flatten().tolist()) for tensor in tensors]


def test_contents_return_to_the_same_addresses() -> None:
    driver = FakeMemoryDriver(10 * CHUNK)
    memory = VirtualMemory(driver, CHUNK)
    tensors = filled(memory)
    expected, num_chunks = contents(tensors), len(driver.mapped)
    assert expected == [{1}, {2}, set(), {4}, {5}] and num_chunks == 4
    assert all(tensor.data_ptr() % 512 == 0 for tensor in tensors)
    for keep in (True, False):
        memory.release((), keep=keep)
        assert not driver.mapped and contents(tensors)[0] == {0xFF}
        memory.claim()
        assert len(driver.mapped) == num_chunks
        assert (contents(tensors) == expected) is keep
    again = [memory.empty(shape, dtype=dtype) for shape, dtype in SHAPES]
    assert [one.data_ptr() for one in again] == [one.data_ptr() for one in tensors]
    assert [one.shape for one in again] == [one.shape for one in tensors] and len(driver.mapped) == num_chunks


def test_a_second_release_drops_what_was_kept() -> None:
    driver = FakeMemoryDriver(10 * CHUNK)
    memory = VirtualMemory(driver, CHUNK)
    tensors = filled(memory)
    memory.release((), keep=True)
    memory.release((), keep=False)
    memory.claim()
    assert contents(tensors)[0] == {0xFF}


def test_without_memory_nothing_changes() -> None:
    driver = FakeMemoryDriver(10 * CHUNK)
    memory = VirtualMemory(driver, CHUNK)
    tensors = filled(memory)
    expected = contents(tensors)
    with pytest.raises(MemoryLimitError, match="do not fit the device"):
        memory.empty((11 * CHUNK,), dtype=torch.uint8)
    memory.release((), keep=True)
    driver.taken = 8 * CHUNK
    with pytest.raises(MemoryLimitError, match=f"no memory to wake up: {4 * CHUNK} bytes.*fake GPU is full.*wake up"):
        memory.claim()
    assert not driver.mapped
    driver.taken = 0
    memory.claim()
    assert contents(tensors) == expected


def test_without_host_memory_the_device_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeMemoryDriver(10 * CHUNK)
    memory = VirtualMemory(driver, CHUNK)
    tensors = filled(memory)
    expected = contents(tensors)

    monkeypatch.setattr(host_copy, "free_memory", lambda: FreeMemory(20_000, 1_000_000))
    with pytest.raises(MemoryLimitError, match="no host memory to keep 16384 bytes.*level 2 keeps nothing"):
        memory.release((), keep=True)
    assert len(driver.mapped) == 4 and contents(tensors) == expected


@pytest.mark.parametrize("asleep", [True, False])
def test_the_last_tensor_gives_all_back(asleep: bool) -> None:
    driver = FakeMemoryDriver(10 * CHUNK)
    memory = VirtualMemory(driver, CHUNK)
    tensors = filled(memory)
    if asleep:
        memory.release((), keep=False)
    del memory
    gc.collect()
    assert not driver.calls
    del tensors[1:]
    gc.collect()
    assert not driver.calls
    tensors.clear()
    gc.collect()
    assert driver.calls == ["free"] and not driver.mapped


class VirtualPlatform(CpuPlatform):
    """A CPU whose static memory is that of a fake GPU: graphs are tapes with frozen addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.drivers: list[FakeMemoryDriver] = []

    def static_memory(self) -> VirtualMemory:
        self.drivers.append(FakeMemoryDriver(8 << 20))
        return VirtualMemory(self.drivers[-1], 1 << 16)


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> VirtualPlatform:
    platform = VirtualPlatform()
    build = functools.partial(start_module.build_engine, platform=platform)
    monkeypatch.setattr(start_module, "build_engine", build)
    return platform


PROMPT = [3 + place * place % 40 for place in range(20)]
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)


def start(folder: Path, **settings: Any) -> LLM:
    sizes = {"max_model_len": 64, "max_num_seqs": 2, "num_kv_blocks": 12, "cudagraph_capture_sizes": [1, 2, 8]}
    return LLM(str(folder), enable_sleep_mode=True, dtype="float32", seed=0, **sizes, **settings)


def tokens(llm: LLM) -> list[int]:
    (output,) = llm.generate([PROMPT], PARAMS)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_an_engine_wakes_up_with_its_graphs(tmp_path: Path, platform: VirtualPlatform, load_format: str) -> None:
    make_checkpoint("qwen3", tmp_path)
    with start(tmp_path, load_format=load_format) as llm:
        weights, kv_cache = platform.drivers
        expected, sizes = tokens(llm), (len(weights.mapped), len(kv_cache.mapped))
        assert all(sizes)
        for level in (1, 2, 1):
            llm.sleep(level)
            assert not weights.mapped and not kv_cache.mapped
            llm.wake_up()
            assert (len(weights.mapped), len(kv_cache.mapped)) == sizes
            assert tokens(llm) == expected
            report = llm.verify(num_replays=2)
            assert report.ok, report.mismatches
            assert llm.step_counts["full decode"] > 0
    gc.collect()
    assert weights.calls == kv_cache.calls == ["free"]


def test_a_part_without_memory_sleeps_on(tmp_path: Path, platform: VirtualPlatform) -> None:
    make_checkpoint("qwen3", tmp_path)
    with start(tmp_path) as llm:
        weights, kv_cache = platform.drivers
        expected = tokens(llm)
        llm.sleep(2)
        kv_cache.taken = kv_cache.device_bytes
        with pytest.raises(MemoryLimitError, match="no memory to wake up"):
            llm.wake_up()
        assert llm.is_sleeping() and weights.mapped and not kv_cache.mapped
        kv_cache.taken = 0
        llm.wake_up(["kv_cache"])
        assert not llm.is_sleeping() and tokens(llm) == expected


def test_files_that_have_changed_are_told(tmp_path: Path, platform: VirtualPlatform) -> None:
    make_checkpoint("qwen3", tmp_path)
    with start(tmp_path) as llm:
        expected = tokens(llm)
        llm.sleep(2)
        with without_norms(tmp_path):
            with pytest.raises(WeightError, match=r"is in none of model\.safetensors"):
                llm.wake_up()
            assert llm.is_sleeping() and not platform.drivers[0].mapped
        llm.wake_up()
        assert tokens(llm) == expected


def test_the_plan_counts_the_unused_parts_of_chunks(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    blocks, size = [], 0
    for enabled in (False, True):
        config = EngineConfig(model=str(tmp_path), device="cuda", dtype="float16", enable_sleep_mode=enabled)
        memory = make_plan(config, read_model_spec(tmp_path), known_device("h200")).memory
        blocks.append(memory.num_blocks)
        size = memory.block
    assert abs((blocks[0] - blocks[1]) * size - 2 * CHUNK_BYTES) <= size


@pytest.mark.gpu
def test_a_gpu_sleeps_and_wakes_up_with_its_graphs() -> None:
    if os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1":
        pytest.skip("the free memory of the GPU is compared, which other processes change: run it without -n")
    with LLM("demo", device="cuda", enable_sleep_mode=True, max_num_seqs=4, gpu_memory_utilization=0.3) as llm:
        expected = tokens(llm)
        free, _ = torch.cuda.mem_get_info()
        for level in (1, 2) * 3:
            llm.sleep(level)
            assert torch.cuda.mem_get_info()[0] > free + llm.plan.memory.kv_cache
            llm.wake_up()
            assert torch.cuda.mem_get_info()[0] > free - (64 << 20)
            assert tokens(llm) == expected
        report = llm.verify(num_replays=20)
        assert report.ok, report.mismatches


class FakeLibrary:
    """Library of the driver that records its calls and answers each with an error, 0 for none."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.errors: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            objects = [getattr(one, "_obj", one) for one in arguments]
            if name in ("cuMemAddressReserve", "cuMemCreate"):
                objects[0].value = 77
            self.calls.append(
                (name, [bytes(one) if isinstance(one, ctypes.Structure) else one.value for one in objects])
            )
            return self.errors.get(name, 0)

        return call


def test_the_calls_of_the_cuda_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """Structures have the layout of cuda.h: a pinned allocation on device 3, and its access."""
    library = FakeLibrary()
    monkeypatch.setattr(cuda_memory_driver.ctypes, "CDLL", lambda name: library)
    properties = SimpleNamespace(total_memory=5 << 30)
    for name, value in {"current_device": 3, "get_device_properties": properties, "mem_get_info": (5, 9)}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("synchronize", "set_device"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    driver = cuda_memory_driver.CudaMemoryDriver()
    assert driver.device_bytes == 5 << 30 and driver.reserve(4096) == 77
    assert driver.map(77, 4096) == 77
    driver.unmap(77, 4096, 77)
    driver.free(77, 4096)
    ints = struct.Struct("<4iQ8B").pack(1, 0, 1, 3, 0, *8 * [0])
    assert library.calls == [
        ("cuMemAddressReserve", [77, 4096, 0, 0, 0]),
        ("cuMemCreate", [77, 4096, ints, 0]),
        ("cuMemMap", [77, 4096, 0, 77, 0]),
        ("cuMemSetAccess", [77, 4096, struct.pack("<3i", 1, 3, 3), 1]),
        ("cuMemUnmap", [77, 4096]),
        ("cuMemRelease", [77]),
        ("cuMemAddressFree", [77, 4096]),
    ]
    library.errors = {"cuMemCreate": 2, "cuMemUnmap": 1}
    with pytest.raises(MemoryLimitError, match="the GPU has 5 free bytes of 9"):
        driver.map(77, 4096)
    with pytest.raises(PhonographError, match="the CUDA driver refused cuMemUnmap, with error 1"):
        driver.unmap(77, 4096, 77)
