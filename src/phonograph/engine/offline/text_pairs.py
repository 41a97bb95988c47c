"""Prompts of a model with an encoder of text: tokens for the encoder, and those that the decoder begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from phonograph.core.token_types import EncoderTokens
from phonograph.engine.offline.prompts import plain_prompt
from phonograph.errors import RequestError, shortened
from phonograph.models.heads.encoder_specs import TextEncoder
from phonograph.text.tokenizer import Tokenizer

_KEYS = {"encoder_prompt", "decoder_prompt", "cache_salt"}


def text_pair(prompt: object, tokenizer: Tokenizer | None, encoder: TextEncoder) -> EncoderTokens:
    """Return the tokens of a prompt in vLLM's forms.

    Args:
        prompt: text, token ids or a mapping as for `plain_prompt`, for the encoder; or a mapping with `encoder_prompt`,
            and perhaps `decoder_prompt`, likewise. The decoder's tokens come after those that begin its prompts, unless
            they begin with the first of these.
        tokenizer: of texts.
        encoder: of the model.

    Raises:
        RequestError: the prompt has another form.
    """
    if isinstance(prompt, EncoderTokens):
        return prompt
    decoder, start = None, [*encoder.start]
    if isinstance(prompt, Mapping) and "encoder_prompt" in prompt:
        entries = cast("Mapping[str, Any]", prompt)
        if set(entries) - _KEYS:
            raise RequestError("prompts", shortened(repr(list(entries))), f"has keys other than {', '.join(_KEYS)}")
        prompt, decoder = entries["encoder_prompt"], entries.get("decoder_prompt")
    if decoder is not None:
        written = _tokens(decoder, tokenizer, special=False)
        start = written if written[:1] == start[:1] else start + written
    source = _tokens(prompt, tokenizer, special=True)
    try:
        return EncoderTokens(start, np.array(source, np.int32))
    except (OverflowError, TypeError, ValueError):
        raise RequestError("encoder_prompt", shortened(repr(source)), "must be text or token ids") from None


def _tokens(prompt: object, tokenizer: Tokenizer | None, *, special: bool) -> list[int]:
    plain = plain_prompt(prompt)
    if not isinstance(plain, str):
        return [*plain]
    if tokenizer is None:
        raise RequestError("prompt", plain, "is text, and the engine runs without a tokenizer; give token ids")
    return tokenizer.encode(plain, add_special_tokens=special)
