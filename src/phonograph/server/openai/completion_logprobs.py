"""Log-probabilities in the three forms that clients know: of completions, of chats, and of prompts as vLLM has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from phonograph.core.batch import TokenLogprobs
from phonograph.text.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not know."""


class TokenTexts:
    """Text and bytes of each token as a part of a text, not as its beginning. A token may be half a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._texts: dict[int, str] = {}

    def text(self, token_id: int) -> str:
        """Return the token's text, or its bytes in OpenAI's form (`bytes:\\xe2`) if they are no whole characters."""
        if token_id not in self._texts:
            data = self.bytes(token_id)
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
            self._texts[token_id] = text
        return self._texts[token_id]

    def bytes(self, token_id: int) -> bytes:
        """Return the token's UTF-8 bytes; those of the tokens of a text make up the text."""
        return self._token_bytes.next(token_id) or b""


class CompletionLogprobs:
    """Those of one completion, piece by piece: the offsets go on where the last piece ended.

    as_ids:        name tokens by their ids
    skips_special: special tokens are not in the completion's text
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
        # The same stream as the text's: a token may be half a character, and the offset moves when the rest has come.
        self._stream = tokenizer.stream(skip_special_tokens=skips_special, after=prompt_token_ids)

    def echo(self, token_ids: Sequence[int], text: str, *, num_before: int) -> list[int]:
        """Offsets of a prompt's tokens in its text, behind which the output goes on.

        Special tokens are in the text where its writer put them there, the `num_before` that the tokenizer put before
        it are not, nor is the space that some tokenizers begin a text with.
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
        """Of some tokens, one position each; a position is None for the first token of a prompt.

        top:    likely tokens to name beside each; the positions may have more
        echoed: offsets of the tokens of a prompt, with which they begin
        """
        offsets = [*echoed]
        for token_id in token_ids[len(echoed) :]:
            offsets.append(self._offset)
            self._offset += len(self._stream.push(token_id))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids],
            "token_logprobs": [None if position is None else _finite(position.logprobs[0]) for position in positions],
            "top_logprobs": [None if position is None else self._top(position, top) for position in positions],
            "text_offset": offsets,
        }

    def _top(self, position: TokenLogprobs, top: int) -> dict[str, float]:
        """The token itself is in it, whether or not it is one of the most likely."""
        pairs = zip(position.token_ids[: top + 1], position.logprobs, strict=False)
        return {self._name(token_id): _finite(logprob) for token_id, logprob in pairs}


def chat_content(positions: Sequence[TokenLogprobs], texts: TokenTexts, *, as_ids: bool) -> list[dict[str, Any]]:
    """`logprobs.content` of a chat's choice."""
    name = _namer(texts, as_ids)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": name(token_id), "logprob": _finite(logprob), "bytes": list(texts.bytes(token_id))}

    found: list[dict[str, Any]] = []
    for position in positions:
        first, *top = (entry(*pair) for pair in zip(position.token_ids, position.logprobs, strict=True))
        found.append({**first, "top_logprobs": top})
    return found


def prompt_positions(
    positions: Sequence[TokenLogprobs | None] | None, texts: TokenTexts, *, top: int
) -> list[dict[str, Any] | None] | None:
    """`prompt_logprobs` of a choice: by token id, the token itself and the `top` most likely."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": texts.text(token_id)}
            for token_id, logprob, rank in islice(zip(*position, strict=True), top + 1)
        }
        for position in positions
    ]


def _namer(texts: TokenTexts, as_ids: bool) -> Callable[[int], str]:
    return (lambda token_id: f"token_id:{token_id}") if as_ids else texts.text


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)
