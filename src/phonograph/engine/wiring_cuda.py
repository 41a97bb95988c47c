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
from phonograph.models.fused import FusedDecoder
from phonograph.runner.cuda_inputs import DeviceInputs
from phonograph.runner.cuda_program import CudaStepProgram
from phonograph.runner.cuda_runner import CudaRunner
from phonograph.runner.masked_sampling import MaskedSampling
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
    limits = plan.limits
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode():
        model = FusedDecoder(
            parts.model,
            max_num_tokens=limits.max_num_batched_tokens,
            max_num_logits=limits.max_num_seqs,
            max_positions=limits.max_model_len,
            batch_invariant=plan.attention.batch_invariant,
        )
        inputs = DeviceInputs(
            max_num_seqs=limits.max_num_seqs,
            max_num_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            vocab_size=plan.model.vocab_size,
            device=device,
        )
    runtime = CudaRuntime(device, model.workspace.tensors())
    program = CudaStepProgram(
        model=model,
        backend=parts.backend,
        layers=parts.layers,
        kv_caches=parts.kv_caches,
        inputs=inputs,
        runtime=runtime,
        batch_invariant=plan.attention.batch_invariant,
    )
    sampler = make_sampler(plan, device)
    return CudaRunner(
        program=program,
        builder=parts.backend.make_builder(),
        inputs=inputs,
        sampler=sampler,
        masked=MaskedSampling(
            program.sample_masked,
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
