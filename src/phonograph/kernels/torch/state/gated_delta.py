"""Gated delta net of a step as one operator of torch, for CPUs and as the reference for others.

The tape records the operator as one call and runs it at each replay, so that it may read lengths and slots on the host.

Shapes: T tokens, R sequences of the step, S slots, G heads of keys, H heads of values, K size of a key, V size of a
value, C channels of the convolution, W its taps, P = W - 1 inputs that a slot keeps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from phonograph.kernels.torch.state.causal_conv import causal_conv
from phonograph.kernels.torch.state.delta_rule import CHUNK, delta_chunks, delta_steps
from phonograph.kernels.torch.state.state_runs import state_runs

MOST_GPU_SIZE = 128
"""Largest head on a GPU, whose kernels hold the state of a head in registers."""
_MOST_STEPS = 16
"""Tokens of a sequence in a step up to which the rule is computed token by token."""
NORM_EPS = 1e-6
"""Epsilon of the norm of keys and queries, which models have in common."""


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net.

    Attributes:
        key_heads: G.
        value_heads: H, a multiple of G.
        key_size: K.
        value_size: V.
        by_head: columns of the projections are in the order of the heads of keys: the query, the key, the values and
            the output gates of each, and the rates and times of its values. Otherwise all queries come first, then all
            keys, and so on.
        tiled: value head h has the query and the key of head h % G, as in GGUF files; otherwise of head h // (H / G).
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    by_head: bool
    tiled: bool = False

    @property
    def channels(self) -> int:
        """C: queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    @property
    def scratch_widths(self) -> tuple[int, int, int]:
        """Numbers of a token in the scratch of a GPU's kernels: factors, pairs, and outputs of the convolution."""
        return 8 * self.value_heads, 3 * CHUNK * self.value_heads, self.channels

    def split(self, projected_TF: torch.Tensor, gates_TB: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return inputs of the convolution [T, C], output gates [T, H, V], and rates and times, [T, H] each."""
        values = self.value_heads // self.key_heads
        widths = [self.key_size, self.key_size, *[values * self.value_size] * 2]
        if self.by_head:
            *mixed, z_TGX = projected_TF.unflatten(-1, (self.key_heads, -1)).split(widths, -1)
            rate_TGX, time_TGX = gates_TB.unflatten(-1, (self.key_heads, -1)).split(values, -1)
            x_TC = torch.cat([part.flatten(1) for part in mixed], 1)
            return x_TC, z_TGX.reshape(len(z_TGX), self.value_heads, -1), rate_TGX.flatten(1), time_TGX.flatten(1)
        x_TC, z_TX = projected_TF.split([self.channels, self.value_heads * self.value_size], -1)
        return x_TC, z_TX.unflatten(-1, (self.value_heads, -1)), *gates_TB.split(self.value_heads, -1)


_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define(
    "gated_delta(Tensor projected, Tensor gates, Tensor taps, Tensor decay, Tensor time_bias, Tensor norm, "
    "Tensor query_start_loc, Tensor seq_lens, Tensor slots, Tensor checkpoints, "
    "Tensor(a!) history, Tensor(b!) state, Tensor(c!) out, int[] sizes, Tensor eps) -> ()"
)


def gated_delta(
    projected_TF: torch.Tensor,
    gates_TB: torch.Tensor,
    taps_CW: torch.Tensor,
    decay_H: torch.Tensor,
    time_bias_H: torch.Tensor,
    norm_V: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    history_SPC: torch.Tensor,
    state_SHKV: torch.Tensor,
    out_TX: torch.Tensor,
    sizes: DeltaSizes | list[int],
    eps: torch.Tensor,
) -> None:
    """Mix the tokens of each sequence with its state, and write the new states into the slots.

    A sequence whose step is its first one starts from zeros, whatever its slot has. A sequence in slot -1 starts from
    zeros too, and writes no state.

    Args:
        projected_TF: queries, keys, values and output gates, before the convolution.
        gates_TB: rates and times of each head of values.
        taps_CW: of the convolution, float32.
        decay_H: logarithm of the speed of each head's decay, float32.
        time_bias_H: bias of the times, float32.
        norm_V: weights of the norm of the output, float32.
        query_start_loc: int32 [R + 1].
        seq_lens_R: int32, tokens of each sequence, the step's included.
        slots_R: int32, slot of each sequence; -1 for none.
        checkpoints_3R: int32, by sequence: the place that its state is read from, in place of its slot; the place that
            it is copied to; and its tokens at the copy. -1 for none.
        history_SPC: last inputs of the convolution, by slot, then by checkpoint.
        state_SHKV: float32.
        out_TX: receives the normed and gated outputs [T, H * V]; outputs of padding are 0.
        sizes: `DeltaSizes` as a list.
        eps: epsilon of the norm of the output.
    """
    *counts, by_head, tiled = sizes
    net = DeltaSizes(*counts, by_head=bool(by_head), tiled=bool(tiled))
    x_TC, z_THV, rate_TH, time_TH = net.split(projected_TF, gates_TB)
    decay_TH = -decay_H.exp() * functional.softplus(time_TH.float() + time_bias_H)
    rate_TH = rate_TH.float().sigmoid()
    mixed_TX = torch.zeros(out_TX.shape, dtype=torch.float32, device=out_TX.device)
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    for tokens_NT, (history_NPC, state_NHKV) in state_runs(*rows, (history_SPC, state_SHKV)):
        conv_NTC = causal_conv(x_TC[tokens_NT], history_NPC, taps_CW)
        q_NTHK, k_NTHK, v_NTHV = _heads(conv_NTC, net)
        rule = delta_steps if tokens_NT.shape[1] <= _MOST_STEPS else delta_chunks
        out_NTHV = rule(q_NTHK, k_NTHK, v_NTHV, decay_TH[tokens_NT], rate_TH[tokens_NT], state_NHKV)
        mixed_TX[tokens_NT] = out_NTHV.flatten(2)
    mixed_THV = mixed_TX.view(z_THV.shape)
    inverse_rms = torch.addcmul(eps, mixed_THV, mixed_THV, value=1.0).mean(-1, keepdim=True).rsqrt_()
    out_TX.copy_((mixed_THV * inverse_rms * norm_V * functional.silu(z_THV.float())).flatten(1))


def _heads(conv_NTC: torch.Tensor, net: DeltaSizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries and keys of norm 1, queries scaled, each for all heads of values, and values."""
    width = net.key_heads * net.key_size
    q_NTX, k_NTX, v_NTX = conv_NTC.split([width, width, net.value_heads * net.value_size], -1)

    def normed(x_NTX: torch.Tensor) -> torch.Tensor:
        x_NTGK = x_NTX.unflatten(-1, (net.key_heads, -1))
        x_NTGK = x_NTGK * (x_NTGK.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
        count = net.value_heads // net.key_heads
        return x_NTGK.repeat(1, 1, count, 1) if net.tiled else x_NTGK.repeat_interleave(count, 2)

    return normed(q_NTX) * net.key_size**-0.5, normed(k_NTX), v_NTX.unflatten(-1, (net.value_heads, -1))


for _device in ("CPU", "CUDA"):
    _library.impl("gated_delta", gated_delta, _device)
# The tape's replay, which is on a CPU, calls the function without torch's dispatch.
torch.ops.phonograph.gated_delta.default.python_function = gated_delta  # pyright: ignore[reportAttributeAccessIssue]
