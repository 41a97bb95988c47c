"""Pinned host arrays that plans are copied from, and the events that say when they may be written again.

The host is a step ahead of the device: what it copied for one step may still wait in the stream while it plans the
next. So arrays come in turn, and each has an event recorded behind the copies from it.
"""

from __future__ import annotations

import numpy as np
import torch

_TURNS = 8
"""More than steps can be in flight, of which a mixed one takes two."""


class Fence:
    """Marks a place in the current stream; nothing to wait for on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def record(self) -> None:
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Steps ahead are bounded, so that the copies are long done: this is a check, hardly ever a wait."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class HostPlan:
    """One step's lengths as the library wants them, int32, for n <= N sequences and a slot of padding behind them.

    queries    [N+2]  running sum of query lengths; the padding slot has the rows of no request
    pages      [N+2]  running sum of pages, from the first that is theirs; the padding slot has none
    last_page  [N+1]  keys in the last page, 0 where there are none
    lens       [N+1]  keys
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
        """Takes n sequences, in `num_rows` rows with their padding.

        Args:
            starts: [n+1] running sum of query lengths
            lens: [n] keys
            first_page: pages of the batch before theirs
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
    """HostPlans in turn."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._plans = [HostPlan(max_num_seqs, device) for _ in range(_TURNS)]
        self._next = 0

    def take(self) -> HostPlan:
        """The next one, free to be written; its fence is to be recorded behind the copies from it."""
        plan = self._plans[self._next % _TURNS]
        self._next += 1
        plan.fence.wait()
        return plan
