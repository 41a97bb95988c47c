"""The protocol by which an engine is made on one kind of device; tests hand in platforms of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch

from phonograph.attention.backend import AnyBackend, AttentionLayer
from phonograph.engine.plan import EnginePlan
from phonograph.graphs.runtime import GraphRuntime
from phonograph.models.transformer import Transformer
from phonograph.runner.step_inputs import Inputs
from phonograph.runner.step_program import StepProgram
from phonograph.runner.steps import Sampling
from phonograph.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """Weights, attention, and the KV cache of each layer."""

    model: Transformer
    backend: AnyBackend
    layers: list[AttentionLayer]
    kv_caches: list[torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceParts:
    """The parts of a runner that a kind of device has of its own."""

    runtime: GraphRuntime
    inputs: Inputs
    program: StepProgram
    sampling: Sampling


class Platform(Protocol):
    """A device, and the parts of an engine that suit it.

    compiles: True where kernels are compiled at the start, which is reported as a phase of its own
    """

    device: torch.device
    compiles: bool

    def starting(self) -> AbstractContextManager[object]:
        """Return what surrounds a start: it begins what weights are not needed for, and leaves no process behind."""
        ...

    def compile(self, launch: Callable[[], None]) -> None:
        """Compile and load every kernel that `launch` launches, where kernels have to be compiled, and run none."""
        ...

    def make_parts(self, plan: EnginePlan, parts: ModelParts, sampler: Sampler) -> DeviceParts:
        """Bind the model to its kernels and make the parts, within the plan's limits."""
        ...
