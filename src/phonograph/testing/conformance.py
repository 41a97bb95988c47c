"""Conformance of a backend: its outputs on batches of difficult shapes, compared with those of the oracle.

It ships with the package, so that authors of other backends can run it:

    results = check_backend(MyBackend, spec, torch.device("cuda"))
    assert all(result.passed for result in results), [str(result) for result in results]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AnyBackend, AttentionCall, AttentionLayer
from phonograph.core.limits import Limits
from phonograph.testing.conformance_batch import (
    BatchShape,
    PagedBatch,
    make_batch,
    make_layer,
    quantized,
    shapes_of,
)
from phonograph.testing.oracle import Array, dense_attention

# Relative errors that rounding explains: the oracle gets the rounded inputs, so what remains is the arithmetic and, in
# half precision, the rounding of weights and of the result.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
# Where a backend rounds queries to FP8 the oracle gets them rounded too. What remains are weights rounded likewise,
# each off by up to 1/16: simulated, a sequence's output is then off by 1.6% on average and by 2.7% at most.
FP8_QUERY_TOLERANCE = 5e-2
# Dividing by a scale or multiplying by its reciprocal may round one FP8 value in many to its neighbour.
_FP8_WRITE_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """Result of one batch in a layer with one window.

    out_error: the largest of its sequences' ||out - oracle|| / ||oracle||
    lse_error: the largest |LSE - oracle| / max(1, |oracle|); 0 where the spec asks for no LSE
    problem:   another fault (padding, the cache), or ""
    """

    name: str
    window: tuple[int, int]
    out_error: float
    lse_error: float
    tolerance: float
    problem: str

    @property
    def passed(self) -> bool:
        # In this form NaN fails.
        return not self.problem and self.out_error <= self.tolerance and self.lse_error <= self.tolerance

    def __str__(self) -> str:
        return (
            f"{'ok' if self.passed else 'FAILED'}: {self.name}, window {self.window}: output {self.out_error:.1e}, LSE "
            f"{self.lse_error:.1e}, tolerance {self.tolerance:.1e} {self.problem}"
        ).rstrip()


def check_backend(
    backend_class: type[AnyBackend],
    spec: AttentionSpec,
    device: torch.device,
    *,
    shapes: Sequence[BatchShape] = (),
    seed: int = 0,
) -> list[CaseResult]:
    """Run each batch shape through a layer of each window of `spec`, which the backend must not refuse.

    Args:
        backend_class: backend to check.
        spec: configuration of the backend.
        device: device of the tensors.
        seed: seed of the contents.
        shapes: those of `shapes_of` for the spec, unless others are given.
    """
    shapes = shapes or shapes_of(spec)
    limits = Limits(
        max_num_seqs=max(len(shape.query_lens) + shape.padded_reqs for shape in shapes),
        max_num_batched_tokens=max(sum(shape.query_lens) + shape.padded_tokens for shape in shapes),
        max_model_len=max(max(shape.seq_lens, default=1) for shape in shapes),
    )
    backend = backend_class(spec, device, limits)
    generator = torch.Generator().manual_seed(seed)
    results: list[CaseResult] = []
    with torch.inference_mode():
        for shape in shapes:
            for index, window in enumerate(spec.windows):
                layer = make_layer(spec, index, window, device, generator)
                results.append(_check(backend, layer, shape, make_batch(spec, layer, shape, device, generator)))
    return results


def _check(backend: AnyBackend, layer: AttentionLayer, shape: BatchShape, batch: PagedBatch) -> CaseResult:
    spec, common = backend.spec, batch.common
    before = batch.kv_cache.clone()
    builder = backend.make_builder()
    metadata = builder.build(common, key=None)
    backend.schedule(metadata)
    call = AttentionCall(layer, batch.kv_cache, metadata)
    backend.write_kv(batch.key, batch.value, call)
    problem = _write_problem(spec, layer, batch, before)
    num_tokens = batch.query.shape[0]
    out_THD = torch.full_like(batch.query, torch.nan)
    if not backend.clears_padding:
        out_THD[common.num_tokens :] = 0
    lse_HT = torch.full((spec.num_query_heads, num_tokens), torch.nan, device=backend.device) if spec.lse else None
    backend.forward(batch.query, call, out_THD, lse_HT)

    out, query = _host(out_THD), _host(batch.query)
    if backend.quantizes_queries:
        query = _host(rounded_queries(batch.query, layer, spec))
    lse = None if lse_HT is None else _host(lse_HT)
    if out[common.num_tokens :].any() or np.isnan(out[common.num_tokens :]).any():
        problem = problem or "rows of no request are not zero"
    if lse is not None and (lse[:, common.num_tokens :] != -np.inf).any():
        problem = problem or "LSE of rows of no request is not -inf"
    cache = batch.kv_cache.flatten(1, 2)
    out_error = lse_error = 0.0
    for index, slots in enumerate(batch.slots):
        tokens = slice(int(common.query_start_loc_cpu[index]), int(common.query_start_loc_cpu[index + 1]))
        keys = _dequantized(cache[0][slots.to(cache.device)], layer.k_scale)
        values = _dequantized(cache[1][slots.to(cache.device)], layer.v_scale)
        expected, expected_lse = dense_attention(query[tokens], keys, values, layer, causal=common.causal)
        size = float(np.linalg.norm(expected))
        # np.maximum keeps NaN, which max() may drop.
        out_error = np.maximum(out_error, np.linalg.norm(out[tokens] - expected) / (size or 1.0))
        if lse is not None:
            lse_error = np.maximum(lse_error, _lse_error(lse[:, tokens], expected_lse))
    return CaseResult(
        name=shape.name,
        window=layer.window,
        out_error=float(out_error),
        lse_error=float(lse_error),
        tolerance=FP8_QUERY_TOLERANCE if backend.quantizes_queries else TOLERANCE[spec.dtype],
        problem=problem,
    )


def rounded_queries(query_THD: torch.Tensor, layer: AttentionLayer, spec: AttentionSpec) -> torch.Tensor:
    """Return queries as a backend that rounds them to FP8 reads them, in float32."""
    group = spec.num_query_heads // spec.num_kv_heads
    scale_H = None if layer.q_scale is None else layer.q_scale.repeat_interleave(group)
    rounded = quantized(query_THD.float(), scale_H, spec).float()
    return rounded if scale_H is None else rounded * scale_H[:, None]


def _write_problem(spec: AttentionSpec, layer: AttentionLayer, batch: PagedBatch, before: torch.Tensor) -> str:
    """Return the fault of the cache after the KV write, or ""."""
    num_tokens = batch.common.num_tokens
    written = batch.common.slot_mapping[:num_tokens]
    after = batch.kv_cache.flatten(1, 2)
    for plane, new, scale in ((0, batch.key, layer.k_scale), (1, batch.value, layer.v_scale)):
        got = after[plane][written].double()
        expected = quantized(new[:num_tokens].float(), scale, spec).double()
        error = float((got - expected).norm() / (expected.norm() or 1.0))
        if not error <= (_FP8_WRITE_TOLERANCE if scale is not None else 0.0):
            return f"the KV write stored {'keys' if plane == 0 else 'values'} with a relative error of {error:.1e}"
    others = torch.ones(after.shape[1], dtype=torch.bool, device=after.device)
    others[written] = False
    # Compared as bytes, since most of it is NaN.
    if not torch.equal(after[:, others].view(torch.uint8), before.flatten(1, 2)[:, others].view(torch.uint8)):
        return "the KV write changed slots that were not its own"
    return ""


def _lse_error(lse: Array, expected: Array) -> float:
    finite = np.isfinite(expected)
    if not np.array_equal(lse[~finite], expected[~finite]):
        return float("nan")
    difference = np.abs(lse[finite] - expected[finite]) / np.maximum(1.0, np.abs(expected[finite]))
    return float(difference.max(initial=0.0))


def _dequantized(stored_LKD: torch.Tensor, scale_K: torch.Tensor | None) -> Array:
    return _host(stored_LKD) * (1.0 if scale_K is None else _host(scale_K)[:, None])


def _host(tensor: torch.Tensor) -> Array:
    return tensor.double().cpu().numpy()
