"""Engine parts on the CPU: the tape, inputs in host memory, torch kernels, and sampling on the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.engine.startup.platform import (
    DeviceParts,
    DraftModelParts,
    ModelParts,
    make_draft_budget,
    make_states,
    make_step_attention,
    make_suffix_drafts,
)
from phonograph.engine.startup.static_memory import HostMemory, StaticMemory
from phonograph.engine.startup.threads import start_threads
from phonograph.graphs.dispatch import Dispatcher
from phonograph.graphs.runtime import GraphRuntime
from phonograph.graphs.tape.tape import TapeRuntime, operator_threads
from phonograph.kernels.ranks import Ranks
from phonograph.models.heads.encoder_specs import AudioEncoder
from phonograph.models.heads.shared_weights import share
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.transformer import Transformer
from phonograph.runner.cpu_inputs import CpuInputs
from phonograph.runner.cpu_sampling import CpuSampling
from phonograph.runner.draft_runner import DraftRunner, FollowedSequences, HeadFeatures
from phonograph.runner.group_builder import GroupBuilder
from phonograph.runner.runner import Runner
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_program import StepProgram
from phonograph.runner.steps import Pooling
from phonograph.runner.synthetic_batches import SyntheticBatches
from phonograph.sampling.sampler import Sampler
from phonograph.speculation.host_drafts import HostDrafts
from phonograph.speculation.ngram import NgramProposer


class CpuPlatform:
    """The CPU; see `Platform`.

    Args:
        ranks: ranks that have a part of the model each; None for a whole model.
    """

    device = torch.device("cpu")
    compiles = False

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = ranks

    def starting(self) -> AbstractContextManager[object]:
        """Return a context whose operators take no more threads than the CPU quota allows."""
        return operator_threads(start_threads())

    def compile(self, launch: Callable[[], None]) -> None:
        """Do nothing: torch has no kernels to compile."""

    def static_memory(self) -> StaticMemory:
        """Return memory of the host; see `Platform`."""
        return HostMemory(1 if self._ranks is None else self._ranks.size)

    def make_parts(self, plan: EnginePlan, parts: ModelParts, sampler: Sampler | None) -> DeviceParts:
        """Make the parts; see `Platform`."""
        limits, model = plan.limits, parts.model
        runtime = TapeRuntime(None if plan.threads is None else plan.threads.count)
        speculation, budget = plan.config.speculation, make_draft_budget(plan)
        drafts = make_suffix_drafts(plan, sampler)
        if drafts is None and speculation is not None and budget is not None:
            proposer = None
            if parts.draft is None:
                proposer = NgramProposer(shortest=speculation.prompt_lookup_min, longest=speculation.prompt_lookup_max)
            drafts = HostDrafts(proposer, budget, max_num_seqs=limits.max_num_seqs)
        inputs = CpuInputs(
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_sizes=plan.kv.block_sizes,
            max_num_logits=limits.max_num_logits,
            encoder_lens=[group.encoder_len for group in plan.kv.groups],
        )
        if sampler is not None and isinstance(plan.model.encoder, AudioEncoder):
            sampler.grammars.first_timestamp = plan.model.encoder.first_timestamp
        states_TF, taps = make_states(plan, parts)
        if isinstance(model, Transformer):
            _bind(model, limits.max_model_len, taps, max_num_tokens=limits.max_num_batched_tokens, ranks=self._ranks)
        draft_runner = None
        if parts.draft is not None:
            assert sampler is not None, "a draft model is for models that generate"
            if taps:
                assert isinstance(model, Transformer), "a draft head has a decoder of ours"
                share(parts.draft.model, model)
            draft_runner = _draft_runner(plan, parts.draft, inputs, runtime, sampler, states_TF)
        attention = make_step_attention(plan, parts, inputs, runtime)
        return DeviceParts(
            runtime=runtime,
            inputs=inputs,
            program=StepProgram(model=model, attention=attention, inputs=inputs, states=parts.states),
            sampling=Pooling(model) if sampler is None else CpuSampling(sampler, inputs, drafts, draft_runner),
        )


def _bind(
    model: Transformer,
    max_model_len: int,
    taps: Mapping[int, torch.Tensor] = MappingProxyType({}),
    max_num_tokens: int = 0,
    ranks: Ranks | None = None,
) -> None:
    spec = model.spec
    rotary = rotary_tables(spec, max_model_len, model.dtype, model.device)
    kernels = TorchKernels(
        rotary, spec.rms_norm_eps, spec.factors, spec.norms, max_num_tokens, ranks=ranks, vocab_size=spec.vocab_size
    )
    model.bind(kernels, taps)


def _draft_runner(
    plan: EnginePlan,
    draft: DraftModelParts,
    inputs: CpuInputs,
    runtime: GraphRuntime,
    sampler: Sampler,
    states_TF: torch.Tensor,
) -> DraftRunner:
    """Make the runner of a draft model or head over the slots and blocks of `inputs`; a head reads the states."""
    limits = plan.limits
    # A step may have a token more of each sequence than that of the target: the sampled one.
    max_num_tokens = limits.max_num_batched_tokens + limits.max_num_seqs
    own = CpuInputs(
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=max_num_tokens,
        max_model_len=limits.max_model_len,
        block_sizes=plan.kv.block_sizes,
    )
    _bind(draft.model, limits.max_model_len)
    head = None
    if draft.model.features is not None:
        vocab_size = plan.model.vocab_size
        head = HeadFeatures(draft.model, states_TF, max_num_seqs=limits.max_num_seqs, vocab_size=vocab_size)
    shift = 0 if head is None else 1
    own.share_slots(inputs, shift=shift)
    attention = StepAttention([draft.backend], draft.layers, draft.kv_caches, own.slot_mappings, runtime)
    captures = replace(plan.captures, drafting=(), wide=())
    sequences = FollowedSequences(sampler, max_num_seqs=limits.max_num_seqs, shift=shift)
    runner = Runner(
        program=StepProgram(
            model=draft.model, attention=attention, inputs=own, features_TE=None if head is None else head.step_TE
        ),
        builder=GroupBuilder([draft.backend]),
        inputs=own,
        sampling=CpuSampling(sampler.for_drafts(), own, head=head),
        sequences=sequences,
        dispatcher=Dispatcher(plan.resolution, captures, max_num_tokens=max_num_tokens),
        runtime=runtime,
        synthetic=SyntheticBatches(
            own.load,
            max_model_len=limits.max_model_len,
            groups=plan.kv.groups,
            num_blocks=plan.memory.num_blocks,
            vocab_size=draft.model.spec.vocab_size,
        ),
    )
    return DraftRunner(runner, own, sequences, most=limits.draft_tokens, max_num_tokens=max_num_tokens, head=head)
