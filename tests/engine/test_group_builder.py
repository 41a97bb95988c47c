"""Groups of equal attention share a plan where a backend plans by lengths only."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.attention.attention_spec import AttentionKind
from phonograph.attention.metadata import AttentionMetadata
from phonograph.attention.selection import BUILT_IN
from phonograph.runner.group_builder import GroupBuilder
from phonograph.runner.step_attention import StepAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata(AttentionMetadata):
    plan: int


@dataclass(frozen=True)
class Common:
    """A batch, of which only the block table is looked at."""

    block_table: str
    plan_tables: tuple[str, ...] = ()


@dataclass(eq=False)
class Backend:
    """Counts its builders; each makes metadata with its own number as the plan."""

    shares: bool
    made: list[int] = field(default_factory=list[int])
    scheduled: list[Any] = field(default_factory=list[Any])
    reads_on_host = False
    spec = SimpleNamespace(kind=AttentionKind.DECODER)

    @property
    def capabilities(self) -> Any:
        return SimpleNamespace(plans_by_lengths=self.shares)

    def make_builder(self) -> Any:
        number = len(self.made)
        self.made.append(number)
        return SimpleNamespace(units=None, build=lambda common, key: Metadata(common=common, plan=number))

    def schedule(self, metadata: Any) -> None:
        self.scheduled.append(metadata.common)


@pytest.mark.parametrize("shares", [True, False])
def test_groups_with_one_backend(shares: bool) -> None:
    """A plan for several groups is made of the block tables of all."""
    windowed, full = Backend(shares), Backend(shares)
    backends: Any = [windowed, full, windowed]
    commons: Any = [Common("a"), Common("b"), Common("c")]
    metadata: Any = GroupBuilder(backends).build(commons, key=None)
    assert [one.plan for one in metadata] == ([0, 0, 0] if shares else [0, 0, 1])
    assert [one.common.block_table for one in metadata] == ["a", "b", "c"]
    runtime: Any = None
    attention = StepAttention(backends, [], [], [], runtime)
    attention.metadata = metadata
    attention.schedule()
    assert windowed.scheduled == ([Common("a", ("a", "c"))] if shares else [Common("a"), Common("c")])
    assert full.scheduled == [Common("b")]


def test_which_backends_plan_by_lengths() -> None:
    """Others read block tables: the reference its whole schedule, FlashInfer page numbers, pairs those of each part."""
    labels = {one.capabilities.label for one in BUILT_IN if one.capabilities.plans_by_lengths}
    assert labels == {"triton", "flash_attn 3", "flash_attn 4"}
