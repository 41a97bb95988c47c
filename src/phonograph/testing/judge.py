"""Comparison of a run with the float64 oracle: the rows of requests, the padding rows, and the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionLayer
from phonograph.testing.conformance_batch import PagedBatch, quantized
from phonograph.testing.inputs import POISON, RigInputs
from phonograph.testing.oracle import Array, dense_attention
from phonograph.testing.rig import Outputs

# Relative errors that rounding explains. The oracle gets the rounded inputs, so the arithmetic remains and, in half
# precision, the rounding of weights and of the result.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
# If a backend rounds queries to FP8 the oracle gets them rounded too. Weights rounded to FP8 remain, each off by up to
# 1/16: simulated, a sequence's output is then off by 1.6% on average and by 2.7% at most.
FP8_QUERY_TOLERANCE = 5e-2
# A write may divide by a scale or multiply by its reciprocal. One FP8 value in many is then the neighbouring value.
_FP8_WRITE_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """Result of one layer.

    name: the batch or the layer
    out_error: the largest ||out - oracle|| / ||oracle|| of a sequence
    lse_error: the largest |LSE - oracle| / max(1, |oracle|); 0 where the spec asks for no LSE
    worst: the sequence with the larger of these errors, as text, or "" where both are within `tolerance`
    problem: fault of the KV write, or ""
    left, dirty: padding rows that were not written, or that do not hold zeros (LSE: -inf), as text, or ""
    """

    name: str
    window: tuple[int, int]
    out_error: float
    lse_error: float
    tolerance: float
    worst: str
    problem: str
    left: str
    dirty: str

    @property
    def wrong(self) -> str:
        """Fault of the cache or of the rows of requests, or ""."""
        return self.problem or self.worst

    @property
    def passed(self) -> bool:
        return not (self.wrong or self.left or self.dirty)

    def __str__(self) -> str:
        padding = f"padding rows: {self.left or self.dirty}" if self.left or self.dirty else ""
        return (
            f"{'ok' if self.passed else 'FAILED'}: {self.name}, window {self.window}: output {self.out_error:.1e}, LSE "
            f"{self.lse_error:.1e}, tolerance {self.tolerance:.1e} {self.problem or padding}"
        ).rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """First fault of each kind in the layers of a run; see `LayerResult`."""

    wrong: str
    left: str
    dirty: str


def judge(inputs: RigInputs, batch: PagedBatch, outputs: Outputs, num_tokens: int) -> Verdict:
    """Compare rows up to the padded `num_tokens`; report the first layer with a difference."""
    results = judge_layers(inputs, batch, outputs, num_tokens)
    return Verdict(
        wrong=next((f"{one.name} (window {one.window}): {one.wrong}" for one in results if one.wrong), ""),
        left=next((f"{one.name}: {one.left}" for one in results if one.left), ""),
        dirty=next((f"{one.name}: {one.dirty}" for one in results if one.dirty), ""),
    )


def judge_layers(inputs: RigInputs, batch: PagedBatch, outputs: Outputs, num_tokens: int) -> list[LayerResult]:
    """Compare rows up to the padded `num_tokens`, layer by layer."""
    return [_judge_layer(inputs, batch, outputs, num_tokens, index) for index in range(len(inputs.layers))]


def _judge_layer(inputs: RigInputs, batch: PagedBatch, outputs: Outputs, num_tokens: int, index: int) -> LayerResult:
    spec, layer, name = inputs.spec, inputs.layers[index], f"layer {index}"
    out_THD, cache = outputs.outs_THD[index][:num_tokens], outputs.caches[index][:, : outputs.loaded.shape[1]]
    query_THD, tolerance = batch.query, TOLERANCE[spec.dtype]
    if outputs.quantizes_queries:
        query_THD, tolerance = rounded_queries(batch.query, layer, spec), FP8_QUERY_TOLERANCE
    common, stored = batch.common, cache.flatten(1, 2)
    query, out = _float64(query_THD), _float64(out_THD)
    lse = _float64(outputs.lses_HT[index][:, :num_tokens]) if outputs.lses_HT else None
    out_error, lse_error, worst = 0.0, 0.0, (tolerance, "")
    for sequence, slots in enumerate(batch.slots):
        tokens = slice(*common.query_start_loc_cpu[sequence : sequence + 2].tolist())
        keys, values = (
            _dequantized(stored[plane][slots], scale) for plane, scale in ((0, layer.k_scale), (1, layer.v_scale))
        )
        expected, expected_lse = dense_attention(query[tokens], keys, values, layer, causal=common.causal)
        size = float(np.linalg.norm(expected)) or 1.0
        errors = (
            float(np.linalg.norm(out[tokens] - expected)) / size if len(slots) else 0.0,
            0.0 if lse is None else _lse_error(lse[:, tokens], expected_lse),
        )
        # np.maximum keeps NaN, which max() may drop.
        out_error, lse_error = np.maximum((out_error, lse_error), errors).tolist()
        error = float(np.maximum(*errors))
        # In this form NaN is worse than any number.
        if not error <= worst[0]:
            lengths = f"{tokens.stop - tokens.start} of {len(slots)} tokens"
            worst = error, f"sequence {sequence} ({lengths}) is off by {error:.1e}, {tolerance:.0e} allowed"
    padding = out_THD[common.num_tokens :]
    untouched = int((padding.view(torch.int16) == POISON).flatten(1).any(1).sum())
    filled = int((padding != 0).flatten(1).any(1).sum())
    dirty = f"{filled} of {len(padding)} hold something other than zeros" if filled and not untouched else ""
    if lse is not None and (lse[:, common.num_tokens :] != -np.inf).any():
        dirty = dirty or "their LSE is not -inf"
    return LayerResult(
        name=name,
        window=layer.window,
        out_error=out_error,
        lse_error=lse_error,
        tolerance=tolerance,
        worst=worst[1],
        problem=_write_problem(spec, layer, batch, outputs.loaded, cache),
        left=f"{untouched} of {len(padding)} were not written" if untouched else "",
        dirty=dirty,
    )


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


def rounded_queries(query_THD: torch.Tensor, layer: AttentionLayer, spec: AttentionSpec) -> torch.Tensor:
    """Return queries as a backend that rounds them to FP8 reads them, in float32."""
    group = spec.num_query_heads // spec.num_kv_heads
    scale_H = None if layer.q_scale is None else layer.q_scale.to(query_THD.device).repeat_interleave(group)
    rounded = quantized(query_THD.float(), scale_H, spec).float()
    return rounded if scale_H is None else rounded * scale_H[:, None]


def _write_problem(
    spec: AttentionSpec, layer: AttentionLayer, batch: PagedBatch, before: torch.Tensor, cache: torch.Tensor
) -> str:
    """Return the fault of the new keys and values in the cache, or of the other slots, or ""."""
    num_tokens, after = batch.common.num_tokens, cache.flatten(1, 2)
    slots = batch.common.slot_mapping[:num_tokens]
    own = slots >= 0
    slots = slots[own]
    for plane, new, scale in ((0, batch.key, layer.k_scale), (1, batch.value, layer.v_scale)):
        expected = quantized(new[:num_tokens][own].float(), scale, spec).double()
        error = float((after[plane][slots].double() - expected).norm() / (expected.norm() or 1.0))
        if not error <= (0.0 if scale is None else _FP8_WRITE_TOLERANCE):
            return f"new {'values' if plane else 'keys'} in the cache are off by {error:.1e}"
    others = torch.ones(after.shape[1], dtype=torch.bool)
    others[slots] = False
    # Compared as bytes, since most of it is NaN.
    got, kept = (one[:, others].contiguous().view(torch.uint8) for one in (after, before.flatten(1, 2)))
    return "" if torch.equal(got, kept) else "the KV write changed slots that were not its own"


def _lse_error(lse: Array, expected: Array) -> float:
    # Where both are -inf they agree; the difference would be NaN.
    apart = lse != expected
    errors = np.abs(lse[apart] - expected[apart]) / np.maximum(1.0, np.abs(expected[apart]))
    return float(errors.max(initial=0.0))


def _dequantized(stored_LKD: torch.Tensor, scale_K: torch.Tensor | None) -> Array:
    return _float64(stored_LKD) * (1.0 if scale_K is None else _float64(scale_K)[:, None])


def _float64(tensor: torch.Tensor) -> Array:
    return tensor.double().cpu().numpy()
