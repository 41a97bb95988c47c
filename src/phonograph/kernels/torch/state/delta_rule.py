"""Gated delta rule (Yang et al. 2024, arXiv:2412.06464): a state that maps keys to values, read by queries.

For each token with key k, value v, query q, decay g <= 0 and learning rate b, the state S [K, V] of a head becomes

    S = exp(g) S,  S = S + b k (v - S^T k)^T,  and the output is S^T q.

`delta_steps` computes that. `delta_chunks` computes the same with products of matrices over 64 tokens: the corrections
of a chunk's tokens depend on each other through a triangular system (the WY form of the paper).

Shapes: N sequences, T tokens of each, H heads of values, K size of a key, V size of a value, C tokens of a chunk. All
tensors are float32, and keys and queries are normalised and scaled already.
"""

from __future__ import annotations

import torch

CHUNK = 64
"""Tokens of a chunk."""


def delta_steps(
    q_NTHK: torch.Tensor,
    k_NTHK: torch.Tensor,
    v_NTHV: torch.Tensor,
    decay_NTH: torch.Tensor,
    rate_NTH: torch.Tensor,
    state_NHKV: torch.Tensor,
) -> torch.Tensor:
    """Return the outputs [N, T, H, V], token by token. The state is overwritten.

    Args:
        q_NTHK: queries.
        k_NTHK: keys.
        v_NTHV: values.
        decay_NTH: logarithm of the factor of the state before each token.
        rate_NTH: learning rate of each token.
        state_NHKV: state before the first token.
    """
    outputs: list[torch.Tensor] = []
    factors_NTH = decay_NTH.exp()
    for token in range(q_NTHK.shape[1]):
        k_NHK1 = k_NTHK[:, token].unsqueeze(-1)
        state_NHKV.mul_(factors_NTH[:, token, :, None, None])
        known_NHV = (state_NHKV * k_NHK1).sum(-2)
        correction_NHV = (v_NTHV[:, token] - known_NHV) * rate_NTH[:, token].unsqueeze(-1)
        state_NHKV.addcmul_(k_NHK1, correction_NHV.unsqueeze(-2))
        outputs.append((state_NHKV * q_NTHK[:, token].unsqueeze(-1)).sum(-2))
    return torch.stack(outputs, 1)


def delta_chunks(
    q_NTHK: torch.Tensor,
    k_NTHK: torch.Tensor,
    v_NTHV: torch.Tensor,
    decay_NTH: torch.Tensor,
    rate_NTH: torch.Tensor,
    state_NHKV: torch.Tensor,
) -> torch.Tensor:
    """Return what `delta_steps` returns, chunk by chunk; the arguments are the same."""
    by_head = (x.transpose(1, 2).split(CHUNK, 2) for x in (q_NTHK, k_NTHK, v_NTHV, decay_NTH, rate_NTH))
    outputs: list[torch.Tensor] = []
    for q_NHCK, k_NHCK, v_NHCV, decay_NHC, rate_NHC in zip(*by_head, strict=True):
        total_NHC, rate_NHC1 = decay_NHC.cumsum(-1), rate_NHC.unsqueeze(-1)
        since_NHC1 = total_NHC.exp().unsqueeze(-1)
        # Decay from token j to token i; later tokens have none.
        between_NHCC = (total_NHC.unsqueeze(-1) - total_NHC.unsqueeze(-2)).tril().exp().tril()
        k_NHKC = k_NHCK.transpose(-1, -2)
        system_NHCC = (rate_NHC1 * k_NHCK @ k_NHKC) * between_NHCC
        known_NHCV = (k_NHCK * since_NHC1) @ state_NHKV
        correction_NHCV = torch.linalg.solve_triangular(
            system_NHCC, rate_NHC1 * (v_NHCV - known_NHCV), upper=False, unitriangular=True
        )
        read_NHCV = (q_NHCK * since_NHC1) @ state_NHKV
        outputs.append(read_NHCV + (q_NHCK @ k_NHKC * between_NHCC) @ correction_NHCV)
        until_NHC1 = (total_NHC[..., -1:] - total_NHC).exp().unsqueeze(-1)
        state_NHKV.mul_(since_NHC1[..., -1:, :]).add_((k_NHCK * until_NHC1).transpose(-1, -2) @ correction_NHCV)
    return torch.cat(outputs, 2).transpose(1, 2)
