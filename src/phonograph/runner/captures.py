"""The graphs of an engine by their keys: captures the whole list, largest first, and replays one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from phonograph.errors import CaptureError
from phonograph.graphs.capture_list import CaptureRetry
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.runtime import CapturedGraph, GraphRuntime

CaptureProgress = Callable[[int, int, GraphKey], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureReport:
    """Result of the capture phase: graphs, their cost, and those that took a second try."""

    num_graphs: int
    seconds: float
    memory_bytes: int
    retries: tuple[CaptureRetry, ...] = ()


class CapturedGraphs:
    """The graphs that were captured, by key."""

    def __init__(self, runtime: GraphRuntime) -> None:
        self.runtime = runtime
        self._graphs: dict[GraphKey, CapturedGraph] = {}

    def capture(
        self,
        keys: tuple[GraphKey, ...],
        step: Callable[[GraphKey], Callable[[], tuple[torch.Tensor, ...]]],
        progress: CaptureProgress | None = None,
    ) -> tuple[CaptureRetry, ...]:
        """Capture `keys` in their order.

        A library may have something left to load, which a capture refuses. Its first run is eager then, and the graph
        is captured at a second try.

        Args:
            keys: the graphs.
            step: prepares a real batch of a graph's shape and returns what runs it.
            progress: called before each graph.

        Returns:
            The second tries, with the reasons.

        Raises:
            CaptureError: a second try failed too.
        """
        retries: list[CaptureRetry] = []
        for done, key in enumerate(keys):
            if progress is not None:
                progress(done, len(keys), key)
            try:
                self._capture(key, step)
            except CaptureError as error:
                retries.append(CaptureRetry(key, str(error)))
                step(key)()
                self._capture(key, step)
        return tuple(retries)

    def _capture(self, key: GraphKey, step: Callable[[GraphKey], Callable[[], tuple[torch.Tensor, ...]]]) -> None:
        run = step(key)
        if key.graphs is GraphSet.PIECEWISE and not self.runtime.runs_captured:
            # Attention between the pieces runs during the capture, on what this makes.
            run()
        self._graphs[key] = self.runtime.capture(run)

    def graph(self, key: GraphKey) -> CapturedGraph:
        """Return the graph of `key`."""
        return self._graphs[key]

    def replay(self, key: GraphKey) -> tuple[torch.Tensor, ...]:
        """Replay the graph of `key`; the next replay overwrites the outputs."""
        graph = self.graph(key)
        graph.replay()
        return graph.outputs
