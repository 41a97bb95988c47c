"""Tensor functions of the sampler: counter-based noise, ranking, filters, penalties. No state, no host reads.

Shapes: N rows of logits, V vocabulary, K ranked candidates of a row (most likely first).

Randomness is a pure function of (seed, sample index, draw index, token id). The finaliser of SplitMix64 (Steele, Lea,
Flood 2014; constants of Stafford's variant 13) mixes 64-bit integers once at each level of that tuple, and the result
becomes Gumbel noise. Adding it to scaled logits and taking the argmax draws from their softmax (Gumbel-max). So a draw
depends neither on other rows nor on the number of candidates, and a fused kernel can repeat the int64 arithmetic bit
for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_MAX_INT64 = 2**63 - 1
_MIX_STEPS = (30, _MIX_1), (27, _MIX_2), (31, 1)
"""Shift and factor of each round of the mixer."""


def mix64(x: torch.Tensor) -> torch.Tensor:
    """Mix int64 values in place, bijectively, and return them. 0 stays 0, so a plain counter is no valid input."""
    shifted = torch.empty_like(x)
    for shift, multiplier in _MIX_STEPS:
        # int64 shifts are arithmetic: the mask makes a logical one, without which mixing would lose the sign bit.
        torch.bitwise_right_shift(x, shift, out=shifted)
        x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if multiplier != 1:
            x.mul_(multiplier)
    return x


def _descend(keys: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return keys one level down. `index + 1`, because key 0 (of seed 0) with index 0 would stay 0 at every level."""
    return mix64(keys + (index + 1) * _GAMMA)


def stream_key(seed: int, sample_index: int) -> int:
    """Return the key of all draws of one sample of a request. `seed` is any signed 64-bit integer."""
    # In Python, as the operations of tensors would take 0.1 ms for one number.
    key = _mixed(_mixed(seed) + (sample_index + 1) * _GAMMA)
    return key - 2**64 if key > _MAX_INT64 else key


def _mixed(number: int) -> int:
    """Return `mix64` of one number, as an unsigned one."""
    number %= 2**64
    for shift, multiplier in _MIX_STEPS:
        number = (number ^ number >> shift) * multiplier % 2**64
    return number


def draw_keys(stream_keys_N: torch.Tensor, draws_N: torch.Tensor) -> torch.Tensor:
    """Return the key of one draw of each row, int64 [N]; `draws_N` counts the tokens already generated."""
    return _descend(stream_keys_N, draws_N)


def gumbel_noise(keys_N: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, float32 [N, K], for int64 `token_ids` [K] or [N, K].

    It is -log(-log1p(-u)) with u from the upper 63 bits. Floats are dense near u = 0, from where the winners of a large
    vocabulary come, so their order is not quantised. u is never 0 (lowest bit set), nor 1 (clamped).
    """
    bits = _descend(keys_N[:, None], token_ids).bitwise_and_(_MAX_INT64).bitwise_or_(1)
    u = bits.to(torch.float32).mul_(2.0**-63).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


class Rows(NamedTuple):
    """Rows to sample from, each with its parameters, all finite; temperature > 0.

    logits_NV any float dtype, max_N its maxima, keys_N int64 from `draw_keys`, top_k_N int64 (0 keeps all), the others
    float64 (min_p 0 and top_p 1 keep all).
    """

    logits_NV: torch.Tensor
    max_N: torch.Tensor
    keys_N: torch.Tensor
    temperature_N: torch.Tensor
    min_p_N: torch.Tensor
    top_p_N: torch.Tensor
    top_k_N: torch.Tensor

    def take(self, rows: torch.Tensor) -> Rows:
        """Return copies of the rows with these indices, or of a mask."""
        return Rows(*(field[rows] for field in self))


def sample_full(rows: Rows) -> torch.Tensor:
    """Draw token ids, int64 [N], by temperature and min-p alone: no ranking, noise for the whole vocabulary."""
    scaled_NV = scale(rows.logits_NV, rows, torch.float32)
    token_ids_V = torch.arange(scaled_NV.shape[-1], device=scaled_NV.device)
    return scaled_NV.add_(gumbel_noise(rows.keys_N, token_ids_V)).argmax(dim=-1)


def sample_ranked(rows: Rows, width: int) -> torch.Tensor:
    """Draw token ids, int64 [N], by all filters, from the `width` most likely tokens: V, or the largest top_k."""
    values_NK, token_ids_NK = ranked(rows.logits_NV, width)
    scaled_NK = scale(values_NK, rows, torch.float64)
    return _draw_ranked(filter_ranked(scaled_NK, rows.top_k_N, rows.top_p_N), token_ids_NK, rows.keys_N)


def sample_nucleus(rows: Rows, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw like `sample_ranked` for rows without top_k, but from the `width` most likely tokens.

    Returns:
        Token ids, int64 [N], and bool [N]: the `width` tokens reach top_p. Rows that are False need `sample_ranked`
        over the whole row.
    """
    values_NK, token_ids_NK = ranked(rows.logits_NV, width)
    scaled_NK = scale(values_NK, rows, torch.float64)
    total_N = scale(rows.logits_NV, rows, torch.float32).exp_().sum(dim=-1, dtype=torch.float64)
    holds_N = scaled_NK.exp().sum(dim=-1) >= rows.top_p_N * total_N
    kept_NK = filter_ranked(scaled_NK, rows.top_k_N, rows.top_p_N, total_N)
    return _draw_ranked(kept_NK, token_ids_NK, rows.keys_N), holds_N


def _draw_ranked(scores_NK: torch.Tensor, token_ids_NK: torch.Tensor, keys_N: torch.Tensor) -> torch.Tensor:
    places_N1 = scores_NK.add_(gumbel_noise(keys_N, token_ids_NK)).argmax(dim=-1, keepdim=True)
    return token_ids_NK.gather(-1, places_N1).squeeze(-1)


def scale(logits_NK: torch.Tensor, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return (logits - max) / temperature in `dtype`, and -inf for tokens less than min_p times as likely as the best.

    The maximum is subtracted first, so that tiny temperatures cannot overflow.
    """
    scaled_NK = logits_NK.to(dtype) - rows.max_N.to(dtype)[:, None]
    scaled_NK.div_(rows.temperature_N.to(dtype)[:, None])
    return scaled_NK.masked_fill_(scaled_NK < rows.min_p_N.to(dtype).log()[:, None], -torch.inf)


def ranked(logits_NV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest logits of each row, descending, and their token ids, [N, k]. Equal logits: lower id first.

    torch.topk does not define the order of equal values, nor which of them it returns. Here each float32 and its token
    id share one int64 sort key, so no two keys are equal.
    """
    vocab_size = logits_NV.shape[-1]
    bits = (logits_NV.to(torch.float32) + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, its equal
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integer order is now float order
    falling_ids = torch.arange(vocab_size - 1, -1, -1, device=logits_NV.device)
    keys = bits.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(falling_ids)
    best = keys.topk(k).values if 2 * k < vocab_size else keys.sort(dim=-1, descending=True).values[:, :k]
    ids_NK = vocab_size - 1 - best.bitwise_and_(0xFFFFFFFF)
    return logits_NV.gather(-1, ids_NK), ids_NK


def filter_ranked(
    scaled_NK: torch.Tensor, top_k_N: torch.Tensor, top_p_N: torch.Tensor, total_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Set tokens that top-k, then top-p on the rest, remove to -inf, in place; return the argument.

    Args:
        scaled_NK: float64, descending, as from `scale`
        top_k_N: int64; 0 keeps all
        top_p_N: keeps the shortest head whose probability reaches it; 1 keeps all
        total_N: sum of exp(scaled) over the whole row, if scaled_NK is only its head; None for all that top-k keeps
    """
    rank_K = torch.arange(scaled_NK.shape[-1], device=scaled_NK.device)
    scaled_NK.masked_fill_((rank_K >= top_k_N[:, None]) & (top_k_N[:, None] > 0), -torch.inf)
    mass_NK = scaled_NK.exp()
    total_N = mass_NK.sum(dim=-1) if total_N is None else total_N
    # Rounding may bring the running sum to the total before the last token, so 1 is treated apart.
    limit_N = (top_p_N * total_N).masked_fill_(top_p_N >= 1.0, torch.inf)
    mass_before_NK = mass_NK.cumsum(dim=-1) - mass_NK
    return scaled_NK.masked_fill_(mass_before_NK >= limit_N[:, None], -torch.inf)


def filtered(rows: Rows, tokens_N: torch.Tensor, *, by_rank: bool) -> torch.Tensor:
    """Return (logits - max) / temperature, float32 [N, V], with -inf for tokens that the filters of a row remove.

    Args:
        rows: the rows.
        tokens_N: int64, token drawn from each row, which is kept where rounding would remove it.
        by_rank: a row may have top-k or top-p.
    """
    scaled_NV = scale(rows.logits_NV, rows, torch.float32)
    drawn_N1 = (rows.logits_NV.gather(-1, tokens_N[:, None]) - rows.max_N[:, None]).div_(rows.temperature_N[:, None])
    if by_rank:
        values_NV, token_ids_NV = ranked(rows.logits_NV, scaled_NV.shape[-1])
        kept_NV = filter_ranked(scale(values_NV, rows, torch.float64), rows.top_k_N, rows.top_p_N)
        removed_NV = torch.empty_like(kept_NV, dtype=torch.bool).scatter_(-1, token_ids_NV, kept_NV.isneginf())
        scaled_NV.masked_fill_(removed_NV, -torch.inf)
    return scaled_NV.scatter_(-1, tokens_N[:, None], drawn_N1)


def penalize(
    logits_NV: torch.Tensor,
    in_prompt_NV: torch.Tensor,
    output_counts_NV: torch.Tensor,
    repetition_N: torch.Tensor,
    presence_N: torch.Tensor,
    frequency_N: torch.Tensor,
) -> torch.Tensor:
    """Apply repetition penalty (Keskar et al. 2019) to tokens of prompt or output, then presence and frequency ones.

    `in_prompt_NV` is bool, `output_counts_NV` integers. Returns new float32 logits; -inf stays -inf.
    """
    in_output_NV = output_counts_NV > 0
    logits_NV = logits_NV.to(torch.float32)
    repetition_N1 = repetition_N.to(torch.float32)[:, None]
    repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    out_NV = torch.where(in_prompt_NV | in_output_NV, repeated_NV, logits_NV)
    out_NV -= in_output_NV * presence_N.to(torch.float32)[:, None]
    return out_NV.sub_(output_counts_NV * frequency_N.to(torch.float32)[:, None])


def prefer_timestamps(
    logits_LV: torch.Tensor, rows_G: torch.Tensor, bitmask_GW: torch.Tensor, first_timestamp: int
) -> None:
    """Set the logits of text to -inf where all timestamps together are more likely than any token of text.

    It is the rule of Whisper's decoding (transformers' `WhisperTimeStampLogitsProcessor`), which follows the masks.

    Args:
        logits_LV: rows of logits, masked already; tokens from `first_timestamp` on are timestamps.
        rows_G: rows that have masks; entries below 0 are padding.
        bitmask_GW: their masks, int32. Bit V, after the vocabulary, is 0 for rows that follow the rule.
        first_timestamp: token of the time 0.
    """
    num_rows, vocab_size = logits_LV.shape
    follows_G = (bitmask_GW[:, vocab_size // 32] >> (vocab_size % 32)) & 1 == 0
    # One row more, for padding.
    follows_L = torch.zeros(num_rows + 1, dtype=torch.bool, device=logits_LV.device)
    follows_L[torch.where(rows_G < 0, num_rows, rows_G).long()] = follows_G
    text_LX, times_LX = logits_LV.split((first_timestamp, vocab_size - first_timestamp), 1)
    is_time_L = times_LX.float().logsumexp(1) > text_LX.amax(1)
    text_LX.masked_fill_((follows_L[:-1] & is_time_L)[:, None], -torch.inf)


def mask_tokens(logits_NV: torch.Tensor, bitmask_NW: torch.Tensor) -> torch.Tensor:
    """Return the logits with -inf for tokens whose bit is not set; token t is bit t % 32 of word t // 32 (int32)."""
    shifts = torch.arange(32, dtype=torch.int32, device=bitmask_NW.device)
    allowed_NV = ((bitmask_NW[:, :, None] >> shifts) & 1).flatten(1)[:, : logits_NV.shape[1]]
    return logits_NV.masked_fill(allowed_NV == 0, -torch.inf)
