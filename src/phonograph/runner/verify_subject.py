"""Lets `graphs.verify` drive a model runner: random paged batches over a cache full of random keys and values."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata, MetadataBuilder
from phonograph.graphs.buffers import StaticBuffers
from phonograph.graphs.modes import GraphKey
from phonograph.runner.model_runner import ModelRunner
from phonograph.runner.program import StepProgram
from phonograph.runner.synthetic import SyntheticBatches


# Blocks filled at a time: a cache may take nearly all memory there is.
_BLOCKS_AT_ONCE = 4096


class RunnerSubject:
    """Compares hidden states, logits, and the keys and values written, of a replay with an eager run.

    It overwrites the whole KV cache, so no request may be in flight.
    """

    def __init__(
        self,
        *,
        runner: ModelRunner,
        program: StepProgram,
        builder: MetadataBuilder,
        buffers: StaticBuffers,
        synthetic: SyntheticBatches,
        kv_caches: list[torch.Tensor],
    ) -> None:
        self._runner = runner
        self._program = program
        self._builder = builder
        self._buffers = buffers
        self._synthetic = synthetic
        self._kv_caches = kv_caches
        self._common: CommonMetadata | None = None
        generator = torch.Generator(kv_caches[0].device).manual_seed(0)
        for cache in kv_caches:
            for blocks in cache.split(_BLOCKS_AT_ONCE, dim=1):
                blocks.copy_(torch.randn(blocks.shape, dtype=torch.float32, device=cache.device, generator=generator))

    def graph_keys(self) -> tuple[GraphKey, ...]:
        return self._runner.dispatcher.captures.largest_first()

    def prepare(self, key: GraphKey, rng: np.random.Generator) -> str:
        common = self._synthetic.random_batch(key, rng)
        self._common = common
        return (
            f"{common.num_tokens} tokens, {common.num_decodes} decodes + {common.num_reqs - common.num_decodes} "
            f"prefills, longest sequence {common.max_seq_len}"
        )

    def replay(self, key: GraphKey) -> dict[str, torch.Tensor]:
        common = self._batch()
        self._poison_written(common)
        self._runner.runtime.poison()
        self._program.metadata = self._builder.build(common, key=key)
        self._buffers.prepared(key)
        with torch.inference_mode():
            return self._results(common, *self._runner.replay(key))

    def eager(self, key: GraphKey) -> dict[str, torch.Tensor]:
        common = self._batch()
        self._poison_written(common)
        self._program.metadata = self._builder.build(common, key=None)
        with torch.inference_mode():
            return self._results(common, *self._runner.run_shape(key))

    def _batch(self) -> CommonMetadata:
        assert self._common is not None, "prepare() comes first"
        return self._common

    def _written(self, common: CommonMetadata) -> tuple[torch.Tensor, torch.Tensor]:
        slots = common.slot_mapping[: common.num_tokens]
        size = self._kv_caches[0].shape[2]
        return slots // size, slots % size

    def _poison_written(self, common: CommonMetadata) -> None:
        blocks, offsets = self._written(common)
        for cache in self._kv_caches:
            cache[:, blocks, offsets] = float("nan")

    def _results(self, common: CommonMetadata, hidden: torch.Tensor, logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """Padded rows are compared too: they must be finite, or they could poison a real row some day."""
        blocks, offsets = self._written(common)
        written = torch.stack([cache[:, blocks, offsets].float() for cache in self._kv_caches])
        return {"hidden": hidden.clone(), "logits": logits.clone(), "kv": written}
