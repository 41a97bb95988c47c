"""Cases of the workloads decode and mixed: their syntax, and the published ones."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.bench.cases import parse_size
from phonograph.errors import ConfigError

DECODE_TOKENS = 96
"""Tokens whose time is measured, after a first one."""
MIXED_TOKENS = 100
MIXED_SEQS = 2


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


DECODE_CASES = tuple(
    DecodeCase(*case) for case in ((1, 1024), (8, 1024), (32, 1024), (128, 1024), (256, 512), (1, 32768), (8, 32768))
)
IDLE_CASES = (DecodeCase(1, 1024), DecodeCase(256, 512))
STEP_CASES = (DecodeCase(1, 1024), DecodeCase(32, 1024), DecodeCase(256, 512))
MIXED_CASES = tuple(MixedCase(context) for context in (16384, 32768, 65536))
