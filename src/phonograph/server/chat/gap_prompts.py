"""Prompts with a suffix, of which the answer is the text between."""

from __future__ import annotations

from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import invalid
from phonograph.text.infill import FORMS, Infill, find_infill


def infill_form(serving: Serving) -> Infill:
    """Return the form of prompts with a gap.

    Raises:
        ApiError: the model has none.
    """
    found = find_infill(serving.tokenizer)
    if found is None:
        problem = f"suffix needs tokens such as {' '.join(FORMS[0])}, which the model's vocabulary does not have"
        raise invalid("suffix", problem, code="unsupported_parameter")
    return found


def gap_prompt(serving: Serving, prefix: str | list[int], suffix: str) -> list[int]:
    """Return the token ids of a prompt of which the answer comes before `suffix`.

    Raises:
        ApiError: the model fills no gaps, or a text is too long.
        RequestError: a token id is outside the vocabulary.
    """
    infill, tokenizer = infill_form(serving), serving.tokenizer
    (before,) = serving.encode([prefix], add_special_tokens=False)
    after = serving.encode_text(suffix, field="suffix")
    return [*tokenizer.encode("")[: tokenizer.num_tokens_before], *infill.prompt(before, after)]
