"""Cases of the engine's workloads: their syntax, the published ones, and the ones that fit an engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from phonograph.errors import UNSET, ConfigError

DECODE_TOKENS = 96
"""Tokens whose time is measured, after a first one."""
MIXED_TOKENS = 100
MIXED_SEQS = 2


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
            raise ConfigError(setting, text, "must be a number of tokens >= 1, or a range of them such as 100-1023")
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
class DecodeCase:
    """`num_seqs` sequences that decode at once, each after a prompt of `context` tokens."""

    num_seqs: int
    context: int

    def __str__(self) -> str:
        return f"{self.num_seqs}x{self.context}"

    @classmethod
    def parse(cls, text: str) -> DecodeCase:
        """Parse "8x1024" or "8x1k"."""
        count, _, context = text.partition("x")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError("cases", text, "must be sequences x tokens of context, such as 8x1024 or 1x32k")
        return cls(int(count), parse_size("cases", context))

    @property
    def length(self) -> int:
        """Tokens of a sequence at its end."""
        return self.context + 1 + DECODE_TOKENS


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


@dataclass(frozen=True, slots=True)
class MixedCase:
    """A long decode after a prompt of `context` tokens, beside short prompts."""

    context: int
    num_seqs: int = MIXED_SEQS

    def __str__(self) -> str:
        return str(self.context)

    @classmethod
    def parse(cls, text: str) -> MixedCase:
        """Parse "16384" or "16k"."""
        return cls(parse_size("cases", text))

    @property
    def length(self) -> int:
        """Tokens of the longest sequence at its end."""
        return self.context + MIXED_TOKENS


AnyCase = DecodeCase | LatencyCase | MixedCase


def cases_that_fit(
    setting: str, cases: Sequence[AnyCase], *, requested: bool, max_num_seqs: int, max_model_len: int
) -> tuple[list[AnyCase], list[str]]:
    """Select the cases that an engine can run.

    Args:
        setting: name of the setting in errors.
        cases: cases to select from.
        requested: the user named the cases, so that one that does not fit is an error.
        max_num_seqs: sequences that the engine runs at once.
        max_model_len: tokens of a sequence that the engine allows.

    Returns:
        The fitting cases, and one line for each other case.

    Raises:
        ConfigError: a requested case does not fit, or no case fits.
    """
    fitting: list[AnyCase] = []
    left_out: list[str] = []
    for case in cases:
        if case.num_seqs > max_num_seqs:
            problem = f"needs {case.num_seqs} sequences at once; max_num_seqs={max_num_seqs}"
        elif case.length > max_model_len:
            problem = f"needs {case.length} tokens in a sequence; max_model_len={max_model_len}"
        else:
            fitting.append(case)
            continue
        if requested:
            raise ConfigError(setting, str(case), problem)
        left_out.append(f"{case} left out: {problem}")
    if not fitting:
        raise ConfigError(setting, UNSET, f"is not set, and no published case fits this engine: {'; '.join(left_out)}")
    return fitting, left_out


DECODE_CASES = tuple(
    DecodeCase(*case) for case in ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 512), (1, 32768), (8, 32768))
)
IDLE_CASES = (DecodeCase(1, 1024), DecodeCase(256, 512))
STEP_CASES = (DecodeCase(1, 1024), DecodeCase(32, 1024), DecodeCase(256, 512))
LATENCY_INPUT_LENS = (500, 1000, 2000, 4000, 8000, 16000)
LATENCY_OUTPUT_LEN = 4
MIXED_CASES = tuple(MixedCase(context) for context in (16384, 32768, 65536))
THROUGHPUT_LENS = Lengths(100, 1023)
