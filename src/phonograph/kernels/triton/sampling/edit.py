"""Edits of logits as they are read: logit bias, the mask of min_tokens, and penalties.

Shapes: V vocabulary.

A row with edits reads a word for each logit (`kernels.logit_edits`). The words count the tokens that earlier steps have
accepted. A row behind drafts counts these too. If one of them is rejected, nothing reads the row's token. Edits are in
float32 for logits of any dtype, in the order of `kernels.torch.sampling.penalize`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# pyright: reportOperatorIssue=false
from __future__ import annotations

from collections import namedtuple

import triton
import triton.language as tl

from phonograph.kernels.logit_edits import BIAS_BIT, BIAS_ENTRIES, END_BIT, NUM_FACTORS, PROMPT_BIT

_COUNT = tl.constexpr((1 << PROMPT_BIT) - 1)
_PROMPT = tl.constexpr(1 << PROMPT_BIT)
_END = tl.constexpr(1 << END_BIT)
_BIAS_BIT = tl.constexpr(BIAS_BIT)
_BIAS_ENTRIES = tl.constexpr(BIAS_ENTRIES)
_NUM_FACTORS = tl.constexpr(NUM_FACTORS)

# A row, its slot, its entry of `LogitEdits.edits`, and the other tensors of `LogitEdits`.
Edit = namedtuple("Edit", "row slot kind words biases factors row_slots logits_rows input_ids")


@triton.jit
def edit_logits(logit, ids, mask, edit, V: tl.constexpr, MOST_DRAFTS: tl.constexpr):
    """Return the edited logits of tokens of a row with edits.

    Args:
        logit: float32, of the tokens `ids`
        ids: int32
        mask: True for ids below V
        edit: an `Edit`
        V: vocabulary
        MOST_DRAFTS: most drafts of a sequence
    """
    slot = edit.slot.to(tl.int64)
    word = tl.load(edit.words + slot * V + ids, mask=mask, other=0)
    bias_index = (word >> _BIAS_BIT) & (_BIAS_ENTRIES - 1)
    logit += tl.load(edit.biases + slot * _BIAS_ENTRIES + bias_index, mask=bias_index > 0, other=0.0)
    logit = tl.where(((word & _END) > 0) & (edit.kind > 1), float("-inf"), logit)
    count = word & _COUNT
    for back in tl.static_range(MOST_DRAFTS):
        # If the row before is of the same sequence, the token of this row is a draft.
        before = edit.row - 1 - back
        is_draft = (before >= 0) & (tl.load(edit.row_slots + before, mask=before >= 0, other=-1) == edit.slot)
        place = tl.load(edit.logits_rows + edit.row) - back
        count += (tl.load(edit.input_ids + place, mask=is_draft, other=-1) == ids).to(tl.int32)
    repetition = tl.load(edit.factors + slot * _NUM_FACTORS)
    presence = tl.load(edit.factors + slot * _NUM_FACTORS + 1)
    frequency = tl.load(edit.factors + slot * _NUM_FACTORS + 2)
    repeated = tl.where(logit > 0.0, tl.math.div_rn(logit, repetition), logit * repetition)
    logit = tl.where((count > 0) | ((word & _PROMPT) > 0), repeated, logit)
    logit -= tl.where(count > 0, presence, 0.0)
    return logit - count.to(tl.float32) * frequency
