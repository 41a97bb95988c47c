"""Configuration of speculation: the keys of `speculative_config`, by vLLM's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from phonograph.errors import ConfigError, shortened

MOST_DRAFTS = 15
"""Largest number of drafts: attention takes up to 16 tokens of a sequence beside decodes of one."""
METHODS = ("ngram",)
_KEYS = ("method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
_LOOKUP = 5
"""Default of both lookups; one of them alone is also the other."""


class SpeculativeConfig(NamedTuple):
    """Drafts of decodes.

    Attributes:
        method: "ngram" drafts what followed an earlier occurrence of the last tokens.
        num_speculative_tokens: most drafts of a decode.
        prompt_lookup_max: most last tokens that are looked up.
        prompt_lookup_min: fewest.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


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
    return SpeculativeConfig(method, given["num_speculative_tokens"], longest, shortest)
