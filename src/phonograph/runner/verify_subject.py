"""Subject of `graphs.verify`: a runner with random paged batches over a cache of random keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.graphs.modes import GraphKey
from phonograph.graphs.verification import Drawn
from phonograph.runner.runner import Runner
from phonograph.runner.step_program import StepOutputs

# Blocks filled at a time: the cache may leave little free memory.
_BLOCKS_AT_ONCE = 4096


class RunnerSubject:
    """Collects hidden states, logits, sampled tokens and written keys and values of replays and eager runs.

    It overwrites the whole KV cache, so no request may be in flight.
    """

    def __init__(self, runner: Runner, kv_caches: list[torch.Tensor]) -> None:
        self._runner = runner
        self._kv_caches = kv_caches
        self._common: CommonMetadata | None = None
        with runner.runtime.scope():
            generator = torch.Generator(kv_caches[0].device).manual_seed(0)
            for cache in kv_caches:
                for blocks in cache.split(_BLOCKS_AT_ONCE, dim=1):
                    random = torch.randn(blocks.shape, dtype=torch.float32, device=cache.device, generator=generator)
                    blocks.copy_(random)

    def graph_keys(self) -> tuple[GraphKey, ...]:
        return self._runner.dispatcher.captures.largest_first()

    def prepare(self, key: GraphKey, rng: np.random.Generator) -> Drawn:
        with torch.inference_mode(), self._runner.runtime.scope():
            common = self._runner.synthetic.random_batch(key, rng)
        self._common = common
        return Drawn(
            num_tokens=common.num_tokens,
            num_decodes=common.num_decodes,
            num_prefills=common.num_reqs - common.num_decodes,
            longest=common.max_seq_len,
            median=int(np.median(common.seq_lens_cpu[: common.num_reqs])),
            prefix=0 if common.prefix is None else common.prefix.num_tokens,
        )

    def replay(self, key: GraphKey) -> dict[str, torch.Tensor]:
        return self._results(key, self._runner.replay, poisons=True)

    def eager(self, key: GraphKey) -> dict[str, torch.Tensor]:
        return self._results(key, self._runner.run_shape, poisons=False)

    def _results(
        self, key: GraphKey, run: Callable[[GraphKey], StepOutputs], *, poisons: bool
    ) -> dict[str, torch.Tensor]:
        """Run the prepared batch and return all outputs, padded rows included: these must be finite too."""
        runner, common = self._runner, self._common
        assert common is not None, "prepare() comes first"
        with torch.inference_mode(), runner.runtime.scope():
            slots = common.slot_mapping[: common.num_tokens]
            size = self._kv_caches[0].shape[2]
            blocks, offsets = slots // size, slots % size
            for cache in self._kv_caches:
                cache[:, blocks, offsets] = float("nan")
            if poisons:
                runner.runtime.poison()
            runner.prepare(common, key)
            outputs = run(key)
            written = torch.stack([cache[:, blocks, offsets].float() for cache in self._kv_caches])
            results = {**{name: tensor.clone() for name, tensor in outputs._asdict().items()}, "kv": written}
            # The caller compares them on another stream.
            runner.runtime.synchronize()
            return results
