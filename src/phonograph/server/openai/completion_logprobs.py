"""Log-probabilities in the formats of completions, of chats, and of vLLM's prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from phonograph.core.batch import TokenLogprobs
from phonograph.text.token_texts import TokenTexts
from phonograph.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Replaces minus infinity, which JSON cannot represent."""


class CompletionLogprobs:
    """Log-probabilities of one completion in pieces. Text offsets continue from piece to piece.

    as_ids:        name tokens by their ids
    skips_special: special tokens are not part of the completion's text
    """

    def __init__(
        self,
        texts: TokenTexts,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        as_ids: bool,
        skips_special: bool,
    ) -> None:
        self._name = _namer(texts, as_ids)
        self._tokenizer = tokenizer
        self._offset = 0
        # Decodes as the text does: a token may be part of a character, which moves the offset when it is complete.
        self._stream = tokenizer.stream(skip_special_tokens=skips_special, after=prompt_token_ids)

    def echo(self, token_ids: Sequence[int], text: str, *, num_before: int) -> list[int]:
        """Return the offsets of a prompt's tokens in its text. Offsets of the output continue after the text.

        The text contains special tokens only if its author wrote them. It contains neither the first `num_before`
        tokens, which the tokenizer added, nor the space that some tokenizers add at the start.
        """
        offsets = [0] * num_before
        offset = 0
        special = self._tokenizer.special_token_ids
        stream = self._tokenizer.stream(skip_special_tokens=False)
        for token_id in token_ids[num_before:]:
            offsets.append(min(offset, len(text)))
            shown = stream.push(token_id)
            if not text.startswith(shown, offset):
                shown = "" if token_id in special else shown.removeprefix(" ")
            offset += len(shown)
        self._offset = len(text)
        return offsets

    def block(
        self,
        token_ids: Sequence[int],
        positions: Sequence[TokenLogprobs | None],
        *,
        top: int,
        echoed: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Return the log-probabilities of tokens, with one position for each: None for the first token of a prompt.

        `echoed` are the offsets of the prompt's tokens, with which `token_ids` begin. For these at most `top` likely
        tokens are listed, of which positions may have more.
        """
        offsets = [*echoed]
        for token_id in token_ids[len(echoed) :]:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token_id))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if position is None else _finite(position.logprobs[0]) for position in positions],
            "top_logprobs": [
                None if position is None else self._top(position, top if place < len(echoed) else None)
                for place, position in enumerate(positions)
            ],
            "text_offset": offsets,
        }

    def _top(self, position: TokenLogprobs, top: int | None) -> dict[str, float]:
        """Return the token itself, and at most `top` others of its position."""
        pairs = islice(
            zip(position.token_ids, position.logprobs, strict=True), None if top is None or top < 0 else top + 1
        )
        return {self._name(token_id): _finite(logprob) for token_id, logprob in pairs}


def chat_content(
    positions: Sequence[TokenLogprobs], texts: TokenTexts, *, as_ids: bool, listed: bool = False
) -> list[dict[str, Any]]:
    """Return `logprobs.content` of a chat choice. With `listed`, its `top_logprobs` begin with the token itself."""
    name = _namer(texts, as_ids)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": _finite(logprob), "bytes": list(texts.bytes(token_id))}

    found: list[dict[str, Any]] = []
    for position in positions:
        pairs = zip(position.token_ids, position.logprobs, strict=True)
        first, *top = (entry(*pair) for pair in (dict(pairs).items() if listed else pairs))
        found.append({**first, "top_logprobs": [first, *top] if listed else top})
    return found


def prompt_positions(
    positions: Sequence[TokenLogprobs | None] | None, texts: TokenTexts, *, top: int
) -> list[dict[str, Any] | None] | None:
    """Return `prompt_logprobs` of a choice: by token id, the token itself and the `top` most likely; -1 is all."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(token_id)}
            for token_id, logprob, rank in islice(zip(*position, strict=True), None if top < 0 else top + 1)
        }
        for position in positions
    ]


def _namer(texts: TokenTexts, as_ids: bool) -> Callable[[int], str]:
    return (lambda token_id: f"token_id:{token_id}") if as_ids else texts.text


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
