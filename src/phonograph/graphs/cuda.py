"""CUDA graphs, all on one stream, all over the same static tensors.

Captures share one memory pool. The kernels of a step write to the runner's workspace, so a graph takes little more
memory than its nodes, and any order of captures and replays is safe as long as one stream runs them. An eager call ends
the running capture and opens the next, so a broken graph is a list of graphs with calls between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from phonograph.errors import CaptureError, MemoryLimitError, PhonographError
from phonograph.graphs.runtime import CapturedGraph


class CudaRuntime:
    """GraphRuntime of the current CUDA device.

    Args:
        device: the device.
        scratch: static floating-point tensors of intermediates, for `poison`.
    """

    runs_captured = False

    def __init__(self, device: torch.device, scratch: Sequence[torch.Tensor] = ()) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._scratch = list(scratch)
        self._pool = torch.cuda.graph_pool_handle()
        self._running: torch.cuda.CUDAGraph | None = None
        self._steps: list[Callable[[], object]] | None = None
        self._memory_bytes = 0

    def scope(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)

    def capture(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> CapturedGraph:
        """Capture `function`, which must have run eagerly before, so that its kernels are compiled.

        Raises:
            CaptureError: it did what a capture refuses (a host read, a synchronising call).
            MemoryLimitError: the device has no memory left for the graph.
        """
        assert self._steps is None, "captures do not nest"
        torch.cuda.synchronize(self.device)
        free_before, _ = torch.cuda.mem_get_info(self.device)
        self._steps = []
        try:
            with torch.inference_mode(), self.scope():
                self._open()
                outputs = function()
                self._close()
            graph = CapturedGraph(self._steps, outputs)
        except BaseException as error:
            self._abandon()
            if isinstance(error, torch.OutOfMemoryError):
                raise MemoryLimitError(
                    "no memory is left for a CUDA graph; lower gpu_memory_utilization, max_cudagraph_capture_size or "
                    "max_num_seqs"
                ) from error
            if isinstance(error, RuntimeError) and not isinstance(error, PhonographError):
                raise CaptureError(f"a CUDA graph cannot hold this step: {_first_line(error)}") from error
            raise
        finally:
            self._steps = None
        torch.cuda.synchronize(self.device)
        free_after, _ = torch.cuda.mem_get_info(self.device)
        self._memory_bytes += max(0, free_before - free_after)
        return graph

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        if self._steps is None:
            function(*tensors)
            return
        self._close()
        call = functools.partial(function, *tensors)
        call()
        self._steps.append(call)
        self._open()

    def synchronize(self) -> None:
        self.stream.synchronize()

    def poison(self) -> None:
        with self.scope():
            for tensor in self._scratch:
                tensor.fill_(float("nan"))

    @property
    def memory_bytes(self) -> int:
        """Memory that captures took from the device's free memory."""
        return self._memory_bytes

    def _open(self) -> None:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._running = graph

    def _close(self) -> None:
        assert self._running is not None and self._steps is not None
        graph, self._running = self._running, None
        graph.capture_end()
        self._steps.append(graph.replay)

    def _abandon(self) -> None:
        """End a failed capture, or the stream would stay in capture mode."""
        graph, self._running = self._running, None
        if graph is not None:
            try:
                with self.scope():
                    graph.capture_end()
            except RuntimeError:
                pass  # the failure that brought us here has invalidated it


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
