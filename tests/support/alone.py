"""Is attention of a token the same bits alone, in any batch, and in any chunk of a prefill?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from attention_specs import llama

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.attention.backend import AttentionBackend, AttentionCall
from phonograph.attention.metadata import CommonMetadata
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.testing.conformance_batch import make_layer, quantized

LLAMA = llama(block_size=64, lse=False, batch_invariant=True)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"windows": ((99, 0),)},
    "softcap": {"softcap": 20.0},
    "sinks": {"sinks": True},
    "alibi": {"alibi": True},
    "hnd, small blocks": {"layout": KVLayout.HND, "block_size": 16},
    "head size 64": {"head_size": 64, "num_kv_heads": 32},
    "wide groups": {"num_kv_heads": 1},
    "fp8": {"kv_cache_dtype": "float8_e4m3fn"},
}
Piece = tuple[int, int, int]
"""A sequence, and the positions of its queries: first, and behind the last."""


class Sequences:
    """Sequences whose queries, keys and values are all known, the latter in a cache; any parts of them make a batch."""

    def __init__(
        self, backend: type[AttentionBackend], spec: AttentionSpec, lengths: Sequence[int], device: torch.device
    ) -> None:
        self.spec, self.lengths, self.device = spec, lengths, device
        size, self.slots, self.tokens = spec.block_size, len(lengths) + 2, sum(lengths) + 7
        limits = Limits(max_num_seqs=self.slots, max_num_batched_tokens=self.tokens, max_model_len=max(lengths))
        self.backend = backend(spec, device, limits)
        self.builder = self.backend.make_builder()
        generator = torch.Generator().manual_seed(sum(lengths))
        self.layer = make_layer(spec, 0, spec.windows[0], torch.device("cpu"), generator)
        blocks = [-(-length // size) for length in lengths]
        ids = torch.randperm(sum(blocks), generator=generator).split(blocks)
        self.table = torch.zeros(self.slots, max(blocks), dtype=torch.int32)
        for row, own in enumerate(ids):
            self.table[row, : len(own)] = own
        rows = torch.randn(2, sum(blocks) * size, spec.num_kv_heads, spec.head_size, generator=generator)
        cache = torch.stack(
            [quantized(rows[0], self.layer.k_scale, spec), quantized(rows[1], self.layer.v_scale, spec)]
        ).unflatten(1, (-1, size))
        if spec.layout is KVLayout.HND:
            cache = cache.transpose(2, 3).contiguous().transpose(2, 3)
        self.cache = cache.to(device)
        dtype = getattr(torch, spec.dtype)
        heads = spec.num_query_heads, spec.head_size
        self.queries = [torch.randn(length, *heads, generator=generator).to(device, dtype) for length in lengths]
        moved = {
            name: None if tensor is None else tensor.to(device)
            for name in ("alibi_slopes", "sinks", "q_scale", "k_scale", "v_scale")
            for tensor in [getattr(self.layer, name)]
        }
        self.layer = replace(self.layer, **moved)

    def attend(self, pieces: Sequence[Piece], key: GraphKey | None = None) -> list[torch.Tensor]:
        """Return the output [n, H, D] of each piece."""
        slots, padded = (len(pieces), None) if key is None else (key.num_reqs, key.num_tokens)
        query_lens, lens = np.zeros((2, slots), np.int32)
        table = torch.zeros(slots, self.table.shape[1], dtype=torch.int32)
        for row, (seq, first, end) in enumerate(pieces):
            query_lens[row], lens[row], table[row] = end - first, end, self.table[seq]
        starts = np.concatenate([[0], query_lens.cumsum()]).astype(np.int32)
        total, num_tokens = padded or int(starts[-1]), int(starts[-1])
        num_decodes = next((row for row, (_, a, b) in enumerate(pieces) if b - a != 1), len(pieces))
        query = torch.full((total, *self.queries[0].shape[1:]), torch.nan, dtype=self.queries[0].dtype).to(self.device)
        query[:num_tokens] = torch.cat([self.queries[seq][first:end] for seq, first, end in pieces])
        common = CommonMetadata(
            num_reqs=len(pieces),
            num_decodes=num_decodes,
            num_tokens=num_tokens,
            num_decode_tokens=num_decodes,
            max_query_len=int(query_lens.max()),
            max_seq_len=int(lens.max()),
            query_start_loc=torch.from_numpy(starts).to(self.device),
            seq_lens=torch.from_numpy(lens).to(self.device),
            block_table=table.to(self.device),
            slot_mapping=torch.full((total,), -1, device=self.device),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
        )
        out = torch.full_like(query, torch.nan)
        with torch.inference_mode():
            metadata = self.builder.build(common, key=key)
            self.backend.schedule(metadata)
            self.backend.forward(query, AttentionCall(self.layer, self.cache, metadata), out)
        assert bool(out[:num_tokens].isfinite().all())
        return [out[int(a) : int(b)] for a, b in itertools.pairwise(starts[: len(pieces) + 1])]


def batches(lengths: Sequence[int]) -> list[list[Piece]]:
    """Yield the same tokens as decodes, drafts and chunks of every kind, few and all sequences at a time."""
    last = [(seq, length - 1, length) for seq, length in enumerate(lengths)]
    return [
        last,
        last[:2],
        [*last[:1], *((seq, length - min(4, length), length) for seq, length in enumerate(lengths) if seq)],
        [(seq, length // 2, length) for seq, length in enumerate(lengths)],
        [*last[1:], (0, lengths[0] // 3, lengths[0])],
        [(0, max(lengths[0] - 17, 0), lengths[0]), (1, lengths[1] - 1, lengths[1])],
        [(seq, 0, length) for seq, length in enumerate(lengths)],
    ]


def unlike(sequences: Sequences, tried: list[list[Piece]], keys: bool) -> list[list[Piece]]:
    """Return the batches in which a sequence's output differs in any bit from its output alone in one prefill."""
    alone = [sequences.attend([(seq, 0, length)])[0] for seq, length in enumerate(sequences.lengths)]
    found: list[list[Piece]] = []
    for batch in tried:
        decodes = all(end - first == 1 for _, first, end in batch)
        forms: list[GraphKey | None] = [None]
        if keys:
            forms.append(GraphKey(GraphSet.MIXED, sequences.tokens, sequences.slots))
            if decodes:
                forms.append(GraphKey(GraphSet.DECODE, sequences.slots, sequences.slots, 1))
        for key in forms:
            outs = sequences.attend(batch, key)
            if not all(
                torch.equal(out, alone[seq][first:end]) for out, (seq, first, end) in zip(outs, batch, strict=True)
            ):
                found.append(batch)
    return found


def check_real_sizes(backend: type[AttentionBackend], spec: AttentionSpec, device: torch.device, seed: int) -> None:
    """Few long sequences, and many short ones, eager and at the shapes of graphs."""
    rng = np.random.default_rng(seed)
    for count, longest in ((2, 5000), (6, 3000), (62, 300)):
        lengths = [longest, *(int(length) for length in rng.integers(2, longest, count - 1))]
        sequences = Sequences(backend, spec, lengths, device)
        assert not unlike(sequences, batches(lengths), keys=True)
