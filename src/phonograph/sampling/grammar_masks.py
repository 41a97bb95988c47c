"""Token masks of rows with a grammar: a matcher for each slot, and the bitmasks of a step."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import numpy as np
import torch

from phonograph.core.grammar import Grammar, Matcher
from phonograph.core.host_resources import usable_cpus
from phonograph.kernels.torch.sampling import mask_tokens, prefer_timestamps
from phonograph.sampling.failures import SlotFailures

_SEQUENTIAL_SECONDS = 2e-3
"""Time after which threads fill the remaining masks. Threads that start earlier mostly wait for Python's lock."""
_SLOW_SECONDS = 1e-3
"""Time of the masks of one slot and its drafts that is too long beside a step."""
_THREADS = max(1, min(8, usable_cpus() // 2))

_Work = tuple[int, int, Sequence[int]]
"""First row of a slot, the slot, and its drafts."""


class GrammarMasks:
    """Matchers of the slots 0 .. max_num_seqs - 1, and one bitmask [max_num_seqs, words] int32 on the host.

    `constrained` is True for slots with a grammar: bool [max_num_seqs]. `slow` counts fills with drafts that took too
    long, for each slot. `first_timestamp` is that of a model of speech, see `prefer_timestamps`.
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.constrained = np.zeros(max_num_seqs, dtype=bool)
        self.slow = np.zeros(max_num_seqs, dtype=np.int64)
        self.first_timestamp: int | None = None
        self._matchers: dict[int, Matcher] = {}
        self._device = device
        self._threads: ThreadPoolExecutor | None = None
        # Pinned, so that the copy to the device does not block the host.
        self._bitmask = torch.full(
            (max_num_seqs, bitmask_words(vocab_size)), -1, dtype=torch.int32, pin_memory=device.type == "cuda"
        )

    @property
    def in_use(self) -> bool:
        """True if any slot has a grammar."""
        return bool(self._matchers)

    def load(self, slot: int, grammar: Grammar, output_token_ids: Sequence[int]) -> None:
        """Load a grammar into a slot; `output_token_ids` are those generated before a preemption."""
        matcher = grammar.matcher()
        for token_id in output_token_ids:
            matcher.accept(token_id)
        self._matchers[slot] = matcher
        self.constrained[slot] = True

    def clear(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self.constrained[slot] = False
        self.slow[slot] = 0

    def matcher(self, slot: int) -> Matcher | None:
        """Return the matcher of a slot now. A later request in the slot has another one."""
        return self._matchers.get(slot)

    def num_allowed(self, slot: int, token_ids: Sequence[int], failures: SlotFailures) -> int:
        """Return how many of the tokens the grammar of a slot, if any, allows one after another from here."""
        matcher, counts = self._matchers.get(slot), list[int]()
        if matcher is None:
            return len(token_ids)
        failures.run(slot, "grammar", lambda: counts.append(matcher.validate(token_ids)))
        return sum(counts)

    def fill(
        self,
        slots: Sequence[int],
        bitmask_RW: np.ndarray,
        failures: SlotFailures,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Write the masks of these slots into the first rows of a bitmask, int32 [rows, words].

        A slot without a matcher, or whose output has ended, allows every token, and its token is dropped. A slot whose
        matcher raises is added to `failures`, and has no grammar from then on. If the first slots take long, threads
        share the others.

        Args:
            slots: distinct slots.
            bitmask_RW: written.
            failures: as above.
            drafts: tokens of each slot, with masks of the places behind them in rows of their own; None for none. The
                places behind one that the grammar forbids, or that ends the output, allow every token.
        """
        drafts = drafts or [()] * len(slots)
        firsts = [*accumulate((1 + len(one) for one in drafts), initial=0)]
        if firsts[-1] > len(bitmask_RW):
            raise IndexError(f"{firsts[-1]} masks do not fit a bitmask of {len(bitmask_RW)} rows")
        work = [*zip(firsts, slots, drafts, strict=False)]
        began = time.perf_counter()
        for number, one in enumerate(work):
            self._fill_slot(*one, bitmask_RW, failures)
            if time.perf_counter() - began > _SEQUENTIAL_SECONDS and len(slots) - number > 2 and _THREADS > 1:
                self._fill_in_threads(work[number + 1 :], bitmask_RW, failures)
                return

    def _fill_in_threads(self, work: Sequence[_Work], bitmask_RW: np.ndarray, failures: SlotFailures) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS - 1, "masks")
        shares = [work[start::_THREADS] for start in range(min(len(work), _THREADS))]
        futures = [self._threads.submit(self._fill_share, share, bitmask_RW, failures) for share in shares[1:]]
        self._fill_share(shares[0], bitmask_RW, failures)
        for future in futures:
            future.result()

    def _fill_share(self, work: Sequence[_Work], bitmask_RW: np.ndarray, failures: SlotFailures) -> None:
        for one in work:
            self._fill_slot(*one, bitmask_RW, failures)

    def _fill_slot(
        self, row: int, slot: int, drafts: Sequence[int], bitmask_RW: np.ndarray, failures: SlotFailures
    ) -> None:
        matcher, began = self._matchers.get(slot), time.perf_counter()
        if matcher is None or not failures.run(slot, "grammar", _fill, matcher, bitmask_RW, row, drafts):
            self.clear(slot)
            bitmask_RW[row : row + 1 + len(drafts)] = -1
        elif drafts:
            is_slow = time.perf_counter() - began > _SLOW_SECONDS
            self.slow[slot] += 1 if is_slow else -min(self.slow[slot], 1)

    def apply(self, logits_NV: torch.Tensor, rows: np.ndarray, slots: Sequence[int], failures: SlotFailures) -> None:
        """Set the logits of forbidden tokens to -inf, in these rows, whose slots are `slots`."""
        self.fill(slots, self._bitmask.numpy(), failures)
        bitmask = self._bitmask[: len(slots)].to(self._device, non_blocking=True)
        rows_G = torch.from_numpy(rows).to(self._device)
        logits_NV[rows_G] = mask_tokens(logits_NV[rows_G], bitmask)
        if self.first_timestamp is not None:
            prefer_timestamps(logits_NV, rows_G, bitmask, self.first_timestamp)

    def accept(self, slot: int, token_id: int, failures: SlotFailures) -> None:
        """Advance the matcher of a slot, if any, by the chosen token."""
        matcher = self._matchers.get(slot)
        if matcher is not None and not failures.run(slot, "grammar", _accept, matcher, token_id):
            self.clear(slot)


def _fill(matcher: Matcher, bitmask_RW: np.ndarray, row: int, drafts: Sequence[int]) -> None:
    bitmask_RW[row : row + 1 + len(drafts)] = -1
    if matcher.ended:
        return
    matcher.fill(bitmask_RW, row)
    taken = 0
    try:
        for token_id in drafts[: matcher.validate(drafts) if drafts else 0]:
            matcher.accept(token_id)
            taken += 1
            if matcher.ended:
                break
            matcher.fill(bitmask_RW, row + taken)
    finally:
        if taken:
            matcher.rollback(taken)


def _accept(matcher: Matcher, token_id: int) -> None:
    if not matcher.ended:
        matcher.accept(token_id)


def bitmask_words(vocab_size: int) -> int:
    """Return the number of 32-bit words with a bit for each token."""
    return -(-vocab_size // 32)
