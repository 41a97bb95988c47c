"""Evaluations and benchmarks of small engines, with no settings from the environment."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from commands import plain_environment  # noqa: F401 - a fixture of every test here

from phonograph import LLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="session")
def demo_llm() -> LLM:
    """Return the demo model with few graphs, which starts quickly."""
    return LLM(model="demo", dtype="float32", max_num_seqs=8, cudagraph_capture_sizes=[1, 4, 8, 16, 128, 512])


@pytest.fixture(scope="session")
def benchmark_script() -> Iterator[Callable[[str], ModuleType]]:
    """Load a script of `benchmarks/` as a module, with the others importable as when it is run."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield load
