"""Joins the parts of an engine into a runner, on the CPU: the tape, static buffers in host memory, torch's sampler."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from phonograph.attention.backend import AnyBackend, AttentionLayer
from phonograph.attention.cascade.shared_prefix import SharedPrefixes
from phonograph.engine.plan import EnginePlan
from phonograph.graphs.buffers import StaticBuffers
from phonograph.graphs.tape.tape import TapeRuntime
from phonograph.models.layers.rotary import rotary_table
from phonograph.models.layers.torch_kernels import TorchKernels
from phonograph.models.transformer import Transformer
from phonograph.runner.cpu_inputs import SlotTable, blocks_for
from phonograph.runner.model_runner import ModelRunner
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_program import StepProgram
from phonograph.runner.synthetic_batches import SyntheticBatches, load_buffers
from phonograph.sampling.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What every device needs: weights, attention, and the KV cache of each layer."""

    model: Transformer
    backend: AnyBackend
    layers: list[AttentionLayer]
    kv_caches: list[torch.Tensor]


def make_cpu_runner(plan: EnginePlan, parts: Parts) -> ModelRunner:
    """A runner over the plan's limits; its graphs are still to be captured."""
    limits = plan.limits
    runtime = TapeRuntime()
    buffers = StaticBuffers(
        max_num_tokens=limits.max_num_batched_tokens,
        max_num_seqs=limits.max_num_seqs,
        max_blocks_per_seq=blocks_for(limits.max_model_len, limits.block_size),
    )
    model = parts.model
    rotary_PD = rotary_table(model.spec, limits.max_model_len, model.dtype, model.device)
    model.bind(TorchKernels(rotary_PD, model.spec.rms_norm_eps))
    attention = StepAttention(parts.backend, parts.layers, parts.kv_caches, buffers.slot_mapping, runtime)
    return ModelRunner(
        program=StepProgram(model=model, attention=attention, inputs=buffers),
        builder=parts.backend.make_builder(),
        buffers=buffers,
        slots=SlotTable(
            max_num_seqs=limits.max_num_seqs, max_model_len=limits.max_model_len, block_size=limits.block_size
        ),
        sampler=make_sampler(plan, torch.device("cpu")),
        dispatcher=plan.make_dispatcher(),
        runtime=runtime,
        synthetic=SyntheticBatches(
            functools.partial(load_buffers, buffers, block_size=limits.block_size),
            max_model_len=limits.max_model_len,
            block_size=limits.block_size,
            num_blocks=plan.memory.num_blocks,
            vocab_size=plan.model.vocab_size,
        ),
        prefixes=make_prefixes(plan),
        num_threads=None if plan.threads is None else plan.threads.count,
    )


def make_prefixes(plan: EnginePlan) -> SharedPrefixes | None:
    limits = plan.limits
    if not plan.attention.cascade:
        return None
    return SharedPrefixes(
        max_num_seqs=limits.max_num_seqs,
        max_blocks_per_seq=blocks_for(limits.max_model_len, limits.block_size),
        block_size=limits.block_size,
    )


def make_sampler(plan: EnginePlan, device: torch.device) -> Sampler:
    return Sampler(
        max_num_seqs=plan.limits.max_num_seqs,
        vocab_size=plan.model.vocab_size,
        device=device,
        seed=plan.config.seed,
        batch_invariant=plan.attention.batch_invariant,
    )
