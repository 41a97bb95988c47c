"""Mamba 2 of a step (Dao and Gu 2024, arXiv:2405.21060): a convolution, and a state that tokens decay and add to.

For each token with input x [V], key b [K], query c [K], time t > 0 and decay a < 0, the state S [V, K] of a head
becomes

    S = exp(a t) S + t x b^T,  and the output is S c + d x.

`scan` computes that with products of matrices over chunks of 64 tokens. It is an operator with outputs, as
`gated_delta` is.

Shapes: N sequences of T tokens each, or T tokens of a step; R sequences of the step, S slots, G groups of heads that
share keys and queries, H heads, V size of a head's input, K size of a key, C channels of the convolution, W its taps,
P = W - 1 inputs that a slot keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from phonograph.kernels.torch.state.causal_conv import causal_conv
from phonograph.kernels.torch.state.state_runs import state_runs

MOST_GPU_KEYS = 256
"""Largest K on a GPU, whose kernels hold rows of the state in registers."""
_CHUNK = 64
SEGMENT = 512
"""Tokens of a segment of a long sequence on a GPU; see `kernels/triton/state/mamba_segments.py`."""


class MambaSizes(NamedTuple):
    """Sizes of a Mamba 2 mixer.

    Attributes:
        heads: H.
        head_size: V.
        groups: G, a divisor of H.
        key_size: K, the size of the state of a number.
        norm_groups: parts of an output that are normed on their own; 0 for no norm.
        gates_last: 1 if outputs are multiplied by their gates after the norm, and not before it.
    """

    heads: int
    head_size: int
    groups: int
    key_size: int
    norm_groups: int = 1
    gates_last: int = 0

    @property
    def inner(self) -> int:
        """Numbers of a token's inputs, gates and outputs."""
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """C: inputs, keys and queries of a token."""
        return self.inner + 2 * self.groups * self.key_size

    @property
    def scratch_widths(self) -> tuple[int, int]:
        """Numbers of a token in scratch: for float32 states after segments, with their decays, and channels."""
        return 2 * -(-self.heads * (self.head_size * self.key_size + 1) // SEGMENT), self.channels


def scan(
    x_NTHV: torch.Tensor,
    keys_NTHK: torch.Tensor,
    queries_NTHK: torch.Tensor,
    time_NTH: torch.Tensor,
    decay_H: torch.Tensor,
    state_NHVK: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs [N, T, H, V] without d x. The state is overwritten. All tensors are float32.

    Args:
        x_NTHV: inputs.
        keys_NTHK: keys.
        queries_NTHK: queries.
        time_NTH: times.
        decay_H: a.
        state_NHVK: state before the first token.
    """
    outputs: list[torch.Tensor] = []
    chunks = (part.transpose(1, 2).split(_CHUNK, 2) for part in (x_NTHV, keys_NTHK, queries_NTHK))
    times = time_NTH.transpose(1, 2).split(_CHUNK, 2)
    for x_NHCV, keys_NHCK, queries_NHCK, time_NHC in zip(*chunks, times, strict=True):
        total_NHC = (decay_H.unsqueeze(1) * time_NHC).cumsum(-1)
        between_NHCC = total_NHC.unsqueeze(-1) - total_NHC.unsqueeze(-2)
        is_later_CC = torch.ones(between_NHCC.shape[-2:], dtype=torch.bool).tril()
        factors_NHCC = between_NHCC.masked_fill(~is_later_CC, -torch.inf).exp()
        scaled_NHCV = x_NHCV * time_NHC.unsqueeze(-1)
        within_NHCV = (queries_NHCK @ keys_NHCK.transpose(-1, -2) * factors_NHCC) @ scaled_NHCV
        before_NHCV = queries_NHCK @ state_NHVK.transpose(-1, -2) * total_NHC.exp().unsqueeze(-1)
        outputs.append(within_NHCV + before_NHCV)
        until_NHC1 = (total_NHC[..., -1:] - total_NHC).exp().unsqueeze(-1)
        added_NHVK = (scaled_NHCV * until_NHC1).transpose(-1, -2) @ keys_NHCK
        state_NHVK.mul_(total_NHC[..., -1, None, None].exp()).add_(added_NHVK)
    return torch.cat(outputs, 2).transpose(1, 2)


_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define(
    "mamba2(Tensor projected, Tensor taps, Tensor? bias, Tensor decay, Tensor skip, Tensor time_bias, Tensor? norm, "
    "Tensor query_start_loc, Tensor seq_lens, Tensor slots, Tensor checkpoints, "
    "Tensor(a!) history, Tensor(b!) state, Tensor(c!) out, int[] sizes, Tensor eps) -> ()"
)


def mamba2(
    projected_TF: torch.Tensor,
    taps_CW: torch.Tensor,
    bias_C: torch.Tensor | None,
    decay_H: torch.Tensor,
    skip_H: torch.Tensor,
    time_bias_H: torch.Tensor,
    norm_X: torch.Tensor | None,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    history_SPC: torch.Tensor,
    state_SHVK: torch.Tensor,
    out_TX: torch.Tensor,
    sizes: list[int],
    eps: torch.Tensor,
) -> None:
    """Mix the tokens of each sequence with its state, and write the new states into the slots.

    Args:
        projected_TF: output gates, inputs of the convolution and times of each token.
        taps_CW: of the convolution, float32.
        bias_C: of the convolution, float32; None for none.
        decay_H: logarithm of -a, float32.
        skip_H: d, float32.
        time_bias_H: bias of the times, float32.
        norm_X: weights of the norm of the output, float32; None for none.
        query_start_loc: as in `state_runs`, and the next three too.
        seq_lens_R: see there.
        slots_R: see there.
        checkpoints_3R: see there.
        history_SPC: last inputs of the convolution, by slot, then by checkpoint.
        state_SHVK: float32.
        out_TX: receives the gated and normed outputs [T, H * V]; outputs of padding are 0.
        sizes: `MambaSizes` as a list.
        eps: epsilon of the norm.
    """
    net = MambaSizes(*sizes)
    gates_TX, x_TC, time_TH = projected_TF.split([net.inner, net.channels, net.heads], -1)
    time_TH = functional.softplus(time_TH.float() + time_bias_H)
    mixed_TX = torch.zeros(out_TX.shape, dtype=torch.float32, device=out_TX.device)
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    keys, rate_H = net.groups * net.key_size, -decay_H.exp()
    for tokens_NT, (history_NPC, state_NHVK) in state_runs(*rows, (history_SPC, state_SHVK)):
        conv_NTC = causal_conv(x_TC[tokens_NT], history_NPC, taps_CW, bias_C)
        x_NTX, keys_NTX, queries_NTX = conv_NTC.split([net.inner, keys, keys], -1)
        keys_NTHK, queries_NTHK = (
            part.unflatten(-1, (net.groups, -1)).repeat_interleave(net.heads // net.groups, 2)
            for part in (keys_NTX, queries_NTX)
        )
        x_NTHV = x_NTX.unflatten(-1, (net.heads, -1))
        out_NTHV = scan(x_NTHV, keys_NTHK, queries_NTHK, time_TH[tokens_NT], rate_H, state_NHVK)
        mixed_TX[tokens_NT] = (out_NTHV + x_NTHV * skip_H.unsqueeze(-1)).flatten(2)
    gates_TX = functional.silu(gates_TX.float())
    if not net.gates_last:
        mixed_TX *= gates_TX
    if norm_X is not None:
        mixed_TGX = mixed_TX.unflatten(-1, (net.norm_groups, -1))
        inverse_rms = torch.addcmul(eps, mixed_TGX, mixed_TGX, value=1.0).mean(-1, keepdim=True).rsqrt_()
        mixed_TX = (mixed_TGX * inverse_rms).flatten(1) * norm_X
    out_TX.copy_(mixed_TX * gates_TX if net.gates_last else mixed_TX)


for _device in ("CPU", "CUDA"):
    _library.impl("mamba2", mamba2, _device)
# The tape's replay, which is on a CPU, calls the function without torch's dispatch.
torch.ops.phonograph.mamba2.default.python_function = mamba2  # pyright: ignore[reportAttributeAccessIssue]
