"""Verification of captured graphs: each replay on random inputs must equal the eager run.

The inputs differ from those of the capture, so a length, an address or a launch bound that a graph froze shows as a
mismatch. The module knows no models and no attention; a `VerifySubject` prepares inputs and runs them both ways.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from phonograph.errors import ConfigError, counted
from phonograph.graphs.modes import GraphKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Description of a random batch.

    Attributes:
        num_tokens: query tokens.
        num_decodes, num_prefills: sequences of each kind.
        longest, median: tokens of its sequences, context included.
        prefix: leading tokens that its first sequences have in the same blocks.
    """

    num_tokens: int
    num_decodes: int
    num_prefills: int
    longest: int
    median: int
    prefix: int = 0

    @property
    def mixed(self) -> bool:
        return self.num_decodes > 0 and self.num_prefills > 0

    @property
    def skewed(self) -> bool:
        """True if its longest sequence is far longer than the others."""
        return self.longest >= 8 * self.median

    def __str__(self) -> str:
        prefix = f", {self.prefix} tokens in shared blocks" if self.prefix else ""
        return (
            f"{counted(self.num_tokens, 'token')}, {counted(self.num_decodes, 'decode')} + "
            f"{counted(self.num_prefills, 'prefill')}, longest sequence "
            f"{self.longest}{prefix}"
        )


class VerifySubject(Protocol):
    """Engine part that `verify` drives. `replay` and `eager` return copies of all results of the step, by name."""

    def graph_keys(self) -> tuple[GraphKey, ...]:
        """Return the keys of all captured graphs."""
        ...

    def prepare(self, key: GraphKey, rng: np.random.Generator) -> Drawn:
        """Draw a random batch.

        Args:
            key: graph that it runs as.
            rng: source of the random numbers.
        """
        ...

    def replay(self, key: GraphKey) -> dict[str, torch.Tensor]:
        """Poison scratch and outputs, and replay the graph on the prepared batch.

        Args:
            key: the graph.
        """
        ...

    def eager(self, key: GraphKey) -> dict[str, torch.Tensor]:
        """Run the prepared batch eagerly at the graph's padded shape.

        Args:
            key: the graph.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """One tensor of one replay that differs.

    Attributes:
        key: the graph.
        batch: description of the batch.
        tensor: name of the tensor.
        num_different, num_elements: elements that differ, and all.
        max_abs_error: largest difference; NaN if one side is not finite.
        rank: of several ranks the one that replayed it.
    """

    key: GraphKey
    batch: str
    tensor: str
    num_different: int
    num_elements: int
    max_abs_error: float
    rank: int | None = None

    def on_rank(self, rank: int) -> Mismatch:
        """Return the mismatch with the rank that found it.

        Args:
            rank: the number of that rank.
        """
        return replace(self, rank=rank)

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}, "
        return (
            f"{where}{self.key}: {self.tensor} differs in {self.num_different} of {self.num_elements} elements "
            f"(largest error {self.max_abs_error:.3g}) on a batch of {self.batch}"
        )


@dataclass(slots=True, kw_only=True)
class VerifyReport:
    """Result of `verify`.

    Attributes:
        replays: number of replays of each graph.
        num_mixed, num_skewed, longest_sequence: of the batches.
        mismatches: empty if every replay equalled the eager run bit for bit.
    """

    replays: dict[GraphKey, int] = field(default_factory=dict[GraphKey, int])
    num_mixed: int = 0
    num_skewed: int = 0
    longest_sequence: int = 0
    mismatches: list[Mismatch] = field(default_factory=list[Mismatch])

    @property
    def num_replays(self) -> int:
        return sum(self.replays.values())

    @property
    def ok(self) -> bool:
        return not self.mismatches and bool(self.replays)


def verify(
    subject: VerifySubject,
    *,
    num_replays: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Replay every graph of `subject` in turn.

    Args:
        subject: prepares and runs the batches.
        num_replays: number of replays in all; each graph gets at least one.
        seed: of the random batches.
        progress: gets the number of replays done and in all.

    Returns:
        Counts, and each tensor that differed.

    Raises:
        ConfigError: there is no graph to verify.
    """
    keys = subject.graph_keys()
    if not keys:
        raise ConfigError("cudagraph_mode", "NONE", "there is no graph to verify; ask for a mode with graphs")
    rng = np.random.default_rng(seed)
    report = VerifyReport()
    total = max(num_replays, len(keys))
    for index in range(total):
        key = keys[index % len(keys)]
        batch = subject.prepare(key, rng)
        replayed = subject.replay(key)
        expected = subject.eager(key)
        report.replays[key] = report.replays.get(key, 0) + 1
        report.num_mixed += batch.mixed
        report.num_skewed += batch.skewed
        report.longest_sequence = max(report.longest_sequence, batch.longest)
        for name, tensor in expected.items():
            mismatch = _compare(key, str(batch), name, replayed[name], tensor)
            if mismatch is not None:
                report.mismatches.append(mismatch)
        if progress is not None:
            progress(index + 1, total)
    return report


def _compare(key: GraphKey, batch: str, name: str, got: torch.Tensor, expected: torch.Tensor) -> Mismatch | None:
    # NaN does not equal itself: a NaN in an output is a mismatch, even if the eager run has it too.
    different = got != expected
    count = int(different.sum())
    if count == 0:
        return None
    error = (got.double() - expected.double()).abs().max()
    return Mismatch(
        key=key,
        batch=batch,
        tensor=name,
        num_different=count,
        num_elements=got.numel(),
        max_abs_error=float(error),
    )
