"""Attention as the model calls it: KV write and attention of a layer by the backend of its KV group."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from phonograph.attention.backend import AnyBackend, AnyCall, AttentionCall, AttentionLayer
from phonograph.attention.metadata import AttentionMetadata
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.host_arrays import to_device
from phonograph.models.layers.kernel_set import KVTarget
from phonograph.runner.group_builder import plan_sources

# Pages copied at a time, which bounds the memory that this takes.
_COPIED = 16


class StepAttention:
    """The `Attend` of a step program. Any model code may call it, also inside a capture.

    metadata: of each KV group in the step that runs next; set before the step runs
    pieces:   True while a step runs whose capture is split at each call of attention

    Args:
        backends: backend of each KV group; groups of equal attention have the same object.
        layers: parameters of the layers.
        kv_caches: keys and values of each of `layers`.
        slot_mappings: int64 [T] of each group, static: cache slot of each token of the step.
        runtime: calls attention between the pieces of graphs.
        groups: KV group of each of `layers`; None if there is one.
        draft_caches: keys and values of a draft model in the same pages.
    """

    def __init__(
        self,
        backends: Sequence[AnyBackend],
        layers: Sequence[AttentionLayer],
        kv_caches: Sequence[torch.Tensor],
        slot_mappings: Sequence[torch.Tensor],
        runtime: GraphRuntime,
        groups: Sequence[int] | None = None,
        draft_caches: Sequence[torch.Tensor] = (),
    ) -> None:
        self.metadata: Sequence[AttentionMetadata] | None = None
        self.pieces = False
        self.layers = layers
        self._groups = groups or [0] * len(layers)
        # A model may have layers without attention between them.
        self._places = {layer.index: place for place, layer in enumerate(layers)}
        self._backends = backends
        self._planning = list(dict.fromkeys(plan_sources(backends)))
        self._kv_caches, self._draft_caches = kv_caches, draft_caches
        self._slot_mappings = slot_mappings
        self._runtime = runtime

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages, from and to, in all layers, before the step runs; no page is in both places.

        Those of a draft model are copied too, whose passes come after the step.
        """
        device = self._kv_caches[0].device
        # Layers of several groups view the same tensors.
        tensors = {cache.data_ptr(): cache for cache in (*self._kv_caches, *self._draft_caches)}.values()
        for first in range(0, len(copies), _COPIED):
            sources, targets = to_device(torch.tensor(copies[first : first + _COPIED]), device).T
            for cache in tensors:
                # Indices take bytes of any type.
                pages_B = cache.view(torch.uint8) if cache.element_size() == 1 else cache
                pages_B[:, targets] = pages_B[:, sources]

    @property
    def is_barrier(self) -> bool:
        """True if no kernel after `schedule` starts before all those before it in the step have ended."""
        return any(self._backends[group].schedule_is_barrier for group in self._planning)

    def schedule(self) -> None:
        """Compute the attention schedules that all layers of the step share."""
        for group in self._planning:
            self._run_in_piece(group, functools.partial(self._schedule, group))

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor | None, v_TKD: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        """Write keys and values to the cache, if there are any, and attend. Return a new, contiguous [T, H, D].

        Args:
            q_THD: rotated queries; a view is allowed if each head is contiguous.
            k_TKD: rotated keys, likewise; None for a layer that reads another's.
            v_TKD: values, likewise.
            layer: index of the layer.
        """
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        group = self.group(layer)
        if not self._backends[group].clears_padding:
            out_THD.zero_()
        if k_TKD is not None and v_TKD is not None:
            self._run_in_piece(group, functools.partial(self._write, layer), k_TKD, v_TKD)
        self.read(q_THD, layer, out_THD)
        return out_THD

    def kv_cache(self, layer: int) -> torch.Tensor:
        """Return the keys and values of a layer."""
        return self._kv_caches[self._places[layer]]

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        """Return the destination of a layer's keys and values, for a kernel that writes them itself."""
        group, call = self.group(layer), self._call(layer)
        values = call.layer
        return KVTarget(
            *self._backends[group].kv_places(call, self._slot_mappings[group][:num_tokens]),
            values.k_scale,
            values.v_scale,
            self._backends[group].clears_padding,
        )

    def block_table(self, layer: int) -> torch.Tensor:
        """Return the block table that a layer reads in the step that runs next."""
        return self._metadata(self.group(layer)).common.block_table

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        """Attend to the cache, which already has the step's keys and values; write into `out_THD`."""
        if self.pieces:
            self._runtime.eager_call(functools.partial(self._read, layer), q_THD, out_THD)
        else:
            self._read(layer, q_THD, out_THD)

    def _run_in_piece(self, group: int, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Run what pieces of graphs contain, unless the group's backend reads on the host there."""
        if self.pieces and self._backends[group].reads_on_host:
            self._runtime.eager_call(function, *tensors)
        else:
            function(*tensors)

    def _schedule(self, group: int) -> None:
        self._backends[group].schedule(self._metadata(group))

    def _write(self, layer: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        self._backends[self.group(layer)].write_kv(k_TKD, v_TKD, self._call(layer))

    def _read(self, layer: int, q_THD: torch.Tensor, out_THD: torch.Tensor) -> None:
        self._backends[self.group(layer)].forward(q_THD, self._call(layer), out_THD)

    def _call(self, layer: int) -> AnyCall:
        # Created at each call: between pieces `_read` runs again at each replay, with that step's metadata.
        place = self._places[layer]
        return AttentionCall(self.layers[place], self._kv_caches[place], self._metadata(self._groups[place]))

    def group(self, layer: int) -> int:
        return self._groups[self._places[layer]]

    def _metadata(self, group: int) -> AttentionMetadata:
        assert self.metadata is not None, "the step's attention metadata is built before it runs"
        return self.metadata[group]
