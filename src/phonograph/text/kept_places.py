"""Tokens of a text, or of a pair of texts, that are kept where it is cut."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.errors import RequestError


def kept_places(sequence_ids: Sequence[int | None], most: int) -> list[int]:
    """Return the places of the tokens that are kept of one text or two; None is the sequence of a special token.

    Raises:
        RequestError: there are more special tokens.
    """
    left = [sum(one == number for one in sequence_ids) for number in (0, 1)]
    num_special = len(sequence_ids) - sum(left)
    if most <= num_special:
        problem = f"leaves no room for a text beside {num_special} special tokens"
        raise RequestError("truncate_prompt_tokens", most, problem)
    for _ in range(len(sequence_ids) - most):
        left[left[1] >= left[0]] -= 1
    kept: list[int] = []
    for place, sequence in enumerate(sequence_ids):
        if sequence is not None:
            left[sequence] -= 1
        if sequence is None or left[sequence] >= 0:
            kept.append(place)
    return kept
