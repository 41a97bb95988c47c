"""Parts of CUDA that the GPU's runner needs, without a GPU: graphs are calls, and tokens are on the host already."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from phonograph.kernels.triton.gemm import choose
from phonograph.kernels.triton.gemm.product_plan import GemmSmallMConfig


@contextlib.contextmanager
def tiles_of_small_models() -> Generator[None]:
    """Products of few rows by large tiles of few columns, in a tenth of the time.

    The interpreter takes as long for columns that the model does not have. Tests of layers
    (tests/models/test_kernel_sets.py) and of products have the tiles of a GPU.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "_through_registers", lambda rows, shape: GemmSmallMConfig(rows, 32, 128, 2, 2, 4, 1))
        choose.choose.cache_clear()
        yield
    choose.choose.cache_clear()


@dataclass
class CallRuntime:
    """Runtime without graphs: a replay calls the captured function.

    lazily: a capture does not call it. The outputs are those of the first replay.
    """

    runs_captured: bool = True
    lazily: bool = False
    memory_bytes: int = 0
    log: list[str] = field(default_factory=list)

    def scope(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        function(*tensors)

    def synchronize(self) -> None:
        """Wait for nothing."""

    def poison(self) -> None:
        """Poison nothing: there is no pool."""

    def capture(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> Any:
        with torch.inference_mode():
            graph = SimpleNamespace(outputs=None if self.lazily else function())

        def replay() -> None:
            with torch.inference_mode():
                outputs = function()
            self.log.append("step" if outputs else "masks")
            graph.outputs = outputs if graph.outputs is None else graph.outputs

        graph.replay = replay
        return graph


class HostRing:
    """Tokens as the device sends them, where there is no device. Early rows are written by the kernel."""

    def __init__(self, *, depth: int, max_rows: int, units: torch.Tensor | None = None, early_words: int = 0) -> None:
        self.depth, self.sent, self.log = depth, list[np.ndarray](), list[str]()
        self._early = torch.full((depth, early_words + 4), -77, dtype=torch.int32)
        self._early_words = early_words
        self.sent_units: list[tuple[int, int, int]] = []
        self.shared_tiles = 0
        self._units = torch.zeros(3, dtype=torch.int32) if units is None else units

    def send(self, tokens: torch.Tensor) -> int:
        self.log.append("send")
        self.sent.append(tokens.numpy().copy())
        shared, own, tiles = map(int, self._units)
        self.sent_units.append((shared, own, tiles))
        return self.latest

    @property
    def early_row(self) -> tuple[int, int]:
        return len(self.sent) % self.depth, len(self.sent) + 1

    def send_early(self, staging: torch.Tensor, results: torch.Tensor) -> None:
        from phonograph.kernels.triton.step.pinned_words import send_words

        send_words(staging, results[: self._early_words], self._early, more=self._units)

    @property
    def latest(self) -> int:
        return len(self.sent) - 1

    def read(self, ticket: int) -> np.ndarray:
        assert ticket >= len(self.sent) - self.depth
        self.log.append(f"read {self.latest - ticket}")
        return self.sent[ticket]

    def read_early(self, ticket: int) -> np.ndarray:
        *words, tag = self._early[ticket % self.depth].tolist()
        assert tag == ticket + 1, "the step has sent nothing early"
        assert words == [*self.sent[ticket][: self._early_words].tolist(), *self.sent_units[ticket]]
        self.log.append(f"early {self.latest - ticket}")
        return np.array(words[: self._early_words], np.int32)

    def units(self, ticket: int) -> tuple[int, int]:
        *units, self.shared_tiles = self.sent_units[ticket]
        return units[0], units[1]
