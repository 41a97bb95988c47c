"""Rig that runs a backend as the engine does: metadata before each run, schedule and all layers in one graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.attention.backend import AnyBackend, AttentionCall, MakeBackend
from phonograph.attention.metadata import AnyBuilder, AttentionMetadata
from phonograph.graphs.cuda import CudaRuntime
from phonograph.graphs.modes import GraphKey
from phonograph.graphs.runtime import CapturedGraph, GraphRuntime
from phonograph.graphs.tape.tape import TapeRuntime
from phonograph.testing.conformance_batch import PagedBatch
from phonograph.testing.inputs import ALL_POISON, Poison, RigInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Copies of the results of a run, by layer: outputs [T, H, D] and LSE [H, T], padding included, and the caches.

    loaded: the cache before the run, equal in all layers
    """

    outs_THD: list[torch.Tensor]
    lses_HT: list[torch.Tensor]
    caches: list[torch.Tensor]
    loaded: torch.Tensor
    quantizes_queries: bool


class Rig:
    """A new backend and a new builder, with the graphs captured so far."""

    def __init__(self, make: MakeBackend, inputs: RigInputs) -> None:
        self.inputs = inputs
        self.backend: AnyBackend = make(inputs.spec, inputs.device, inputs.limits)
        self.builder: AnyBuilder = self.backend.make_builder()
        # Backends from before the attribute clear their padding.
        self.clears_padding = bool(getattr(self.backend, "clears_padding", True))
        self.runtime: GraphRuntime = CudaRuntime(inputs.device) if inputs.device.type == "cuda" else TapeRuntime()
        self._graphs: dict[GraphKey, CapturedGraph] = {}
        if inputs.device.type == "cuda":
            # The inputs may still be in use on the stream of another rig.
            torch.cuda.synchronize(inputs.device)

    def build(self, batch: PagedBatch, key: GraphKey | None, poison: Poison = ALL_POISON) -> AttentionMetadata:
        """Load a batch and build its metadata."""
        capabilities = self.backend.capabilities
        with torch.inference_mode(), self.runtime.scope():
            common = self.inputs.load(
                batch,
                clears_padding=self.clears_padding,
                skips_freed=capabilities.skips_freed_blocks,
                bounds_lengths=capabilities.takes_length_bounds,
                poison=poison,
            )
            return self.builder.build(common, key=key)

    def capture(self, key: GraphKey, batch: PagedBatch) -> AttentionMetadata:
        """Capture `key` on a batch of its shape; on a GPU after one eager run, which loads the kernels.

        Raises:
            CaptureError: the backend did something that cannot be captured.
        """
        if self.inputs.device.type == "cuda":
            self._run(key, batch, ALL_POISON)
        metadata = self.build(batch, key)

        def step() -> tuple[torch.Tensor, ...]:
            self._step(metadata, key.num_tokens)
            return tuple(self.inputs.outs_THD)

        self._graphs[key] = self.runtime.capture(step)
        return metadata

    def replay(self, key: GraphKey, batch: PagedBatch, poison: Poison = ALL_POISON) -> Outputs:
        """Replay the graph of `key` on another batch. All memory that it must write holds NaN before."""
        # Held until the replay is done, as the engine holds it.
        metadata = self.build(batch, key, poison)
        with torch.inference_mode(), self.runtime.scope():
            if poison.scratch:
                self.runtime.poison()
            self._graphs[key].replay()
            del metadata
            return self._outputs()

    def eager(self, key: GraphKey | None, batch: PagedBatch, poison: Poison = ALL_POISON) -> Outputs:
        """Run a batch without a graph, at the padded shape of `key`."""
        self._run(key, batch, poison)
        with torch.inference_mode(), self.runtime.scope():
            return self._outputs()

    def _run(self, key: GraphKey | None, batch: PagedBatch, poison: Poison) -> None:
        metadata = self.build(batch, key, poison)
        with torch.inference_mode(), self.runtime.scope():
            self._step(metadata, batch.query.shape[0])

    def _step(self, metadata: AttentionMetadata, num_tokens: int) -> None:
        inputs = self.inputs
        inputs.prepare()
        self.backend.schedule(metadata)
        rows = slice(0, num_tokens)
        for index, layer in enumerate(inputs.layers):
            call = AttentionCall(layer, inputs.caches[index], metadata)
            self.backend.write_kv(inputs.key_TKD[rows], inputs.value_TKD[rows], call)
            lse_HT = None if inputs.lses_HT is None else inputs.lses_HT[index][:, rows]
            self.backend.forward(inputs.query_THD[rows], call, inputs.outs_THD[index][rows], lse_HT)

    def _outputs(self) -> Outputs:
        inputs = self.inputs
        copies = Outputs(
            outs_THD=[out_THD.to("cpu", copy=True) for out_THD in inputs.outs_THD],
            lses_HT=[lse_HT.to("cpu", copy=True) for lse_HT in inputs.lses_HT or []],
            caches=[cache.to("cpu", copy=True) for cache in inputs.caches],
            loaded=inputs.loaded.to("cpu", copy=True),
            quantizes_queries=bool(getattr(self.backend, "quantizes_queries", False)),
        )
        self.runtime.synchronize()
        return copies
