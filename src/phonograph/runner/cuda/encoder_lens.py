"""Lengths of the encoders that sequences attend to, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


class EncoderLens:
    """Keys of cross attention by row of a step, and by slot if sequences have different numbers of them.

    Args:
        lens: `KVGroup.encoder_len` of each group; none if no group has it.
        max_num_seqs: slots.
        device: device of the lengths.
        ragged: sequences may have fewer keys.

    Attributes:
        of_kernel: arguments of `prepare`.
        of_metadata: arguments of `metadata_of`.
    """

    def __init__(self, lens: Sequence[int], max_num_seqs: int, device: torch.device, *, ragged: bool) -> None:
        lens = lens if any(lens) else ()
        rows_R, self._slots_R = (
            torch.zeros(max_num_seqs, dtype=torch.int32, device=device) if has else None for has in (lens, ragged)
        )
        self._host_R = np.zeros(max_num_seqs, np.int32)
        self.of_kernel: dict[str, Any] = {
            "encoder_lens": lens,
            "encoder_lens_R": rows_R,
            "slot_encoder_lens_R": self._slots_R,
        }
        self.of_metadata = lens, rows_R, self._host_R if ragged else None

    def keep(self, slots: Sequence[int], lens: Sequence[int]) -> None:
        """Keep the keys of slots for the steps that are sent from now on, if they differ between slots."""
        if self._slots_R is not None:
            for slot, length in zip(slots, lens, strict=True):
                self._host_R[slot] = length
                self._slots_R[slot].fill_(length)
