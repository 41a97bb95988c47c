"""Allowed tokens and forbidden words as a grammar, so that the masks of grammars enforce them inside of a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phonograph.core.batch import TokenLogprobs
from phonograph.core.grammar import Grammar, GrammarError, Matcher
from phonograph.core.sampling_params import SamplingParams


class TimestampRules:
    """A grammar of texts between timestamps, as transformers' `WhisperTimeStampLogitsProcessor` has it; see `Grammar`.

    An output begins with a timestamp. Timestamps do not fall; two of them in turn have text before and after them, or
    the end. Bit V of its masks is 0, for `prefer_timestamps`.

    Args:
        vocab_size: tokens V of the model, no multiple of 32.
        first: token of the time 0, after that of no timestamps; those after it are later times.
        end: token that ends an output; text is below.
        most_first: number of the latest timestamp that an output begins with; None for any.
    """

    warnings: tuple[str, ...] = ()

    def __init__(self, vocab_size: int, *, first: int, end: int, most_first: int | None) -> None:
        self.vocab_size, self.first, self.end, self.most_first = vocab_size, first, end, most_first

    def matcher(self) -> Matcher:
        return _TimestampMatcher(self, [])


class _TimestampMatcher:
    """Position of one output, by its tokens so far; see `Matcher`."""

    ended = False

    def __init__(self, rules: TimestampRules, output: list[int]) -> None:
        self._rules, self._output = rules, output

    def accept(self, token_id: int) -> None:
        if self._forbids(token_id):
            raise GrammarError(f"token {token_id} does not follow the rules of timestamps")
        self._output.append(token_id)

    def validate(self, token_ids: Sequence[int]) -> int:
        copy = self.copy()
        for count, token_id in enumerate(token_ids):
            if copy._forbids(token_id):
                return count
            copy._output.append(token_id)
        return len(token_ids)

    def rollback(self, num_tokens: int) -> None:
        del self._output[len(self._output) - num_tokens :]

    def copy(self) -> _TimestampMatcher:
        return _TimestampMatcher(self._rules, self._output.copy())

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        bits_W = bitmask_RW[row].view(np.uint32)
        bits_W[:] = 0xFFFFFFFF
        size = self._rules.vocab_size
        for start, stop in (*self._forbidden(), (size, size + 1)):
            first, last = start // 32, stop // 32
            # Bits before `start` and from `stop` on.
            before, after = np.uint32((1 << start % 32) - 1), np.uint32(0xFFFFFFFF << stop % 32 & 0xFFFFFFFF)
            if first == last:
                bits_W[first] &= before | after
                continue
            bits_W[first] &= before
            bits_W[first + 1 : last] = 0
            bits_W[last : last + 1] &= after

    def _forbids(self, token_id: int) -> bool:
        return any(start <= token_id < stop for start, stop in self._forbidden())

    def _forbidden(self) -> list[tuple[int, int]]:
        """Return the ranges of tokens that cannot follow."""
        rules, output = self._rules, self._output
        first, size = rules.first, rules.vocab_size
        if not output:
            latest = size if rules.most_first is None else min(size, first + rules.most_first + 1)
            return [(0, first), (latest, size)] if latest < size else [(0, first)]
        found = [(first - 1, first)]
        is_time = output[-1] >= first
        # The one after the first timestamp is text too.
        opens = is_time and (len(output) < 2 or output[-2] >= first)
        if is_time:
            found.append((first, size) if opens else (0, rules.end))
        latest = next((token for token in reversed(output) if token >= first), None)
        if latest is not None and (bound := latest + (opens or not is_time)) > first:
            found.append((first, min(bound, size)))
        return found


class TokenRules:
    """A grammar of all outputs of allowed tokens without forbidden words; see `Grammar`.

    Args:
        vocab_size: tokens of the model.
        allowed: token ids that an output may have; None for all.
        forbidden: words, each as one token or more, none of them empty. An output never has all tokens of one in order.
        inner: a grammar that outputs also follow.
        first: token ids that no output begins with.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed: Sequence[int] | None,
        forbidden: Sequence[Sequence[int]],
        inner: Grammar | None,
        first: Sequence[int] = (),
    ) -> None:
        self.inner, self.first = inner, first
        allowed_V = np.ones(vocab_size, dtype=bool)
        if allowed is not None:
            allowed_V[:] = False
            allowed_V[list(allowed)] = True
        allowed_V[[word[0] for word in forbidden if len(word) == 1]] = False
        # Bits after the vocabulary stay set, as in other masks.
        padded = np.ones(-(-vocab_size // 32) * 32, dtype=bool)
        padded[:vocab_size] = allowed_V
        self.mask_W = np.packbits(padded, bitorder="little").view(np.int32)
        # Longer words by their last token but one: a step looks at few of them.
        self.longer: dict[int, list[tuple[list[int], int]]] = {}
        for word in forbidden:
            if len(word) > 1:
                self.longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))

    @property
    def warnings(self) -> tuple[str, ...]:
        return () if self.inner is None else self.inner.warnings

    def matcher(self) -> Matcher:
        return _RulesMatcher(self, None if self.inner is None else self.inner.matcher(), [])


def with_token_rules(
    inner: Grammar | None,
    params: SamplingParams,
    vocab_size: int,
    suppressed: Sequence[int] = (),
    suppressed_first: Sequence[int] = (),
) -> Grammar | None:
    """Return a grammar with the allowed tokens and bad words of a request, and the tokens that its model suppresses.

    Args:
        inner: grammar of the request, or None.
        params: their bad words are token ids.
        vocab_size: tokens of the model.
        suppressed: tokens that no output has.
        suppressed_first: tokens that no output begins with.
    """
    words = [word for word in params.bad_words if not isinstance(word, str)]
    words += [(token,) for token in suppressed]
    if params.allowed_token_ids is None and not words and not suppressed_first:
        return inner
    allowed = params.allowed_token_ids
    return TokenRules(vocab_size, allowed=allowed, forbidden=words, inner=inner, first=suppressed_first)


class BegunGrammar:
    """A grammar of outputs that have begun; see `Grammar`.

    Args:
        grammar: grammar of whole outputs.
        token_ids: beginning of the output, which the grammar allows.
    """

    def __init__(self, grammar: Grammar, token_ids: Sequence[int]) -> None:
        self._grammar, self._token_ids = grammar, token_ids
        self.warnings = grammar.warnings

    def matcher(self) -> Matcher:
        matcher = self._grammar.matcher()
        for token_id in self._token_ids:
            matcher.accept(token_id)
        return matcher


def likeliest_allowed(position: TokenLogprobs, grammar: Grammar, vocab_size: int, count: int) -> TokenLogprobs:
    """Return the first token of a position, and of the others the `count` likeliest that a grammar begins with.

    Args:
        position: a token, then the whole vocabulary, the likeliest first.
        grammar: grammar of the output from this position on.
        vocab_size: tokens of the model.
        count: maximum number of other tokens.
    """
    bitmask_RW = np.full((1, -(-vocab_size // 32)), -1, np.int32)
    grammar.matcher().fill(bitmask_RW, 0)
    allowed_V = np.unpackbits(bitmask_RW[0].view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
    possible = allowed_V[position.token_ids[1:]] & np.isfinite(position.logprobs[1:])
    places = [0, *(np.flatnonzero(possible)[:count] + 1).tolist()]
    token_ids, logprobs, ranks = position
    return TokenLogprobs(
        [token_ids[place] for place in places],
        [logprobs[place] for place in places],
        [ranks[place] for place in places],
    )


class _RulesMatcher:
    """Position of one output: its tokens so far, and the position in the inner grammar; see `Matcher`."""

    def __init__(self, rules: TokenRules, inner: Matcher | None, output: list[int]) -> None:
        self._rules = rules
        self._inner = inner
        self._output = output

    @property
    def ended(self) -> bool:
        return self._inner is not None and self._inner.ended

    def accept(self, token_id: int) -> None:
        if not self._allows(token_id):
            raise GrammarError(f"token {token_id} is not allowed, or completes a word of bad_words")
        if self._inner is not None:
            self._inner.accept(token_id)
        self._output.append(token_id)

    def validate(self, token_ids: Sequence[int]) -> int:
        most = len(token_ids) if self._inner is None else self._inner.validate(token_ids)
        length = len(self._output)
        for token_id in token_ids[:most]:
            if not self._allows(token_id):
                break
            self._output.append(token_id)
        count = len(self._output) - length
        del self._output[length:]
        return count

    def rollback(self, num_tokens: int) -> None:
        if self._inner is not None:
            self._inner.rollback(num_tokens)
        del self._output[len(self._output) - num_tokens :]

    def copy(self) -> Matcher:
        return _RulesMatcher(self._rules, None if self._inner is None else self._inner.copy(), self._output.copy())

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        if self._inner is None:
            bitmask_RW[row] = self._rules.mask_W
        else:
            self._inner.fill(bitmask_RW, row)
            bitmask_RW[row] &= self._rules.mask_W
        bits_W = bitmask_RW[row].view(np.uint32)
        for token_id in self._completing():
            bits_W[token_id // 32] &= ~np.uint32(1 << token_id % 32)

    def _allows(self, token_id: int) -> bool:
        word = int(self._rules.mask_W[token_id // 32]) & 0xFFFFFFFF
        return bool(word >> token_id % 32 & 1) and token_id not in self._completing()

    def _completing(self) -> Sequence[int]:
        """Return the tokens that would complete a word of several tokens; at the beginning, those that begin none."""
        output = self._output
        if not output:
            return self._rules.first
        words = self._rules.longer.get(output[-1], ())
        return [last for before, last in words if output[-len(before) :] == before]
