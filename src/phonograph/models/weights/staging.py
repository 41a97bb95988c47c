"""Copies of weights from mapped files to a GPU by several threads, each with page-locked staging memory.

A copy from pageable memory goes through a buffer of the driver, one copy at a time, and waits for page faults of the
file's mapping. Threads overlap both: one faults pages into its staging memory while the bus transfers those of others.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, nullcontext
from threading import local

import numpy as np
import torch

from phonograph.core.host_resources import usable_cpus
from phonograph.errors import WeightError

STAGING_BYTES = 32 << 20
_THREADS = 8


class Staging:
    """Staging memory and stream of one thread."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._bytes = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
        self._array = self._bytes.numpy()
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        if self._stream is not None:
            # Earlier work may still read the weights' memory.
            self._stream.wait_stream(torch.cuda.default_stream(device))

    @torch.inference_mode()
    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a contiguous CPU tensor into `destination`, of any strides and type, and wait for the copy."""
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
    """Copies in progress to `device`. On the CPU they run one after another, because each uses all cores.

    `done` is called in this thread with the number of finished copies.
    """

    def __init__(self, device: torch.device, done: Callable[[int], None]) -> None:
        self._device = device
        self._done = done
        self._thread = local()
        self._futures: list[Future[None]] = []
        self._num_done = 0
        self._pool = None
        if device.type == "cuda":
            self._pool = ThreadPoolExecutor(min(_THREADS, usable_cpus()), thread_name_prefix="weights")

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, *_: object) -> None:
        """Drop copies that have not begun."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def add(self, name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Start to fill the weight `name`.

        Raises:
            WeightError: finite numbers become infinite in the destination's type; with threads, `finish` raises it.
        """
        if self._pool is None:
            destination.copy_(source)
            _check_finite(name, destination, source)
            self._count()
        else:
            self._futures.append(self._pool.submit(self._copy, name, destination, source))

    def run(self, load: Callable[[], None]) -> None:
        """Start to load weights of another format, which counts as one copy; errors as with `add`."""
        if self._pool is None:
            load()
            self._count()
        else:
            self._futures.append(self._pool.submit(self._load, load))

    def finish(self) -> None:
        """Wait for all copies.

        Raises:
            WeightError: as `add`.
        """
        for future in as_completed(self._futures):
            future.result()
            self._count()
        self._futures.clear()

    def _count(self) -> None:
        self._num_done += 1
        self._done(self._num_done)

    def _load(self, load: Callable[[], None]) -> None:
        load()
        torch.cuda.current_stream(self._device).synchronize()

    def _copy(self, name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
        staging = getattr(self._thread, "staging", None)
        if staging is None:
            staging = self._thread.staging = Staging(self._device)
        staging.copy(destination, source.contiguous())
        staging.check_finite(name, destination, source)


@torch.inference_mode()
def _check_finite(name: str, destination: torch.Tensor, source: torch.Tensor) -> None:
    """Raise a WeightError if the cast of finite numbers to the destination's type gave infinite ones.

    Checks the extremes of the result, without another copy; reads the source only if they are infinite.
    """
    if torch.finfo(source.dtype).max <= torch.finfo(destination.dtype).max or not source.numel():
        return
    low, high = torch.aminmax(destination)
    if bool(low.isfinite() & high.isfinite()):
        return
    finite = source[source.isfinite()]
    if finite.numel() and not bool(finite.to(destination.dtype).isfinite().all()):
        dtype, largest = str(destination.dtype).removeprefix("torch."), torch.finfo(destination.dtype).max
        others = [other for other in (torch.bfloat16, torch.float32) if torch.finfo(other).max > largest]
        works = " or ".join(str(other).removeprefix("torch.") for other in others)
        raise WeightError(
            f"tensor {name} has numbers up to {float(finite.abs().amax()):g}, and the largest {dtype} is {largest:g}; "
            + (f"dtype {works} works" if works and bool(finite.float().isfinite().all()) else "no type here has them")
        )
