"""The computation of one step, written once: the same function is captured into every graph and run eagerly.

It reads its inputs from the static buffers only. What may differ between calls is the shape (how many padded tokens and
rows of logits) and whether the capture is broken at the attention calls; the attention metadata is set beforehand.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from phonograph.attention.backend import AttentionBackend, AttentionLayer
from phonograph.attention.metadata import AttentionMetadata
from phonograph.graphs.buffers import StaticBuffers
from phonograph.graphs.runtime import GraphRuntime
from phonograph.models.decoder import Decoder


class StepProgram:
    """Embedding, decoder layers with paged attention, logits of the rows that need them.

    `metadata` None means no attention at all: outputs of zeros, as in a dry run that only measures memory.
    """

    def __init__(
        self,
        *,
        model: Decoder,
        backend: AttentionBackend,
        layers: list[AttentionLayer],
        kv_caches: list[torch.Tensor],
        buffers: StaticBuffers,
        runtime: GraphRuntime,
    ) -> None:
        self.model = model
        self.metadata: AttentionMetadata | None = None
        self._backend = backend
        self._layers = layers
        self._kv_caches = kv_caches
        self._buffers = buffers
        self._runtime = runtime

    def run(
        self, *, num_tokens: int, num_logits: int, every_row: bool, pieces: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the step on the static buffers.

        Args:
            num_tokens: padded tokens T.
            num_logits: rows of logits N.
            every_row: the N = T rows of logits are those of the tokens themselves (uniform decode).
            pieces: break the capture at each attention call.

        Returns:
            hidden [T, hidden size] before the final norm, logits [N, V].
        """
        buffers = self._buffers
        attend = self._attend_between_pieces if pieces else self._attend
        if self.metadata is not None:
            self._backend.schedule(self.metadata)
        attention = functools.partial(self._attention, attend)
        hidden = self.model.forward(buffers.input_ids[:num_tokens], buffers.positions[:num_tokens], attention)
        rows = hidden if every_row else hidden.index_select(0, buffers.logits_rows[:num_logits])
        return hidden, self.model.logits(rows)

    def _attention(
        self,
        attend: Callable[[int, torch.Tensor, torch.Tensor], None],
        index: int,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKD: torch.Tensor,
    ) -> torch.Tensor:
        out_THD = torch.empty(query_THD.shape, dtype=query_THD.dtype, device=query_THD.device)
        metadata = self.metadata
        if metadata is None:
            return out_THD.zero_()
        self._backend.write_kv(self._layers[index], key_TKD, value_TKD, self._kv_caches[index], metadata)
        attend(index, query_THD, out_THD)
        return out_THD

    def _attend(self, index: int, query_THD: torch.Tensor, out_THD: torch.Tensor) -> None:
        # Read at call time: between pieces this runs again at each replay, with that step's metadata.
        metadata = self.metadata
        assert metadata is not None
        self._backend.forward(self._layers[index], query_THD, self._kv_caches[index], metadata, out_THD)

    def _attend_between_pieces(self, index: int, query_THD: torch.Tensor, out_THD: torch.Tensor) -> None:
        self._runtime.eager_call(functools.partial(self._attend, index), query_THD, out_THD)
