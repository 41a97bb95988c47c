"""Batches of prefills for the attention kernel of long queries, and what it should come to, in float64.

Shapes: T tokens, R slots, H query heads, K KV heads, D head size, B blocks, S block size, L keys of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.kernels.triton.attention.prefill import merge_prefill, prefill_attention
from phonograph.kernels.triton.attention.prefill_plan import (
    PrefillPlan,
    make_prefill_plan,
    multiprocessors_of,
    plan_prefill,
)

MIN_QUERY_LEN = 17
# (query length, keys): each below MIN_QUERY_LEN is left to the decode kernel; (0, 0) is an empty slot.
RAGGED = ((1, 70), (16, 16), (17, 17), (40, 40), (33, 150), (0, 0))


@dataclass(frozen=True)
class Case:
    batch: tuple[tuple[int, int], ...] = RAGGED
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype | None = None
    heads_outside: bool = False
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    num_sms: int = 2
    multiprocessors: int = 1 << 20
    padding: int = 5

    @property
    def features(self) -> dict[str, object]:
        return {"scale": self.head_size**-0.5, "softcap": self.softcap, "window": self.window, "causal": self.causal}


class Batch:
    """Random inputs of a case. All that no sequence may read is NaN; so are the outputs."""

    def __init__(self, case: Case, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.case = case
        num_reqs = len(case.batch)
        kv_dtype = case.kv_dtype or case.dtype
        heads, kv_heads, size, block = case.num_heads, case.num_kv_heads, case.head_size, case.block_size
        lengths = torch.tensor([query_len for query_len, _ in case.batch], dtype=torch.int32)
        self.num_tokens = int(lengths.sum())
        padded = self.num_tokens + case.padding
        needed = [-(-keys // block) for _, keys in case.batch]
        num_blocks = sum(needed) + 2
        fused = torch.randn(padded, (heads + 2 * kv_heads) * size, device=device).to(case.dtype)
        self.query_THD = fused[:, : heads * size].view(padded, heads, size)
        order = (0, 1, 3, 2, 4) if case.heads_outside else (0, 1, 2, 3, 4)
        shape = (2, num_blocks, block, kv_heads, size)
        cache = torch.full([shape[i] for i in order], torch.nan, device=device).to(kv_dtype)
        self.kv_cache = cache.permute(order)
        # Ids behind a sequence's blocks are stale: they must not be followed.
        table = torch.full((num_reqs, max(needed) + 1), 2**30, dtype=torch.int32)
        blocks = torch.randperm(num_blocks).to(torch.int32)
        self.dense: list[torch.Tensor] = []
        first = 0
        for row, (_, keys) in enumerate(case.batch):
            ids = blocks[first : first + needed[row]]
            first += needed[row]
            table[row, : len(ids)] = ids
            values = torch.randn(2, keys, kv_heads, size, device=device).to(kv_dtype)
            self.dense.append(values.double())
            for index, block_id in enumerate(ids.tolist()):
                part = values[:, index * block : (index + 1) * block]
                self.kv_cache[:, block_id, : part.shape[1]] = part
        self.block_table = table.to(device)
        self.query_start_loc = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]).to(device)
        self.seq_lens = torch.tensor([keys for _, keys in case.batch], dtype=torch.int32, device=device)
        fp8 = kv_dtype.itemsize == 1
        self.tensors = {
            "alibi_slopes": torch.rand(heads, device=device) * 0.1 if case.alibi else None,
            "sinks": torch.randn(heads, device=device) if case.sinks else None,
            "k_scale": torch.rand(kv_heads, device=device) + 0.5 if fp8 else None,
            "v_scale": torch.rand(kv_heads, device=device) + 0.5 if fp8 else None,
        }
        self.out_THD = torch.full((padded, heads, size), torch.nan, dtype=case.dtype, device=device)
        self.lse_HT = torch.full((heads, padded), torch.nan, device=device)

    def plan(self, plan: PrefillPlan) -> None:
        causal, window = self.case.causal, self.case.window
        multiprocessors_of(plan).fill_(min(plan.num_sms, self.case.multiprocessors))
        plan_prefill(
            plan, self.query_start_loc, self.seq_lens, min_query_len=MIN_QUERY_LEN, causal=causal, window=window
        )

    def attend(self, plan: PrefillPlan) -> None:
        prefill_attention(
            plan,
            self.query_THD,
            self.kv_cache,
            self.block_table,
            self.out_THD,
            self.lse_HT,
            **self.case.features,
            **self.tensors,
        )
        merge_prefill(plan, self.query_start_loc, self.out_THD, self.lse_HT, self.tensors["sinks"])

    def check(self, tolerance: float) -> None:
        start = 0
        written = torch.zeros(self.out_THD.shape[0], dtype=torch.bool, device=self.out_THD.device)
        for (query_len, _), keys_2LKD in zip(self.case.batch, self.dense, strict=True):
            rows = slice(start, start + query_len)
            start += query_len
            if query_len < MIN_QUERY_LEN:
                continue
            written[rows] = True
            expected, lse_HT = reference(self, self.query_THD[rows].double(), keys_2LKD)
            got = self.out_THD[rows].double()
            assert torch.isfinite(got).all()
            assert (got - expected).norm() <= tolerance * expected.norm()
            torch.testing.assert_close(self.lse_HT[:, rows].double(), lse_HT, rtol=tolerance, atol=tolerance)
        assert self.out_THD[~written].isnan().all()
        assert self.lse_HT[:, ~written].isnan().all()


def reference(batch: Batch, query_THD: torch.Tensor, keys_2LKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D] and LSE [H, T] of one sequence, in float64."""
    case, tensors = batch.case, batch.tensors
    group = case.num_heads // case.num_kv_heads
    keys_LKD, values_LKD = keys_2LKD
    if tensors["k_scale"] is not None:
        keys_LKD = keys_LKD * tensors["k_scale"][:, None]
        values_LKD = values_LKD * tensors["v_scale"][:, None]
    keys_HLD, values_HLD = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (keys_LKD, values_LKD))
    num_tokens, length = query_THD.shape[0], keys_LKD.shape[0]
    logits_HTL = query_THD.transpose(0, 1) @ keys_HLD.mT * case.head_size**-0.5
    if case.softcap:
        logits_HTL = case.softcap * torch.tanh(logits_HTL / case.softcap)
    position = torch.arange(length - num_tokens, length, device=query_THD.device)[:, None]
    key = torch.arange(length, device=query_THD.device)[None, :]
    if tensors["alibi_slopes"] is not None:
        logits_HTL = logits_HTL + tensors["alibi_slopes"][:, None, None] * (key - position)
    left, right = case.window
    seen = (key <= position) if case.causal else torch.ones_like(key <= position)
    if left >= 0:
        seen = seen & (key >= position - left)
    if right >= 0:
        seen = seen & (key <= position + right)
    logits_HTL = logits_HTL.masked_fill(~seen, -torch.inf)
    terms = logits_HTL
    if tensors["sinks"] is not None:
        terms = torch.cat([logits_HTL, tensors["sinks"].double()[:, None, None].expand(-1, num_tokens, 1)], -1)
    lse_HT = terms.logsumexp(-1)
    weights = torch.exp(logits_HTL - lse_HT[..., None])
    return (weights @ values_HLD).transpose(0, 1), lse_HT


def make_plan(case: Case, device: torch.device, max_num_seqs: int = 16, max_num_tokens: int = 512) -> PrefillPlan:
    plan = make_prefill_plan(
        num_query_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_size=case.head_size,
        max_num_seqs=max_num_seqs,
        max_num_tokens=max_num_tokens,
        num_sms=case.num_sms,
        device=device,
    )
    plan.entries.fill_(2**30)
    plan.partial_out.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    return plan


def run(case: Case, device: torch.device, tolerance: float, **limits: int) -> PrefillPlan:
    plan = make_plan(case, device, **limits)
    batch = Batch(case, device)
    batch.plan(plan)
    batch.attend(plan)
    batch.check(tolerance)
    return plan
