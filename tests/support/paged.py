"""A backend's tensors stay where they are while batches of any lengths pass through them, as in the engine.

Memory that no kernel may read is NaN before every run, and so are outputs and scratch. Contents are drawn on the
device, and results compared there with attention from its definition in float64, so that large batches take
milliseconds.

Shapes: T tokens, R slots, H query heads, K KV heads, G = H / K, D head size, B blocks, S block size, L keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionCall, AttentionLayer, MakeBackend
from phonograph.attention.metadata import AttentionMetadata, CommonMetadata
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.testing.conformance_batch import make_layer, quantized
from phonograph.testing.judge import FP8_QUERY_TOLERANCE, rounded_queries

Batch = Sequence[tuple[int, int]]
"""(query length, keys) of each sequence, decodes first."""

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
_FP8_WRITE_TOLERANCE = 1e-2
_MAX_LOGITS = 1 << 24
_NAN_BYTE = 255
"""NaN in every floating dtype, if all bytes of a number are this."""


class Arena:
    """One layer for each window of `spec` (their parameters are the same), and the tensors of any batch for them.

    Args:
        num_blocks: block 0 is never a sequence's: tables lead to it behind their ends.
        first_block: the lowest id that sequences may get.
    """

    def __init__(
        self,
        backend_class: MakeBackend,
        spec: AttentionSpec,
        device: torch.device,
        *,
        causal: bool,
        num_reqs: int,
        num_tokens: int,
        num_blocks: int,
        max_keys: int,
        first_block: int = 1,
        seed: int = 0,
    ) -> None:
        self.spec, self.device, self.causal = spec, device, causal
        self.num_reqs, self.num_tokens = num_reqs, num_tokens
        self.generator = torch.Generator(device).manual_seed(seed)
        self.rng = np.random.default_rng(seed)
        self.free = np.arange(first_block, num_blocks)
        limits = Limits(max_num_seqs=num_reqs, max_num_batched_tokens=num_tokens, max_model_len=max_keys)
        self.backend = backend_class(spec, device, limits)
        self.builder = self.backend.make_builder()
        layer = make_layer(spec, 0, spec.windows[0], device, torch.Generator().manual_seed(seed))
        self.layers = [replace(layer, index=index, window=window) for index, window in enumerate(spec.windows)]

        heads, kv_heads, dim = spec.num_query_heads, spec.num_kv_heads, spec.head_size
        dtype = getattr(torch, spec.dtype)
        # As in the engine: views of the fused projections.
        self.fused = torch.empty(num_tokens, (heads + 2 * kv_heads) * dim, dtype=dtype, device=device)
        rows_THD = self.fused.unflatten(1, (-1, dim))
        self.query, self.key, self.value = rows_THD.split([heads, kv_heads, kv_heads], 1)
        kv_dtype = getattr(torch, spec.kv_cache_dtype)
        if spec.layout.value == "NHD":
            self.cache = torch.empty(2, num_blocks, spec.block_size, kv_heads, dim, dtype=kv_dtype, device=device)
        else:
            cache = torch.empty(2, num_blocks, kv_heads, spec.block_size, dim, dtype=kv_dtype, device=device)
            self.cache = cache.transpose(2, 3)
        self.bytes = self.cache.view(torch.uint8)
        # A row of outputs behind those of the batch, which nothing may write.
        self.outs = [torch.empty(num_tokens + 1, heads, dim, dtype=dtype, device=device) for _ in self.layers]
        self.lses = [torch.empty(heads + 1, num_tokens, device=device) if spec.lse else None for _ in self.layers]
        self.starts = torch.zeros(num_reqs + 1, dtype=torch.int32, device=device)
        self.lens = torch.zeros(num_reqs, dtype=torch.int32, device=device)
        self.table = torch.zeros(num_reqs, -(-max_keys // spec.block_size) + 2, dtype=torch.int32, device=device)
        self.slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=device)

    def check(self, batch: Batch, graph: torch.cuda.CUDAGraph | None = None, *, prefix_len: int | None = None) -> float:
        """Run the batch eagerly, and in the graph if there is one; return the largest relative error of both.

        prefix_len: tokens that all sequences have in the same blocks

        Raises:
            AssertionError: an error above the tolerance, or something written that should not be, or not written.
        """
        common = self.fill(batch, prefix_len)
        before = self.bytes.clone()
        self.poison()
        self.run(self.builder.build(common, key=None))
        self._check_cache(before)
        references = [self._references(layer) for layer in self.layers]
        error = self._check_outputs(references)
        if batch:
            self.bytes.copy_(before)
            self.poison()
            self.run_unpadded(common)
            error = max(error, self._check_outputs(references))
        if graph is not None:
            written = self.bytes.clone()
            self.bytes.copy_(before)
            self.poison()
            self.builder.build(common, key=self.captured)
            graph.replay()
            assert torch.equal(self.bytes, written), "the graph left another cache"
            error = max(error, self._check_outputs(references))
        return error

    def capture(
        self, batch: Batch, key: GraphKey | None = None, *, prefix_len: int | None = None
    ) -> torch.cuda.CUDAGraph:
        """Return the graph of `key`, or of any batch, captured on this one."""
        key = key or GraphKey(GraphSet.MIXED, self.num_tokens, self.num_reqs)
        self.captured = key
        metadata = self.builder.build(self.fill(batch, prefix_len), key=key)
        self.poison()
        self.run(metadata)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(metadata)
        return graph

    def run(self, metadata: AttentionMetadata) -> None:
        self.plans = getattr(metadata, "plans", {})
        self.backend.schedule(metadata)
        self.backend.write_kv(self.key, self.value, AttentionCall(self.layers[0], self.cache, metadata))
        for layer, out, lse in zip(self.layers, self.outs, self.lses, strict=True):
            lse_HT = None if lse is None else lse[:-1]
            call = AttentionCall(layer, self.cache, metadata)
            self.backend.forward(self.query, call, out[: self.num_tokens], lse_HT)

    def run_unpadded(self, common: CommonMetadata) -> None:
        """Run the batch as the engine does eagerly, with as many slots and rows as sequences and tokens."""
        slots, end = len(self.batch), self.end
        metadata = self.builder.build(
            replace(
                common,
                query_start_loc=common.query_start_loc[: slots + 1],
                seq_lens=common.seq_lens[:slots],
                block_table=common.block_table[:slots],
                slot_mapping=common.slot_mapping[:end],
                query_start_loc_cpu=common.query_start_loc_cpu[: slots + 1],
                seq_lens_cpu=common.seq_lens_cpu[:slots],
            ),
            key=None,
        )
        self.backend.schedule(metadata)
        self.backend.write_kv(self.key[:end], self.value[:end], AttentionCall(self.layers[0], self.cache, metadata))
        for layer, out, lse in zip(self.layers, self.outs, self.lses, strict=True):
            out[end : self.num_tokens] = 0
            lse_HT = None if lse is None else torch.full_like(lse[:-1, :end], torch.nan).contiguous()
            self.backend.forward(self.query[:end], AttentionCall(layer, self.cache, metadata), out[:end], lse_HT)
            if lse is not None and lse_HT is not None:
                lse[:-1, :end] = lse_HT

    def poison(self) -> None:
        for out in self.outs:
            out.fill_(torch.nan)
        for lse in self.lses:
            if lse is not None:
                lse.fill_(torch.nan)
                lse[:-1, self.end :] = -torch.inf
        if not self.backend.clears_padding:
            for out in self.outs:
                out[self.end : self.num_tokens] = 0
        for plans in getattr(self, "plans", {}).values():
            for plan in plans:
                plan.partial_out.fill_(torch.nan)
                plan.partial_lse.fill_(torch.nan)
                levels = getattr(plan, "levels", None)
                for tensor in () if levels is None else (levels.out, levels.lse):
                    tensor.fill_(torch.nan)

    def fill(self, batch: Batch, prefix_len: int | None = None) -> CommonMetadata:
        """Draws contents for the batch, the context of each sequence already in the cache."""
        spec, size = self.spec, self.spec.block_size
        assert len(batch) <= self.num_reqs
        query_lens, lens = np.zeros((2, self.num_reqs), np.int32)
        if batch:
            query_lens[: len(batch)], lens[: len(batch)] = np.array(batch, np.int32).T
        starts = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
        self.batch, self.end = list(batch), int(starts[-1])
        assert self.end <= self.num_tokens

        shared, blocks = np.split(self.rng.permutation(self.free), [(prefix_len or 0) // size])
        table = np.zeros(self.table.shape, np.int32)
        keys: list[np.ndarray] = []
        for row, (_, length) in enumerate(batch):
            count = -(-length // size)
            own, blocks = np.split(blocks, [count - len(shared)])
            own = np.concatenate([shared, own])
            assert len(own) == count
            table[row, :count] = own
            keys.append((own[:, None] * size + np.arange(size)).ravel()[:length])
        nothing = np.zeros(0, np.int64)
        context = np.concatenate([nothing, *(own[: len(own) - n] for own, (n, _) in zip(keys, batch, strict=True))])
        new = np.concatenate([nothing, *(own[len(own) - n :] for own, (n, _) in zip(keys, batch, strict=True))])
        self.keys = [torch.from_numpy(own).to(self.device) for own in keys]
        self.new = torch.from_numpy(new).to(self.device)

        self.bytes.fill_(_NAN_BYTE)
        rows = self._randn(2, len(context), spec.num_kv_heads, spec.head_size)
        at = torch.from_numpy(context).to(self.device)
        for plane, scale in enumerate((self.layers[0].k_scale, self.layers[0].v_scale)):
            self.bytes[plane, at // size, at % size] = quantized(rows[plane], scale, spec).view(torch.uint8)
        self.fused.fill_(torch.nan)
        self.fused[: self.end] = self._randn(self.end, self.fused.shape[1]).to(self.fused.dtype)
        self.slots.fill_(-1)
        self.slots[: self.end] = self.new
        for tensor, array in ((self.starts, starts), (self.lens, lens), (self.table, table)):
            tensor.copy_(torch.from_numpy(array))
        num_decodes = next((row for row, (length, _) in enumerate(batch) if length != 1), len(batch))
        return CommonMetadata(
            num_reqs=len(batch),
            num_decodes=num_decodes,
            num_tokens=self.end,
            num_decode_tokens=num_decodes,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(lens.max()),
            query_start_loc=self.starts,
            seq_lens=self.lens,
            block_table=self.table,
            slot_mapping=self.slots,
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
            causal=self.causal,
        )

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator)

    def _stored(self, plane: int, slots: torch.Tensor, scale_K: torch.Tensor | None) -> torch.Tensor:
        """Rows of the cache [N, K, D] in float64."""
        size = self.spec.block_size
        rows = self.bytes[plane, slots // size, slots % size].view(self.cache.dtype).double()
        return rows if scale_K is None else rows * scale_K[:, None].double()

    def _check_cache(self, before: torch.Tensor) -> None:
        """Check that new keys and values are in place, and that everything else is unchanged."""
        size, layer = self.spec.block_size, self.layers[0]
        for plane, rows, scale in ((0, self.key, layer.k_scale), (1, self.value, layer.v_scale)):
            expected = quantized(rows[: self.end].float(), scale, self.spec).double()
            if scale is not None:
                expected *= scale[:, None]
            difference = (self._stored(plane, self.new, scale) - expected).norm()
            limit = 0.0 if scale is None else _FP8_WRITE_TOLERANCE
            assert bool(difference <= limit * expected.norm()), f"plane {plane} of the cache"
        after = self.bytes.clone()
        at = self.new // size, self.new % size
        after[:, at[0], at[1]] = before[:, at[0], at[1]]
        assert torch.equal(after, before), "the KV write changed slots that were not its own"

    def _references(self, layer: AttentionLayer) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for (query_len, _), slots in zip(self.batch, self.keys, strict=True):
            query = self.query[start : start + query_len]
            query = (rounded_queries(query, layer, self.spec) if self.backend.quantizes_queries else query).double()
            start += query_len
            keys, values = (
                self._stored(plane, slots, scale) for plane, scale in enumerate((layer.k_scale, layer.v_scale))
            )
            found.append(attend(query, keys, values, layer, causal=self.causal))
        return found

    def _check_outputs(self, references: list[list[tuple[torch.Tensor, torch.Tensor]]]) -> float:
        largest = 0.0
        tolerance = FP8_QUERY_TOLERANCE if self.backend.quantizes_queries else TOLERANCE[self.spec.dtype]
        for layer, out, lse, expected in zip(self.layers, self.outs, self.lses, references, strict=True):
            where = f"window {layer.window}, batch {self.batch}"
            assert bool(out[self.num_tokens :].isnan().all()), f"written behind the output: {where}"
            assert not bool(out[self.end : self.num_tokens].any()), f"rows of no request are not zero: {where}"
            errors, lse_errors = [torch.zeros((), dtype=torch.float64, device=self.device)], []
            start = 0
            for (query_len, _), (wanted, wanted_lse) in zip(self.batch, expected, strict=True):
                rows = slice(start, start + query_len)
                start += query_len
                norm = wanted.norm()
                errors.append((out[rows].double() - wanted).norm() / torch.where(norm > 0, norm, 1.0))
                if lse is not None:
                    got = lse[:-1, rows].double()
                    difference = (got - wanted_lse).abs() / wanted_lse.abs().clamp(min=1.0)
                    lse_errors.append(torch.where(got == wanted_lse, 0.0, difference).max())
            error = float(torch.stack(errors).max())
            assert error <= tolerance, f"relative error {error:.2e}: {where}"
            if lse is not None:
                assert bool(lse[-1].isnan().all()), f"written behind the LSE: {where}"
                assert bool((lse[:-1, self.end :] == -torch.inf).all()), f"LSE of rows of no request: {where}"
                if lse_errors:
                    lse_error = float(torch.stack(lse_errors).max())
                    assert lse_error <= tolerance, f"error of the LSE {lse_error:.2e}: {where}"
            largest = max(largest, error)
        return largest


def attend(
    query_THD: torch.Tensor, keys_LKD: torch.Tensor, values_LKD: torch.Tensor, layer: AttentionLayer, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one sequence from its definition, in the dtype of its inputs: output [T, H, D] and LSE [H, T]."""
    num_tokens, heads, _ = query_THD.shape
    length, kv_heads, _ = keys_LKD.shape
    group = heads // kv_heads
    outs, lses = [], []
    step = max(1, _MAX_LOGITS // (heads * max(length, 1)))
    for first in range(0, num_tokens, step):
        query_TKGD = query_THD[first : first + step].unflatten(1, (kv_heads, group))
        logits_HTL = torch.einsum("tkgd,lkd->kgtl", query_TKGD, keys_LKD).flatten(0, 1) * layer.scale
        if layer.softcap:
            logits_HTL = layer.softcap * torch.tanh(logits_HTL / layer.softcap)
        key = torch.arange(length, device=query_THD.device)[None, :]
        rows = torch.arange(first, first + len(query_TKGD), device=query_THD.device)
        position = (length - num_tokens + rows)[:, None]
        if layer.alibi_slopes is not None:
            logits_HTL += layer.alibi_slopes.to(logits_HTL.dtype)[:, None, None] * (key - position)
        left, right = layer.window
        hidden = key > position if causal else torch.zeros_like(key > position)
        hidden = hidden | (key < position - left) if left >= 0 else hidden
        hidden = hidden | (key > position + right) if right >= 0 else hidden
        logits_HTL.masked_fill_(hidden, -torch.inf)
        lse_HT = logits_HTL.logsumexp(2)
        if layer.sinks is not None:
            lse_HT = torch.logaddexp(lse_HT, layer.sinks.to(lse_HT.dtype)[:, None])
        weights_HTL = torch.exp(logits_HTL - torch.where(lse_HT.isinf(), 0.0, lse_HT)[:, :, None])
        out = torch.einsum("kgtl,lkd->tkgd", weights_HTL.unflatten(0, (kv_heads, group)), values_LKD)
        outs.append(out.flatten(1, 2))
        lses.append(lse_HT)
    return torch.cat(outs), torch.cat(lses, 1)
