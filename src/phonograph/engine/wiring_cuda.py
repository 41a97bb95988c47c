"""Joins the parts of an engine into a runner, on a GPU: CUDA graphs, one static workspace, state on the device."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from phonograph.engine.plan import EnginePlan
from phonograph.engine.wiring import Parts, make_prefixes, make_sampler
from phonograph.graphs.cuda import CudaRuntime
from phonograph.kernels.triton.launch import compile_helper
from phonograph.kernels.triton.launch.precompile import begin_hashing
from phonograph.models.layers.rotary import rotary_table
from phonograph.models.layers.triton_kernels import TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.runner.cuda_inputs import DeviceInputs
from phonograph.runner.cuda_runner import CudaRunner
from phonograph.runner.device_sampler import DeviceSampler
from phonograph.runner.masked_sampling import MaskedSampling
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_program import StepProgram
from phonograph.runner.synthetic_batches import SyntheticBatches


@contextmanager
def compiling() -> Generator[None]:
    """Around a start: begins what compiling kernels needs and weights do not; leaves no process behind."""
    begin_hashing()
    compile_helper.start_early()
    try:
        yield
    finally:
        compile_helper.end_helper(compiled_all=False)


def make_cuda_runner(plan: EnginePlan, parts: Parts) -> CudaRunner:
    """A runner over the plan's limits; its graphs are still to be captured."""
    limits, spec, batch_invariant = plan.limits, parts.model.spec, plan.attention.batch_invariant
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        workspace = Workspace.make(spec, limits.max_num_batched_tokens, limits.max_num_seqs, parts.model.dtype, device)
        rotary_PD = rotary_table(spec, limits.max_model_len, torch.float32, device)
        parts.model.bind(TritonKernels(workspace, rotary_PD, spec.rms_norm_eps, batch_invariant=batch_invariant))
        inputs = DeviceInputs(
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            vocab_size=plan.model.vocab_size,
            device=device,
        )
    runtime = CudaRuntime(device, workspace.tensors())
    device_sampler = DeviceSampler(inputs, workspace.logits_NV, batch_invariant=batch_invariant)
    program = StepProgram(
        model=parts.model,
        attention=StepAttention(parts.backend, parts.layers, parts.kv_caches, inputs.slot_mapping, runtime),
        inputs=inputs,
        sampler=device_sampler,
        batch_invariant=batch_invariant,
    )
    sampler = make_sampler(plan, device)
    return CudaRunner(
        program=program,
        builder=parts.backend.make_builder(),
        inputs=inputs,
        sampler=sampler,
        masked=MaskedSampling(
            device_sampler.sample_masked,
            masks=sampler.grammars,
            max_rows=limits.max_num_seqs,
            vocab_size=plan.model.vocab_size,
            device=device,
        ),
        dispatcher=plan.make_dispatcher(),
        runtime=runtime,
        synthetic=SyntheticBatches(
            inputs.load,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            num_blocks=plan.memory.num_blocks,
            vocab_size=plan.model.vocab_size,
        ),
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_batched_tokens,
        prefixes=make_prefixes(plan),
    )
