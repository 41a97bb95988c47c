"""Faults of operators of mixers with a state, in replays of graphs on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from phonograph.kernels.torch.state import gated_conv, gated_delta, mamba2

OPERATORS: dict[str, tuple[Any, Callable[..., None], int]] = {
    "qwen3_5": (torch.ops.phonograph.gated_delta.default, gated_delta.gated_delta, 6),
    "lfm2": (torch.ops.phonograph.short_conv.default, gated_conv.short_conv, 3),
    "bamba": (torch.ops.phonograph.mamba2.default, mamba2.mamba2, 7),
}
"""A family for each mixer: its operator, and the position of `query_start_loc` in its arguments."""
STARTS, LENS, SLOTS, CHECKPOINTS = range(4)
"""Arguments of the operators from the first of a step's rows on."""


def later(args: list[Any], more: torch.Tensor) -> None:
    """Have sequences begin `more` tokens later than they do."""
    args[LENS] = args[LENS] + more
    saved = args[CHECKPOINTS][2] + more
    args[CHECKPOINTS] = torch.cat([args[CHECKPOINTS][:2], saved.unsqueeze(0)])


def padding_writes(args: list[Any]) -> None:
    """Padding rows have a token of their own, and write to slot 0; the step's tokens follow its rows."""
    args[SLOTS] = args[SLOTS].clamp_min(0)
    args[STARTS], args[LENS] = args[STARTS].clone(), args[LENS].clone()
    if int(args[STARTS][-1]) < args[-1]:
        args[STARTS][-1] += 1
        args[LENS][-1] += 1


def not_reset(args: list[Any]) -> None:
    """Sequences without context read their slot."""
    later(args, torch.ones_like(args[LENS]))


def one_token_is_a_decode(args: list[Any]) -> None:
    """Prompts of one token read the state of their slot."""
    later(args, (args[STARTS].diff() == 1).to(torch.int32))


def not_restored(args: list[Any]) -> None:
    """Sequences that start from a checkpoint read their slot."""
    args[CHECKPOINTS] = args[CHECKPOINTS].clone()
    args[CHECKPOINTS][0] = -1


def another_boundary(args: list[Any]) -> None:
    """Checkpoints have the state at the end of the step."""
    args[CHECKPOINTS] = torch.cat([args[CHECKPOINTS][:2], args[LENS].unsqueeze(0)])


def plant(fault: Callable[[list[Any]], None], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the fault before the operator of a family of `OPERATORS`, in replays only, as one of a kernel in a graph."""
    operator, original, first = OPERATORS[family]

    def faulty(*args: Any) -> None:
        rows = [*args[first : first + 4], len(args[0])]
        fault(rows)
        original(*args[:first], *rows[:4], *args[first + 4 :])

    monkeypatch.setattr(operator, "python_function", faulty)
