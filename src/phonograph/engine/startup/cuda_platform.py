"""Engine parts on a GPU: CUDA graphs, one static workspace, state and sampling on the device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType

import torch

from phonograph.engine.groups.draft_plan import keeps_tokens
from phonograph.engine.plan import EnginePlan
from phonograph.engine.startup.cuda_memory_driver import CudaMemoryDriver
from phonograph.engine.startup.platform import (
    DeviceParts,
    DraftModelParts,
    ModelParts,
    make_draft_budget,
    make_states,
    make_step_attention,
    make_suffix_drafts,
)
from phonograph.engine.startup.static_memory import StaticMemory
from phonograph.engine.startup.virtual_memory import MemoryDriver, VirtualMemory
from phonograph.graphs.cuda import CudaRuntime
from phonograph.graphs.modes import GraphMode
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.ranks import Ranks
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.kernels.triton.launch import compile_helper
from phonograph.kernels.triton.launch.precompile import begin_hashing, compile_only
from phonograph.models.heads.encoder_specs import AudioEncoder
from phonograph.models.heads.shared_weights import share
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.layers.triton_parts import TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.modules.step_model import StepModel
from phonograph.models.transformer import Transformer
from phonograph.runner.cuda.cuda_inputs import CudaInputs
from phonograph.runner.cuda.cuda_rank_inputs import CudaRankInputs
from phonograph.runner.cuda.cuda_sampling import LOOKAHEAD, RING_DEPTH, CudaSampling
from phonograph.runner.cuda.device_sampler import DeviceSampler
from phonograph.runner.cuda.draft_passes import DraftPasses
from phonograph.runner.cuda.listed_drafts import ListedDrafts
from phonograph.runner.cuda.masked_sampling import MaskedSampling
from phonograph.runner.cuda.token_ring import TokenRing
from phonograph.runner.step_program import StepProgram
from phonograph.runner.steps import Pooling
from phonograph.sampling.sampler import Sampler
from phonograph.speculation.device_drafts import DeviceDrafts


class CudaPlatform:
    """A GPU; see `Platform`.

    Args:
        device: the GPU.
        make_runtime: called with the device and the static tensors that graphs use for intermediates.
        make_ring: called with `depth`, `max_rows`, `units` and `early_words`.
        make_memory_driver: called for each memory that can sleep.
        ranks: ranks that have a part of the model each; None for a whole model.
    """

    compiles = True

    def __init__(
        self,
        device: torch.device,
        *,
        make_runtime: Callable[[torch.device, list[torch.Tensor]], GraphRuntime] = CudaRuntime,
        make_ring: Callable[..., TokenRing] = TokenRing,
        make_memory_driver: Callable[[], MemoryDriver] = CudaMemoryDriver,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self.device = device
        self._make_runtime = make_runtime
        self._make_ring = make_ring
        self._make_memory_driver = make_memory_driver

    @contextmanager
    def starting(self) -> Generator[None]:
        """Start the helper that compiles kernels; see `Platform`."""
        begin_hashing()
        compile_helper.start_early()
        try:
            yield
        finally:
            compile_helper.end_helper(compiled_all=False)

    def compile(self, launch: Callable[[], None]) -> None:
        """Compile and load the kernels; see `Platform`."""
        with compile_only():
            launch()

    def static_memory(self) -> StaticMemory:
        """Return memory on virtual addresses; see `Platform`."""
        return VirtualMemory(self._make_memory_driver(), num_ranks=1 if self._ranks is None else self._ranks.size)

    def make_parts(self, plan: EnginePlan, parts: ModelParts, sampler: Sampler | None) -> DeviceParts:
        """Make the parts; see `Platform`."""
        limits, model = plan.limits, parts.model
        device = parts.kv_caches[0].device  # with its index
        spec, batch_invariant = model.spec, plan.attention.batch_invariant
        with torch.inference_mode():
            taps = () if plan.draft is None else plan.draft.taps
            states, kept = make_states(plan, parts)
            workspace = _bind(plan, model, limits.max_num_logits, device, kept, self._ranks)
            make_inputs = CudaInputs if self._ranks is None else partial(CudaRankInputs, self._ranks)
            inputs = make_inputs(
                max_num_seqs=limits.max_num_seqs,
                max_num_tokens=limits.max_num_batched_tokens,
                max_model_len=limits.max_model_len,
                block_sizes=plan.kv.block_sizes,
                vocab_size=1 if sampler is None else spec.vocab_size,
                device=device,
                draft_tokens=limits.draft_tokens,
                max_num_logits=limits.max_num_logits,
                keeps_tokens=keeps_tokens(plan.config, plan.draft),
                has_states=bool(spec.states),
                encoder_lens=[group.encoder_len for group in plan.kv.groups],
                ragged_encoder=any(group.ragged_encoder for group in plan.kv.groups),
            )
            if sampler is None or (self._ranks is not None and self._ranks.rank > 0):
                return self._parts_without_sampling(plan, parts, inputs, workspace)
            sampler.edits = inputs.edits
            static = workspace.tensors()
            if parts.draft is not None:
                if parts.draft.model.features is not None:
                    assert isinstance(model, Transformer), "a draft head has a decoder of ours"
                    share(parts.draft.model, model)
                static += _bind(plan, parts.draft.model, limits.max_num_seqs, device).tensors()
        runtime = self._make_runtime(device, static)
        in_steps, drafts = parts.draft is not None, make_suffix_drafts(plan, sampler)
        budget = make_draft_budget(plan, in_steps=in_steps)
        if drafts is None and budget is not None:
            drafts = DeviceDrafts(
                budget,
                max_num_logits=limits.max_num_logits,
                slow_masks=sampler.grammars.slow,
                in_steps=in_steps,
                waits_for_lengths=plan.waits,
            )
        device_sampler = DeviceSampler(
            inputs,
            workspace.logits_NV,
            speculation=plan.config.speculation,
            batch_invariant=batch_invariant,
            first_timestamp=spec.encoder.first_timestamp if isinstance(spec.encoder, AudioEncoder) else None,
        )
        masked = MaskedSampling(
            device_sampler.sample_masked,
            masks=sampler.grammars,
            max_rows=limits.max_masked_rows,
            vocab_size=spec.vocab_size,
            device=device,
        )
        passes = listed = None
        if parts.draft is not None:
            passes = _draft_passes(plan, parts.draft, inputs, runtime, states, taps)
            pieces = plan.resolution.mode is GraphMode.PIECEWISE
            listed = ListedDrafts(passes, masked.requests, max_num_seqs=limits.max_num_seqs, pieces=pieces)
        early_words = len(inputs.tokens) + len(inputs.counts)
        ring = self._make_ring(
            depth=RING_DEPTH, max_rows=len(inputs.results), units=parts.units, early_words=early_words
        )
        return DeviceParts(
            runtime=runtime,
            inputs=inputs,
            program=StepProgram(
                model=model,
                attention=make_step_attention(plan, parts, inputs, runtime),
                inputs=inputs,
                sample=device_sampler.sample,
                batch_invariant=batch_invariant,
                passes=passes,
                send_early=partial(ring.send_early, inputs.staging, inputs.results),
                states=parts.states,
                drafts_read_last=_drafts_read_last(plan),
            ),
            sampling=CudaSampling(sampler, inputs, masked, ring, drafts, listed),
        )

    def _parts_without_sampling(
        self, plan: EnginePlan, parts: ModelParts, inputs: CudaInputs, workspace: Workspace
    ) -> DeviceParts:
        """Make the parts of an engine that generates nothing, or of a rank that does not sample."""
        runtime = self._make_runtime(parts.kv_caches[0].device, workspace.tensors())
        attention = make_step_attention(plan, parts, inputs, runtime)
        return DeviceParts(
            runtime=runtime,
            inputs=inputs,
            program=StepProgram(
                model=parts.model,
                attention=attention,
                inputs=inputs,
                states=parts.states,
                drafts_read_last=_drafts_read_last(plan),
            ),
            sampling=Pooling(parts.model, lookahead=LOOKAHEAD),
        )


def _bind(
    plan: EnginePlan,
    model: StepModel,
    max_num_logits: int,
    device: torch.device,
    taps: Mapping[int, torch.Tensor] = MappingProxyType({}),
    ranks: Ranks | None = None,
) -> Workspace:
    """Bind a model to kernels with a workspace of their own, for steps of all sizes, and return the workspace."""
    limits, spec, gemm_device = plan.limits, model.spec, GemmDevice.of(plan.device)
    workspace = Workspace.make(
        spec, limits.max_num_batched_tokens, max_num_logits, model.dtype, device, gemm_device=gemm_device
    )
    if not isinstance(model, Transformer):
        model.logits_NV = workspace.logits_NV
        return workspace
    kernels = TritonKernels(
        workspace,
        rotary_tables(spec, limits.max_model_len, torch.float32, device),
        spec.rms_norm_eps,
        device=gemm_device,
        factors=spec.factors,
        batch_invariant=plan.attention.batch_invariant,
        ranks=ranks,
    )
    # An encoder may have more rows than a step, and has no cache: torch's operators allocate what it needs.
    of_encoder = None
    if spec.encoder is not None:
        of_encoder = TorchKernels(rotary_tables(spec, 1, model.dtype, device), spec.rms_norm_eps, norms=spec.norms)
    model.bind(kernels, taps, of_encoder)
    return workspace


def _drafts_read_last(plan: EnginePlan) -> bool:
    return plan.draft is not None and plan.model.num_layers in plan.draft.taps


def _draft_passes(
    plan: EnginePlan,
    draft: DraftModelParts,
    inputs: CudaInputs,
    runtime: GraphRuntime,
    states: torch.Tensor,
    taps: Sequence[int],
) -> DraftPasses:
    return DraftPasses(
        model=draft.model,
        backend=draft.backend,
        layers=draft.layers,
        kv_caches=draft.kv_caches,
        inputs=inputs,
        runtime=runtime,
        block_size=plan.kv.block_sizes[0],
        max_num_tokens=plan.limits.max_num_batched_tokens,
        max_model_len=plan.limits.max_model_len,
        states_TF=states if taps else None,
    )
