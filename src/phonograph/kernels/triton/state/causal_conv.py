"""Causal convolution of each channel, with the last inputs of each slot, for mixers that have one.

A gated delta net and Mamba 2 convolve their queries, keys and values, and silu follows. A short convolution is between
two gates.

Shapes are those of the torch twins. Two launches, for queries of any lengths:

1. Outputs. A program has a tile of tokens and channels. It finds the sequence of each token, and takes inputs before
   the step from the place that the sequence's state is read from.
2. Last inputs. A program has a sequence and channels: it writes them to the slot and to a checkpoint. The first launch
   has read the old ones then.

Where no sequence has more than one token, the first launch writes the last inputs too: what a program reads of a place
of the pool, no other one overwrites. Decodes of a gated delta net with few rows convolve elsewhere (`delta_step.py`),
and write last inputs by `append_input`.
"""

# pyright: basic, reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
from __future__ import annotations

import torch
import triton
import triton.language as tl

from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.kernels.triton.launch.pdl import pdl_begin, pdl_options, pdl_wait
from phonograph.kernels.triton.state.delta_rows import column_of, sequence_of

_TOKENS, _CHANNELS, HISTORY_CHANNELS = 16, 128, 512
NO_NET = DeltaSizes(1, 1, 1, 1, by_head=False)
"""Sizes for mixers whose channels are in the order of the projection's columns."""


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
    *,
    single: bool = False,
) -> None:
    """Write the outputs of a short convolution and the last inputs of each sequence; see the torch twin.

    Args:
        projected_TF: rows may be apart from one another, as those of `checkpoints_3R`.
        taps_CW: as in the twin; all others too, and contiguous.
        bias_C: see there.
        query_start_loc: see there.
        seq_lens_R: see there.
        slots_R: see there.
        checkpoints_3R: see there.
        history_SPC: see there.
        out_TC: see there.
        single: see `StepStates`.
    """
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    causal_conv(projected_TF, taps_CW, *rows, history_SPC, out_TC, None, bias_C, single=single)


def causal_conv(
    projected_TF: torch.Tensor,
    taps_CW: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_R: torch.Tensor,
    slots_R: torch.Tensor,
    checkpoints_3R: torch.Tensor,
    history_SPC: torch.Tensor,
    out_TC: torch.Tensor,
    net: DeltaSizes | None,
    bias_C: torch.Tensor | None = None,
    *,
    single: bool,
) -> None:
    """Write the mixed inputs of all tokens, and the last inputs of each sequence.

    Args:
        projected_TF: rows may be apart from one another.
        taps_CW: float32, contiguous.
        query_start_loc: int32 [R + 1].
        seq_lens_R: int32.
        slots_R: int32.
        checkpoints_3R: int32; rows may be apart from one another.
        history_SPC: contiguous; see `gated_delta` of the torch set.
        out_TC: contiguous; rows of padding are 0.
        net: sizes of a gated delta net, or NO_NET, for silu(convolution); None for a short convolution with its gates.
        bias_C: float32, added to the convolution; None for none.
        single: see `StepStates`.
    """
    num_tokens, (num_channels, num_taps) = len(projected_TF), taps_CW.shape
    num_reqs = len(slots_R)
    gated, net = net is None, net or NO_NET
    sizes = {"G": net.key_heads, "H": net.value_heads, "K": net.key_size, "V": net.value_size, "BY_HEAD": net.by_head}
    sizes |= {"STRIDE": projected_TF.stride(0), "C": num_channels, "W": num_taps}
    rows = query_start_loc, seq_lens_R, slots_R, checkpoints_3R
    _conv_kernel[(triton.cdiv(num_tokens, _TOKENS), triton.cdiv(num_channels, _CHANNELS))](
        projected_TF, taps_CW, bias_C, *rows, history_SPC, out_TC, num_tokens, num_reqs,
        checkpoints_3R.stride(0), SEARCH=0 if single else num_reqs.bit_length(), TOKENS=_TOKENS, CHANNELS=_CHANNELS,
        GATED=gated, **sizes, **pdl_options(),
    )  # fmt: skip
    if single:
        return
    _history_kernel[(num_reqs, triton.cdiv(num_channels, HISTORY_CHANNELS))](
        projected_TF, *rows, history_SPC, checkpoints_3R.stride(0), CHANNELS=HISTORY_CHANNELS, GATED=gated, **sizes,
        **pdl_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_reqs"])
def _conv_kernel(
    projected_ptr, taps_ptr, bias_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, history_ptr, out_ptr,
    num_tokens, num_reqs, checkpoints_stride, STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    SEARCH: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr, G: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the outputs.

    STRIDE: numbers from a row of the projection to the next one, a constant so that loads are as wide as it allows.
    SEARCH: bits of the number of sequences; 0 if each has one token, and for the last inputs too.
    """
    pdl_begin(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    # The last sequence that begins at the token or before is its own: empty ones begin where the next one does.
    row = tl.zeros((TOKENS,), tl.int32) if SEARCH > 0 else tl.minimum(token, num_reqs - 1)
    for bit in tl.static_range(SEARCH):
        probe = row + (1 << (SEARCH - 1 - bit))
        begins = tl.load(starts_ptr + tl.minimum(probe, num_reqs))
        row = tl.where((probe < num_reqs) & (begins <= token), probe, row)
    start, _, source, slot, saved, _ = sequence_of(
        row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    is_token = (token < num_tokens) & (token < tl.load(starts_ptr + num_reqs))
    mask = is_token[:, None] & (channel < C)[None, :]
    column = column_of(channel, G, H, K, V, BY_HEAD)
    row_ptr = projected_ptr + token.to(tl.int64)[:, None] * STRIDE + column[None, :]
    inputs = ()
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(W):
        at = token - (W - 1) + tap
        within = at >= start
        pointer = row_ptr + (tap - (W - 1)) * STRIDE
        x = _input(pointer, mask & within[:, None], C, GATED)
        place = source.to(tl.int64) * (W - 1) + (W - 1) + at - start
        known = (~within) & (source >= 0)
        x += tl.load(history_ptr + place[:, None] * C + channel[None, :], mask & known[:, None], other=0.0)
        inputs = inputs + (x,)
        total += x.to(tl.float32) * tl.load(taps_ptr + channel * W + tap, channel < C, other=0.0)[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channel, channel < C, other=0.0)[None, :]
    if GATED:
        total *= tl.load(row_ptr + C, mask, other=0.0).to(tl.float32)
    else:
        total *= tl.sigmoid(total)
    pointer = out_ptr + token.to(tl.int64)[:, None] * C + channel[None, :]
    # Sums of padding are 0.
    tl.store(pointer, total.to(out_ptr.dtype.element_ty), (token < num_tokens)[:, None] & (channel < C)[None, :])
    if SEARCH == 0:
        # Another thread may have read what a thread overwrites.
        tl.debug_barrier()
        for index in tl.static_range(W - 1):
            history = history_ptr + index * C + channel[None, :]
            slots, places = (slot.to(tl.int64) * (W - 1) * C)[:, None], (saved.to(tl.int64) * (W - 1) * C)[:, None]
            tl.store(history + slots, inputs[index + 1], mask & (slot >= 0)[:, None])
            tl.store(history + places, inputs[index + 1], mask & (saved >= 0)[:, None])


@triton.jit
def _history_kernel(
    projected_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, history_ptr, checkpoints_stride,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, GATED: tl.constexpr,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BY_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pdl_begin(PDL)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    start, count, source, slot, saved, before = sequence_of(
        tl.program_id(0), starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    if count == 0:
        return
    column = column_of(channel, G, H, K, V, BY_HEAD)
    mask = channel < C
    # The checkpoint comes first, as it reads inputs that the slot loses. Inputs move up by one thread for a channel.
    for target in tl.static_range(2):
        place = saved if target == 0 else slot
        end = before if target == 0 else count
        # Without a place the end is no token of the sequence either.
        target_mask = mask & (place >= 0)
        for index in tl.static_range(W - 1):
            at = end - (W - 1) + index
            pointer = projected_ptr + (start + at).to(tl.int64) * STRIDE + column
            x = _input(pointer, target_mask & (at >= 0), C, GATED)
            old = history_ptr + (source.to(tl.int64) * (W - 1) + (W - 1) + at) * C + channel
            x += tl.load(old, target_mask & (at < 0) & (source >= 0), other=0.0)
            tl.store(history_ptr + (place.to(tl.int64) * (W - 1) + index) * C + channel, x, target_mask)


@triton.jit
def append_input(
    projected_ptr, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, history_ptr, checkpoints_stride, row, block,
    STRIDE: tl.constexpr, C: tl.constexpr, W: tl.constexpr, CHANNELS: tl.constexpr, G: tl.constexpr, H: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BY_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the last inputs of a block of channels of a sequence with one token; old ones are read before the wait."""
    channel = block * CHANNELS + tl.arange(0, CHANNELS)
    start, count, source, slot, saved, _ = sequence_of(
        row, starts_ptr, lens_ptr, slots_ptr, checkpoints_ptr, checkpoints_stride
    )
    mask = (channel < C) & (count > 0)
    inputs = ()
    for index in tl.static_range(1, W - 1):
        old = history_ptr + (source.to(tl.int64) * (W - 1) + index) * C + channel
        inputs = inputs + (tl.load(old, mask & (source >= 0), other=0.0),)
    pdl_wait(PDL)
    new = projected_ptr + start.to(tl.int64) * STRIDE + column_of(channel, G, H, K, V, BY_HEAD)
    inputs = inputs + (tl.load(new, mask, other=0.0),)
    # Another thread may have read what a thread overwrites.
    tl.debug_barrier()
    for index in tl.static_range(W - 1):
        for target in tl.static_range(2):
            place = saved if target == 0 else slot
            pointer = history_ptr + (place.to(tl.int64) * (W - 1) + index) * C + channel
            tl.store(pointer, inputs[index], mask & (place >= 0))


@triton.jit
def _input(pointer, mask, C: tl.constexpr, GATED: tl.constexpr):
    """Return inputs of the convolution, rounded to the model's type; 0 where the mask is False."""
    x = tl.load(pointer, mask, other=0.0)
    if GATED:
        gated = x.to(tl.float32) * tl.load(pointer + 2 * C, mask, other=0.0).to(tl.float32)
        x = gated.to(pointer.dtype.element_ty)
    return x
