"""Values of `logprobs_mode` in float64, from logits and the parameters of a request; and kinds of such requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import pytest
from ladders import Ladder

from phonograph.config.values import LogprobsMode
from phonograph.core.batch import TokenLogprobs
from phonograph.core.sampling_params import SamplingParams

MODES: tuple[str, ...] = get_args(LogprobsMode)
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": 0.3}
BIAS = {3: 2.0, 50: -1.5, 60: -np.inf, 99: 4.0}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.0, "logprobs": -1, "min_tokens": 5, "logit_bias": BIAS, **PENALTIES},
    {"temperature": 0.7, "logprobs": 12, "top_k": 9, "top_p": 0.8, "min_p": 0.02, "logit_bias": BIAS, **PENALTIES},
    {"temperature": 1.6, "logprobs": 4, "top_p": 0.9, "presence_penalty": 1.5},
    {"temperature": 2.5, "logprobs": -1, "min_p": 0.1, "frequency_penalty": -0.7},
    {"temperature": 0.4, "logprobs": 0, "min_tokens": 4},
    {"temperature": 1e-3, "logprobs": 2, "top_k": 3, "repetition_penalty": 0.8},
    {"temperature": 1.2, "logprob_token_ids": [98, 0, 60, 3], "top_k": 20, "logit_bias": BIAS},
    {"temperature": 1.0},
]
VOCAB, END = 100, 99


def exact_scores(
    mode: str,
    logits_V: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    ends: Sequence[int] = (),
    allowed_V: np.ndarray | None = None,
) -> np.ndarray:
    """Return the number that is reported for each token, float64 [V].

    Args:
        mode: value of the setting.
        logits_V: raw logits.
        params: of the request.
        prompt: its tokens.
        output: tokens before this one.
        ends: tokens that min_tokens masks.
        allowed_V: tokens that a grammar allows; None for all.
    """
    x = logits_V.astype(np.float64)
    if mode.startswith("processed"):
        x = _processed(x, params, prompt, output, ends, allowed_V)
    if mode.endswith("logits"):
        return x
    return x - (x.max() + np.log(np.exp(x - x.max()).sum()))


def check_position(found: TokenLogprobs, exact_V: np.ndarray, token_id: int, top: int, *, near: float = 2e-5) -> None:
    """Check the token, and `top` others, -1 for all; equal numbers have the lower token first."""
    best = np.argsort(-exact_V, kind="stable")[: len(exact_V) if top < 0 else top].tolist()
    assert found.token_ids == [token_id, *best]
    wanted = exact_V[found.token_ids]
    assert np.array_equal(np.isneginf(found.logprobs), np.isneginf(wanted))
    finite = np.isfinite(wanted)
    assert np.array(found.logprobs)[finite] == pytest.approx(wanted[finite], rel=2e-6, abs=near)
    assert found.ranks == [1 + int((exact_V > value).sum()) for value in wanted]


def check_whole(
    mode: str,
    one: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    found: Sequence[Any],
    rows: Sequence[np.ndarray],
    grammar: Ladder | None,
) -> None:
    """Check all positions of an output, with the logits of each."""
    if one.logprobs is None:
        assert not found
        return
    assert len(found) == len(output) == len(rows)
    matcher = None if grammar is None else grammar.matcher()
    for place, (position, logits) in enumerate(zip(found, rows, strict=True)):
        allowed = None if matcher is None else matcher.allowed()[:VOCAB].astype(bool)
        exact = exact_scores(mode, logits, one, prompt, output[:place], ends=[END], allowed_V=allowed)
        token = output[place]
        assert np.isfinite(exact[token])
        if one.logprob_token_ids is None:
            # A temperature multiplies the rounding of edits.
            check_position(position, exact, token, one.logprobs, near=2e-5 + 1e-6 / max(one.temperature, 1e-3))
        else:
            assert position.token_ids == [token, *one.logprob_token_ids]
            assert position.logprobs == pytest.approx(exact[position.token_ids].tolist(), abs=2e-5)
            assert position.ranks == [1 + int((exact > exact[one]).sum()) for one in position.token_ids]
        if matcher is not None:
            matcher.accept(token)


def _processed(
    x: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: Sequence[int],
    allowed_V: np.ndarray | None,
) -> np.ndarray:
    for token, bias in (params.logit_bias or {}).items():
        x[token] += np.float32(bias)
    if len(output) < params.min_tokens:
        x[[*ends]] = -np.inf
    for token in {*prompt, *output}:
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in {*output}:
        x[token] -= params.presence_penalty + [*output].count(token) * params.frequency_penalty
    if allowed_V is not None:
        x[~allowed_V] = -np.inf
    if params.greedy:
        return x
    x /= params.temperature
    if params.min_p:
        x[x < x.max() + np.log(params.min_p)] = -np.inf
    order = np.argsort(-x, kind="stable")
    if params.top_k > 0:
        x[order[params.top_k :]] = -np.inf
    if params.top_p < 1.0:
        mass = np.exp(x[order] - x.max())
        x[order[(mass.cumsum() - mass) >= params.top_p * mass.sum()]] = -np.inf
    return x
