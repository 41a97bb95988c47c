"""Sampling kernels over the inputs of a step."""

from __future__ import annotations

import torch

from phonograph.config.speculative_config import SpeculativeConfig
from phonograph.kernels.torch.sampling import prefer_timestamps
from phonograph.kernels.triton.sampling.bitmask import mask_logits
from phonograph.kernels.triton.sampling.sample import sample
from phonograph.runner.cuda.cuda_inputs import CudaInputs


class DeviceSampler:
    """Samples rows of logits into the step's tokens and the state of the slots, and makes drafts for the next step.

    Args:
        inputs: of the step.
        logits_LV: static tensor in which steps leave their logits.
        speculation: kind of drafts; None for none.
        batch_invariant: see `sampling.sample`.
        first_timestamp: of a model of speech, see `prefer_timestamps`.
    """

    def __init__(
        self,
        inputs: CudaInputs,
        logits_LV: torch.Tensor,
        *,
        speculation: SpeculativeConfig | None = None,
        batch_invariant: bool = False,
        first_timestamp: int | None = None,
    ) -> None:
        self._first_timestamp = first_timestamp
        self._inputs = inputs
        self._logits_LV = logits_LV
        self._speculation = speculation
        self._batch_invariant = batch_invariant
        rates = () if speculation is None else speculation.synthetic_rates
        self._synthetic_K = torch.tensor(rates, dtype=torch.float32, device=logits_LV.device) if rates else None

    def sample(self, logits_NV: torch.Tensor, num_reqs: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample the step's rows of logits [N, V], and accept and make drafts.

        Args:
            logits_NV: rows of logits, padding included.
            num_reqs: requests, padding included.

        Returns:
            The tokens int32 [N], and the counts of `accept` int32 [num_reqs], which are empty without drafts.
        """
        inputs, num_logits = self._inputs, len(logits_NV)
        self._sample(logits_NV, inputs.sampling.sample_slots, num_logits)
        tokens = inputs.tokens[:num_logits]
        self._draft(tokens, num_reqs)
        return tokens, inputs.counts[:num_reqs]

    def sample_masked(self, rows_G: torch.Tensor, bitmask_GW: torch.Tensor, requests_G: torch.Tensor) -> None:
        """Mask rows of the last step's logits in place, sample them, and accept and make drafts.

        Args:
            rows_G: int32 numbers of rows of logits; entries below 0 are padding.
            bitmask_GW: int32 words with one bit per token; 1 allows it.
            requests_G: int32 numbers of the requests that have these rows; entries below 0 are padding.
        """
        mask_logits(self._logits_LV, rows_G, bitmask_GW)
        if self._first_timestamp is not None:
            prefer_timestamps(self._logits_LV, rows_G, bitmask_GW, self._first_timestamp)
        self._sample(self._logits_LV, self._inputs.sampling.row_slots, None, rows_G)
        self._draft(self._inputs.tokens, len(requests_G), requests_G)

    def _draft(self, tokens: torch.Tensor, num_reqs: int, requests_G: torch.Tensor | None = None) -> None:
        inputs, speculation = self._inputs, self._speculation
        if inputs.counts.shape[0]:
            # All rows of a sequence wrote its state; this writes what is accepted.
            inputs.accept(tokens, num_reqs=num_reqs, synthetic_K=self._synthetic_K, listed_G=requests_G)
        if speculation is not None and speculation.model is None and not speculation.on_host:
            inputs.propose_ngrams(
                tokens,
                num_reqs=num_reqs,
                shortest=speculation.prompt_lookup_min,
                longest=speculation.prompt_lookup_max,
                listed_G=requests_G,
            )

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
            parameters.lengths[:num_rows],
            rows_G=rows_G,
            edits=inputs.logit_edits(),
            most_drafts=inputs.drafts.shape[1],
            batch_invariant=self._batch_invariant,
        )
