"""Second pass over a transcript, whose cross attention says when each token was spoken.

Radford et al., "Robust Speech Recognition via Large-Scale Weak Supervision" (2022), and transformers'
`WhisperForConditionalGeneration`: weights of the heads of `alignment_heads`, normalised over the tokens, smoothed by a
median over positions, and averaged. Kernels of steps give no weights, so that torch's operators run the decoder again.

Shapes: T tokens, P positions of the encoder, E hidden size, H heads, K heads of keys, D head size, A alignment heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch.nn import functional

from phonograph.models.heads.audio_encoder import AudioEncoderWeights
from phonograph.models.layers.part_weights import AttentionWeights, FeedForwardWeights

if TYPE_CHECKING:
    from phonograph.models.layers.kernel_set import Attend
    from phonograph.models.transformer import Transformer


def align_words(
    model: Transformer, features_MF: np.ndarray, token_ids: Sequence[int], first: int, num_positions: int
) -> np.ndarray:
    """Return how well tokens and positions fit, float32 [T - first, num_positions].

    Args:
        model: has an encoder with alignment heads.
        features_MF: log-mel frames of the recording.
        token_ids: tokens of the prompt and of the transcript.
        first: number of tokens of the prompt.
        num_positions: positions of the recording without its padding.
    """
    from phonograph.models.layers.kernel_set import Step

    kernels, encoder = model.of_encoder, model.encoder
    assert isinstance(encoder, AudioEncoderWeights) and model.input is not None
    with torch.inference_mode():
        states_PE = encoder(torch.from_numpy(features_MF)[None].to(model.device, model.dtype))
        attend = _KeptWeights(model, states_PE, encoder.spec.alignment_heads)
        ids_T = torch.tensor(token_ids, device=model.device)
        positions_T = torch.arange(len(ids_T), device=model.device)
        step = Step(kernels.rotary(positions_T), cast("Attend", attend))
        stream = kernels.input(model.embedding_VE, model.input)(ids_T, positions_T)
        for layer in model.weights:
            for attention in (layer.mixer, layer.cross):
                stream = kernels.attention(cast(AttentionWeights, attention))(stream, step)
            stream = kernels.feed_forward(cast(FeedForwardWeights, layer.feed_forward))(stream)
        weights_ATP = torch.stack(attend.kept)[:, first:, :num_positions]
        std, mean = torch.std_mean(weights_ATP, dim=1, keepdim=True, correction=0)
        return _smoothed((weights_ATP - mean) / std, encoder.spec.median_width).mean(0).cpu().numpy()


def _smoothed(x_ATP: torch.Tensor, width: int) -> torch.Tensor:
    """Return medians of `width` positions around each, with the ends mirrored."""
    half = width // 2
    if x_ATP.shape[-1] <= half:
        return x_ATP
    return functional.pad(x_ATP, (half, half), mode="reflect").unfold(-1, width, 1).sort()[0][..., half]


class _KeptWeights:
    """Attention to earlier tokens, and to the encoder's states, of which the weights of some heads are kept."""

    def __init__(self, model: Transformer, states_PE: torch.Tensor, heads: Sequence[tuple[int, int]]) -> None:
        self.kept: list[torch.Tensor] = []
        self._model, self._states_PE, self._heads = model, states_PE, heads

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor | None, v_TKD: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        weights = self._model.attention_weights(layer)
        is_cross = weights.memory is not None
        if weights.memory is not None:
            kv_PXD = weights.memory.product(self._states_PE).unflatten(-1, (-1, q_THD.shape[2]))
            k_TKD, v_TKD = kv_PXD.chunk(2, 1)
        assert k_TKD is not None and v_TKD is not None
        scores_HTS = torch.einsum("thd,shd->hts", q_THD * weights.spec.scale, k_TKD).float()
        if not is_cross:
            later_TS = torch.ones(scores_HTS.shape[1:], dtype=torch.bool, device=scores_HTS.device).triu(1)
            scores_HTS = scores_HTS.masked_fill(later_TS, -torch.inf)
        probs_HTS = scores_HTS.softmax(-1)
        self.kept += [
            probs_HTS[head] for at, head in self._heads if is_cross and at == layer % self._model.spec.num_layers
        ]
        return torch.einsum("hts,shd->thd", probs_HTS.to(v_TKD.dtype), v_TKD).contiguous()
