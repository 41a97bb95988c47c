"""Keys and values of an encoder's states, written to the pages of the requests that start, before their first step."""

from __future__ import annotations

import numpy as np
import torch

from phonograph.core.batch import ScheduledBatch
from phonograph.models.modules.step_model import StepModel
from phonograph.models.transformer import Transformer
from phonograph.runner.step_attention import StepAttention
from phonograph.sampling.failures import SlotFailures


class EncoderKeys:
    """Runs the encoder for each request that starts, eagerly, and fills the blocks of its cross attention.

    A request that lost its blocks starts again, so that its encoder runs again too.

    Args:
        model: has the encoder.
        attention: KV caches and groups of the layers.
    """

    def __init__(self, model: Transformer, attention: StepAttention) -> None:
        self._model, self._attention = model, attention
        # All layers of cross attention are equal, so that they have one group.
        self._group = attention.group(model.spec.num_layers)

    @classmethod
    def of(cls, model: StepModel, attention: StepAttention) -> EncoderKeys | None:
        """Return the writer of a model's encoder; None without one."""
        return cls(model, attention) if isinstance(model, Transformer) and model.encoder is not None else None

    def write(self, batch: ScheduledBatch, failures: SlotFailures) -> None:
        """Write the keys of the requests that start with a step.

        Args:
            batch: the step, with the blocks of these requests.
            failures: receives slots whose audio cannot be encoded.
        """
        if not batch.new:
            return
        blocks = {append.slot: append.block_ids for append in batch.appends if append.group == self._group}
        for new in batch.new:
            failures.run(new.slot, "encoder", self._write, new.features, blocks[new.slot])

    def _write(self, features_MF: np.ndarray | None, block_ids: list[int]) -> None:
        assert features_MF is not None, "the session admits no prompt without audio"
        features_1MF = torch.from_numpy(features_MF)[None].to(self._model.device, self._model.dtype)
        encoder, blocks = self._model.encoder, np.array(block_ids)
        assert encoder is not None
        states_PE = encoder(features_1MF, self._model.kernels)
        for layer in self._model.weights:
            assert layer.cross is not None and layer.cross.memory is not None
            kv_PXD = layer.cross.memory.product(states_PE).unflatten(-1, (-1, layer.cross.spec.head_size))
            kv_cache = self._attention.kv_target(layer.cross.layer, 0).kv_cache
            page, offset = np.divmod(np.arange(len(kv_PXD)), kv_cache.shape[2])
            for part, rows_PKD in zip(kv_cache, kv_PXD.chunk(2, 1), strict=True):
                part[blocks[page], offset] = rows_PKD
