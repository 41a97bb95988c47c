"""Brings weights from mapped files to a GPU by several threads, each through page-locked memory of its own.

A copy from ordinary memory goes through a buffer of the driver's, one copy at a time, and waits for the pages that the
file's mapping has not seen yet. Here threads do both side by side: pages are brought into a thread's staging memory
while the bus brings those of others to the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from threading import local

import numpy as np
import torch

from phonograph.core.device import num_cores
from phonograph.errors import WeightError

STAGING_BYTES = 32 << 20
_THREADS = 8
_FLOAT16_INFINITE = 65520.0
"""Numbers from here on are cast to an infinite float16."""


class Staging:
    """Memory of one thread that is on its way to the device."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._bytes = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._array = self._bytes.numpy()
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        if self._stream is not None:
            # The weights' memory may still be read by what had it before.
            self._stream.wait_stream(torch.cuda.default_stream(device))

    @torch.inference_mode()
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Fills `destination`, at any strides and of any type, from a contiguous CPU tensor of its shape. It is there
        when this returns."""
        if source.ndim == 0:
            source, destination = source.reshape(1), destination.reshape(1)
        row_bytes = source[:1].numel() * source.itemsize
        if row_bytes > STAGING_BYTES:
            for row in range(len(source)):
                self.copy(destination[row], source[row])
            return
        rows = max(1, STAGING_BYTES // max(1, row_bytes))
        for start in range(0, len(source), rows):
            piece = source[start : start + rows]
            data = piece.view(-1).view(torch.uint8).numpy()
            np.copyto(self._array[: data.size], data)
            staged = self._bytes[: data.size].view(source.dtype).view(piece.shape)
            with self._scope():
                destination[start : start + rows].copy_(staged, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()

    def check_finite(self, name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Raise a WeightError if a copy made finite numbers infinite."""
        with self._scope():
            _check_finite(name, destination, source)

    def _scope(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class Copies:
    """Copies under way to `device`; one after another where it is the CPU, whose copies use all cores already.

    done: called in this thread with how many are there
    """

    def __init__(self, device: torch.device, done: Callable[[int], None]) -> None:
        self._device = device
        self._done = done
        self._own = local()
        self._futures: list[Future[None]] = []
        self._num_done = 0
        self._pool = None
        if device.type == "cuda":
            self._pool = ThreadPoolExecutor(min(_THREADS, num_cores()), thread_name_prefix="weights")

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        """What has not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Begin to fill the weight `name`.

        Raises:
            WeightError: finite numbers of the source are infinite in the destination's type; by threads, in `finish`.
        """
        if self._pool is None:
            destination.copy_(source)
            _check_finite(name, destination, source)
            self._one_more()
        else:
            self._futures.append(self._pool.submit(self._copy, name, destination, source))

    def finish(self) -> None:
        """Wait for all copies.

        Raises:
            WeightError: as `add`.
        """
        for future in as_completed(self._futures):
            future.result()
            self._one_more()
        self._futures.clear()

    def _one_more(self) -> None:
        self._num_done += 1
        self._done(self._num_done)

    def _copy(self, name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        staging = getattr(self._own, "staging", None)
        if staging is None:
            staging = self._own.staging = Staging(self._device)
        staging.copy(destination, source.contiguous())
        staging.check_finite(name, destination, source)


@torch.inference_mode()
def _check_finite(name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise a WeightError if the cast of finite numbers to float16 gave infinite ones.

    The extremes of the cast tensor tell without another copy; the source is looked at only where they are infinite.
    """
    if destination.dtype != torch.float16 or source.dtype == torch.float16 or not source.numel():
        return
    low, high = torch.aminmax(destination)
    if bool(low.isfinite() & high.isfinite()):
        return
    largest = float(source[source.isfinite()].abs().amax()) if bool(source.isfinite().any()) else 0.0
    if largest >= _FLOAT16_INFINITE:
        raise WeightError(
            f"tensor {name} has numbers up to {largest:g}, and the largest float16 is 65504; dtype bfloat16 or float32 "
            "works"
        )
