"""Comparison of the outputs of a run with the float64 oracle: the rows of requests, the padding rows, the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionLayer
from phonograph.testing.conformance import TOLERANCE
from phonograph.testing.conformance_batch import PagedBatch, quantized
from phonograph.testing.inputs import POISON, RigInputs
from phonograph.testing.oracle import dense_attention
from phonograph.testing.rig import Outputs

# A write may divide by a scale or multiply by its reciprocal: one FP8 value in many is then its neighbour.
_FP8_WRITE_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """wrong: what is wrong with the rows of requests or with the cache, or "".

    left, dirty: rows of no request that were not written, or not with zeros (LSE: -inf), as text, or ""
    """

    wrong: str
    left: str
    dirty: str


def judge(inputs: RigInputs, batch: PagedBatch, outputs: Outputs, num_tokens: int) -> Verdict:
    """Compare rows up to the padded `num_tokens`; report the first layer with a difference."""
    wrong = left = dirty = ""
    for index, layer in enumerate(inputs.layers):
        cache = outputs.caches[index]
        out_THD = outputs.outs_THD[index][:num_tokens]
        lse_HT = outputs.lses_HT[index][:, :num_tokens] if outputs.lses_HT else None
        problem = _written(inputs.spec, layer, batch, cache) or _attended(
            inputs.spec, layer, batch, cache, out_THD, lse_HT
        )
        where = f"layer {index} (window {layer.window})"
        wrong = wrong or (f"{where}: {problem}" if problem else "")
        padding = out_THD[batch.common.num_tokens :]
        untouched = (padding.view(torch.int16) == POISON).flatten(1).any(1)
        if untouched.any():
            left = left or f"{where}: {int(untouched.sum())} of {len(padding)} were not written"
        elif not bool((padding == 0).all()):
            rows = int((padding != 0).flatten(1).any(1).sum())
            dirty = dirty or f"{where}: {rows} of {len(padding)} hold something other than zeros"
        if lse_HT is not None and not bool((lse_HT[:, batch.common.num_tokens :] == -torch.inf).all()):
            dirty = dirty or f"{where}: their LSE is not -inf"
    return Verdict(wrong=wrong, left=left, dirty=dirty)


def difference(one: Outputs, other: Outputs, num_tokens: int) -> str:
    """Return the first difference of rows of requests between two runs, bit for bit, or ""."""
    for index, (first, second) in enumerate(zip(one.outs_THD, other.outs_THD, strict=True)):
        unlike = int((first[:num_tokens] != second[:num_tokens]).sum())
        if unlike:
            return f"layer {index} differs in {unlike} of {first[:num_tokens].numel()} elements"
    for index, (first, second) in enumerate(zip(one.lses_HT, other.lses_HT, strict=True)):
        if not torch.equal(first[:, :num_tokens], second[:, :num_tokens]):
            return f"the LSE of layer {index} differs"
    return ""


def _written(spec: AttentionSpec, layer: AttentionLayer, batch: PagedBatch, cache: torch.Tensor) -> str:
    """Return the fault of the new keys and values in the cache, or ""."""
    num_tokens = batch.common.num_tokens
    slots = batch.common.slot_mapping[:num_tokens]
    stored = cache.flatten(1, 2)
    for plane, new, scale in ((0, batch.key, layer.k_scale), (1, batch.value, layer.v_scale)):
        host_scale = None if scale is None else scale.cpu()
        expected = quantized(new[:num_tokens].float(), host_scale, spec).double()
        error = float((stored[plane][slots].double() - expected).norm() / (expected.norm() or 1.0))
        if not error <= (0.0 if scale is None else _FP8_WRITE_TOLERANCE):
            return f"new {'values' if plane else 'keys'} in the cache are off by {error:.1e}"
    before = batch.kv_cache.flatten(1, 2)
    others = torch.ones(before.shape[1], dtype=torch.bool)
    others[slots] = False
    got, kept = stored[:, : before.shape[1]][:, others], before[:, others]
    # Slots that held no token may have been cleared of their poison on purpose.
    same = (got.float() == kept.float()) | kept.float().isnan()
    return "" if bool(same.all()) else "the KV write changed slots that were not its own"


def _attended(
    spec: AttentionSpec,
    layer: AttentionLayer,
    batch: PagedBatch,
    cache: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
) -> str:
    """Return the sequence with the largest error beyond rounding, or ""."""
    common, stored = batch.common, cache.flatten(1, 2)
    tolerance, worst = TOLERANCE[spec.dtype], ""
    largest = tolerance
    for index, slots in enumerate(batch.slots):
        tokens = slice(int(common.query_start_loc_cpu[index]), int(common.query_start_loc_cpu[index + 1]))
        keys, values = (
            _dequantized(stored[plane][slots], scale) for plane, scale in ((0, layer.k_scale), (1, layer.v_scale))
        )
        expected, expected_lse = dense_attention(
            _float64(batch.query[tokens]), keys, values, layer, causal=common.causal
        )
        size = float(np.linalg.norm(expected)) or 1.0
        error = float(np.linalg.norm(_float64(out_THD[tokens]) - expected)) / size
        if lse_HT is not None:
            got = _float64(lse_HT[:, tokens])
            # Where both are -inf they agree; the difference would be NaN.
            apart = np.where(got == expected_lse, 0.0, np.abs(got - expected_lse))
            error = float(np.maximum(error, (apart / np.maximum(1.0, np.abs(expected_lse))).max(initial=0.0)))
        if not error <= largest:
            largest = error
            query_len, seq_len = tokens.stop - tokens.start, len(slots)
            worst = f"sequence {index} ({query_len} of {seq_len} tokens) is off by {error:.1e}, {tolerance:.0e} allowed"
        if np.isnan(error):
            break
    return worst


def _dequantized(stored_LKD: torch.Tensor, scale_K: torch.Tensor | None) -> np.ndarray:
    return _float64(stored_LKD) * (1.0 if scale_K is None else _float64(scale_K)[:, None])


def _float64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().cpu().numpy()
