"""Sampling parameters of one request, validated when they are made, so that a bad one never reaches a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from phonograph.errors import RequestError

MAX_LOGPROBS = 1024
MAX_N = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next tokens of a request, and when to stop.

    n:                  samples of the same prompt
    temperature:        0 is greedy
    top_k:              keep the k most likely tokens; 0 keeps all
    top_p:              keep the smallest set of most likely tokens whose probability reaches p
    min_p:              keep tokens at least min_p times as likely as the most likely one
    repetition_penalty: > 1 divides positive (multiplies negative) logits of tokens in prompt or output
    presence_penalty, frequency_penalty: subtracted from logits of tokens in the output (once; for each occurrence)
    logit_bias:         added to the logits of these token ids
    seed:               makes the draws of this request repeatable, whatever else is in the batch
    logprobs:           None, or how many most likely tokens to report beside each sampled one (0: just the sampled)
    prompt_logprobs:    the same for the tokens of the prompt
    max_tokens:         tokens to generate at most; None is up to the model's context
    min_tokens:         neither end-of-sequence nor stop conditions before so many tokens
    stop:               strings that end the output; they are cut from it unless include_stop_str_in_output
    stop_token_ids:     token ids that end the output
    ignore_eos:         do not end at the model's end-of-sequence tokens
    skip_special_tokens: leave special tokens out of the text

    Raises:
        RequestError: a value is out of range; the message names it and what would work.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        # -1 is how much of the field writes "no limit".
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        _check_int("top_k", self.top_k, 0, None)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for token_id, bias in self.logit_bias.items():
            _check_int("logit_bias key", token_id, 0, None)
            # -inf (ban) is a bias people use; NaN and +inf are not.
            if not isinstance(bias, (int, float)) or math.isnan(bias) or bias == math.inf:
                raise RequestError("logit_bias", bias, "each bias must be a number below +inf")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if any(not isinstance(text, str) or not text for text in self.stop):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise RequestError("stop", list(self.stop), "each stop must be a non-empty string")
        for token_id in self.stop_token_ids:
            _check_int("stop_token_ids", token_id, 0, None)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def _check_int(name: str, value: object, low: int | None, high: int | None) -> None:
    expected = _interval("an integer", low, high)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(name, value, f"must be {expected}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise RequestError(name, value, f"must be {expected}")


def _check_float(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    relation = ">" if low_open else ">="
    limit = f"a finite number {relation} {low:g}" + (f" and <= {high:g}" if high != math.inf else "")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(name, value, f"must be {limit}")
    if value < low or (low_open and value == low) or value > high:
        raise RequestError(name, value, f"must be {limit}")


def _interval(kind: str, low: int | None, high: int | None) -> str:
    bounds = [f">= {low}"] if low is not None else []
    bounds += [f"<= {high}"] if high is not None else []
    return " ".join([kind, " and ".join(bounds)]).strip()
