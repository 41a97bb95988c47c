"""Repeated patterns at the end of an output, with vLLM's parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phonograph.errors import RequestError

MAX_PATTERN_SIZE = 4096
"""Each token of the output is compared with that many tokens before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams:
    """Repeated pattern that ends an output, with finish reason "repetition".

    Attributes:
        max_pattern_size: maximum tokens of a pattern; 0 detects none.
        min_pattern_size: minimum tokens of a pattern; 0 is 1.
        min_count: times that the pattern stands at the end of the output, at least 2.

    Raises:
        RequestError: a value is out of range.

    Example:
        ```python
        params = RepetitionDetectionParams(max_pattern_size=20, min_count=4)
        assert params.min_pattern_size == 0
        ```
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        least = 2 if self.max_pattern_size else 0
        for name, low, high in (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE),
            ("min_pattern_size", 0, self.max_pattern_size),
            ("min_count", least, None),
        ):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < low or (high is not None and value > high):
                limit = f"must be an integer >= {low}" + ("" if high is None else f" and <= {high}")
                raise RequestError(f"repetition_detection.{name}", value, limit)


class RepetitionDetector:
    """Finds patterns that stand several times in a row at the end of a growing output.

    For each size p of a pattern it counts the tokens at the end that equal the token p places before them. A pattern of
    p tokens stands n times at the end if p * (n - 1) tokens do.

    Args:
        params: sizes of patterns, and their number.
    """

    def __init__(self, params: RepetitionDetectionParams) -> None:
        sizes = np.arange(1, params.max_pattern_size + 1)
        self._needed = sizes * (params.min_count - 1)
        self._needed[: max(params.min_pattern_size - 1, 0)] = np.iinfo(np.int64).max
        self._before = np.full(params.max_pattern_size, -1)
        self._equal = np.zeros(params.max_pattern_size, np.int64)

    def push(self, token_id: int) -> bool:
        """Take the next token; return True if a pattern is repeated at the end now."""
        self._equal = np.where(self._before == token_id, self._equal + 1, 0)
        self._before[1:] = self._before[:-1]
        self._before[:1] = token_id
        return bool((self._equal >= self._needed).any())
