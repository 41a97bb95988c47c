"""A slow and obvious stand-in for runner and attention: every sequence keeps all its keys and values, in float64.

States of layers that have them are in slots, of which a sequence takes the last free one.
"""

from __future__ import annotations

import itertools

import torch

from phonograph.models.layers.kernel_set import StepStates
from phonograph.models.transformer import Transformer
from phonograph.runner.pools.state_pool import allocate_state_pool


class DenseSequences:
    """Runs ragged steps of several sequences through a decoder."""

    def __init__(self, decoder: Transformer, *, num_slots: int = 12) -> None:
        self.decoder = decoder
        self.pool = allocate_state_pool(
            decoder.spec.states, num_slots=num_slots, dtype=decoder.dtype, device=decoder.device
        )
        for state in itertools.chain.from_iterable(self.pool.values()):
            state.fill_(torch.nan)
        self.free = [*range(num_slots)]
        self.slots: list[int] = []
        self.lengths: list[int] = []
        self.keys: list[dict[int, torch.Tensor]] = []
        self.values: list[dict[int, torch.Tensor]] = []
        self._step: list[tuple[int, int]] = []

    def add(self, *, prefix_of: int | None = None, prefix_len: int = 0) -> int:
        """Add a sequence; its first `prefix_len` tokens are taken from the cache of another."""
        if prefix_of is None:
            layers = self.decoder.spec.attentions.items()
            for kept in (self.keys, self.values):
                kept.append(
                    {
                        index: torch.empty(0, one.num_kv_heads, one.head_size, dtype=torch.float64)
                        for index, one in layers
                    }
                )
            self.slots.append(self.free.pop() if self.pool else -1)
        else:
            assert not self.pool
            self.keys.append({index: key[:prefix_len].clone() for index, key in self.keys[prefix_of].items()})
            self.values.append({index: value[:prefix_len].clone() for index, value in self.values[prefix_of].items()})
        self.lengths.append(prefix_len)
        return len(self.lengths) - 1

    def step(self, chunks: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
        """Compute logits [tokens, V] for the next tokens of some sequences, given as (sequence, tokens)."""
        self._step = [(sequence, len(tokens)) for sequence, tokens in chunks]
        input_ids = [token for _, tokens in chunks for token in tokens]
        positions = [self.lengths[sequence] + i for sequence, tokens in chunks for i in range(len(tokens))]
        with torch.inference_mode():
            hidden = self.decoder.forward(
                torch.tensor(input_ids), torch.tensor(positions), self._attention, states=self._states()
            )
            logits = self.decoder.logits(hidden)
        for sequence, num_tokens in self._step:
            self.lengths[sequence] += num_tokens
        return list(logits.split([num_tokens for _, num_tokens in self._step]))

    def _states(self) -> StepStates | None:
        if not self.pool:
            return None
        counts = [count for _, count in self._step]
        lens = [self.lengths[sequence] + count for sequence, count in self._step]
        slots = [self.slots[sequence] for sequence, _ in self._step]
        starts = itertools.accumulate(counts, initial=0)
        rows = (torch.tensor([*numbers], dtype=torch.int32) for numbers in (starts, lens, slots))
        return StepStates(*rows, torch.full((3, len(slots)), -1, dtype=torch.int32), self.pool)

    def _attention(
        self, query_THD: torch.Tensor, key_TKD: torch.Tensor | None, value_TKD: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        spec = self.decoder.spec
        attention = spec.layers[layer].attention
        group = attention.num_query_heads // attention.num_kv_heads
        left, right = attention.window
        assert right in (-1, 0)
        out = torch.full(query_THD.shape, torch.nan, dtype=query_THD.dtype)
        start = 0
        for sequence, num_tokens in self._step:
            rows = slice(start, start + num_tokens)
            start += num_tokens
            if key_TKD is not None and value_TKD is not None:
                self.keys[sequence][layer] = torch.cat([self.keys[sequence][layer], key_TKD[rows].double()])
                self.values[sequence][layer] = torch.cat([self.values[sequence][layer], value_TKD[rows].double()])
            source = layer if attention.kv_layer is None else attention.kv_layer
            keys = self.keys[sequence][source].repeat_interleave(group, dim=1)
            values = self.values[sequence][source].repeat_interleave(group, dim=1)
            scores = torch.einsum("thd,lhd->htl", query_THD[rows].double(), keys) * attention.scale
            if attention.softcap:
                scores = attention.softcap * torch.tanh(scores / attention.softcap)
            query_positions = self.lengths[sequence] + torch.arange(num_tokens)[:, None]
            key_positions = torch.arange(len(keys))[None]
            hidden = key_positions > query_positions
            if left >= 0:
                hidden |= key_positions < query_positions - left
            scores = scores.masked_fill(hidden, -torch.inf)
            sinks = self.decoder.weights[layer].mixer.sinks
            if sinks is not None:
                scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, num_tokens, 1)], -1)
            weights = scores.softmax(-1)[..., : len(keys)]
            out[rows] = torch.einsum("htl,lhd->thd", weights, values).to(out.dtype)
        return out
