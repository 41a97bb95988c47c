"""Attention from its definition, in float64, one head of one sequence at a time. Every backend is compared with it.

It shares no code with any kernel, has no blocks, tiles or batches, and is slow.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from phonograph.attention.backend import AttentionLayer

Array = NDArray[np.float64]


def dense_attention(
    query_THD: Array, keys_LKD: Array, values_LKD: Array, layer: AttentionLayer, *, causal: bool
) -> tuple[Array, Array]:
    """Attend T queries of one sequence, the last at position L - 1, to its L keys.

    Keys and values are read from the cache and multiplied by their scales.

    Returns:
        Output [T, H, D] and LSE [H, T]; a query that sees nothing gets zeros and -inf (its head's sink, if any).
    """
    num_tokens, num_heads, head_size = query_THD.shape
    length, num_kv_heads, _ = keys_LKD.shape
    out_THD = np.zeros((num_tokens, num_heads, head_size))
    lse_HT = np.full((num_heads, num_tokens), -np.inf)
    slopes = None if layer.alibi_slopes is None else layer.alibi_slopes.double().cpu().numpy()
    sinks = None if layer.sinks is None else layer.sinks.double().cpu().numpy()
    left, right = layer.window
    for head in range(num_heads):
        kv_head = head * num_kv_heads // num_heads
        for token in range(num_tokens):
            position = length - num_tokens + token
            first = max(0, position - left) if left >= 0 else 0
            last = min(length - 1, position + right) if right >= 0 else length - 1
            if causal:
                last = min(last, position)
            # Queries before the first key have a `last` below 0, which a slice would count from the end.
            logits = keys_LKD[first : max(first, last + 1), kv_head] @ query_THD[token, head] * layer.scale
            if layer.softcap:
                logits = layer.softcap * np.tanh(logits / layer.softcap)
            if slopes is not None:
                logits = logits + slopes[head] * (np.arange(first, first + len(logits)) - position)
            terms = logits if sinks is None else np.append(logits, sinks[head])
            if len(terms) == 0:
                continue
            largest = float(terms.max())
            lse = largest + math.log(float(np.exp(terms - largest).sum()))
            lse_HT[head, token] = lse
            out_THD[token, head] = np.exp(logits - lse) @ values_LKD[first : first + len(logits), kv_head]
    return out_THD, lse_HT
