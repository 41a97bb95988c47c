"""From the mode a user asked for to the mode that will run, every step of the way a value that carries its reason.

This is the only place where a mode changes. It is pure: `explain` runs it without a GPU, the engine runs it when it
starts, and tests walk the whole table (mode x support x pieces x speculation) of docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode, GraphSupport, Support


@dataclass(frozen=True, slots=True)
class Pieces:
    """Whether the capture can be broken at the attention call, and why (or why not)."""

    available: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Reason:
    """One step of a resolution: the mode before (None at the start), the mode after, and why."""

    before: GraphMode | None
    after: GraphMode
    text: str

    def __str__(self) -> str:
        if self.before is None or self.before is self.after:
            return f"{self.after.value}: {self.text}"
        return f"{self.before.value} -> {self.after.value}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """asked: None where the default was taken; mode: what runs; reasons: the chain from one to the other."""

    asked: GraphMode | None
    mode: GraphMode
    support: Support
    reasons: tuple[Reason, ...]

    @property
    def label(self) -> str:
        """The mode in a few words."""
        if self.asked is None:
            return f"mode {self.mode.value} (default)"
        return f"mode {self.mode.value}" + ("" if self.asked is self.mode else f" ({self.asked.value} was asked for)")


def without_support(reason: str, support: Support) -> str:
    """A reason without that of the support, which many repeat, for where it stands beside them."""
    return reason.replace(f" ({support.reason})", "")


def resolve_mode(
    asked: GraphMode | None, support: Support, pieces: Pieces, *, speculative_tokens: int = 0
) -> Resolution:
    """Applies the table of downgrades until nothing changes.

    Raises:
        ConfigError: FULL was asked and the backend supports no graph at all. (The default never fails.)
    """
    mode, text = _start(asked, support)
    reasons = [Reason(None, mode, text)]
    while (step := _downgrade(mode, support, pieces, speculative_tokens)) is not None:
        after, text = step
        reasons.append(Reason(mode, after, text))
        mode = after
    return Resolution(asked=asked, mode=mode, support=support, reasons=tuple(reasons))


def _start(asked: GraphMode | None, support: Support) -> tuple[GraphMode, str]:
    if asked is not None:
        return asked, "asked for"
    level = support.level.name
    if support.level is GraphSupport.ALWAYS:
        return GraphMode.FULL, f"the default where support is ALWAYS ({support.reason})"
    return GraphMode.FULL_AND_PIECEWISE, f"the default where support is below ALWAYS; it is {level} ({support.reason})"


def _downgrade(
    mode: GraphMode, support: Support, pieces: Pieces, speculative_tokens: int
) -> tuple[GraphMode, str] | None:
    """The next step down, or None where the mode holds."""
    level = support.level
    without_full = GraphMode.PIECEWISE if pieces.available else GraphMode.NONE
    if mode is GraphMode.FULL and level is not GraphSupport.ALWAYS:
        if level is GraphSupport.NEVER:
            raise ConfigError(
                "cudagraph_mode",
                mode.value,
                f"the attention backend supports no graph ({support.reason}); {without_full.value} works, or a backend "
                "that supports graphs",
            )
        after = GraphMode.FULL_AND_PIECEWISE if pieces.available else GraphMode.FULL_DECODE_ONLY
        return after, f"support is {level.name}, and mixed batches need ALWAYS ({support.reason})"
    if mode.decode_full and level is GraphSupport.NEVER:
        return without_full, _with_pieces(f"support is NEVER ({support.reason})", pieces)
    if mode.decode_full and speculative_tokens and level < GraphSupport.UNIFORM_BATCH:
        text = (
            f"with {speculative_tokens} speculative tokens a decode has {1 + speculative_tokens} tokens, which needs "
            f"UNIFORM_BATCH; support is {level.name} ({support.reason})"
        )
        return without_full, _with_pieces(text, pieces)
    if mode is GraphMode.FULL_AND_PIECEWISE and not pieces.available:
        return GraphMode.FULL_DECODE_ONLY, f"no graph for mixed batches: no pieces ({pieces.reason})"
    if mode is GraphMode.PIECEWISE and not pieces.available:
        return GraphMode.NONE, f"no pieces ({pieces.reason})"
    return None


def _with_pieces(text: str, pieces: Pieces) -> str:
    return text if pieces.available else f"{text}; and no pieces ({pieces.reason})"
