"""Contract between a step and its model: our decoder, or a module of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from phonograph.models.layers.kernel_set import Attend, StepStates
from phonograph.models.weights.kv_scales import KVScales

if TYPE_CHECKING:
    from phonograph.models.spec import ModelSpec


class StepModel(ABC):
    """A model with its weights, as a step runs it. Its control flow depends on no tensor's contents.

    Attributes:
        spec: the model.
        dtype: type of weights and activations.
        device: device of the weights.
        kv_scales: scales of an FP8 KV cache.
        expert_load: int64 [X], by the index of a layer: pairs of a token and an expert that were computed since the
            start. Empty if they are not counted.
        logits_NV: memory of the logits in which a GPU's sampling reads them, of a model without kernels of ours.
    """

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    kv_scales: KVScales
    expert_load: dict[int, torch.Tensor]
    logits_NV: torch.Tensor | None = None

    @abstractmethod
    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        rows_P: torch.Tensor | None = None,
        num_rows: torch.Tensor | None = None,
        num_kept: torch.Tensor | None = None,
        features_TE: torch.Tensor | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Run all layers and return their output, [T, E] or the kept rows [P, E]. Call it in inference mode.

        Args:
            input_ids_T: token ids.
            positions_T: int64, the position of each token in its sequence.
            attend: attention of this step.
            rows_P: the only rows that the caller reads, int64, for steps for which `leaves_rows_out` is True.
            num_rows: int32 [1], number of tokens that are not padding; None for all.
            num_kept: the same for `rows_P`.
            features_TE: features of the target, of a draft head.
            states: states of the sequences, of a model with state layers.
        """

    @abstractmethod
    def logits(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [N, V] in the model's dtype, of the rows `rows_N` of `forward`'s result, or of all rows."""

    @abstractmethod
    def prompt_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of any number of rows, with torch's operators, which allocate them."""

    @abstractmethod
    def pooled(self, hidden_TE: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        """Return the pooler's rows, float32 [R, F] of `forward`'s result, or [T, F] of all tokens.

        Args:
            hidden_TE: `forward`'s result.
            query_start_loc: int32 [R+1].
        """

    @abstractmethod
    def token_rows(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """Return the normed rows of all tokens of `forward`'s result, float32 [T, E]."""

    @abstractmethod
    def leaves_rows_out(self, num_tokens: int, num_kept: int) -> bool:
        """Return True if the last layer of a prefill of `num_tokens` computes only the `num_kept` rows with logits."""

    @abstractmethod
    def only_layers(self, indices: Sequence[int]) -> AbstractContextManager[None]:
        """Return a context in which `forward` may run these layers only, to compile its kernels."""

    @abstractmethod
    def sinks(self, layer: int) -> torch.Tensor | None:
        """Return the sinks of a layer's heads, float32 [H], or None."""
