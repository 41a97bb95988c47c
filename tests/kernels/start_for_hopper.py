"""Starts the runner of an H200 without a GPU, and prints which kernels it launches as JSON.

    python tests/kernels/start_for_hopper.py CONFIG_FOLDER

Everything is as in a start but that tensors have no memory, no kernel is compiled or launched, and nothing is captured:
what is recorded is the name under which Triton would file each kernel. A program of its own, since it tells torch and
Triton of a GPU that is not there.

"few": launched by the layers that a start runs so that all kernels are compiled; "every": by all layers of the same
steps; "captured", "eager": by the graphs that are captured then, and by steps that no graph holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import triton
from far_gpu import FarGpu
from triton.runtime.jit import JITFunction

from phonograph.attention.triton import backend as triton_backend
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine import build, wiring_cuda
from phonograph.engine.plan import make_plan
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.triton.launch.precompile import filed_under
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import Loading
from phonograph.runner import cuda_runner
from phonograph.runner.cuda_runner import CudaRunner
from phonograph.sampling import sampler

H200 = known_device("h200")
EAGER_TOKENS = (2049, 3000, 3333, 5000, 7777, 8190, 8192)

kernels: set[tuple[str, str]] = set()
"""Launched since it was cleared."""


class Started(Exception):
    """With the runner, where its captures would begin."""


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class Runtime:
    """In place of CUDA graphs."""

    def __init__(self, *_: Any) -> None:
        self.memory_bytes = 0

    @contextmanager
    def scope(self) -> Iterator[None]:
        yield

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        function(*tensors)


class TorchOfMeta(ModuleType):
    """torch, but every device is one whose tensors have no memory."""

    meta = torch.device("meta")

    def device(self, *_: Any) -> torch.device:
        return self.meta

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def pretend_gpu() -> None:
    triton.runtime.driver.set_active(FarGpu(90))
    facts = SimpleNamespace(multi_processor_count=H200.num_sms, shared_memory_per_block_optin=227 << 10)
    for name, value in {
        "current_device": 0,
        "is_available": True,
        "get_device_capability": H200.capability,
        "get_device_properties": facts,
    }.items():
        setattr(torch.cuda, name, lambda *_, value=value: value)
    torch.cuda.Event = Event
    for name in ("zeros", "full", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    triton_backend._INTERPRETER_SMS = H200.num_sms
    sampler._CHUNK_LOGITS["meta"] = sampler._CHUNK_LOGITS["cuda"]
    # The library's products need no kernel of ours, and take long of tensors without memory.
    torch.Tensor.addmm_ = lambda self, *_, **__: self
    torch.mm = torch.addmm = lambda *_, out=None: out


def unpinned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def make(*args: Any, pin_memory: bool = False, **keywords: Any) -> torch.Tensor:
        return function(*args, **keywords)

    return make


def record(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
    kernels.add((self.__name__, filed_under(self, args, keywords)))


@contextmanager
def nothing_compiled() -> Iterator[set[Any]]:
    yield set()


def make_runner(folder: str) -> CudaRunner:
    def start(self: CudaRunner, *_: Any) -> None:
        raise Started(self)

    @contextmanager
    def make_model(spec: Any, *_: Any, dtype: Any, device: Any, **__: Any) -> Generator[Loading]:
        yield Loading(Transformer(spec, dtype, device), (), lambda: None)

    load_kernels, CudaRunner.load_kernels = CudaRunner.load_kernels, start
    build.torch = wiring_cuda.torch = TorchOfMeta("torch")
    build.begin_loading, wiring_cuda.CudaRuntime = make_model, Runtime
    cuda_runner.compile_only, cuda_runner.load_kernels = nothing_compiled, lambda _: None
    config = EngineConfig(model=folder, load_format="dummy", dtype="bfloat16", device="cuda")
    model = read_model_spec(folder, trust_remote_code=False, revision=None)
    try:
        build.build_engine(make_plan(config, model, H200))
    except Started as started:
        CudaRunner.load_kernels = load_kernels
        return started.args[0]
    raise AssertionError("it loads nothing")


def launched(run: Callable[[], None]) -> set[tuple[str, str]]:
    kernels.clear()
    run()
    return set(kernels)


def main() -> None:
    pretend_gpu()
    runner = make_runner(sys.argv[1])
    JITFunction.run = record
    keys = runner.dispatcher.captures.largest_first()
    few = launched(runner.load_kernels)
    type(runner._program).few_layers = lambda _: nullcontext()
    every = launched(runner.load_kernels)

    def capture_all() -> None:
        for key in keys:
            runner._prepared(key)()

    def run_eagerly() -> None:
        for num_tokens in EAGER_TOKENS:
            common = runner._synthetic.capture_batch(GraphKey(GraphSet.MIXED, num_tokens, len(runner._num_known)))
            runner._program.metadata = runner._builder.build(common, key=None)
            runner._run_eager(common)

    with torch.inference_mode():
        found = {"few": few, "every": every, "captured": launched(capture_all), "eager": launched(run_eagerly)}
    names = {name: sorted(f"{kernel} {key}" for kernel, key in those) for name, those in found.items()}
    print(json.dumps({"graphs": len(keys), **names}))


if __name__ == "__main__":
    main()
