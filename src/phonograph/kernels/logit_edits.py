"""Tensors of the edits of logits on a device: logit bias, the mask of min_tokens, and penalties.

Shapes: R requests (slots), V vocabulary, N rows of logits, T tokens of the step.

A word for each token of a slot has all that its edit depends on but the factors:

    word   | index of the bias | ends the output | in the prompt | times in the output |
             bits 22 to 31       21                20              0 to 19
"""

from __future__ import annotations

from typing import NamedTuple

import torch

PROMPT_BIT = 20
END_BIT = 21
BIAS_BIT = 22
BIAS_ENTRIES = 1024
"""Entries of the biases of a slot; the first one is 0."""
NUM_FACTORS = 4
"""Factors of a slot; the last one is padding."""


class LogitEdits(NamedTuple):
    """Edits of a step.

    words:       int32 [R, V], see above; they count the tokens that were accepted
    biases:      float32 [R, BIAS_ENTRIES]
    factors:     float32 [R, NUM_FACTORS]: repetition, presence and frequency penalty
    edits:       int32 [N]: 0 for a row without edits, 2 for one that must not end the output, else 1
    row_slots:   int32 [N], slot of each row; the rows of a sequence stand together
    logits_rows: int64 [N], token of the step that each row follows
    input_ids:   int32 [T], tokens of the step; after its first token a decode has drafts
    """

    words: torch.Tensor
    biases: torch.Tensor
    factors: torch.Tensor
    edits: torch.Tensor
    row_slots: torch.Tensor
    logits_rows: torch.Tensor
    input_ids: torch.Tensor
