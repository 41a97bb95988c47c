"""Grammar of two phases: reasoning, in which any token is allowed up to an end marker, and then a grammar.

Without a grammar anything may follow the marker, which then only limits the length of the reasoning.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from phonograph.core.grammar import Grammar, GrammarError, Matcher
from phonograph.core.sampling_params import SamplingParams

_WORD = 32


def with_reasoning(grammar: Grammar | None, params: SamplingParams, eos: Collection[int]) -> Grammar | None:
    """Return the grammar of an output that may begin with reasoning; None if the output has no constraint.

    Args:
        grammar: grammar of what follows the reasoning, or None.
        params: markers and budget of the reasoning.
        eos: end-of-sequence tokens of the model.
    """
    if not params.reasoning_end_token_ids or (grammar is None and params.thinking_token_budget is None):
        return grammar
    return PhasedGrammar(
        grammar,
        params.reasoning_end_token_ids,
        eos,
        start=params.reasoning_start_token_id,
        budget=params.thinking_token_budget,
    )


class PhasedGrammar:
    """A grammar that begins after the end of reasoning.

    Args:
        grammar: grammar of what follows; None allows anything.
        end: token ids of the end marker.
        eos: end-of-sequence tokens. With a grammar they are not allowed in the reasoning, because the output would be
            invalid.
        start: token that begins reasoning. An output with another first token has none. None is an output that begins
            in its reasoning.
        budget: tokens of reasoning after which the end marker is forced; None for no limit.
    """

    def __init__(
        self,
        grammar: Grammar | None,
        end: Sequence[int],
        eos: Collection[int],
        *,
        start: int | None = None,
        budget: int | None = None,
    ) -> None:
        self.grammar = grammar
        self.end = tuple(end)
        self.eos = frozenset(eos)
        self.start = start
        self.budget = budget

    @property
    def warnings(self) -> tuple[str, ...]:
        return () if self.grammar is None else self.grammar.warnings

    def matcher(self) -> PhasedMatcher:
        return PhasedMatcher(self, None if self.grammar is None else self.grammar.matcher())


class PhasedMatcher:
    """Position in a grammar of two phases.

    Args:
        phases: the grammar.
        inner: matcher of the second phase, or None if anything may follow.
        reasoning: tokens of the reasoning so far, with its markers.
        num_after: tokens of the second phase.
        ended: the output ended without a grammar.
    """

    def __init__(
        self,
        phases: PhasedGrammar,
        inner: Matcher | None,
        reasoning: Sequence[int] = (),
        num_after: int = 0,
        *,
        ended: bool = False,
    ) -> None:
        self._phases = phases
        self._inner = inner
        self._reasoning = list(reasoning)
        self._num_after = num_after
        self._ended = ended

    @property
    def ended(self) -> bool:
        return self._ended if self._inner is None else self._inner.ended

    def accept(self, token_id: int) -> None:
        if self._is_reasoning(self._reasoning, self._num_after, token_id):
            if not self._allows(self._reasoning, token_id):
                raise GrammarError(f"the token {token_id} is not allowed in the reasoning")
            self._reasoning.append(token_id)
        else:
            if self._inner is not None:
                self._inner.accept(token_id)
            self._num_after += 1
        self._ended = token_id in self._phases.eos

    def validate(self, token_ids: Sequence[int]) -> int:
        if self.ended:
            return 0
        reasoning, num_after = list(self._reasoning), self._num_after
        for place, token_id in enumerate(token_ids):
            if self._is_reasoning(reasoning, num_after, token_id):
                if not self._allows(reasoning, token_id):
                    return place
                reasoning.append(token_id)
            elif self._inner is not None:
                return place + self._inner.validate(token_ids[place:])
            else:
                num_after += 1
            if token_id in self._phases.eos:
                return place + 1
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        num_after = min(num_tokens, self._num_after)
        if self._inner is not None:
            self._inner.rollback(num_after)
        self._num_after -= num_after
        del self._reasoning[len(self._reasoning) - (num_tokens - num_after) :]
        self._ended = self._ended and not num_tokens

    def copy(self) -> PhasedMatcher:
        inner = None if self._inner is None else self._inner.copy()
        return PhasedMatcher(self._phases, inner, self._reasoning, self._num_after, ended=self._ended)

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        phases, words_W = self._phases, bitmask_RW[row]
        is_first = phases.start is not None and not self._reasoning and not self._num_after
        if is_first or not self._is_reasoning(self._reasoning, self._num_after, None):
            if self._inner is None:
                words_W[:] = -1
                return
            self._inner.fill(bitmask_RW, row)
            if is_first and phases.start is not None:
                words_W[phases.start // _WORD] |= _bit(phases.start)
            return
        forced = self._forced(self._reasoning)
        if forced is not None:
            words_W[:] = 0
            words_W[forced // _WORD] = _bit(forced)
            return
        words_W[:] = -1
        for token_id in phases.eos if self._inner is not None else ():
            words_W[token_id // _WORD] &= ~_bit(token_id)

    def _is_reasoning(self, reasoning: list[int], num_after: int, token_id: int | None) -> bool:
        """Return True if the next token belongs to the reasoning. `token_id` is that token, if it is the first one."""
        phases = self._phases
        if num_after:
            return False
        if phases.start is not None and not reasoning:
            return token_id == phases.start
        return tuple(reasoning[-len(phases.end) :]) != phases.end

    def _allows(self, reasoning: list[int], token_id: int) -> bool:
        forced = self._forced(reasoning)
        if forced is not None:
            return token_id == forced
        return self._inner is None or token_id not in self._phases.eos

    def _forced(self, reasoning: list[int]) -> int | None:
        """Return the next token of the end marker if the budget is spent."""
        budget, end = self._phases.budget, self._phases.end
        num_tokens = len(reasoning) - (self._phases.start is not None)
        if budget is None or num_tokens < budget:
            return None
        for size in range(min(len(end), len(reasoning)), 0, -1):
            if tuple(reasoning[-size:]) == end[:size]:
                return end[size]
        return end[0]


def _bit(token_id: int) -> np.int32:
    """Return the bit of a token in its word."""
    return np.uint32(1 << token_id % _WORD).view(np.int32)
