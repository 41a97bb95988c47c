"""Pinned host arrays that plans are copied from, with the events that allow to overwrite them.

The host is a step ahead of the device: while it plans a step, copies of the previous one may still wait in the stream.
So the arrays are used in turn, and an event is recorded behind the copies from each.
"""

from __future__ import annotations

import numpy as np
import torch

_TURNS = 8
"""Exceeds the number of plans in flight; a mixed step takes two."""


class Fence:
    """Event in the current stream; no-op on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Wait for the recorded place. The number of steps in flight is bounded, so this is almost always a check."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class HostPlan:
    """Lengths of one step as the library takes them, int32, for n <= N sequences and one padding slot.

    Attributes:
        queries: [N+2] cumulative query lengths; the padding slot has the padding rows.
        pages: [N+2] cumulative pages, beginning with their first page; the padding slot has none.
        last_page: [N+1] keys in the last page, 0 without keys.
        lens: [N+1] keys.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        def pinned(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, pin_memory=device.type == "cuda")

        self.queries = pinned(max_num_seqs + 2)
        self.pages = pinned(max_num_seqs + 2)
        self.last_page = pinned(max_num_seqs + 1)
        self.lens = pinned(max_num_seqs + 1)
        self.fence = Fence(device)

    def fill(self, starts: np.ndarray, lens: np.ndarray, *, num_rows: int, page_size: int, first_page: int = 0) -> None:
        """Fill the arrays with n sequences.

        Args:
            starts: [n+1] cumulative query lengths.
            lens: [n] keys.
            num_rows: query rows, padding included.
            page_size: tokens of a page.
            first_page: pages of the batch before theirs.
        """
        num_seqs = len(lens)
        queries, pages = self.queries.numpy(), self.pages.numpy()
        queries[: num_seqs + 1] = starts
        queries[num_seqs + 1] = num_rows
        pages[0] = first_page
        np.cumsum(-(-lens // page_size), out=pages[1 : num_seqs + 1])
        pages[1 : num_seqs + 1] += first_page
        pages[num_seqs + 1] = pages[num_seqs]
        last_page, lengths = self.last_page.numpy(), self.lens.numpy()
        last_page[:num_seqs] = np.where(lens > 0, (lens - 1) % page_size + 1, 0)
        lengths[:num_seqs] = lens
        last_page[num_seqs] = lengths[num_seqs] = 0


class HostPlans:
    """Ring of HostPlans."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._plans = [HostPlan(max_num_seqs, device) for _ in range(_TURNS)]
        self._next = 0

    def take(self) -> HostPlan:
        """Return the next one, free to be written. The caller records its fence behind the copies from it."""
        plan = self._plans[self._next % _TURNS]
        self._next += 1
        plan.fence.wait()
        return plan
