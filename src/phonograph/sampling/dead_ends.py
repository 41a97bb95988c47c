"""Why there was no token to sample, where that is the request's doing and not the model's.

A grammar may have rules that never end, or that nothing in the vocabulary fits; biases may ban what is left. That shows
only on the way, as a row without a token, and is looked into then: it costs nothing where all is well.
"""

from __future__ import annotations

import math

import numpy as np

from phonograph.core.grammar import Grammar
from phonograph.core.request import Request
from phonograph.errors import RequestError, shortened
from phonograph.sampling.grammar_masks import bitmask_words


def dead_end(request: Request, vocab_size: int) -> RequestError | None:
    """What of its parameters leaves a request no token after those it has; None where something is left."""
    params, num_tokens = request.params, len(request.output_token_ids)
    allowed_V = np.ones(vocab_size, dtype=bool)
    structured = params.structured_outputs
    if request.grammar is not None and structured is not None:
        allowed_V = _allowed(request.grammar, request.output_token_ids, vocab_size)
        if not allowed_V.any():
            after = (
                f"nothing can follow its first {num_tokens} tokens" if num_tokens else "nothing can be its beginning"
            )
            problem = f"{after}: a rule that never ends, or fits no token?"
            return RequestError(structured.kind, shortened(structured.source), problem)
    if num_tokens < params.min_tokens:
        allowed_V[list(request.end_token_ids)] = False
        if not allowed_V.any():
            return RequestError(
                "min_tokens", params.min_tokens, "every token that could come next would end the output"
            )
    allowed_V[[token_id for token_id, bias in params.logit_bias.items() if bias == -math.inf]] = False
    return None if allowed_V.any() else RequestError("logit_bias", "...", "bans every token that could come next")


def _allowed(grammar: Grammar, output_token_ids: list[int], vocab_size: int) -> np.ndarray:
    """By token, whether it may come next: bool [vocabulary]."""
    matcher = grammar.matcher()
    for token_id in output_token_ids:
        matcher.accept(token_id)
    if matcher.ended:
        return np.ones(vocab_size, dtype=bool)
    bitmask_RW = np.zeros((1, bitmask_words(vocab_size)), dtype=np.int32)
    matcher.fill(bitmask_RW, 0)
    return np.unpackbits(bitmask_RW.view(np.uint8), bitorder="little")[:vocab_size].astype(bool)
