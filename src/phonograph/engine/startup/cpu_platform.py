"""Engine parts on the CPU: the tape, inputs in host memory, torch kernels, and sampling on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.engine.startup.platform import DeviceParts, ModelParts, make_step_attention
from phonograph.engine.startup.static_memory import HostMemory, StaticMemory
from phonograph.graphs.tape.tape import TapeRuntime
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.cpu_sampling import CpuSampling
from phonograph.runner.step_program import StepProgram
from phonograph.sampling.sampler import Sampler
from phonograph.speculation.host_drafts import HostDrafts
from phonograph.speculation.ngram import NgramProposer


class CpuPlatform:
    """The CPU; see `Platform`."""

    device = torch.device("cpu")
    compiles = False

    def starting(self) -> AbstractContextManager[object]:
        """Return a context that does nothing."""
        return nullcontext()

    def compile(self, launch: Callable[[], None]) -> None:
        """Do nothing: torch has no kernels to compile."""

    def static_memory(self) -> StaticMemory:
        """Return memory of the host; see `Platform`."""
        return HostMemory()

    def make_parts(self, plan: EnginePlan, parts: ModelParts, sampler: Sampler) -> DeviceParts:
        """Make the parts; see `Platform`."""
        limits, model = plan.limits, parts.model
        runtime = TapeRuntime(None if plan.threads is None else plan.threads.count)
        speculation, drafts = plan.config.speculation, None
        if speculation is not None:
            proposer = NgramProposer(shortest=speculation.prompt_lookup_min, longest=speculation.prompt_lookup_max)
            most = speculation.num_speculative_tokens
            drafts = HostDrafts(proposer, most=most, max_num_seqs=limits.max_num_seqs)
        inputs = CpuInputs(
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_sizes=plan.kv.block_sizes,
            max_num_logits=limits.max_num_logits,
        )
        rotary = rotary_tables(model.spec, limits.max_model_len, model.dtype, model.device)
        model.bind(TorchKernels(rotary, model.spec.rms_norm_eps, model.spec.factors))
        attention = make_step_attention(plan, parts, inputs, runtime)
        return DeviceParts(
            runtime=runtime,
            inputs=inputs,
            program=StepProgram(model=model, attention=attention, inputs=inputs),
            sampling=CpuSampling(sampler, inputs, drafts),
        )
