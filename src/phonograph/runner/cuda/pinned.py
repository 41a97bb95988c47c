"""Pinned host memory for copies that do not block the host, with an event that marks the end of each copy."""

from __future__ import annotations

import torch

from phonograph.kernels.triton.step.pinned_words import copy_words


class PinnedWords:
    """A buffer of int32 words, and the event after which it may be rewritten. Pageable memory without a GPU."""

    def __init__(self, num_words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int32, pin_memory=on_gpu)
        self._sent = torch.cuda.Event() if on_gpu else None

    def send(self, target: torch.Tensor, num_words: int) -> None:
        """Start to copy the first `num_words` words on the current stream."""
        copy_words(self.words, target, num_words)
        if self._sent is not None:
            self._sent.record()

    def wait(self) -> None:
        """Wait until the last copy has ended. It has, as a rule, because the number of steps in flight is bounded."""
        if self._sent is not None and not self._sent.query():
            self._sent.synchronize()
