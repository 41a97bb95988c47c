"""The contract of an attention backend: what it declares, and what it does.

The two are apart. `Capabilities` is pure: it answers from the configuration, needs neither the backend's library nor a
device, and is what selection, the resolver and `explain` read. `AttentionBackend` runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple

import torch

from phonograph.attention.metadata import MetadataBuilder, MetadataT
from phonograph.core.device import DeviceSpec
from phonograph.graphs.modes import GraphKey, Support


class AttentionKind(Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class KVLayout(Enum):
    """Order in memory inside one block: NHD is [S, K, D] (tokens, heads, head size), HND is [K, S, D]."""

    NHD = "NHD"
    HND = "HND"


UNBOUNDED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Everything about a KV group's attention that decides who can run it.

    dtype, kv_cache_dtype: names as torch writes them ("bfloat16"); kv_cache_dtype may be "float8_e4m3fn"/"float8_e5m2"
    windows: the distinct (left, right) windows of the layers, in keys *beside* the query itself; UNBOUNDED (-1) for
        none. A model's `sliding_window` of W keys is (W - 1, 0).
    softcap: 0 means none.
    speculative_tokens: k draft tokens a step, so that a decode has query length 1 + k.
    cascade: a prefix common to a batch is attended once where that pays.
    batch_invariant: what a sequence gets is the same, bit by bit, whatever else is in the batch.
    """

    num_query_heads: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_cache_dtype: str
    block_size: int
    layout: KVLayout = KVLayout.NHD
    kind: AttentionKind = AttentionKind.DECODER
    windows: tuple[tuple[int, int], ...] = ((UNBOUNDED, UNBOUNDED),)
    softcap: float = 0.0
    alibi: bool = False
    sinks: bool = False
    lse: bool = False
    speculative_tokens: int = 0
    cascade: bool = False
    batch_invariant: bool = False

    @property
    def windowed(self) -> bool:
        """Whether any layer's queries see less than all keys for a window."""
        return any(window != (UNBOUNDED, UNBOUNDED) for window in self.windows)


class Capabilities(ABC):
    """What one backend, in one version, can do. Pure: no library, no device, no torch work.

    name:    as users write it in `--attention-backend`
    version: of the kernel family ("2", "3", "4"), or ""
    unverified: why it is taken only where its very version is asked for, or ""
    varies:  why the bits of a sequence's output may differ with the rest of the batch even where the spec asks for
        batch invariance, or "" where they do not
    """

    name: str
    version: str = ""
    unverified: str = ""
    varies: str = "it does not say that its results are the same in every batch"

    @abstractmethod
    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Every reason why this backend cannot run `spec` on `device`; empty when it can."""

    def why_not(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """`refusals`, and that of batch invariance where it is asked for and not borne: what selection goes by."""
        found = self.refusals(spec, device)
        return [*found, f"batch_invariant; {self.varies}"] if spec.batch_invariant and self.varies else found

    @abstractmethod
    def graph_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        """The graph support level for `spec` on `device`, with the reason."""

    def ragged_support(self, spec: AttentionSpec, device: DeviceSpec) -> Support:
        """The level of a graph that no batch of single tokens was captured for, as the prefill part of a split batch.

        Where it differs from `graph_support`, that is because the latter counts what a graph of decodes freezes.
        """
        return self.graph_support(spec, device)

    def preferred_block_size(self, spec: AttentionSpec) -> tuple[int, str] | None:
        """Tokens in a block with which it is fastest, and why, for who leaves that open; None: the device's default."""
        return None

    def buffer_bytes(
        self, spec: AttentionSpec, device: DeviceSpec, limits: BatchLimits, graphs: Sequence[GraphKey]
    ) -> int:
        """What the backend takes of the device's memory for any batch within `limits` and for these graphs, in bytes.

        The KV cache is sized by what is left. What comes to a few MB need not be counted.
        """
        return 0

    def missing(self) -> str | None:
        """Why the backend cannot be loaded in this installation (library absent, kernels not written), or None."""
        return None

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}".strip()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What differs from layer to layer. Tensors are float32 on the device.

    window:  (left, right) as in AttentionSpec.windows
    scale:   factor of the logits before softcap and bias, usually head_size ** -0.5
    alibi_slopes [H], sinks [H]: or None
    k_scale, v_scale [K]: descale factor of each KV head for an FP8 cache, or None for 1
    q_scale [K]: the same of a KV head's queries, for backends that round them to FP8 too (`quantizes_queries`)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLimits:
    """The largest batch a builder must hold in its persistent buffers."""

    max_num_seqs: int
    max_num_tokens: int
    max_model_len: int


class AttentionCall(NamedTuple, Generic[MetadataT]):
    """What every method of a backend needs to know of one layer in one step.

    kv_cache: [2, B, S, K, D] (keys, values): logical shape for both layouts, HND being a view with permuted strides
    metadata: of the step, from the backend's builder
    """

    layer: AttentionLayer
    kv_cache: torch.Tensor
    metadata: MetadataT


class AttentionBackend(ABC, Generic[MetadataT]):
    """Runs attention for one KV group. Built once, used for every layer of the group.

    Host work in `forward` counts: under piecewise graphs it runs for every layer of every step.

    clears_padding: whether `forward` writes the zeros of output rows of no request. Where it does not, the caller has
        put them there before, and they stay.
    quantizes_queries: whether `forward` rounds queries, divided by the layer's q_scale, to the dtype of an FP8 cache
        (and then perhaps the softmax's weights): its kernels take queries, keys and values of one dtype.
    only_triton: whether all that it launches is kernels of Triton's, so that a run that launches nothing tells which
        there are to be compiled. The conformance suite then compiles those of all configurations at once.
    """

    capabilities: Capabilities
    clears_padding: bool = True
    quantizes_queries: bool = False
    only_triton: bool = False

    def __init__(self, spec: AttentionSpec, device: torch.device, limits: BatchLimits) -> None:
        self.spec = spec
        self.device = device
        self.limits = limits

    @abstractmethod
    def make_builder(self) -> MetadataBuilder[MetadataT]: ...

    @abstractmethod
    def schedule(self, metadata: MetadataT) -> None:
        """Makes what all layers of a step share, from the contents of the batch's tensors; may have nothing to do.

        The runner calls it once at the head of every step, inside the graph, so it must be as capturable as `forward`.
        """

    @abstractmethod
    def write_kv(self, key_TKD: torch.Tensor, value_TKD: torch.Tensor, call: AttentionCall[MetadataT]) -> None:
        """Writes new keys and values to their slots (block id * block size + offset); slot -1 writes nothing.

        The slot mapping may be shorter than the keys, whose rows behind it are padding.

        A method of its own, so that it stays inside piecewise graphs.
        """

    @abstractmethod
    def forward(
        self,
        query_THD: torch.Tensor,
        call: AttentionCall[MetadataT],
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None = None,
    ) -> None:
        """Attends each query to its sequence's keys in the cache (the new ones included), into `out_THD`.

        Rows of no request get zeros (and LSE -inf), unless `clears_padding` says otherwise; rows before the first
        query are another launch's. `lse_HT` is float32 [H, T], natural logarithm, sinks included.
        """

    def forward_lse(
        self, query_THD: torch.Tensor, call: AttentionCall[MetadataT], out_THD: torch.Tensor
    ) -> torch.Tensor:
        """`forward` for those who read the LSE at once: returns it, whatever it holds for rows of no request.

        A library that makes the tensor itself is spared a copy.
        """
        num_tokens, num_heads, _ = query_THD.shape
        lse_HT = torch.empty(num_heads, num_tokens, device=query_THD.device)
        self.forward(query_THD, call, out_THD, lse_HT)
        return lse_HT


AnyBackend = AttentionBackend[Any]
"""A backend whose metadata the holder only passes on."""
AnyCall = AttentionCall[Any]
"""A call whose metadata the holder only passes on."""
MakeBackend = Callable[[AttentionSpec, torch.device, BatchLimits], AnyBackend]
"""A backend's class, or what else makes one."""
