"""Capture and replay behind one small protocol, so that the CPU runs what a GPU runs.

`tape.py` implements it for the CPU, with the hazards of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """One recorded computation.

    steps:   what a replay calls, in order; with pieces, graphs and the eager calls between them
    outputs: the tensors the captured function returned. They live in memory that all graphs of a runtime share: the
        next replay of *any* graph may overwrite them, so read them, or copy them, before that.
    """

    steps: list[Callable[[], object]]
    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        """Runs everything again on the same memory, reading its present contents."""
        with torch.inference_mode():
            for step in self.steps:
                step()


class GraphRuntime(Protocol):
    """Captures graphs into one memory pool.

    runs_captured: True where a function has run when it is captured; False where only its eager calls have
    """

    runs_captured: bool

    def scope(self) -> AbstractContextManager[object]:
        """What steps, captures and replays run within: on a GPU, the runtime's stream."""
        ...

    def capture(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> CapturedGraph:
        """Runs `function` once and records it.

        Raises:
            CaptureError: `function` did what a graph cannot hold (a host read, a shape that depends on data, ...).
        """
        ...

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Inside a capture: ends the running piece, has `function(*tensors)` run eagerly now and at each replay, and
        opens the next piece. Outside a capture: just calls it.

        The tensors may be moved into the pool after the capture, so `function` must take them as arguments, not from
        its closure. It writes its results into them.
        """
        ...

    def synchronize(self) -> None:
        """Waits until all that was asked for within `scope` has been done, so that others may read the results."""
        ...

    def poison(self) -> None:
        """Fills the pool's memory with NaN, to show what a graph reads without having written it."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory that the graphs captured so far keep."""
        ...
