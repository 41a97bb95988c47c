"""Suffix decoding: drafts that followed the last tokens in the sequence itself, or in outputs of earlier requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np

from phonograph.config.speculative_config import SuffixSettings
from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.core.request import Request
from phonograph.scheduling.draft_budget import DraftBudget
from phonograph.speculation.host_drafts import HostDrafts
from phonograph.speculation.masked_depths import bound_masked
from phonograph.speculation.suffix_index import END, PathLimits, SuffixIndex

MOST_CACHED_TOKENS = 1 << 20
"""Most tokens of earlier outputs. A token takes 12 bytes, and about 100 where its pair is new."""


class SuffixDrafts(HostDrafts):
    """Drafts of each slot, made when the tokens of a step are known.

    The next step must not be scheduled before. While all sequences rest it may be: then no drafts are made.

    Args:
        settings: of suffix decoding.
        budget: chooses the depths.
        max_num_seqs: slots.
        max_num_logits: rows of logits of the largest step.
        slow_masks: see `bound_masked`.

    Attributes:
        max_num_logits: as above.
        outputs: of earlier requests without a `cache_salt`.
    """

    def __init__(
        self,
        settings: SuffixSettings,
        budget: DraftBudget,
        *,
        max_num_seqs: int,
        max_num_logits: int,
        slow_masks: np.ndarray,
    ) -> None:
        super().__init__(None, budget, max_num_seqs=max_num_seqs)
        self.max_num_logits = max_num_logits
        self._slow_masks = slow_masks
        self._limits = PathLimits(
            budget.most, settings.max_tree_depth, settings.max_spec_factor, settings.min_token_prob
        )
        self.outputs = OutputCache(settings.max_cached_requests, MOST_CACHED_TOKENS)
        self._own: dict[int, SuffixIndex] = {}
        self._known: dict[int, int] = {}  # by slot: tokens that it started with
        self._salted: set[int] = set()

    @property
    def waits(self) -> bool:
        """True if a sequence may have drafts; see `DraftDepths`."""
        return any(map(self.wants, self._own))

    def begin(self, batch: ScheduledBatch) -> dict[int, SuffixIndex]:
        """Keep the outputs of sequences that ended before a step, and load those that start with it.

        Returns:
            Tokens of the sequences by slot, for `follow`. Another sequence may be in the slot by then.
        """
        for slot in batch.freed:
            if slot in self._own:
                own, known = self._own.pop(slot), self._known.pop(slot)
                if slot not in self._salted:
                    self.outputs.add(own.tokens[known:])
        self.start(batch.new)
        for new in batch.new:
            (self._salted.add if new.salted else self._salted.discard)(new.slot)
            known = [] if new.slot in self._plain else new.token_ids
            self._own[new.slot] = own = SuffixIndex()
            own.extend(known)
            self._known[new.slot] = len(known)
        return {slot: self._own[slot] for slot in batch.slots}

    def follow(self, output: StepOutput, owners: dict[int, SuffixIndex], *, is_last: bool = True) -> list[list[int]]:
        """Take the tokens of a step, and return the drafts of each slot in `output.slots`.

        Args:
            output: of the step.
            owners: what `begin` returned for the step.
            is_last: no later step was sent. Otherwise there are no drafts.
        """
        made: list[list[int]] = []
        for slot, run in zip(output.slots, output.token_ids, strict=True):
            owners[slot].extend(run)
            made.append(self._draft(slot) if is_last and self.wants(slot) else [])
            self._num_found[slot] = len(made[-1])
        return made

    def _available(self, decodes: Collection[Request]) -> list[int]:
        return bound_masked(super()._available(decodes), decodes, self._slow_masks)

    def _draft(self, slot: int) -> list[int]:
        own = self._own[slot]
        mine, my_score = own.continuation(own.tokens, self._limits)
        if slot in self._salted:
            return mine
        theirs, their_score = self.outputs.index.continuation(own.tokens, self._limits)
        return theirs if their_score > my_score else mine


class OutputCache:
    """Outputs of requests, of which the oldest are dropped.

    Args:
        max_requests: most outputs.
        max_tokens: most tokens of them; up to a quarter more stay for a while, so that many are dropped at a time.

    Attributes:
        index: the outputs, with `END` before each.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.index = SuffixIndex()
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._lengths: deque[int] = deque()

    def add(self, token_ids: Sequence[int]) -> None:
        """Add an output, and drop the oldest ones if there are too many."""
        if len(token_ids) < 2 or not self._max_requests:
            return
        self._lengths.append(1 + len(token_ids))
        self.index.extend((END, *token_ids))
        if len(self._lengths) > 1.25 * self._max_requests or len(self.index) > 1.25 * self._max_tokens:
            self._drop()

    def _drop(self) -> None:
        dropped, rest = 0, len(self.index)
        while self._lengths and (len(self._lengths) > self._max_requests or rest - dropped > self._max_tokens):
            dropped += self._lengths.popleft()
        self.index.drop(dropped)
