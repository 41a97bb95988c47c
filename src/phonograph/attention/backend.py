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

    Example:
        ```python
        from phonograph.attention.triton.capabilities import TritonCapabilities
        from phonograph.core.device import known_device
        from phonograph.graphs.modes import GraphSupport

        spec = AttentionSpec(
            num_query_heads=32, num_kv_heads=8, head_size=64, dtype="float16", kv_cache_dtype="float16", block_size=16
        )
        device, capabilities = known_device("h200"), TritonCapabilities()
        assert capabilities.label == "triton"
        ```

        Examples of the methods continue this one.
    """

    name: str
    version: str = ""
    varies: str = "it does not say that its results are the same in every batch"

    @abstractmethod
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Return every reason why this backend cannot run a configuration; empty if it can.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.

        Example:
            ```python
            assert not capabilities.refusals(spec, device)
            for reason in capabilities.refusals(spec, known_device("cpu")):
                print(reason)
            ```
        """

    def why_not(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Return `refusals`, and `varies` if the spec is batch-invariant. Selection uses this list.

        Args:
            spec: as for `refusals`.
            device: as for `refusals`.

        Example:
            ```python
            from dataclasses import replace

            assert not capabilities.why_not(replace(spec, batch_invariant=True), device)
            ```
        """
        found = self.refusals(spec, device)
        return [*found, f"batch_invariant; {self.varies}"] if spec.batch_invariant and self.varies else found

    @abstractmethod
    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        """Return the graph support level of a configuration, with the reason.

        Args:
            spec: as for `refusals`; the backend does not refuse it.
            device: as for `refusals`.

        Example:
            ```python
            support = capabilities.graph_support(spec, device)
            assert support.level is GraphSupport.ALWAYS and support.reason
            ```
        """

    def ragged_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        """Return the level of graphs that hold only the prefills of a split batch.

        Override it if a limit of `graph_support` comes from decodes of one token.

        Args:
            spec: as for `graph_support`.
            device: as for `graph_support`.

        Example:
            ```python
            assert capabilities.ragged_support(spec, device).level is GraphSupport.ALWAYS
            ```
        """
        return self.graph_support(spec, device)

    def preferred_block_size(self, spec: AttentionSpec) -> tuple[int, str] | None:
        """Return the fastest block size in tokens with the reason, or None for the device's default.

        Args:
            spec: attention of the group, with any block size.

        Example:
            ```python
            assert capabilities.preferred_block_size(spec) is None
            ```
        """
        return None

    def buffer_bytes(self, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
        """Return the bytes of device memory that the backend takes for any batch within `limits` and these graphs.

        The KV cache is sized by the rest. A few MB need not be counted.

        Args:
            spec: attention of the group.
            device: device, which need not be in this machine.
            limits: the largest batch.
            graphs: keys of the graphs to capture.

        Example:
            ```python
            limits = Limits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=131072)
            print(capabilities.buffer_bytes(spec, device, limits, graphs=[]))
            ```
        """
        return 0

    def missing(self) -> str | None:
        """Return the reason why the backend cannot be loaded in this installation, or None.

        Example:
            ```python
            if reason := capabilities.missing():
                print(reason)
            ```
        """
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
    """Attention of one KV group. One instance serves all its layers.

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

    The guide `docs/guides/writing-a-backend.md` has a complete backend of 70 lines, `examples/out_of_tree_backend` one
    with windows, softcap and the LSE.

    Example:
        A step of two requests in one layer: a decode with 8 tokens in the cache, and a prefill of 3 tokens.

        ```python
        import numpy as np

        from phonograph.attention.metadata import CommonMetadata
        from phonograph.attention.reference.backend import ReferenceBackend

        spec = AttentionSpec(
            num_query_heads=4, num_kv_heads=2, head_size=64, dtype="float32", kv_cache_dtype="float32", block_size=16
        )
        limits = Limits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64)
        backend = ReferenceBackend(spec, torch.device("cpu"), limits)
        starts, lens = np.array([0, 1, 4], dtype=np.int32), np.array([9, 3], dtype=np.int32)
        batch = CommonMetadata(
            num_reqs=2,
            num_decodes=1,
            num_tokens=4,
            num_decode_tokens=1,
            max_query_len=3,
            max_seq_len=9,
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lens),
            block_table=torch.tensor([[1], [2]], dtype=torch.int32),
            slot_mapping=torch.tensor([24, 32, 33, 34]),
            query_start_loc_cpu=starts,
            seq_lens_cpu=lens,
        )
        builder = backend.make_builder()
        metadata = builder.build(batch, key=None)  # None: an eager step.
        call = AttentionCall(
            layer=AttentionLayer(index=0, scale=64**-0.5),
            kv_cache=torch.zeros(2, 4, 16, 2, 64),
            metadata=metadata,
        )
        query, key, value = torch.randn(4, 4, 64), torch.randn(4, 2, 64), torch.randn(4, 2, 64)
        output = torch.empty_like(query)
        backend.schedule(metadata)
        backend.write_kv(key, value, call)
        backend.forward(query, call, output)
        ```

        Examples of the methods continue this one.
    """

    capabilities: Capabilities
    clears_padding: bool = True
    quantizes_queries: bool = False
    only_triton: bool = False
    reads_on_host: bool = False

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: Limits) -> None:
        self.spec = spec
        self.device = device
        self.limits = limits

    @abstractmethod
    def make_builder(self) -> MetadataBuilder[MetadataT]:
        """Make the builder of this backend's metadata. The runner calls it once.

        Example:
            ```python
            builder = backend.make_builder()
            metadata = builder.build(batch, key=None)
            ```
        """

    @abstractmethod
    def schedule(self, metadata: MetadataT) -> None:
        """Compute what all layers of a step share, from the contents of the batch's tensors.

        The runner calls it once at the head of every step, inside the graph, so it must be as capturable as `forward`
        (but see `reads_on_host`).

        Args:
            metadata: of the step, from the builder.

        Example:
            ```python
            lens[1] += 1  # The tensor of the batch reads the same memory.
            starts[2] += 1
            backend.schedule(metadata)
            ```
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

        Example:
            ```python
            backend.write_kv(key, value, call)
            assert call.kv_cache[0, 1, 8].equal(key[0])  # Slot 24 is place 8 of block 1.
            ```
        """

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
            lse_HT: where the LSE goes: float32, natural logarithm, sinks included.

        Example:
            ```python
            backend.forward(query, call, output)
            # The first token of the prefill attends to itself only; two query heads share a KV head.
            assert output[1].allclose(value[1].repeat_interleave(2, dim=0), atol=1e-5)
            ```
        """

    def forward_lse(
        self, query_THD: torch.Tensor, call: AttentionCall[MetadataT], out_THD: torch.Tensor
    ) -> torch.Tensor:
        """Run `forward` and return the LSE [H, T], with any value in rows of no request.

        Override it if the library allocates the LSE itself: that spares a copy.

        Args:
            query_THD: as for `forward`.
            call: as for `forward`.
            out_THD: as for `forward`.

        Returns:
            The LSE, float32 [H, T].

        Example:
            ```python
            lse = backend.forward_lse(query, call, output)
            assert lse.shape == (4, 4)
            ```
        """
        num_tokens, num_heads, _ = query_THD.shape
        lse_HT = torch.empty(num_heads, num_tokens, device=query_THD.device)
        self.forward(query_THD, call, out_THD, lse_HT)
        return lse_HT


AnyBackend = AttentionBackend[Any]
"""A backend whose metadata the caller only passes on."""
AnyCall = AttentionCall[Any]
"""A call whose metadata the caller only passes on."""
MakeBackend = Callable[[AttentionSpec, torch.device, Limits], AnyBackend]
"""A backend's class, or another callable that makes a backend."""
