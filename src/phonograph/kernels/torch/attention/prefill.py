"""Attention of one sequence with any number of queries, which gathers its keys first.

Queries go in tiles, which bounds memory for any prompt; each tile takes only the keys that some query of it can see.
Where the device and the features allow, torch's own fused kernel computes the softmax.
"""

from __future__ import annotations

import torch

from phonograph.kernels.torch.attention.scoring import Scoring, add_sinks, gather_blocks, softcap_

# Queries of a masked tile: larger ones waste work above the diagonal, smaller ones calls.
_TILE = 128
# Elements of the largest temporary of a tile (a mask, or scores).
_MAX_ELEMENTS = 4 * 2**20


def prefill(
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_row: torch.Tensor,
    seq_len: int,
    causal: bool,
    scoring: Scoring,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
) -> None:
    """Attend the T queries of one sequence, whose last position is seq_len - 1, to its keys.

    `block_row` [max_blocks] int32 is the sequence's row of the block table.
    """
    num_tokens, num_heads, head_size = query_THD.shape
    num_kv_heads = kv_cache.shape[3]
    left = scoring.left if scoring.left >= 0 else seq_len
    right = 0 if causal else scoring.right if scoring.right >= 0 else num_tokens
    # Queries before the first key, which exist if queries outnumber keys, see nothing.
    blind = min(max(num_tokens - seq_len - right, 0), num_tokens) if seq_len else num_tokens
    if blind:
        out_THD[:blind] = 0
        if lse_HT is not None:
            lse_HT[:, :blind] = -torch.inf if scoring.sinks_H is None else scoring.sinks_H[:, None]
    first_position = seq_len - num_tokens
    low = max(first_position + blind - left, 0)
    if blind == num_tokens:
        return
    block_size = kv_cache.shape[2]
    first_block = low // block_size
    gathered = gather_blocks(kv_cache, block_row[first_block : -(-seq_len // block_size)]).flatten(1, 2)
    # Only positions low ... seq_len - 1.
    visible = gathered[:, low - first_block * block_size : seq_len - first_block * block_size]
    keys_KLD, values_KLD = visible.transpose(1, 2)
    full = scoring.left < 0 and scoring.slopes_H is None
    triangle = full and causal and first_position + blind == 0
    rectangle = full and not causal and scoring.right < 0
    fused = query_THD.device.type == "cpu" and scoring.softcap == 0.0
    if fused and (triangle or rectangle):
        tile = num_tokens
    else:
        heads = 1 if fused and scoring.slopes_H is None else num_heads
        tile = max(min(_TILE, _MAX_ELEMENTS // (heads * (seq_len - low))), 1)
    group = num_heads // num_kv_heads
    for start in range(blind, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        near, far = max(first_position + start - left, low), min(first_position + stop + right, seq_len)
        query = query_THD[start:stop].view(-1, num_kv_heads, group, head_size).permute(1, 2, 0, 3).float()
        if scoring.k_scale_K is not None:
            query = query * scoring.k_scale_K.view(-1, 1, 1, 1)
        keys, values = keys_KLD[:, near - low : far - low], values_KLD[:, near - low : far - low]
        if fused and (triangle or rectangle):
            out, lse = _fused(query, keys, values, None, scoring.scale, causal=triangle)
        else:
            # In float32, which holds the positions of any context exactly.
            positions_L = torch.arange(near, far, device=query.device, dtype=torch.float32)
            first, last = first_position + start, first_position + stop
            positions_T = torch.arange(first, last, device=query.device, dtype=torch.float32)
            distance_TL = positions_L - positions_T[:, None]
            hidden_TL = (distance_TL > right) | (distance_TL < -left)
            slopes = scoring.slopes_H
            bias = distance_TL.new_zeros(1) if slopes is None else slopes.view(-1, group, 1, 1) * distance_TL
            bias = bias.masked_fill(hidden_TL, -torch.inf)
            if fused:
                out, lse = _fused(query, keys, values, bias, scoring.scale, causal=False)
            else:
                out, lse = _explicit(query, keys, values, bias, scoring)
        if scoring.v_scale_K is not None:
            out = out * scoring.v_scale_K.view(-1, 1, 1, 1)
        if scoring.sinks_H is not None:
            lse = add_sinks(out, lse, scoring.sinks_H.view(num_kv_heads, group, 1))
        out_THD[start:stop].view(-1, num_kv_heads, group, head_size).copy_(out.permute(2, 0, 1, 3))
        if lse_HT is not None:
            lse_HT[:, start:stop] = lse.reshape(num_heads, -1)


def _fused(
    query_KGTD: torch.Tensor,
    keys_KLD: torch.Tensor,
    values_KLD: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call torch's flash attention on the CPU: KV heads are its batch, and heads share keys by a stride of 0."""
    group = query_KGTD.shape[1]
    keys = keys_KLD.unsqueeze(1).expand(-1, group, -1, -1)
    values = values_KLD.unsqueeze(1).expand(-1, group, -1, -1)
    mask = None if bias is None else bias.expand(query_KGTD.shape[0], group, *bias.shape[-2:])
    # The public function does not return the LSE.
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query_KGTD, keys, values, is_causal=causal, attn_mask=mask, scale=scale
    )


def _explicit(
    query_KGTD: torch.Tensor,
    keys_KLD: torch.Tensor,
    values_KLD: torch.Tensor,
    bias: torch.Tensor,
    scoring: Scoring,
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = query_KGTD.shape
    scores = torch.bmm(query_KGTD.reshape(shape[0], -1, shape[3]) * scoring.scale, keys_KLD.transpose(1, 2))
    scores = softcap_(scores.view(*shape[:3], -1), scoring.softcap).add_(bias)
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse.unsqueeze(-1)).exp_()
    return torch.bmm(weights.view(shape[0], -1, weights.shape[-1]), values_KLD).view(shape), lse
