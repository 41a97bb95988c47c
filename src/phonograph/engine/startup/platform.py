"""Protocol that makes the parts of an engine for one kind of device. Tests pass their own platforms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from phonograph.attention.backend import AnyBackend, AttentionLayer
from phonograph.engine.plan import EnginePlan
from phonograph.engine.startup.static_memory import StaticMemory
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.ranks import Ranks
from phonograph.models.heads.shared_weights import gather_shared
from phonograph.models.modules.step_model import StepModel
from phonograph.models.transformer import Transformer
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_inputs import Inputs
from phonograph.runner.step_program import StepProgram
from phonograph.runner.steps import Sampling
from phonograph.sampling.sampler import Sampler
from phonograph.scheduling.draft_budget import DraftBudget
from phonograph.speculation.suffix_drafts import SuffixDrafts


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelParts:
    """Draft model, its attention backend, attention and KV cache of each of its layers."""

    model: Transformer
    backend: AnyBackend
    layers: list[AttentionLayer]
    kv_caches: list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Model, attention backend of each KV group, attention and KV cache of each layer, and a draft model if any.

    states: states by slot, by the index of the layer that has them
    units: counts of attention that each step leaves; see `MetadataBuilder`
    """

    model: StepModel
    backends: Sequence[AnyBackend]
    layers: list[AttentionLayer]
    kv_caches: list[torch.Tensor]
    states: Mapping[int, tuple[torch.Tensor, ...]] = field(default_factory=dict[int, tuple[torch.Tensor, ...]])
    draft: DraftModelParts | None = None
    units: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """Parts of a runner that depend on the kind of device."""

    runtime: GraphRuntime
    inputs: Inputs
    program: StepProgram
    sampling: Sampling


class Platform(Protocol):
    """A device, and the engine parts for it.

    compiles: True if the start compiles kernels and reports this as a phase
    """

    device: torch.device
    compiles: bool

    def starting(self) -> AbstractContextManager[object]:
        """Return a context for the start. It begins work that needs no weights, and ends every helper process."""
        ...

    def compile(self, launch: Callable[[], None]) -> None:
        """Compile and load every kernel that `launch` launches, without running one."""
        ...

    def static_memory(self) -> StaticMemory:
        """Make memory that the engine can give back while it sleeps.

        Raises:
            ConfigError: there is none here.
        """
        ...

    def make_parts(self, plan: EnginePlan, parts: ModelParts, sampler: Sampler | None) -> DeviceParts:
        """Bind the model to its kernels, and make the parts within the plan's limits; no sampler for a pooler."""
        ...


def make_states(plan: EnginePlan, parts: ModelParts) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
    """Return memory for the states that a draft head reads, and its parts by layer; see `Transformer.bind`."""
    taps, model = () if plan.draft is None or parts.draft is None else plan.draft.taps, parts.model
    size = plan.limits.max_num_batched_tokens, len(taps) * model.spec.hidden_size
    states_TF = torch.empty(size, dtype=model.dtype, device=model.device)
    of_layers = states_TF.chunk(max(len(taps), 1), 1)
    return states_TF, {layer - 1: part for layer, part in zip(taps, of_layers, strict=False)}


def gather_draft_weights(plan: EnginePlan, parts: ModelParts, ranks: Ranks) -> None:
    """Copy what a draft head takes of its target from all ranks to rank 0, when these have their weights."""
    features = None if plan.draft is None else plan.draft.model.features
    if features is not None:
        assert isinstance(parts.model, Transformer)
        gather_shared(features, parts.model, ranks, None if parts.draft is None else parts.draft.model)


def make_step_attention(plan: EnginePlan, parts: ModelParts, inputs: Inputs, runtime: GraphRuntime) -> StepAttention:
    """Make the attention that the model calls, over the tables of the inputs."""
    return StepAttention(
        parts.backends, parts.layers, parts.kv_caches, inputs.slot_mappings, runtime, plan.kv.group_of_layer,
        draft_caches=() if parts.draft is None else parts.draft.kv_caches,
    )  # fmt: skip


def make_draft_budget(plan: EnginePlan, *, in_steps: bool = False) -> DraftBudget | None:
    """Make the budget that chooses the drafts of each step; None without speculation.

    Args:
        plan: of the engine.
        in_steps: a draft model runs inside the steps.
    """
    speculation, max_num_seqs = plan.config.speculation, plan.limits.max_num_seqs
    if speculation is None:
        return None
    return DraftBudget(
        speculation.most_drafts(max_num_seqs),
        max_num_seqs=max_num_seqs,
        adaptive=speculation.adaptive_depth,
        in_steps=in_steps,
    )


def make_suffix_drafts(plan: EnginePlan, sampler: Sampler | None) -> SuffixDrafts | None:
    """Make the drafts of suffix decoding; None without it."""
    speculation, budget = plan.config.speculation, make_draft_budget(plan)
    if speculation is None or budget is None or sampler is None or not speculation.on_host:
        return None
    limits = plan.limits
    return SuffixDrafts(
        speculation.suffix,
        budget,
        max_num_seqs=limits.max_num_seqs,
        max_num_logits=limits.max_num_logits,
        slow_masks=sampler.grammars.slow,
    )
