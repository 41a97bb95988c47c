"""Configuration of speculation: the keys of `speculative_config`, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from phonograph.errors import ConfigError, shortened

MOST_DRAFTS = 15
"""Largest number of drafts: attention takes up to 16 tokens of a sequence beside decodes of one."""
METHODS = ("ngram", "draft_model", "eagle", "eagle3", "suffix")
_PER_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
_SUFFIX, _RANKS = "suffix_decoding_", "draft_tensor_parallel_size"
_RATES, _LENGTH, _ACCEPTANCE = "synthetic_acceptance_rates", "synthetic_acceptance_length", "rejection_sample_method"
_RANGES = {
    "num_speculative_tokens": (1, MOST_DRAFTS),
    "prompt_lookup_max": (1, 1 << 20),
    "prompt_lookup_min": (1, 1 << 20),
    _SUFFIX + "max_tree_depth": (2, 1 << 10),
    _SUFFIX + "max_cached_requests": (0, 1 << 20),
    _SUFFIX + "max_spec_factor": (0.0, 1e3),
    _SUFFIX + "min_token_prob": (0.0, 1.0),
}
"""Least and largest value of each number. A number whose bounds are whole is whole."""
_KEYS = (
    *("method", *_RANGES),
    *("model", "revision", _RANKS, "adaptive_depth", _PER_BATCH_SIZE, _ACCEPTANCE, _RATES, _LENGTH),
)
_OWNERS = {"prompt_lookup_": "ngram", _SUFFIX: "suffix"}
"""Method of the keys that begin so."""
_LOOKUP = 5
"""Default of both lookups; one of them alone is also the other."""


class SuffixSettings(NamedTuple):
    """Settings of suffix decoding, by the names of vLLM behind `suffix_decoding_`.

    Attributes:
        max_tree_depth: most last tokens that are compared.
        max_cached_requests: earlier outputs that are kept.
        max_spec_factor: most drafts for each token that matched.
        min_token_prob: least probability of a draft, by the continuations of the places that matched.
    """

    max_tree_depth: int = 24
    max_cached_requests: int = 10000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1


class SpeculativeConfig(NamedTuple):
    """Drafts of decodes.

    Attributes:
        method: "ngram" drafts what followed an earlier occurrence of the last tokens, "draft_model" what a smaller
            model says, "eagle3" or "eagle" (EAGLE-1) what a head says that reads states of the model, "suffix" what
            followed the last tokens most often, in earlier outputs too.
        num_speculative_tokens: most drafts of a decode.
        prompt_lookup_max: most last tokens that are looked up.
        prompt_lookup_min: fewest.
        adaptive_depth: choose the drafts of each step by what they gain; False verifies all.
        model: folder or name of the draft model; None without one.
        revision: branch, tag or commit of it on the hub.
        suffix: settings of suffix decoding.
        synthetic_rates: share of decodes that keep their first 1, 2, ... drafts, whatever these are; empty to keep what
            is right.
        per_batch_size: fewer drafts for numbers of decodes from a first to a last one, as (first, last, drafts).
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int
    adaptive_depth: bool = True
    per_batch_size: tuple[tuple[int, int, int], ...] = ()
    model: str | None = None
    revision: str | None = None
    synthetic_rates: tuple[float, ...] = ()
    suffix: SuffixSettings = SuffixSettings()

    @property
    def on_host(self) -> bool:
        """True if the host makes the drafts on a GPU too, so that it waits for the tokens of each step."""
        return self.method == "suffix"

    def most_drafts(self, max_num_seqs: int) -> list[int]:
        """Return the most drafts of a decode, by the number of decodes in a step: 0 to `max_num_seqs`."""
        most = [self.num_speculative_tokens] * (max_num_seqs + 1)
        for first, last, drafts in self.per_batch_size:
            for number in range(first, min(last, max_num_seqs) + 1):
                most[number] = drafts
        return most

    @property
    def note(self) -> str:
        """The choice of the depth, for `explain`."""
        most = self.num_speculative_tokens
        if self.adaptive_depth:
            return f"speculation: 0 to {most} drafts a decode, by acceptance and durations of steps (adaptive_depth)"
        return f"speculation: 0 to {most} drafts a decode, all that {self.method} makes (adaptive_depth is off)"


def read_speculative_config(given: Mapping[str, Any]) -> SpeculativeConfig:
    """Return the configuration from its keys.

    Raises:
        ConfigError: a key is unknown or missing, or has another value than it can have.
    """

    def refused(key: str, problem: str) -> ConfigError:
        value = given.get(key)
        return ConfigError(f"speculative_config.{key}", shortened(repr(value)) if key in given else None, problem)

    for key in given:
        if key not in _KEYS:
            raise refused(str(key), f"is not known; the keys are {', '.join(_KEYS)}")
    if given.get("model") in ("ngram", "[ngram]"):  # vLLM's older names of the method
        given = {"method": "ngram", **{key: value for key, value in given.items() if key != "model"}}
    named = str(given.get("model") or "").lower()
    of_model = "eagle3" if "eagle3" in named else "eagle" if "eagle-" in named else "draft_model"
    inferred = of_model if named else "ngram"
    method = given.get("method", inferred)
    if method == "ngram_gpu":
        method = METHODS[0]
    if method not in METHODS:
        raise refused("method", f"is not supported yet; {' or '.join(METHODS)} is")
    if method == "suffix":
        given = {"num_speculative_tokens": MOST_DRAFTS, **given}
    if "num_speculative_tokens" not in given:
        raise refused("num_speculative_tokens", f"is missing; give a number from 1 to {MOST_DRAFTS}")
    for key in given:
        owner = next((one for start, one in _OWNERS.items() if key.startswith(start)), method)
        if owner != method:
            raise refused(key, f"belongs to method {owner}; leave it out")
    if method not in ("ngram", "suffix"):
        if not isinstance(given.get("model"), str):
            raise refused("model", "must be the folder or name of a draft model")
    elif given.get("model") is not None:
        raise refused("model", "belongs to methods draft_model, eagle and eagle3; leave one of them out")
    for key, (least, most) in _RANGES.items():
        value = given.get(key, least)
        if type(value) not in (int, type(most)) or not least <= value <= most:
            noun = "whole number" if type(most) is int else "number"
            raise refused(key, f"must be a {noun} from {least:g} to {most:g}")
    if given.get(_RANKS, 1) != 1:
        raise refused(_RANKS, "is not supported; 1 is, as a draft model runs on rank 0")
    suffix = {key.removeprefix(_SUFFIX): value for key, value in given.items() if key.startswith(_SUFFIX)}
    longest = given.get("prompt_lookup_max", given.get("prompt_lookup_min", _LOOKUP))
    shortest = given.get("prompt_lookup_min", longest)
    if shortest > longest:
        raise refused("prompt_lookup_min", f"must be at most prompt_lookup_max={longest}")
    if type(adaptive := given.get("adaptive_depth", True)) is not bool:
        raise refused("adaptive_depth", "must be true or false")
    ranges = given.get(_PER_BATCH_SIZE) or []
    problem = _problem_of(ranges, given["num_speculative_tokens"])
    if problem is not None:
        raise refused(_PER_BATCH_SIZE, problem)
    per_batch_size = tuple((first, last, drafts) for first, last, drafts in ranges)
    rates, problem = _synthetic_rates(given)
    if problem is not None:
        raise refused(*problem)
    return SpeculativeConfig(
        method,
        given["num_speculative_tokens"],
        longest,
        shortest,
        adaptive,
        per_batch_size,
        given.get("model"),
        given.get("revision"),
        rates,
        SuffixSettings(**suffix),
    )


def _synthetic_rates(given: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[str, str] | None]:
    """Return the shares of decodes that keep their first drafts in a bench, and a key with what is wrong with it."""
    rates, length, most = given.get(_RATES), given.get(_LENGTH), given["num_speculative_tokens"]
    method = given.get(_ACCEPTANCE, "standard")
    if method not in ("standard", "synthetic"):
        return (), (_ACCEPTANCE, "must be standard, or synthetic for benches, whose tokens are not the model's")
    if method == "standard":
        key = _RATES if rates is not None else _LENGTH
        return (), None if given.get(key) is None else (key, f"works with {_ACCEPTANCE} synthetic; leave it out")
    if (rates is None) == (length is None):
        return (), (_ACCEPTANCE, f"synthetic takes one of {_RATES} and {_LENGTH}")
    if rates is None:
        if not isinstance(length, (int, float)) or isinstance(length, bool) or not 1 <= length <= 1 + most:
            return (), (_LENGTH, f"must be a number of tokens a step from 1 to {1 + most}")
        return tuple(float(min(1, max(0, length - 1 - index))) for index in range(most)), None
    numbers = isinstance(rates, Sequence) and all(type(one) in (int, float) and 0 <= one <= 1 for one in rates)
    if not numbers or len(rates) != most or any(late > early for early, late in pairwise(rates)):
        return (), (_RATES, f"must be a list of {most} shares from 0 to 1, none above the one before it")
    return tuple(map(float, rates)), None


def _problem_of(ranges: Any, most: int) -> str | None:
    """Return what is wrong with ranges of batch sizes, if anything."""
    form = "must be a list of [first batch size, last batch size, drafts], such as [[1, 8, 4], [9, 64, 0]]"
    if not isinstance(ranges, Sequence) or isinstance(ranges, str):
        return form
    before = 0
    for one in ranges:
        if not isinstance(one, Sequence) or len(one) != 3 or any(type(number) is not int for number in one):
            return form
        first, last, drafts = one
        if not before < first <= last:
            return f"must have ascending batch sizes from 1; {list(one)} does not follow {before}"
        if not 0 <= drafts <= most:
            return f"must have 0 to num_speculative_tokens={most} drafts; {list(one)} has not"
        before = last
    return None
