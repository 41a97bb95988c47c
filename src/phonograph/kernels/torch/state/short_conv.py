"""Short convolution of a step as one operator of torch, for CPUs and as the reference for others.

For each token the projection has an input gate b, an output gate c and an input x of each channel. The output is
c * convolution(b * x).

Shapes: T tokens, R sequences of the step, S slots, C channels, W taps, P = W - 1 inputs that a slot keeps.
"""

from __future__ import annotations

import torch

from phonograph.kernels.torch.state.causal_conv import causal_conv
from phonograph.kernels.torch.state.state_runs import state_runs

_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define(
    "short_conv(Tensor projected, Tensor taps, Tensor query_start_loc, Tensor seq_lens, Tensor slots, "
    "Tensor checkpoints, Tensor(a!) history, Tensor(b!) out) -> ()"
)


def short_conv(
    projected_TF: torch.Tensor,
    taps_CW: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    history_SPC: torch.Tensor,
    out_TC: torch.Tensor,
) -> None:
    """Mix the tokens of each sequence with its last inputs, and write the new ones into the slots.

    Args:
        projected_TF: input gates, output gates and inputs, [T, 3 * C].
        taps_CW: of the convolution, float32.
        query_start_loc: rows of the step, as in `state_runs`.
        seq_lens_R: see there.
        slots_R: see there.
        checkpoints_3R: see there.
        history_SPC: last products b * x, by slot, then by checkpoint.
        out_TC: receives the outputs; those of padding are 0.
    """
    gate_TC, out_gate_TC, x_TC = projected_TF.chunk(3, -1)
    inputs_TC = gate_TC * x_TC
    mixed_TC = torch.zeros(out_TC.shape, dtype=torch.float32, device=out_TC.device)
    for runs in state_runs(query_start_loc, seq_lens_R, slots_R, checkpoints_3R):
        history_NPC = runs.read(history_SPC)
        mixed_TC[runs.tokens_NT] = causal_conv(inputs_TC[runs.tokens_NT], history_NPC, taps_CW)
        runs.write(history_SPC, history_NPC)
    out_TC.copy_(mixed_TC * out_gate_TC.float())


for _device in ("CPU", "CUDA"):
    _library.impl("short_conv", short_conv, _device)
OPERATOR = torch.ops.phonograph.short_conv.default
"""`short_conv` as an operator."""
# The tape's replay, which is on a CPU, calls the function without torch's dispatch.
OPERATOR.python_function = short_conv  # pyright: ignore[reportAttributeAccessIssue]
