"""Subject of `graphs.verify`: a runner with random paged batches over a cache of random keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import numpy as np
import torch

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.kv_group import KVGroup
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.verification import Drawn
from phonograph.runner.runner import Runner
from phonograph.runner.step_program import StepOutputs

_NAN_ROWS = "NaN rows, where blocks behind windows are NaN,"
_WRITTEN_SLOTS = "states of no sequence that the step wrote"
# Blocks filled at a time: the cache may leave little free memory.
_BLOCKS_AT_ONCE = 4096
_STATES_COMPARED = 8
"""Sequences of a batch whose states are compared: those of all may take as much memory as is free."""


class RunnerSubject:
    """Collects hidden states, logits, sampled tokens and written keys and values of replays and eager runs.

    It overwrites the whole KV cache, so no request may be in flight.

    Args:
        runner: the runner.
        kv_caches: keys and values of each layer with attention, by its index.
        groups: KV groups.
        states: states by slot, by the index of the layer that has them.
        local_slots: for each group, a function that returns the slots in the pages of this rank, -1 for those of other
            ranks; None where slots are those of the pages.
        poisons_freed: fill the page in the place of blocks behind windows with NaN, so that reading one key too many
            shows.
    """

    def __init__(
        self,
        runner: Runner,
        kv_caches: Mapping[int, torch.Tensor],
        groups: Sequence[KVGroup],
        *,
        states: Mapping[int, tuple[torch.Tensor, ...]] = MappingProxyType({}),
        local_slots: Sequence[Callable[[torch.Tensor], torch.Tensor] | None] = (),
        poisons_freed: bool,
    ) -> None:
        self._runner = runner
        self._groups = groups
        self._local_slots = local_slots or (None,) * len(groups)
        self._kv_caches = kv_caches
        # Layers of several groups view the same tensors.
        self._tensors = list({cache.data_ptr(): cache for cache in kv_caches.values()}.values())
        self._states = [state for of_layer in states.values() for state in of_layer]
        self._device = self._tensors[0].device
        self._state_seed = 0
        self._commons: tuple[CommonMetadata, ...] = ()
        self._poisons_freed = poisons_freed
        self._poisoned: int | None = None
        self._generator = torch.Generator(self._device).manual_seed(0)
        with runner.runtime.scope():
            for cache in self._tensors:
                for blocks in cache.split(_BLOCKS_AT_ONCE, dim=1):
                    self._fill(blocks)

    def graph_keys(self) -> tuple[GraphKey, ...]:
        encoder = self._runner.encoder_keys
        return *self._runner.dispatcher.captures.largest_first(), *(() if encoder is None else encoder.graphs)

    def prepare(self, key: GraphKey, rng: np.random.Generator) -> Drawn:
        if key.graphs is GraphSet.ENCODER:
            return self._draw_audios(key, rng)
        synthetic = self._runner.synthetic
        with torch.inference_mode(), self._runner.runtime.scope():
            self._commons = synthetic.random_batch(key, rng)
            self._state_seed = int(rng.integers(1 << 62))
            freed = synthetic.freed_page if self._poisons_freed else None
            for cache in self._tensors:
                if self._poisoned is not None:
                    self._fill(cache[:, self._poisoned])
                if freed is not None:
                    cache[:, freed] = float("nan")
            self._poisoned = freed
        common = self._commons[0]
        return Drawn(
            num_tokens=common.num_tokens,
            num_decodes=common.num_decodes,
            num_prefills=common.num_reqs - common.num_decodes,
            longest=common.max_seq_len,
            median=int(np.median(common.seq_lens_cpu[: common.num_reqs])),
            prefix=synthetic.latest.prefix_len,
        )

    def replay(self, key: GraphKey) -> dict[str, torch.Tensor]:
        if key.graphs is GraphSet.ENCODER:
            return self._encoded(key, eager=False)
        results = self._results(key, self._runner.replay, poisons=True)
        for index, tables in enumerate(self._runner.synthetic.latest.blocks):
            rows = zip(self._table_read(index), tables, strict=False)
            results[self._name("block table", index)] = torch.cat([row[: len(blocks)] for row, blocks in rows])
        if self._poisoned is not None:
            results[_NAN_ROWS] = results["logits"].isnan().any(-1).sum()
        return results

    def eager(self, key: GraphKey) -> dict[str, torch.Tensor]:
        """Run the batch eagerly.

        Its block tables are those that were drawn, no row may be NaN, and no slot of another sequence may be written.
        """
        if key.graphs is GraphSet.ENCODER:
            return self._encoded(key, eager=True)
        results = self._results(key, self._runner.run_shape, poisons=False)
        device = self._device
        for group, tables in enumerate(self._runner.synthetic.latest.blocks):
            results[self._name("block table", group)] = torch.from_numpy(np.concatenate(tables)).to(device)
        if self._poisoned is not None:
            results[_NAN_ROWS] = torch.zeros((), dtype=torch.int64, device=device)
        if self._states:
            results[_WRITTEN_SLOTS] = torch.zeros((), dtype=torch.int64, device=device)
        return results

    def _results(
        self, key: GraphKey, run: Callable[[GraphKey], StepOutputs], *, poisons: bool
    ) -> dict[str, torch.Tensor]:
        """Run the prepared batch and return all outputs, padded rows included: these must be finite too."""
        runner = self._runner
        assert self._commons, "prepare() comes first"
        with torch.inference_mode(), runner.runtime.scope():
            # No step writes the keys of an encoder.
            places = {index: self._places(index) for index, one in enumerate(self._groups) if not one.encoder_len}
            for index, (blocks, offsets) in places.items():
                for layer in self._groups[index].layers:
                    self._kv_caches[layer][:, blocks, offsets] = float("nan")
            self._fill_states()
            if poisons:
                runner.runtime.poison()
            runner.prepare(self._commons, key)
            outputs = run(key)
            results = {name: tensor.clone() for name, tensor in outputs._asdict().items()}
            results["drafts"] = runner.step_drafts().clone()
            for index, (blocks, offsets) in places.items():
                written = [self._kv_caches[layer][:, blocks, offsets].float() for layer in self._groups[index].layers]
                results[self._name("kv", index)] = torch.stack(written)
            results |= self._state_results()
            # The caller compares them on another stream.
            runner.runtime.synchronize()
            return results

    def _draw_audios(self, key: GraphKey, rng: np.random.Generator) -> Drawn:
        assert self._runner.encoder_keys is not None
        with torch.inference_mode(), self._runner.runtime.scope():
            self._runner.encoder_keys.draw(key.num_reqs, rng)
        each = key.num_tokens // key.num_reqs
        return Drawn(num_tokens=key.num_tokens, num_decodes=0, num_prefills=key.num_reqs, longest=each, median=each)

    def _encoded(self, key: GraphKey, *, eager: bool) -> dict[str, torch.Tensor]:
        runner, keys = self._runner, self._runner.encoder_keys
        assert keys is not None
        run = partial(keys.run, key.num_reqs) if eager else keys.graphs[key].replay
        with torch.inference_mode(), runner.runtime.scope():
            if not eager:
                runner.runtime.poison()
            written = keys.written(key.num_reqs, run)
            runner.runtime.synchronize()
        return {"keys of the encoder": written}

    def _fill_states(self) -> None:
        """Draw the states that sequences with context start from; all others are NaN, which no sequence may read."""
        if not self._states:
            return
        batch = self._runner.synthetic.latest
        assert batch.slots is not None
        places = {slot: slot for slot, context in zip(batch.slots, batch.context_lens, strict=True) if context}
        places |= {one.slot: one.row for one in batch.restored}
        generator = torch.Generator(self._device).manual_seed(self._state_seed)
        for state in self._states:
            state.fill_(float("nan"))
            for place in places.values():
                random = torch.randn(state.shape[1:], dtype=torch.float32, device=self._device, generator=generator)
                state[place].copy_(random)

    def _state_results(self) -> dict[str, torch.Tensor]:
        """Return some of the states that the step wrote, and the number of places of no sequence that changed."""
        if not self._states:
            return {}
        batch = self._runner.synthetic.latest
        assert batch.slots is not None
        written = [*batch.slots, *(one.row for one in batch.saved)]
        step = -(-len(written) // _STATES_COMPARED)
        states = torch.cat([state[written[::step]].float().flatten() for state in self._states])
        used = {*written, *(one.row for one in batch.restored)}
        others = [place for place in range(len(self._states[0])) if place not in used]
        changed = torch.zeros((), dtype=torch.int64, device=self._device)
        for state in self._states:
            for place in others:
                changed += (~state[place].isnan()).any()
        return {"states": states, _WRITTEN_SLOTS: changed}

    def _table_read(self, group: int) -> torch.Tensor:
        """Return the block table that the layers of a group read; of several, one that is not the group's own."""
        expected = self._commons[group].block_table
        layers = (*self._groups[group].layers, *self._groups[group].readers)
        read = (self._runner.block_table(layer) for layer in layers)
        return next((table for table in read if table.data_ptr() != expected.data_ptr()), expected)

    def _places(self, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the page and the offset in it of each new token's keys and values."""
        common, local = self._commons[group], self._local_slots[group]
        size = self._kv_caches[self._groups[group].layers[0]].shape[2]
        slots = common.slot_mapping[: common.num_tokens]
        if local is not None:
            slots = local(slots)
            slots = slots[slots >= 0]
        return slots // size, slots % size

    def _name(self, name: str, group: int) -> str:
        return name if len(self._groups) == 1 else f"{name} of KV group {group}"

    def _fill(self, blocks: torch.Tensor) -> None:
        random = torch.randn(blocks.shape, dtype=torch.float32, device=blocks.device, generator=self._generator)
        blocks.copy_(random)
