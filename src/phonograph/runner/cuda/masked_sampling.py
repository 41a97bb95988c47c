"""Masked sampling of rows with a grammar, in a small graph behind the step's own graph.

The step's graph skips these rows. Their masks need the tokens of the step before, which the host has when that step
ends. By then the device runs this step's forward pass, and the host fills the masks beside it. The device waits only if
filling the masks takes longer than the forward pass.

With drafts a sequence has a row for each of them too. The drafts come to the host with the tokens of the step before.
A matcher is advanced through them, gives a mask for each place, and is rolled back. The small graph then accepts drafts
of these sequences, and looks up the next ones. A draft model makes them after it (`listed_drafts.py`).

There is one graph for each power of two of rows. The kernel splits each row of logits into as many parts as fill the
device with the graph's number of rows, so a single graph of maximal size would read one row with few programs. All
graphs are captured at the start, because a step must not compile or capture; each has three kernels, and with drafts
two more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from phonograph.core.grammar import Matcher
from phonograph.graphs.dispatch import Decision
from phonograph.graphs.runtime import CapturedGraph, GraphRuntime
from phonograph.kernels.triton.step.accept_drafts import LENGTH_MASK
from phonograph.runner.cuda.cuda_inputs import StepResults
from phonograph.runner.cuda.pinned import PinnedWords
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.grammar_masks import GrammarMasks, bitmask_words

_UPLOADS = 2
"""Pinned buffers, used in turn. One is read until the forward pass of its step ends, while the next one is written."""
_ALIGN = 4
"""Alignment of the bitmask behind the row numbers, in words: 16 bytes."""


class MaskedSequence(NamedTuple):
    """Sequence of a step whose rows are masked: its number in the batch, its slot, its first row and number of rows."""

    number: int
    slot: int
    first_row: int
    num_rows: int


class MaskedSampling:
    """Uploads of row masks, and the graphs that sample with them.

    sample_masked: called with rows int32 [G], bitmask int32 [G, words] and requests int32 [G], views of static tensors;
        see `DeviceSampler.sample_masked`. This call is captured.
    sizes:         numbers of rows that have a graph, rising
    requests:      int32, static: rows of the batch that were sampled last, then entries below 0
    """

    def __init__(
        self,
        sample_masked: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
        *,
        masks: GrammarMasks,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.sizes = graph_sizes(max_rows)
        self._sample_masked = sample_masked
        self._masks = masks
        self._vocab_size = vocab_size
        self._num_words = bitmask_words(vocab_size)
        self._requests_at = -(-max_rows // _ALIGN) * _ALIGN
        self._start = 2 * self._requests_at
        staging = torch.full((self._start + max_rows * self._num_words,), -1, dtype=torch.int32, device=device)
        self._staging = staging
        self._rows, self.requests = staging[:max_rows], staging[self._requests_at :][:max_rows]
        self._bitmask = staging[self._start :].view(max_rows, self._num_words)
        self._uploads = [PinnedWords(staging.shape[0], device) for _ in range(_UPLOADS)]
        self._next = 0
        self._graphs: dict[int, CapturedGraph] = {}
        self._unfed: list[tuple[MaskedSequence, Matcher]] = []

    def run(self, size: int) -> tuple[torch.Tensor, ...]:
        """Launch masking and sampling of the first `size` rows of what was uploaded; return no tensors."""
        self._sample_masked(self._rows[:size], self._bitmask[:size], self.requests[:size])
        return ()

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs, largest first, with kernels that are loaded. Return their number."""
        for size in reversed(self.sizes):
            self._graphs[size] = runtime.capture(functools.partial(self.run, size))
        return len(self._graphs)

    def follow(self, results: Callable[[], StepResults], failures: SlotFailures) -> None:
        """Advance matchers by the tokens that the last `sample` chose for them.

        Call it after the next step was sent to the device and before that step samples. It waits for the results of the
        last step if a matcher needs them; requests that have left their slots are skipped.

        Args:
            results: returns the results of the last step.
            failures: receives slots whose matcher raises.
        """
        unfed = [one for one, matcher in self._unfed if self._masks.matcher(one.slot) is matcher]
        self._unfed = []
        if not unfed:
            return
        tokens, counts, _ = results()
        for one in unfed:
            length = int(counts[one.number]) & LENGTH_MASK if len(counts) else 1
            for token_id in tokens[one.first_row : one.first_row + length].tolist():
                if 0 <= token_id < self._vocab_size:
                    self._masks.accept(one.slot, token_id, failures)

    def sample(
        self,
        sequences: Sequence[MaskedSequence],
        results: Callable[[], StepResults],
        decision: Decision,
        failures: SlotFailures,
    ) -> Decision:
        """Fill, upload and apply the masks of sequences, and sample these behind the step.

        Args:
            sequences: of the step.
            results: as in `follow`; the drafts are read if a sequence has more than one row.
            decision: of the step.
            failures: receives slots whose matcher raises.

        Returns:
            The step's decision, with the masked sampling added to its cause and reason.
        """
        num_rows = sum(one.num_rows for one in sequences)
        drafts: list[list[int]] | None = None
        if num_rows > len(sequences):
            # A row without a draft computes token 0.
            by_slot = np.maximum(results().drafts, 0)
            drafts = [by_slot[one.slot, : one.num_rows - 1].tolist() for one in sequences]
        size = self.sizes[(num_rows - 1).bit_length()]
        upload = self._uploads[self._next % _UPLOADS]
        self._next += 1
        upload.wait()
        words, end = upload.words.numpy(), self._start + num_rows * self._num_words
        words[:size] = words[self._requests_at : self._requests_at + size] = -1
        words[:num_rows] = [one.first_row + place for one in sequences for place in range(one.num_rows)]
        words[self._requests_at : self._requests_at + len(sequences)] = [one.number for one in sequences]
        bitmask = words[self._start : end].reshape(num_rows, self._num_words)
        self._masks.fill([one.slot for one in sequences], bitmask, failures, drafts)
        upload.send(self._staging, end)
        for one in sequences:
            matcher = self._masks.matcher(one.slot)
            if matcher is not None:  # None if its mask failed
                self._unfed.append((one, matcher))
        graph = self._graphs.get(size)
        if graph is None:
            self.run(size)
        else:
            graph.replay()
        return _with_masked_rows(decision, num_rows, None if graph is None else size)


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the powers of two below a number, and the number."""
    return (*(1 << bit for bit in range((most - 1).bit_length())), most)


@functools.lru_cache(maxsize=1024)
def _with_masked_rows(decision: Decision, num_rows: int, size: int | None) -> Decision:
    where = "eagerly" if size is None else f"in a graph of {size}"
    noun = "row" if num_rows == 1 else "rows"
    return replace(
        decision,
        cause=f"{decision.cause}; masked sampling",
        reason=f"{decision.reason}; masked sampling of {num_rows} {noun} with a grammar {where}",
    )
