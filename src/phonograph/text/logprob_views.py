"""Log-probabilities of outputs in vLLM's form, a mapping from token ids at each position.

The engine keeps `TokenLogprobs`. A view makes a mapping, and the text of its tokens, when a caller reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast, overload

import numpy as np

from phonograph.core.batch import TokenLogprobs
from phonograph.core.sampling_params import SamplingParams

TokenText = Callable[[int], str | None]
"""Returns the text of a token, or None if it is not known."""


class Logprob(NamedTuple):
    r"""Log-probability of one token at one position.

    Attributes:
        logprob: natural logarithm of the probability, or what the engine's `logprobs_mode` has in its place.
        rank: 1 + the number of tokens that are more likely.
        decoded_token: text of the token, or None without a tokenizer. The bytes of a part of a character are written
            as in `bytes:\xe2`.
    """

    logprob: float
    rank: int
    decoded_token: str | None


class PositionLogprobs(Mapping[int, Logprob]):
    """Log-probabilities at one position by token id: the token itself first, then the most likely ones.

    Attributes:
        token_ids: the token itself, then the most likely tokens, the likeliest first.
        logprobs: log-probability of each of them.
        ranks: rank of each of them.
    """

    __slots__ = ("_places", "_position", "_text")

    def __init__(self, position: TokenLogprobs, text: TokenText) -> None:
        self._position = position
        self._text = text
        self._places: dict[int, int] | None = None

    @property
    def token_ids(self) -> list[int]:
        return self._position.token_ids

    @property
    def logprobs(self) -> list[float]:
        return self._position.logprobs

    @property
    def ranks(self) -> list[int]:
        return self._position.ranks

    def __getitem__(self, token_id: int) -> Logprob:
        token_ids, logprobs, ranks = self._position
        if self._places is None:
            count = len(token_ids)
            self._places = dict(zip(reversed(token_ids), range(count - 1, -1, -1), strict=True))
        place = self._places[token_id]
        return Logprob(logprobs[place], ranks[place], self._text(token_ids[place]))

    def __iter__(self) -> Iterator[int]:
        # The token itself is often among the most likely ones too.
        return iter(dict.fromkeys(self.token_ids))

    def __len__(self) -> int:
        return len(set(self.token_ids))

    def __repr__(self) -> str:
        return repr(dict(self))


Item = TypeVar("Item", PositionLogprobs, PositionLogprobs | None)


class LogprobsView(Sequence[Item]):
    """Log-probabilities of several positions, each a mapping; None for the first token of a prompt.

    Args:
        positions: values as the engine keeps them. The list may grow.
        text: returns the text of a token.
    """

    def __init__(self, positions: Sequence[TokenLogprobs | None], text: TokenText) -> None:
        self.positions = positions
        self._text = text

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        found = self.positions[index]
        if isinstance(index, slice):
            return [self._item(one) for one in cast("Sequence[TokenLogprobs | None]", found)]
        return self._item(cast("TokenLogprobs | None", found))

    def __len__(self) -> int:
        return len(self.positions)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, LogprobsView):
            return list(self.positions) == list(cast("LogprobsView[Any]", other).positions)
        return isinstance(other, list) and list(self) == other

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return a copy that has the texts of its tokens in place of a tokenizer."""
        token_ids = {token_id for one in self.positions if one is not None for token_id in one.token_ids}
        return LogprobsView, (list(self.positions), {token_id: self._text(token_id) for token_id in token_ids}.get)

    def __repr__(self) -> str:
        return repr(list(self))

    def _item(self, position: TokenLogprobs | None) -> Item:
        return cast("Item", None if position is None else PositionLogprobs(position, self._text))


def without_listed(
    positions: Sequence[TokenLogprobs], params: SamplingParams
) -> tuple[Sequence[TokenLogprobs], np.ndarray | None]:
    """Return the positions of a prompt without listed tokens, and the log-probabilities of these.

    Args:
        positions: of all tokens of the prompt but the first, with the listed tokens at the end of each.
        params: of the request.

    Returns:
        The positions, and float32 [rows, widest row]; None without listed tokens, or before all rows are computed.
    """
    rows, start = params.prompt_logprob_token_ids, params.prompt_logprob_start
    if rows is None:
        return positions, None
    found = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
    plain = list(positions[:start])
    for place, (row, position) in enumerate(zip(rows, positions[start:], strict=False)):
        found[place, : len(row)] = position.logprobs[-len(row) :]
        plain.append(TokenLogprobs(*(numbers[: -len(row)] for numbers in position)))  # pyright: ignore[reportArgumentType]
    return plain, found if len(positions) == start + len(rows) else None


def no_text(token_id: int) -> None:
    """Return None: there is no tokenizer."""
