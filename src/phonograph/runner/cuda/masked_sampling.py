"""Masked sampling of rows with a grammar, in a small graph behind the step's own graph.

The step's graph skips these rows. Their masks need the tokens of the step before, which the host has when that step
ends. By then the device runs this step's forward pass, and the host fills the masks beside it. The device waits only if
filling the masks takes longer than the forward pass.

There is one graph for each power of two of rows. The kernel splits each row of logits into as many parts as fill the
device with the graph's number of rows, so a single graph of maximal size would read one row with few programs. All
graphs are captured at the start, because a step must not compile or capture; each has three kernels.
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
"""Pinned buffers, used in turn. One is read until the forward pass of its step ends, while the next one is written."""
_ALIGN = 4
"""Alignment of the bitmask behind the row numbers, in words: 16 bytes."""


class MaskedSampling:
    """Uploads of row masks, and the graphs that sample with them.

    sample_masked: called with rows int32 [G] and bitmask int32 [G, words], views of static tensors; see
        `DeviceSampler.sample_masked`. This call is captured.
    sizes:         numbers of rows that have a graph, rising
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
        self._unfed: list[tuple[int, int, Matcher]] = []

    def run(self, size: int) -> tuple[torch.Tensor, ...]:
        """Launch masking and sampling of the first `size` rows of what was uploaded; return no tensors."""
        self._sample_masked(self._rows[:size], self._bitmask[:size])
        return ()

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs, largest first, with kernels that are loaded. Return their number."""
        for size in reversed(self.sizes):
            self._graphs[size] = runtime.capture(functools.partial(self.run, size))
        return len(self._graphs)

    def follow(self, ring: TokenRing, failures: SlotFailures) -> None:
        """Advance matchers by the tokens that the last `sample` chose for them.

        Call it after the next step was sent to the device and before that step samples. It waits for the tokens of the
        last step if a matcher needs one; requests that have left their slots are skipped.
        """
        unfed = [(row, slot) for row, slot, matcher in self._unfed if self._masks.matcher(slot) is matcher]
        self._unfed = []
        if not unfed:
            return
        tokens = ring.read(ring.latest)
        for row, slot in unfed:
            token_id = int(tokens[row])
            if 0 <= token_id < self._vocab_size:
                self._masks.accept(slot, token_id, failures)

    def sample(self, rows: Sequence[int], slots: Sequence[int], decision: Decision, failures: SlotFailures) -> Decision:
        """Fill, upload and apply the masks of rows of logits, and sample these rows behind the step.

        Returns:
            The step's decision, with the masked sampling added to its cause and reason.
        """
        num_rows = len(rows)
        size = self.sizes[(num_rows - 1).bit_length()]
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
            if matcher is not None:  # None if its mask failed
                self._unfed.append((row, slot, matcher))
        graph = self._graphs.get(size)
        if graph is None:
            self.run(size)
        else:
            graph.replay()
        return _with_masked_rows(decision, num_rows, None if graph is None else size)


@functools.lru_cache(maxsize=1024)
def _with_masked_rows(decision: Decision, num_rows: int, size: int | None) -> Decision:
    where = "eagerly" if size is None else f"in a graph of {size}"
    noun = "row" if num_rows == 1 else "rows"
    return replace(
        decision,
        cause=f"{decision.cause}; masked sampling",
        reason=f"{decision.reason}; masked sampling of {num_rows} {noun} with a grammar {where}",
    )
