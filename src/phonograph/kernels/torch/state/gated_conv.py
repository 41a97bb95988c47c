"""Gated short convolution of a step: the last inputs of each sequence are its whole state.

It is an operator with outputs, as `gated_delta` is. Shapes: T tokens, R sequences of the step, S slots, C channels, W
taps, P = W - 1 inputs that a slot keeps.
"""

from __future__ import annotations

import torch

from phonograph.kernels.torch.state.causal_conv import causal_conv
from phonograph.kernels.torch.state.state_runs import state_runs

_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define(
    "short_conv(Tensor projected, Tensor taps, Tensor? bias, Tensor query_start_loc, Tensor seq_lens, Tensor slots, "
    "Tensor checkpoints, Tensor(a!) history, Tensor(b!) out) -> ()"
)


def short_conv(
    projected_TF: torch.Tensor,
    taps_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    history_SPC: torch.Tensor,
    out_TC: torch.Tensor,
) -> None:
    """Write output gate * convolution(input gate * x) of all tokens, and the last inputs of each sequence.

    Args:
        projected_TF: input gates, output gates and x of each token, [T, 3 * C].
        taps_CW: float32.
        bias_C: float32; None for none.
        query_start_loc: as in `state_runs`, and the next three too.
        seq_lens_R: see there.
        slots_R: see there.
        checkpoints_3R: see there.
        history_SPC: last inputs of the convolution, by slot, then by checkpoint.
        out_TC: outputs; those of padding are 0.
    """
    input_gate_TC, output_gate_TC, x_TC = projected_TF.chunk(3, -1)
    inputs_TC = input_gate_TC * x_TC
    mixed_TC = torch.zeros(out_TC.shape, dtype=torch.float32, device=out_TC.device)
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    for tokens_NT, (history_NPC,) in state_runs(*rows, (history_SPC,)):
        mixed_TC[tokens_NT] = causal_conv(inputs_TC[tokens_NT], history_NPC, taps_CW, bias_C, silu=False)
    out_TC.copy_(mixed_TC * output_gate_TC.float())


for _device in ("CPU", "CUDA"):
    _library.impl("short_conv", short_conv, _device)
OPERATOR = torch.ops.phonograph.short_conv.default
"""`short_conv` as an operator."""
# The tape's replay, which is on a CPU, calls the function without torch's dispatch.
OPERATOR.python_function = short_conv  # pyright: ignore[reportAttributeAccessIssue]
