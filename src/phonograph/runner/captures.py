"""The graphs of an engine by their keys: captures the whole list, largest first, and replays one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phonograph.graphs.capture_list import CaptureRetry
from phonograph.graphs.modes import GraphKey
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
    """What was captured, by key."""

    def __init__(self, runtime: GraphRuntime) -> None:
        self.runtime = runtime
        self._graphs: dict[GraphKey, CapturedGraph] = {}

    def capture(
        self,
        keys: tuple[GraphKey, ...],
        step: Callable[[GraphKey], Callable[[], tuple[torch.Tensor, ...]]],
        progress: CaptureProgress | None = None,
    ) -> CaptureReport:
        """Captures `keys` in their order. `step(key)` prepares a real batch of that shape and returns what runs it."""
        start = time.perf_counter()
        for done, key in enumerate(keys):
            if progress is not None:
                progress(done, len(keys), key)
            self._graphs[key] = self.runtime.capture(step(key))
        seconds = time.perf_counter() - start
        return CaptureReport(num_graphs=len(keys), seconds=seconds, memory_bytes=self.runtime.memory_bytes)

    def graph(self, key: GraphKey) -> CapturedGraph:
        return self._graphs[key]

    def replay(self, key: GraphKey) -> tuple[torch.Tensor, ...]:
        """Replays the graph of `key`; the next replay overwrites the outputs."""
        graph = self.graph(key)
        graph.replay()
        return graph.outputs
