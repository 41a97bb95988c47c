"""Compiles kernels for compute capability 9.0 through the helper, without a GPU, and prints what came of it as JSON.

A program of its own, since the interpreter, which other tests run kernels in, is chosen when Triton is imported. Its
cache is empty at first: TRITON_CACHE_DIR says where it is. With `killed` the helper is killed when it is asked for the
first kernel; with `few` there is one kernel only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
import triton
import triton.backends.nvidia.driver as nvidia
from far_gpu import FarGpu
from product_problem import linear
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.build import platform_key
from triton.runtime.cache import get_cache_manager
from triton.runtime.jit import JITFunction

from phonograph.kernels.triton.gemm.product_plan import GemmRingConfig, GemmSmallMConfig
from phonograph.kernels.triton.launch import compile_helper, precompile
from phonograph.kernels.triton.sampling.sample import make_sample_scratch, sample


def choose_tokens() -> None:
    """Its second kernel calls functions that its first has, of which Triton hashes the constants by who comes first."""
    rows, vocab_size, device = 2, 5000, torch.device("cpu")
    integers = torch.zeros(rows, dtype=torch.int32)
    sample(
        torch.zeros(rows, vocab_size, dtype=torch.bfloat16), integers, torch.ones(rows), integers, torch.ones(rows),
        torch.zeros(rows), integers.long(), make_sample_scratch(rows, vocab_size, device), integers, integers,
        integers, integers,
    )  # fmt: skip


def launcher_built(kernel: CompiledKernel) -> bool:
    """Return True if the module that launches the kernel is in Triton's cache under the name that this process uses."""
    sources: list[str] = []

    def note_source(src: str, **about: Any) -> None:
        sources.append(src)
        raise InterruptedError

    nvidia.library_dirs, nvidia.compile_module_from_src = list, note_source
    with contextlib.suppress(InterruptedError):
        nvidia.CudaLauncher(kernel.src, kernel.metadata)
    cache = get_cache_manager(hashlib.sha256((sources[0] + platform_key()).encode()).hexdigest())
    return cache.get_file(f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}") is not None


def main() -> None:
    triton.runtime.driver.set_active(FarGpu(90))
    # Nothing can be loaded.
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = CompiledKernel._init_handles = lambda _: None
    compile_helper.ALONE = 0
    told: list[Any] = []
    functions: set[Any] = set()

    def note_compilation(**facts: Any) -> None:
        functions.add(facts["src"].fn)
        told.append((facts["src"].name, facts["cache_hit"]))

    knobs.compilation.listener = note_compilation
    sent: list[Any] = []
    send = compile_helper.CompileHelper.send

    def sending(self: Any, job: Any, answer: Any) -> None:
        if "killed" in sys.argv:
            self._process.kill()
        sent.append((job.name, answer))
        send(self, job, answer)

    compile_helper.CompileHelper.send = sending
    launch = JITFunction.run
    with precompile.compile_only():
        if "few" not in sys.argv:
            choose_tokens()
        x, weight, out = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((8, 256), (64, 256), (8, 64)))
        linear(x, weight, None, out, config=GemmSmallMConfig(8, 16, 128, 2, 1, 4, 1, programs=4))
        if "few" not in sys.argv:
            # In Triton's other language.
            linear(x, weight, None, out, config=GemmRingConfig(16, 64, 64, 1, 2))
        there = compile_helper.helper(1)
        if there is not None:
            there.send(compile_helper.Job("phonograph.kernels.triton.gemm.gemv", "_no_kernel", "", 90, "{}"), Future())
    problems = [(name, answer.result()) for name, answer in sent]
    made = [kernel for function in functions for kernel in function.device_caches[0][0].values()]
    assert len(made) == len(told) and all(isinstance(kernel, CompiledKernel) for kernel in made)
    print(
        json.dumps(
            {
                "problems": problems,
                "told": told,
                "launchers": [(kernel.name, launcher_built(kernel)) for kernel in made],
                "restored": JITFunction.run is launch and knobs.runtime.jit_cache_hook is None,
                "stamped": compile_helper._is_stamped(),
                "ended": compile_helper._current is None,
            }
        )
    )


if __name__ == "__main__":
    main()
