"""Protocol of capture and replay, so that the CPU runs what a GPU runs. `cuda.py` and `tape/` implement it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """One recorded computation.

    Attributes:
        steps: calls of a replay, in order; a broken graph has its pieces and the eager calls between them.
        outputs: the tensors that the captured function returned. All graphs of a runtime share their memory: the next
            replay of any graph may overwrite them.

    Example:
        ```python
        from phonograph.graphs.tape.tape import TapeRuntime

        runtime, number = TapeRuntime(), torch.ones(2)
        with torch.inference_mode(), runtime.scope():
            graph = runtime.capture(lambda: (2 * number,))
            number.fill_(3.0)
            graph.replay()
        assert graph.outputs[0].tolist() == [6.0, 6.0]
        ```
    """

    steps: list[Callable[[], object]]
    outputs: tuple[torch.Tensor, ...]

    def replay(self) -> None:
        """Run everything again on the same memory with its present contents."""
        with torch.inference_mode():
            for step in self.steps:
                step()


class GraphRuntime(Protocol):
    """Capture of graphs into one memory pool.

    Attributes:
        runs_captured: True if a captured function has run; False if only its eager calls have.
    """

    runs_captured: bool

    def scope(self) -> AbstractContextManager[object]:
        """Return the context of steps, captures and replays: on a GPU, the runtime's stream."""
        ...

    def capture(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> CapturedGraph:
        """Run `function` once and record it.

        Args:
            function: reads tensors whose addresses stay the same, and returns its results.

        Returns:
            The graph with the outputs of `function`.

        Raises:
            CaptureError: a graph cannot hold what `function` did (a host read, a shape that depends on data, ...).
        """
        ...

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Call `function(*tensors)`, which writes its results into the tensors.

        Inside a capture, end the running piece, run the call eagerly now and at each replay, and open the next piece.
        The capture may move the tensors into the pool afterwards, so `function` must not take them from its closure.

        Args:
            function: the call.
            tensors: its arguments.
        """
        ...

    def synchronize(self) -> None:
        """Wait until all work of `scope` is done, so that its results may be read elsewhere."""
        ...

    def poison(self) -> None:
        """Fill the pool's memory with NaN, to show what a graph reads before it writes."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Memory of the graphs captured so far."""
        ...
