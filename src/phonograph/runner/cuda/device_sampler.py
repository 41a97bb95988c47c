"""Sampling kernels over the inputs of a step."""

from __future__ import annotations

import torch

from phonograph.kernels.triton.sampling.bitmask import mask_logits
from phonograph.kernels.triton.sampling.sample import sample
from phonograph.runner.cuda.cuda_inputs import CudaInputs


class DeviceSampler:
    """Samples rows of logits into the step's tokens and the state of the slots.

    logits_RV: static tensor in which steps leave their logits
    """

    def __init__(self, inputs: CudaInputs, logits_RV: torch.Tensor, *, batch_invariant: bool = False) -> None:
        self._inputs = inputs
        self._logits_RV = logits_RV
        self._batch_invariant = batch_invariant

    def sample(self, logits_NV: torch.Tensor) -> torch.Tensor:
        """Sample the step's rows of logits [N, V]; return the tokens int32 [N]."""
        num_logits = len(logits_NV)
        self._sample(logits_NV, self._inputs.sampling.sample_slots, num_logits)
        return self._inputs.tokens[:num_logits]

    def sample_masked(self, rows_G: torch.Tensor, bitmask_GW: torch.Tensor) -> None:
        """Mask rows of the last step's logits in place, and sample them.

        Args:
            rows_G: int32 row numbers; entries below 0 are padding.
            bitmask_GW: int32 words with one bit per token; 1 allows it.
        """
        mask_logits(self._logits_RV, rows_G, bitmask_GW)
        self._sample(self._logits_RV, self._inputs.sampling.slots, None, rows_G)

    def _sample(
        self, logits: torch.Tensor, slots: torch.Tensor, num_rows: int | None, rows_G: torch.Tensor | None = None
    ) -> None:
        inputs, parameters = self._inputs, self._inputs.sampling
        sample(
            logits,
            slots[:num_rows],
            parameters.temperature[:num_rows],
            parameters.top_k[:num_rows],
            parameters.top_p[:num_rows],
            parameters.min_p[:num_rows],
            parameters.draw_keys[:num_rows],
            inputs.sample_scratch,
            inputs.tokens[:num_rows],
            inputs.state.last_token,
            inputs.state.num_computed,
            inputs.seq_lens[:num_rows],
            rows_G=rows_G,
            batch_invariant=self._batch_invariant,
        )
