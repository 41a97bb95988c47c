"""The subject of `verify`: a runner, and the memory of its model."""

from __future__ import annotations

from phonograph.attention.composite.context_parallel import ContextParallelBackend
from phonograph.engine.plan import EnginePlan
from phonograph.engine.startup.platform import ModelParts
from phonograph.runner.runner import Runner
from phonograph.runner.verify_subject import RunnerSubject


def make_subject(plan: EnginePlan, parts: ModelParts, runner: Runner) -> RunnerSubject:
    """Make what `verify` compares: a runner, and the memory of its model."""
    return RunnerSubject(
        runner,
        dict(zip(plan.model.attentions, parts.kv_caches, strict=True)),
        plan.kv.groups,
        states=parts.states,
        local_slots=[
            one.tensors.local_slots if isinstance(one, ContextParallelBackend) else None for one in parts.backends
        ],
        poisons_freed=skip_freed_blocks(plan),
    )


def skip_freed_blocks(plan: EnginePlan) -> bool:
    """Return True if no kernel uses what is behind a window, so that it may be NaN, as memory at the start may be."""
    return all(
        group.window is None or selection.capabilities.skips_freed_blocks
        for group, selection in zip(plan.kv.groups, plan.selections, strict=True)
    )
