"""Memory with fixed addresses for one batch at a time, as in the engine, with NaN wherever a batch has no data.

As on a GPU, `prepare` fills the batch's tensors at the head of the step, inside the graph. While a builder runs they
hold something else, and only the host copies are of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.attention.backend import AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey
from phonograph.testing.conformance_batch import FREED_BLOCK, BatchShape, PagedBatch, make_batch, make_layer

POISON = 0x7FAB
"""Bit pattern, repeated in float32: a signalling NaN in float16, bfloat16 and float32, which no arithmetic makes."""
_NAN_BYTE = 0xFF
"""Repeated byte that is NaN in every format of a cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """Places that get NaN: cache slots without a token, padding rows of the inputs, a graph's scratch.

    batch: the batch's tensors describe an empty batch while a builder runs
    """

    cache: bool = True
    padding: bool = True
    scratch: bool = True
    batch: bool = True


ALL_POISON = Poison()


class RigInputs:
    """The persistent tensors of a step with a few layers, on one device. Layers share the batch, not the cache."""

    def __init__(
        self,
        spec: AttentionSpec,
        device: torch.device,
        limits: Limits,
        seed: int,
        windows: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.spec = spec
        self.device = device
        self.limits = limits
        self.generator = torch.Generator().manual_seed(seed)
        first = make_layer(spec, 0, spec.windows[0], device, self.generator)
        windows = windows or (spec.windows if len(spec.windows) > 1 else spec.windows * 2)
        self.layers: list[AttentionLayer] = [
            replace(first, index=index, window=window, scale=first.scale * (1 + 0.1 * index))
            for index, window in enumerate(windows)
        ]
        slots, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self.max_blocks = -(-limits.max_model_len // spec.block_size)
        self._steps = tuple(
            (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
            for shape, dtype in (
                ((slots + 1,), torch.int32),
                ((slots,), torch.int32),
                ((slots, self.max_blocks), torch.int32),
                ((tokens,), torch.int64),
            )
        )
        """Starts, lengths, block table and slots: each as input of kernels, and as staging tensor for `prepare`."""
        heads, kv_heads, size = spec.num_query_heads, spec.num_kv_heads, spec.head_size
        dtype: torch.dtype = getattr(torch, spec.dtype)
        # As in an engine, all three are parts of one projection's rows.
        qkv_THD = torch.zeros(tokens, heads + 2 * kv_heads, size, dtype=dtype, device=device)
        self.query_THD, self.key_TKD, self.value_TKD = qkv_THD.split((heads, kv_heads, kv_heads), 1)
        self._qkv_THD = qkv_THD
        self.caches = [self._new_cache() for _ in self.layers]
        self.outs_THD = [torch.empty(tokens, heads, size, dtype=dtype, device=device) for _ in self.layers]
        self.lses_HT = [torch.empty(heads, tokens, device=device) for _ in self.layers] if spec.lse else None

    def draw(self, shape: BatchShape, key: GraphKey | None) -> PagedBatch:
        """Draw the contents of a batch of these lengths, on the CPU, padded to `key`."""
        if key is not None:
            padded_reqs = key.num_reqs - len(shape.query_lens)
            padded_tokens = key.num_tokens - sum(shape.query_lens)
            shape = replace(shape, padded_reqs=padded_reqs, padded_tokens=padded_tokens)
        layer = self.layers[0]
        on_host = replace(layer, k_scale=_host(layer.k_scale), v_scale=_host(layer.v_scale))
        return make_batch(self.spec, on_host, shape, torch.device("cpu"), self.generator)

    def load(
        self,
        batch: PagedBatch,
        *,
        clears_padding: bool,
        skips_freed: bool = True,
        bounds_lengths: bool = False,
        poison: Poison = ALL_POISON,
    ) -> CommonMetadata:
        """Write a batch where `prepare` reads it; return its metadata, whose tensors the step fills.

        Args:
            batch: the batch.
            clears_padding: False if the caller must zero the padding rows of outputs.
            skips_freed: False if blocks behind windows must be finite.
            bounds_lengths: True if the host's lengths of decodes are upper bounds.
            poison: memory that holds NaN.
        """
        common = batch.common
        width = min(self.max_blocks, common.block_table.shape[1])
        for (_, staged), values in zip(
            self._steps,
            (common.query_start_loc, common.seq_lens, common.block_table[:, :width], common.slot_mapping),
            strict=True,
        ):
            # Entries after the blocks of a sequence point to block 0, which is all NaN.
            staged.zero_()
            staged[tuple(slice(0, size) for size in values.shape)] = values.to(self.device)
        rows = batch.query.shape[0]
        contents = torch.cat([batch.query, batch.key, batch.value], 1)
        self._qkv_THD.fill_(torch.nan if poison.padding else 0.0)
        self._qkv_THD[:rows] = (contents if poison.padding else contents.nan_to_num(0.0)).to(self.device)
        cache = batch.kv_cache.to(self.device)
        if not skips_freed:
            cache = cache.clone()
            cache[:, FREED_BLOCK] = 1.0
        if not poison.cache:
            cache = cache.float().nan_to_num(0.0).to(cache.dtype)
        for target in self.caches:
            target.view(torch.uint8).fill_(_NAN_BYTE if poison.cache else 0)
            target[:, : cache.shape[1]] = cache
        self.loaded = self.caches[0][:, : cache.shape[1]].clone()
        for out_THD in self.outs_THD:
            out_THD.view(torch.int16).fill_(POISON)
            if not clears_padding:
                out_THD[common.num_tokens :] = 0
        sees_keys = torch.zeros(self._qkv_THD.shape[0], dtype=torch.bool)
        sees_keys[: common.num_tokens] = torch.from_numpy(
            np.repeat(common.seq_lens_cpu > 0, np.diff(common.query_start_loc_cpu))
        )
        for lse_HT in self.lses_HT or []:
            lse_HT.view(torch.int16).fill_(POISON)
            lse_HT[:, ~sees_keys] = -torch.inf
        if poison.batch:
            for static, _ in self._steps:
                static.zero_()
        else:
            self.prepare()
        starts, lens, table, slots = (static for static, _ in self._steps)
        num_slots = len(common.seq_lens)
        if bounds_lengths:
            common = self._bounded(common)
        return replace(
            common,
            query_start_loc=starts[: num_slots + 1],
            seq_lens=lens[:num_slots],
            block_table=table[:num_slots],
            slot_mapping=slots[:rows],
        )

    def prepare(self) -> None:
        """Make the batch's tensors from the loaded batch, as the head of a step."""
        for static, staged in self._steps:
            static.copy_(staged)

    def _bounded(self, common: CommonMetadata) -> CommonMetadata:
        """Return metadata whose host lengths of decodes are up to two blocks too long."""
        lens_cpu, decodes = common.seq_lens_cpu.copy(), slice(0, common.num_decodes)
        most = max(self.limits.max_model_len, common.max_seq_len)
        more = torch.randint(0, 2 * self.spec.block_size, (common.num_decodes,), generator=self.generator).numpy()
        lens_cpu[decodes] = (lens_cpu[decodes] + more).clip(max=most)
        longest = int(lens_cpu[: common.num_reqs].max(initial=0))
        return replace(common, seq_lens_cpu=lens_cpu, max_seq_len=max(common.max_seq_len, longest))

    def _new_cache(self) -> torch.Tensor:
        """Return a cache [2, B, S, K, D] in the layout of the spec, with room for the blocks of any drawn batch."""
        spec = self.spec
        # `make_batch` scatters a batch over this number of blocks.
        num_blocks = 2 + 2 * self.limits.max_num_seqs * self.max_blocks
        dtype: torch.dtype = getattr(torch, spec.kv_cache_dtype)
        middle = (spec.block_size, spec.num_kv_heads)
        if spec.layout is KVLayout.HND:
            middle = middle[::-1]
        cache = torch.zeros(2, num_blocks, *middle, spec.head_size, device=self.device).to(dtype)
        return cache if spec.layout is KVLayout.NHD else cache.transpose(2, 3)


def _host(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()
