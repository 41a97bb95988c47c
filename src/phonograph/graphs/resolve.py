"""Resolution of the graph mode: from the requested mode to the one that runs, each step with its reason.

A mode changes nowhere else. The module is pure: `explain` runs it without a GPU, the engine runs it at its start, and
tests walk the whole table (mode x support x pieces x speculation) of docs/architecture.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phonograph.errors import ConfigError, counted
from phonograph.graphs.modes import GraphMode, GraphSupport, Support


@dataclass(frozen=True, slots=True)
class Pieces:
    """Possibility to break a capture at the attention call, with the reason.

    Attributes:
        available: True if it is possible.
        reason: a sentence for the user.
    """

    available: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Reason:
    """One step of a resolution.

    Attributes:
        before: the mode before; None at the start.
        after: the mode after.
        text: the reason.
    """

    before: GraphMode | None
    after: GraphMode
    text: str

    def __str__(self) -> str:
        if self.before is None or self.before is self.after:
            return f"{self.after.value}: {self.text}"
        return f"{self.before.value} -> {self.after.value}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Result of a resolution.

    Attributes:
        asked: the requested mode; None for the default.
        mode: the mode that runs.
        support: level of the attention backend.
        reasons: the steps from `asked` to `mode`.
    """

    asked: GraphMode | None
    mode: GraphMode
    support: Support
    reasons: tuple[Reason, ...]

    @property
    def label(self) -> str:
        """Short description of the mode."""
        if self.asked is None:
            return f"mode {self.mode.value} (default)"
        return f"mode {self.mode.value}" + ("" if self.asked is self.mode else f" ({self.asked.value} was asked for)")

    def after_failure(self, problem: str) -> Resolution:
        """Return the resolution with pieces in the place of whole graphs, or without graphs, as a capture failed.

        Args:
            problem: why it failed.
        """
        after = GraphMode.PIECEWISE if self.mode.decode_full else GraphMode.NONE
        return replace(self, mode=after, reasons=(*self.reasons, Reason(self.mode, after, problem)))


def without_support(reason: str, support: Support) -> str:
    """Remove the reason of the support from a reason that repeats it.

    Args:
        reason: text of a step of the resolution.
        support: level of the attention backend.
    """
    return reason.replace(f" ({support.reason})", "")


def resolve_mode(
    requested: GraphMode | None, support: Support, pieces: Pieces, *, speculative_tokens: int = 0
) -> Resolution:
    """Apply the table of downgrades until nothing changes.

    Args:
        requested: the requested mode, or None for the default.
        support: level of the attention backend.
        pieces: if captures can be broken at attention.
        speculative_tokens: draft tokens a step.

    Returns:
        The mode that runs, with a reason for each change.

    Raises:
        ConfigError: FULL was requested and the backend supports no graph. The default never fails.

    Example:
        ```python
        decodes_only = Support(GraphSupport.UNIFORM_BATCH, "its plan is for decodes")
        resolution = resolve_mode(GraphMode.FULL, decodes_only, Pieces(True, "attention is one operator"))
        assert resolution.mode is GraphMode.FULL_AND_PIECEWISE
        print(*resolution.reasons)
        ```
    """
    mode, text = _start(requested, support)
    reasons = [Reason(None, mode, text)]
    while (step := _downgrade(mode, support, pieces, speculative_tokens)) is not None:
        after, text = step
        reasons.append(Reason(mode, after, text))
        mode = after
    return Resolution(asked=requested, mode=mode, support=support, reasons=tuple(reasons))


def _start(requested: GraphMode | None, support: Support) -> tuple[GraphMode, str]:
    if requested is not None:
        return requested, "asked for"
    level = support.level.name
    if support.level is GraphSupport.ALWAYS:
        return GraphMode.FULL, f"the default where support is ALWAYS ({support.reason})"
    return GraphMode.FULL_AND_PIECEWISE, f"the default where support is below ALWAYS; it is {level} ({support.reason})"


def _downgrade(
    mode: GraphMode, support: Support, pieces: Pieces, speculative_tokens: int
) -> tuple[GraphMode, str] | None:
    """Return the next lower mode with the reason, or None if the mode holds."""
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
            f"with {counted(speculative_tokens, 'speculative token')} a decode has {1 + speculative_tokens} "
            f"tokens, which needs UNIFORM_BATCH; support is {level.name} ({support.reason})"
        )
        return without_full, _with_pieces(text, pieces)
    if mode is GraphMode.FULL_AND_PIECEWISE and not pieces.available:
        return GraphMode.FULL_DECODE_ONLY, f"no graph for mixed batches: no pieces ({pieces.reason})"
    if mode is GraphMode.PIECEWISE and not pieces.available:
        return GraphMode.NONE, f"no pieces ({pieces.reason})"
    return None


def _with_pieces(text: str, pieces: Pieces) -> str:
    return text if pieces.available else f"{text}; and no pieces ({pieces.reason})"
