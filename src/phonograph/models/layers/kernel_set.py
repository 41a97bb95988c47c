"""Protocol of a kernel set: the operations of the decoder's forward loop.

A kernel set decides on fusion. A norm is computed at once, deferred to the next product, or computed inside it. A
residual is added inside a product or after it. The loop is the same for all kernel sets.

Shapes: T tokens, N rows that need logits, H query heads, K KV heads, D head size, E hidden size, I intermediate size, V
vocabulary, F = (H + 2K) * D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from phonograph.models.layers.decoder_layer import AttentionHeads
from phonograph.models.layers.linear import Linear, NormedLinear
from phonograph.models.quantization.block_embedding import Embedding


class KVTarget(NamedTuple):
    """Destination of a layer's keys and values.

    Attributes:
        kv_cache: [2, B, S, K, D].
        slot_mapping: int64, of the step's tokens; may be shorter than they are; -1 writes nothing.
        k_scale: [K] float32 for the keys of an FP8 cache, or None for 1.
        v_scale: the same for values.
        clears_padding: True if attention itself writes the zeros of padding rows.
    """

    kv_cache: torch.Tensor
    slot_mapping: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    clears_padding: bool


class Attend(Protocol):
    """Attention of one step. It writes keys and values to the KV cache, and reads the cache.

    A model needs only `__call__`. The two methods split it, for a kernel set that rotates queries and keys and writes
    the cache in one launch.
    """

    def __call__(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the output, contiguous [T, H, D]. The inputs may be views whose heads are contiguous."""
        ...

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        """Return the destination of a layer's keys and values."""
        ...

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        """Attend to the cache, which has the step's keys and values, into `out_THD`."""
        ...


@dataclass(slots=True)
class Stream:
    """The residual stream between two products.

    Attributes:
        hidden_TE: the rows.
        normed_TE: normed rows from the last product, if the kernel set computes them.
        fp8_rows: normed rows in FP8 (`Fp8Rows`) in place of those in `normed_TE`, if the next product takes them.
        squares: row sums of squares from the last product, for a deferred norm.
        is_part: True if the rows are those of `keep_rows`.
    """

    hidden_TE: torch.Tensor
    normed_TE: torch.Tensor | None = None
    fp8_rows: Any = None
    squares: Any = None
    is_part: bool = False


class KernelSet(Protocol):
    """Operations of a decoder on one kind of device. Results are valid until the next call of the same method."""

    def rotary(self, positions_T: torch.Tensor) -> Any:
        """Return the input of `attention` that depends on the positions only, once a step."""
        ...

    def embed(self, input_ids_T: torch.Tensor, embedding_VE: Embedding, then: NormedLinear) -> Stream:
        """Begin a stream with the embeddings of tokens. `then` is the product that reads the stream first."""
        ...

    def project(self, stream: Stream, layer: NormedLinear) -> torch.Tensor:
        """Return the fused projection [T, F] of the normed stream."""
        ...

    def attention(self, qkv_TF: torch.Tensor, heads: AttentionHeads, rotary: Any, attend: Attend) -> torch.Tensor:
        """Norm and rotate query and key heads, and attend. Returns [T, H * D]."""
        ...

    def project_gated(self, stream: Stream, layer: NormedLinear, then: Linear) -> Any:
        """Return silu(gate) * up [T, I] of the normed stream, as `add` takes it with the product `then`.

        The gates are the first outputs of the matrix.
        """
        ...

    def add(self, stream: Stream, x: Any, layer: Linear, then: NormedLinear | None) -> Stream:
        """Add x @ weight + bias to the stream, in place. `then` is the product that reads the stream next, if any.

        `x` is a tensor [T, inputs], or the result of `project_gated`.
        """
        ...

    def leaves_rows_out(self, num_tokens: int) -> bool:
        """Return True if the last layer computes only the rows that need logits, in a prefill of so many tokens."""
        ...

    def keep_rows(self, stream: Stream, attended_TF: torch.Tensor, rows_P: torch.Tensor) -> tuple[Stream, torch.Tensor]:
        """Return these rows of the stream and of attention's output, for the rest of the last layer."""
        ...

    def logits(
        self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None, norm_E: torch.Tensor, head: Linear
    ) -> torch.Tensor:
        """Return logits [N, V] of the normed rows `rows_N` of the stream, or of all its rows if that is None."""
        ...
