"""Which tokens the rows with a grammar may get: a matcher for each slot, and the bitmask of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from phonograph.grammar import Grammar, Matcher
from phonograph.kernels.sampling import mask_tokens


class GrammarMasks:
    """Matchers of the slots 0 .. max_num_seqs - 1, and one bitmask [max_num_seqs, words] int32 on the host.

    constrained: by slot, whether it has a grammar
    """

    def __init__(self, *, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.constrained = np.zeros(max_num_seqs, dtype=bool)
        self._matchers: dict[int, Matcher] = {}
        self._device = device
        # Pinned, so that the copy to a device does not stop the host.
        self._bitmask = torch.full(
            (max_num_seqs, bitmask_words(vocab_size)), -1, dtype=torch.int32, pin_memory=device.type == "cuda"
        )
        self._bitmask_np = self._bitmask.numpy()

    def load(self, slot: int, grammar: Grammar, output_token_ids: Sequence[int]) -> None:
        """Takes a grammar into a slot; `output_token_ids` are those generated before a preemption."""
        matcher = grammar.matcher()
        for token_id in output_token_ids:
            matcher.accept(token_id)
        self._matchers[slot] = matcher
        self.constrained[slot] = True

    def clear(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self.constrained[slot] = False

    def fill(self, slots: Sequence[int]) -> torch.Tensor:
        """What may come next in these slots, int32 [slots, words] on the host; the next call overwrites it.

        A slot whose output has ended, and whose token nobody will take, may have anything.
        """
        for row, slot in enumerate(slots):
            matcher = self._matchers[slot]
            if matcher.ended:
                self._bitmask_np[row] = -1
            else:
                matcher.fill(self._bitmask_np, row)
        return self._bitmask[: len(slots)]

    def apply(self, logits_NV: torch.Tensor, rows: np.ndarray, slots: Sequence[int]) -> None:
        """Sets to -inf, in the given rows of float logits, what cannot come next in their slots."""
        bitmask = self.fill(slots).to(self._device, non_blocking=True)
        rows_G = torch.from_numpy(rows).to(self._device)
        logits_NV[rows_G] = mask_tokens(logits_NV[rows_G], bitmask)

    def accept(self, slot: int, token_id: int) -> None:
        """A token was chosen for a slot; of one without a grammar that is fine."""
        matcher = self._matchers.get(slot)
        if matcher is not None and not matcher.ended:
            matcher.accept(token_id)


def bitmask_words(vocab_size: int) -> int:
    """32-bit words that hold a bit for each token."""
    return -(-vocab_size // 32)
