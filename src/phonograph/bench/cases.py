"""Cases of the engine's workloads: their syntax, the published ones, and the ones that fit an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from phonograph.core.limits import Limits
from phonograph.errors import UNSET, ConfigError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, setting: str, text: str) -> Lengths:
        """Parse "128" or "100-1023".

        Raises:
            ConfigError: the text is neither, or a number is below 1.
        """
        try:
            low, _, high = text.partition("-")
            lengths = cls(int(low), int(high or low))
        except ValueError:
            lengths = cls(0, 0)
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(setting, text, "must be a whole number >= 1, or a range such as 100-1023")
        return lengths

    def draw(self, rng: random.Random, count: int) -> list[int]:
        return [rng.randrange(self.low, self.high + 1) for _ in range(count)]


def parse_size(setting: str, text: str) -> int:
    """Parse "1024" or "1k".

    Raises:
        ConfigError: the text is neither, or below 1.
    """
    digits, unit = (text[:-1], 1024) if text.endswith("k") else (text, 1)
    size = int(digits) * unit if digits.isdecimal() else 0
    if size < 1:
        raise ConfigError(setting, text, "must be a number of tokens >= 1, such as 500 or 32k")
    return size


@dataclass(frozen=True, slots=True)
class LatencyCase:
    """One batch of `num_seqs` equal requests."""

    input_len: int
    output_len: int
    num_seqs: int

    def __str__(self) -> str:
        return str(self.input_len) if self.num_seqs == 1 else f"{self.num_seqs}x{self.input_len}"

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.input_len + self.output_len


class Case(Protocol):
    """One row of a workload. `length` is the number of tokens of its longest sequence at the end."""

    @property
    def num_seqs(self) -> int: ...
    @property
    def length(self) -> int: ...


def cases_that_fit(
    setting: str, cases: Sequence[Case], limits: Limits, *, requested: bool
) -> tuple[list[Case], list[str]]:
    """Select the cases that an engine can run.

    With `requested` the user named the cases by `setting`, so that one that does not fit is an error.

    Returns:
        The fitting cases, and one line for each other case.

    Raises:
        ConfigError: a requested case does not fit, or no case fits.
    """
    fitting: list[Case] = []
    left_out: list[str] = []
    for case in cases:
        if case.num_seqs > limits.max_num_seqs:
            problem = f"needs {case.num_seqs} sequences at once; max_num_seqs={limits.max_num_seqs}"
        elif case.length > limits.max_model_len:
            problem = f"needs {case.length} tokens in a sequence; max_model_len={limits.max_model_len}"
        else:
            fitting.append(case)
            continue
        if requested:
            raise ConfigError(setting, str(case), problem)
        left_out.append(f"{case} left out: {problem}")
    if not fitting:
        raise ConfigError(setting, UNSET, f"is not set, and no published case fits this engine: {'; '.join(left_out)}")
    return fitting, left_out


LATENCY_INPUT_LENS = (500, 1000, 2000, 4000, 8000, 16000)
LATENCY_OUTPUT_LEN = 4
THROUGHPUT_LENS = Lengths(100, 1023)
