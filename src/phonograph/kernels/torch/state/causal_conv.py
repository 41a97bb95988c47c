"""Causal convolution of each channel, with the last inputs of a sequence as its state.

Shapes: N sequences, T tokens of each, C channels, W taps, P = W - 1 inputs before the first token.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_conv(x_NTC: torch.Tensor, history_NPC: torch.Tensor, taps_CW: torch.Tensor) -> torch.Tensor:
    """Return the sum of taps w times inputs t - P + w of each channel, float32 [N, T, C].

    Args:
        x_NTC: inputs.
        history_NPC: inputs before the first token; zeros at the beginning of a sequence. Overwritten with the last P
            inputs.
        taps_CW: float32; the last tap is that of the token itself.
    """
    inputs_NXC = torch.cat([history_NPC.float(), x_NTC.float()], 1)
    history_NPC.copy_(inputs_NXC[:, -history_NPC.shape[1] :])
    mixed_NCT = functional.conv1d(inputs_NXC.transpose(1, 2), taps_CW.unsqueeze(1), groups=len(taps_CW))
    return mixed_NCT.transpose(1, 2)
