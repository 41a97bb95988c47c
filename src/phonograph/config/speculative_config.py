"""Configuration of speculation: the keys of `speculative_config`, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from phonograph.errors import ConfigError, shortened

MOST_DRAFTS = 15
"""Largest number of drafts: attention takes up to 16 tokens of a sequence beside decodes of one."""
METHODS = ("ngram",)
_PER_BATCH_SIZE = "num_speculative_tokens_per_batch_size"
_KEYS = (
    *("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"),
    *("adaptive_depth", _PER_BATCH_SIZE),
)
_LOOKUP = 5
"""Default of both lookups; one of them alone is also the other."""


class SpeculativeConfig(NamedTuple):
    """Drafts of decodes.

    Attributes:
        method: "ngram" drafts what followed an earlier occurrence of the last tokens.
        num_speculative_tokens: most drafts of a decode.
        prompt_lookup_max: most last tokens that are looked up.
        prompt_lookup_min: fewest.
        adaptive_depth: choose the drafts of each step by what they gain; False verifies all.
        per_batch_size: fewer drafts for numbers of decodes from a first to a last one, as (first, last, drafts).
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int
    adaptive_depth: bool = True
    per_batch_size: tuple[tuple[int, int, int], ...] = ()

    def most_drafts(self, max_num_seqs: int) -> list[int]:
        """Return the most drafts of a decode, by the number of decodes in a step: 0 to `max_num_seqs`."""
        most = [self.num_speculative_tokens] * (max_num_seqs + 1)
        for first, last, drafts in self.per_batch_size:
            for number in range(first, min(last, max_num_seqs) + 1):
                most[number] = drafts
        return most

    def note(self, device_kind: str) -> str:
        """Return how the depth is chosen, for `explain`.

        Args:
            device_kind: "cpu", or a GPU, where the host does not know how many drafts a step will find.
        """
        most = self.num_speculative_tokens
        if device_kind != "cpu":
            return f"speculation: {most} drafts a decode (adaptive_depth works on a CPU only)"
        if self.adaptive_depth:
            return f"speculation: 0 to {most} drafts a decode, by acceptance and durations of steps (adaptive_depth)"
        return f"speculation: 0 to {most} drafts a decode, all that {self.method} finds (adaptive_depth is off)"


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
    method = given.get("method", METHODS[0])
    if method == "ngram_gpu":
        method = METHODS[0]
    if method not in METHODS:
        raise refused("method", f"is not supported yet; {' or '.join(METHODS)} is")
    if "num_speculative_tokens" not in given:
        raise refused("num_speculative_tokens", f"is missing; give a number from 1 to {MOST_DRAFTS}")
    counts = {"num_speculative_tokens": MOST_DRAFTS, "prompt_lookup_max": 1 << 20, "prompt_lookup_min": 1 << 20}
    for key, most in counts.items():
        value = given.get(key)
        if key in given and (type(value) is not int or not 1 <= value <= most):
            raise refused(key, f"must be a whole number from 1 to {most}")
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
    return SpeculativeConfig(method, given["num_speculative_tokens"], longest, shortest, adaptive, per_batch_size)


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
