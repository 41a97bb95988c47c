"""Reasons why a request has no token to sample, if its own parameters are the cause.

A grammar may have rules that never end or match no token, and biases may ban the rest. This only appears during
generation, as a row without a token, and is examined then, so that normal requests pay nothing.
"""

from __future__ import annotations

import math

import numpy as np

from phonograph.core.grammar import Grammar
from phonograph.core.request import Request
from phonograph.errors import RequestError, counted, shortened
from phonograph.sampling.grammar_masks import bitmask_words


def dead_end(request: Request, vocab_size: int) -> RequestError | None:
    """Return the parameter that leaves a request no next token, as an error; None if some token is allowed."""
    params, num_tokens = request.params, len(request.output_token_ids)
    allowed_V = np.ones(vocab_size, dtype=bool)
    structured = params.structured_outputs
    if request.grammar is not None:
        allowed_V = _allowed(request.grammar, request.output_token_ids, vocab_size)
        if not allowed_V.any() and (params.bad_words or params.allowed_token_ids is not None):
            name = "allowed_token_ids" if params.allowed_token_ids is not None else "bad_words"
            problem = f"no token is left after the first {counted(num_tokens, 'token')} of the output"
            return RequestError(name, "...", problem)
        if not allowed_V.any() and structured is not None:
            after = (
                f"no token can follow its first {counted(num_tokens, 'token')}"
                if num_tokens
                else "no token can begin it"
            )
            problem = f"{after}; check for rules that never end or match no token"
            return RequestError(structured.kind, shortened(structured.source), problem)
    if num_tokens < params.min_tokens and structured is None:
        allowed_V[list(request.end_token_ids)] = False
        if not allowed_V.any():
            return RequestError("min_tokens", params.min_tokens, "every allowed token would end the output")
    allowed_V[[token_id for token_id, bias in params.logit_bias.items() if bias == -math.inf]] = False
    return None if allowed_V.any() else RequestError("logit_bias", "...", "bans every allowed token")


def _allowed(grammar: Grammar, output_token_ids: list[int], vocab_size: int) -> np.ndarray:
    """Return the allowed tokens: bool [vocabulary]."""
    matcher = grammar.matcher()
    for token_id in output_token_ids:
        matcher.accept(token_id)
    if matcher.ended:
        return np.ones(vocab_size, dtype=bool)
    bitmask_RW = np.zeros((1, bitmask_words(vocab_size)), dtype=np.int32)
    matcher.fill(bitmask_RW, 0)
    return np.unpackbits(bitmask_RW.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
