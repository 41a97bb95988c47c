"""Starts runners of an H200 without a GPU, one after another, and prints which kernels they launch as a list in JSON.

    python tests/kernels/start_for_hopper.py CONFIG_FOLDER SETTINGS ...

SETTINGS are engine settings as a JSON object. Of several ranks the first is started.

Everything is as in a start but that tensors have no memory, no kernel is compiled or launched, and nothing is captured:
what is recorded is the name under which Triton would file each kernel. A program of its own, since it tells torch and
Triton of a GPU that is not there.

"few": launched by the layers that a start runs so that all kernels are compiled; "every": by all layers of the same
steps; "captured", "eager": by the graphs that are captured then, and by steps that no graph holds.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import triton
from far_gpu import FarGpu
from far_ranks import FarRanks, pretend_ranks
from triton.runtime.jit import JITFunction

from phonograph.attention.triton import backend as triton_backend
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.engine.build import make_backends_of, make_model_parts, make_runner
from phonograph.engine.plan import make_plan
from phonograph.engine.startup.cuda_platform import CudaPlatform
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.kernels.triton.launch.precompile import filed_under
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.runner.runner import Runner
from phonograph.sampling import sampler

H200 = known_device("h200")
EAGER_TOKENS = (2049, 3000, 3333, 5000, 7777, 8190, 8192)

kernels: set[tuple[str, str]] = set()
"""Launched since it was cleared."""


class Event:
    def record(self) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class DryRuntime:
    """In place of CUDA graphs."""

    runs_captured, memory_bytes = False, 0

    def __init__(self, *_: Any) -> None:
        """Take a device and its scratch."""

    def scope(self) -> AbstractContextManager[None]:
        return nullcontext()

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        function(*tensors)


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
    triton_backend._NO_GPU = H200.capability, H200.num_sms
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


def make_hopper_runner(folder: str, settings: dict[str, Any]) -> Runner:
    config = EngineConfig(model=folder, load_format="dummy", dtype="bfloat16", device="cuda", **settings)
    plan = make_plan(config, read_model_spec(folder, trust_remote_code=False, revision=None), H200)
    meta = torch.device("meta")
    make_runtime: Any = DryRuntime
    draft = None if plan.draft is None else Transformer(plan.draft.model, torch.bfloat16, meta)
    ranks = None if config.tensor_parallel_size == 1 else FarRanks(plan, 0)
    model = Transformer(plan.model, torch.bfloat16, meta)
    parts = make_model_parts(plan, make_backends_of(plan, meta, ranks), model, draft)
    return make_runner(plan, parts, CudaPlatform(meta, make_runtime=make_runtime, ranks=ranks))


def launched(run: Callable[[], None]) -> set[tuple[str, str]]:
    kernels.clear()
    run()
    return set(kernels)


def report(folder: str, settings: dict[str, Any]) -> dict[str, Any]:
    runner, speculation = make_hopper_runner(folder, settings), settings.get("speculative_config")
    keys = runner.dispatcher.captures.largest_first()
    few = launched(runner.launch_kernels)
    runner._program.few_layers = nullcontext
    every = launched(runner.launch_kernels)

    def capture_all() -> None:
        for key in keys:
            runner._capturable(key)()

    def run_eagerly() -> None:
        for num_tokens in EAGER_TOKENS:
            slots = runner._sequences.max_num_seqs
            commons = runner.synthetic.capture_batch(GraphKey(GraphSet.MIXED, num_tokens, slots))
            runner.prepare(commons, None)
            for makes_drafts in (False, speculation is not None):
                runner._run_eager(commons[0], commons[0].num_reqs, makes_drafts=makes_drafts)
        # Decodes with drafts run eagerly where graphs are off, or their number is above the largest.
        longest = 0 if speculation is None else 1 + speculation["num_speculative_tokens"]
        for num_reqs in (1, 3, 250) if longest else ():
            commons = runner.synthetic.capture_batch(
                GraphKey(GraphSet.DECODE, num_reqs * longest, num_reqs, longest, num_logits=num_reqs * longest)
            )
            runner.prepare(commons, None)
            runner._run_eager(commons[0], num_reqs * longest, makes_drafts=True)

    with torch.inference_mode():
        found = {"few": few, "every": every, "captured": launched(capture_all), "eager": launched(run_eagerly)}
    names = {name: sorted(f"{kernel} {key}" for kernel, key in those) for name, those in found.items()}
    return {"graphs": len(keys), **names}


def main() -> None:
    pretend_gpu()
    pretend_ranks()
    JITFunction.run = record
    arguments = sys.argv[1:]
    print(
        json.dumps([report(one, json.loads(other)) for one, other in zip(arguments[::2], arguments[1::2], strict=True)])
    )


if __name__ == "__main__":
    main()
