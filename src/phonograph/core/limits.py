"""Sizes of the largest step and the longest request."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DRAFT_LOGITS = 2048
"""Most rows of logits of a step with drafts. Those of a vocabulary of 128,256 take 525 MB in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes that the scheduler keeps to, and that buffers of the runner and of attention backends must hold.

    Attributes:
        max_model_len: tokens of a sequence, prompt and output together.
        max_num_seqs: sequences running at a time, which is the number of request slots R.
        max_num_batched_tokens: tokens T in one step.
        draft_tokens: most drafts of a decode.
        lookahead_tokens: tokens behind those of a step that have blocks too, for keys of a draft model.
        pools: requests generate nothing, so that a prompt may have `max_model_len` tokens.
        whole_prompts: each prompt is computed in one step.
        max_audios: audios that an encoder encodes at a time, a power of two; 0 for one at a time, without graphs.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    draft_tokens: int = 0
    lookahead_tokens: int = 0
    pools: bool = False
    whole_prompts: bool = False
    max_audios: int = 0

    @property
    def max_len(self) -> int:
        """Tokens of a sequence at which it ends; that of the last position is never computed."""
        return self.max_model_len + self.pools

    @property
    def max_num_logits(self) -> int:
        """Rows of logits in one step: one for each sequence, and with drafts one for each draft, up to a bound."""
        most = min(self.max_num_seqs * (1 + self.draft_tokens), self.max_num_batched_tokens)
        return max(self.max_num_seqs, min(most, MOST_DRAFT_LOGITS))

    @property
    def max_masked_rows(self) -> int:
        """Rows with the mask of a grammar in one step of a GPU.

        One for each sequence, and with speculation as many drafts.
        """
        return min(2 * self.max_num_seqs, self.max_num_logits)
