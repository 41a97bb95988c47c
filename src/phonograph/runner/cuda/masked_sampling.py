"""Sampling of rows with a grammar on the device: mask and sample, in a small graph behind the step's own.

The step's graph leaves these rows out. Their masks need the tokens of the step before, which the host has once that is
over; by then the device is in this step's forward pass, beside which the host fills the masks. So the device does not
wait unless filling takes longer than that, and steps without such rows have nothing to do with any of this.

There is a graph for each power of two of rows. Rows that pad it cost next to nothing, but a kernel cuts each row of
logits into as many parts as fill the device, by the rows there could be: in one graph for all, a single row would be
read by few programs. All are captured at the start, as a step is no place to compile and capture: three kernels each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from phonograph.core.grammar import Matcher
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import CapturedGraph, GraphRuntime
from phonograph.runner.cuda.pinned import PinnedWords
from phonograph.runner.cuda.token_ring import TokenRing
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.grammar_masks import GrammarMasks, bitmask_words

_UPLOADS = 2
"""Pinned buffers in turn: a step's is read until its forward pass is over, when the next step's is being written."""
_ALIGN = 4
"""Words to which the bitmask is aligned behind the rows: 16 bytes."""


class MaskedSampling:
    """Masks of a step's rows on their way to the device, and the graphs that sample with them.

    sample_masked: called with rows int32 [G] and bitmask int32 [G, words], views of static tensors: masks the logits of
        these rows (below 0: none) and samples them, into the step's tokens and the slots' last ones. What is captured.

    sizes: the numbers of rows that there are graphs for, rising
    """

    def __init__(
        self,
        sample_masked: Callable[[torch.Tensor, torch.Tensor], None],
        *,
        masks: GrammarMasks,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sizes = (*(1 << bit for bit in range((max_rows - 1).bit_length())), max_rows)
        self._sample_masked = sample_masked
        self._masks = masks
        self._vocab_size = vocab_size
        self._num_words = bitmask_words(vocab_size)
        self._start = -(-max_rows // _ALIGN) * _ALIGN
        staging = torch.full((self._start + max_rows * self._num_words,), -1, dtype=torch.int32, device=device)
        self._staging = staging
        self._rows, self._bitmask = staging[:max_rows], staging[self._start :].view(max_rows, self._num_words)
        self._uploads = [PinnedWords(staging.shape[0], device) for _ in range(_UPLOADS)]
        self._next = 0
        self._graphs: dict[int, CapturedGraph] = {}
        self._owed: list[tuple[int, int, Matcher]] = []

    def run(self, size: int) -> tuple[torch.Tensor, ...]:
        """Launch masking and sampling of the first `size` rows of what was uploaded; return no tensors."""
        self._sample_masked(self._rows[:size], self._bitmask[:size])
        return ()

    def capture(self, runtime: GraphRuntime) -> int:
        """Captures the graphs, largest first, whose kernels must have been compiled; returns how many."""
        for size in reversed(self.sizes):
            self._graphs[size] = runtime.capture(functools.partial(self.run, size))
        return len(self._graphs)

    def follow(self, ring: TokenRing, failures: SlotFailures) -> None:
        """Gives matchers the tokens that the last `sample` chose for them, and waits for that step if there are any.

        To be called when the step after it has been sent to the device, which is busy then, and before that samples.
        Requests that have left their slots meanwhile are not waited for.
        """
        owed = [(row, slot) for row, slot, matcher in self._owed if self._masks.matcher(slot) is matcher]
        self._owed = []
        if not owed:
            return
        tokens = ring.read(ring.latest)
        for row, slot in owed:
            token_id = int(tokens[row])
            if 0 <= token_id < self._vocab_size:
                self._masks.accept(slot, token_id, failures)

    def sample(self, rows: Sequence[int], slots: Sequence[int], decision: Decision, failures: SlotFailures) -> Decision:
        """Fills, uploads and applies the masks of these rows of logits, and samples them, behind the step.

        Returns the step's decision, with word of it.
        """
        num_rows = len(rows)
        size = self.sizes[min((num_rows - 1).bit_length(), len(self.sizes) - 1)]
        upload = self._uploads[self._next % _UPLOADS]
        self._next += 1
        upload.wait()
        words, end = upload.words.numpy(), self._start + num_rows * self._num_words
        words[:num_rows] = rows
        words[num_rows:size] = -1
        self._masks.fill(slots, words[self._start : end].reshape(num_rows, self._num_words), failures)
        upload.send(self._staging, end)
        for row, slot in zip(rows, slots, strict=True):
            matcher = self._masks.matcher(slot)
            if matcher is not None:  # it has not failed
                self._owed.append((row, slot, matcher))
        graph = self._graphs.get(size)
        if graph is None:
            self.run(size)
        else:
            graph.replay()
        return _told(decision, num_rows, None if graph is None else size)


@functools.lru_cache(maxsize=1024)
def _told(decision: Decision, num_rows: int, size: int | None) -> Decision:
    where = "eagerly" if size is None else f"in a graph of {size}"
    noun = "row" if num_rows == 1 else "rows"
    return replace(
        decision,
        cause=f"{decision.cause}; masked sampling",
        reason=f"{decision.reason}; masked sampling of {num_rows} {noun} with a grammar {where}",
    )
