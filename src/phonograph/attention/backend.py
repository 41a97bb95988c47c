"""Contract of an attention backend.

`Capabilities` says what a backend can run. It is pure: it needs neither the backend's library nor a device, and
selection, the resolver and `explain` read it. `AttentionBackend` runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch

from phonograph.attention.attention_spec import UNBOUNDED, AttentionSpec
from phonograph.attention.metadata import MetadataBuilder, MetadataT
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, Support


class Capabilities(ABC):
    """Declaration of one backend in one version. Pure: no library, no device, no torch work.

    Attributes:
        name: as users write it in `--attention-backend`.
        version: of the kernel family ("2", "3", "4"), or "".
        varies: reason why outputs depend on the batch even if the spec sets `batch_invariant`, or "" if they do not.
        plans_by_lengths: True if the metadata of one KV group serve another of equal attention after `common` is
            replaced, because builder and `schedule` read lengths, but no block table and no slot mapping.
        skips_freed_blocks: True if blocks behind the windows of all queries may hold NaN. Otherwise a kernel may
            multiply their values by weights of 0, so the engine and the conformance suite keep them finite.
        takes_length_bounds: True if the host's lengths of decodes may be upper bounds, as they are while a step that
            verifies drafts is in flight. Otherwise the host must know them before it plans a step.
        takes_ragged_decodes: True if a decode graph may replay queries of different lengths.
    """

    name: str
    version: str = ""
    varies: str = "it does not say that its results are the same in every batch"
    plans_by_lengths: bool = False
    skips_freed_blocks: bool = False
    takes_length_bounds: bool = False
    takes_ragged_decodes: bool = True

    @abstractmethod
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Return every reason why this backend cannot run a configuration; empty if it can.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.
        """

    def why_not(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Return `refusals`, and `varies` if the spec is batch-invariant. Selection uses this list.

        Args:
            spec: as for `refusals`.
            device: as for `refusals`.
        """
        found = self.refusals(spec, device)
        return [*found, f"batch_invariant; {self.varies}"] if spec.batch_invariant and self.varies else found

    @abstractmethod
    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        """Return the graph support level of a configuration, with the reason.

        Args:
            spec: as for `refusals`; the backend does not refuse it.
            device: as for `refusals`.
        """

    def ragged_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        """Return the level of graphs that hold only the prefills of a split batch.

        Override it if a limit of `graph_support` comes from decodes of one token.

        Args:
            spec: as for `graph_support`.
            device: as for `graph_support`.
        """
        return self.graph_support(spec, device)

    def preferred_block_size(self, spec: AttentionSpec) -> tuple[int, str] | None:
        """Return the fastest block size in tokens with the reason, or None for the device's default.

        Args:
            spec: attention of the group, with any block size.
        """
        return None

    def prefix_sharing(self, spec: AttentionSpec, device: DeviceSpec) -> tuple[bool, str]:
        """Return True if decodes attend a prefix that they share once, and the reason.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.
        """
        return False, "each decode reads a shared prefix; with attention_backend decode=triton they attend it once"

    def sharing_graphs(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits) -> int:
        """Return the sequences from which graphs of their own attend shared prefixes faster; 0 for none.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.
            limits: limits of the engine.
        """
        return 0

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        """Return the bytes of device memory that the backend takes for any batch within `limits` and these graphs.

        The KV cache is sized by the rest. A few MB need not be counted.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.
            limits: the largest batch.
            graphs: keys of the graphs to capture.
        """
        return 0

    def missing(self) -> str | None:
        """Return the reason why the backend cannot be loaded in this installation, or None."""
        return None

    @property
    def label(self) -> str:
        """Name and version, as "flash_attn 3"."""
        return f"{self.name} {self.version}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Parameters of one layer. Tensors are float32 on the device.

    Attributes:
        index: number of the layer in the model.
        window: (left, right) as in AttentionSpec.windows.
        scale: factor of the logits before softcap and bias, usually head_size ** -0.5.
        alibi_slopes, sinks: [H], or None.
        k_scale, v_scale: [K], descale factors of an FP8 cache, or None for 1.
        q_scale: [K], descale factors of FP8 queries, for backends with `quantizes_queries`.
    """

    index: int
    scale: float
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_scale: torch.Tensor | None = None


class AttentionCall(NamedTuple, Generic[MetadataT]):
    """One layer in one step.

    Attributes:
        kv_cache: [2, B, S, K, D] (keys, values). The shape is the same for both layouts; HND has permuted strides.
        metadata: of the step, from the backend's builder.
    """

    layer: AttentionLayer
    kv_cache: torch.Tensor
    metadata: MetadataT


class AttentionBackend(ABC, Generic[MetadataT]):
    """Attention of the KV groups with one spec. One instance serves all their layers.

    Host work in `forward` counts: with piecewise graphs it runs for every layer of every step.

    Attributes:
        clears_padding: True if `forward` writes zeros to output rows of no request. If False, the caller has zeroed
            them before, and `forward` leaves them alone.
        quantizes_queries: True if `forward` divides queries by the layer's q_scale and rounds them to the dtype of an
            FP8 cache, because its kernels take queries, keys and values of one dtype.
        only_triton: True if it launches Triton kernels only. A run without launches then finds all kernels to
            compile, and the conformance suite compiles them in parallel.
        reads_on_host: True if `schedule` or `write_kv` copies the batch's numbers to the host, which no capture allows.
            Piecewise graphs then contain neither, as they never contain `forward`. Full graphs need `NEVER`.
        schedule_is_barrier: True if each `schedule` launches a kernel that no later one starts before the end of.

    The guide `docs/guides/writing-a-backend.md` has a complete backend of 70 lines and a step by all methods;
    `examples/out_of_tree_backend` has windows, softcap and the LSE.
    """

    capabilities: Capabilities
    clears_padding: bool = True
    quantizes_queries: bool = False
    only_triton: bool = False
    reads_on_host: bool = False
    schedule_is_barrier: bool = False

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: Limits) -> None:
        self.spec = spec
        self.device = device
        self.limits = limits

    @abstractmethod
    def make_builder(self) -> MetadataBuilder[MetadataT]:
        """Make the builder of this backend's metadata. The runner calls it once for each KV group with its own plan."""

    @abstractmethod
    def schedule(self, metadata: MetadataT) -> None:
        """Compute what all layers of a step share, from the contents of the batch's tensors.

        The runner calls it once at the head of every step, inside the graph, so it must be as capturable as `forward`
        (but see `reads_on_host`).

        Args:
            metadata: of the step, from the builder.
        """

    @abstractmethod
    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[MetadataT]) -> None:
        """Write new keys and values to their slots (block id * block size + offset). Slot -1 writes nothing.

        The slot mapping may be shorter than the keys; the rows behind it are padding. Piecewise graphs contain this
        call (but see `reads_on_host`), and not `forward`.

        Args:
            key_TKD: rotated keys.
            value_TKD: values.
            call: layer, cache and metadata.
        """

    def kv_places(
        self, call: AttentionCall[MetadataT], slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cache and the slots for a kernel that writes keys and values in place of `write_kv`.

        Args:
            call: layer, cache and metadata.
            slot_mapping: slots of the step's tokens.
        """
        return call.kv_cache, slot_mapping

    @abstractmethod
    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[MetadataT],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        """Attend each query to the keys of its sequence in the cache, the new ones included.

        Rows behind the last query get zeros (and LSE -inf), but see `clears_padding`. Rows before the first query
        belong to another launch.

        Args:
            query_THD: rotated queries.
            call: layer, cache and metadata.
            out_THD: where the output goes.
            lse_HT: where the LSE goes: float32, natural logarithm, sinks included. The caller has filled it with minus
                infinity, which queries without keys keep; their outputs may be anything.
        """


AnyBackend = AttentionBackend[Any]
"""A backend whose metadata the caller only passes on."""
AnyCall = AttentionCall[Any]
"""A call whose metadata the caller only passes on."""
MakeBackend = Callable[[AttentionSpec, torch.device, Limits], AnyBackend]
"""A backend's class, or another callable that makes a backend."""
