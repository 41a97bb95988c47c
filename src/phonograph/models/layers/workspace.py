"""Static memory of a step on a GPU: every intermediate of the decoder, sized for the largest step.

All graphs share it, so their memory is known before anything runs. Attention's intermediates and the MLP's share one
place, because they are never live together; the gated activation replaces the gates. A product with FP8 activations
that is to be added to the residual stream overlays its input, of which it reads a copy in FP8.

Shapes: T tokens, N rows that need logits, H query heads, K KV heads, D head size, E hidden size, I intermediate size, V
vocabulary, F = (H + 2K) * D (H * D for the attention's output).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from phonograph.kernels.fp8_activations import ScaledScratch
from phonograph.kernels.torch.grouped import MAX_GROUPED_ROWS
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.gemm.choose import choose
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.models.layer_spec import FeedForward, LayerAttention, LayerFeedForward
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class Workspace:
    """Intermediates of a step of T tokens with N rows of logits. Sampling reads `logits_NV`.

    Attributes:
        shared: intermediates of attention or of the MLP.
        qkv_TF: the widest fused projection, in `shared`; so is `attention_TF`.
        kept_TE: normed rows that two mixers read, where the first one's sum over ranks takes `normed_TE`; or empty.
        rows_NE: normed rows that need logits.
        parts_NP: logits of the part of the vocabulary that a rank has; `logits_NV` if there is one rank.
        dequantized: scratch for one dequantized matrix, or for rows in the order of a matrix (act-order).
        fp8_rows: one product's activations in FP8; empty if there are no such products. So is `fp8_scales_T`.
        embeddings_TX: embeddings of the tokens in all layers; empty if there are none.
        routing: lists of experts (`ExpertLists`); empty if there are none.
        pooled: float32 rows of a pooler, [N, F] or [T, F] of all tokens; empty if there is none.
        arrived: counters of programs that route, or None.
    """

    hidden_TE: torch.Tensor
    normed_TE: torch.Tensor
    shared: torch.Tensor
    qkv_TF: torch.Tensor
    attention_TF: torch.Tensor
    kept_TE: torch.Tensor
    rows_NE: torch.Tensor
    parts_NP: torch.Tensor
    logits_NV: torch.Tensor
    dequantized: torch.Tensor
    fp8_rows: torch.Tensor
    fp8_scales_T: torch.Tensor
    embeddings_TX: torch.Tensor
    routing: torch.Tensor
    pooled: torch.Tensor
    arrived: torch.Tensor | None

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        num_tokens: int,
        num_logits: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        gemm_device: GemmDevice,
    ) -> Workspace:
        """Allocate the workspace of a GPU."""
        shapes = cls._shapes(spec, num_tokens, num_logits, dtype, gemm_device)
        made = {
            name: torch.zeros(*shape, dtype=its_dtype, device=device) for name, (*shape, its_dtype) in shapes.items()
        }
        shared, (qkv, attention) = made["shared"].view(-1), _attention_widths(spec)
        return cls(
            hidden_TE=made["hidden"],
            normed_TE=made["normed"],
            shared=shared,
            qkv_TF=shared[: num_tokens * qkv].view(num_tokens, qkv),
            attention_TF=shared[num_tokens * qkv :][: num_tokens * attention].view(num_tokens, attention),
            kept_TE=made["kept"],
            rows_NE=made["rows"],
            parts_NP=made["parts"] if made["parts"].numel() else made["logits"],
            logits_NV=made["logits"],
            dequantized=made["dequantized"].view(-1),
            fp8_rows=made["fp8_rows"].view(-1),
            fp8_scales_T=made["fp8_scales"].view(-1),
            embeddings_TX=made["embeddings"],
            routing=made["routing"].view(-1),
            pooled=made["pooled"],
            arrived=ExpertLists.counters(num_tokens, device) if made["routing"].numel() else None,
        )

    @classmethod
    def nbytes(cls, spec: ModelSpec, num_tokens: int, num_logits: int, dtype: str, *, gemm_device: GemmDevice) -> int:
        shapes = cls._shapes(spec, num_tokens, num_logits, getattr(torch, dtype), gemm_device).values()
        return sum(rows * width * its_dtype.itemsize for rows, width, its_dtype in shapes)

    @staticmethod
    def _shapes(
        spec: ModelSpec, num_tokens: int, num_logits: int, dtype: torch.dtype, gemm_device: GemmDevice
    ) -> dict[str, tuple[int, int, torch.dtype]]:
        """Return the shapes and types of the allocations; "shared" serves attention and the MLP."""
        feed_forwards = [layer.feed_forward for layer in spec.kinds]
        experts = [one for one in feed_forwards if isinstance(one, LayerExperts)]
        feed_forward = max(map(_feed_forward_width, feed_forwards))
        words = max((ExpertLists.num_words(num_tokens, one.gpu_routing) for one in experts), default=0)
        num_rows = num_tokens if spec.pooler and spec.pooler.pooling == "all" else num_logits
        embedded = 0 if spec.layer_embeddings is None else spec.layer_embeddings.size
        written_out, fp8_inputs = quantized_sizes(spec, str(dtype).removeprefix("torch."), gemm_device)
        rows, keeps = spec.head.num_outputs, any(one.beside and one.beside.matrices[-1].partial for one in spec.kinds)
        return {
            "hidden": (num_tokens, spec.hidden_size, dtype),
            "normed": (num_tokens, spec.hidden_size, dtype),
            "shared": (num_tokens, max(sum(_attention_widths(spec)), feed_forward, spec.hidden_size, embedded), dtype),
            "kept": (num_tokens, spec.hidden_size if keeps else 0, dtype),
            "rows": (num_logits, spec.hidden_size, dtype),
            "parts": (num_logits, 0 if rows == spec.vocab_size else rows, dtype),
            "logits": (num_logits, 0 if spec.pooler else spec.vocab_size, dtype),
            "dequantized": (1, written_out, dtype),
            "fp8_rows": (num_tokens, fp8_inputs, torch.float8_e4m3fn),
            "fp8_scales": (num_tokens, min(fp8_inputs, 1), torch.float32),
            "embeddings": (num_tokens, spec.num_layers * embedded, dtype),
            "routing": (1, words, torch.float32),
            "pooled": (num_rows, spec.num_outputs if spec.pooler else 0, torch.float32),
        }

    def attention_memory(self, num_tokens: int, widths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the memory of a fused projection and of the attention's output, of a layer with these widths."""
        qkv, attention = widths
        after = self.attention_TF.view(-1)
        return (
            self.shared[: num_tokens * qkv].view(num_tokens, qkv),
            after[: num_tokens * attention].view(num_tokens, attention),
        )

    def scaled_scratch(self) -> ScaledScratch | None:
        """Return the scratch of products with FP8 activations; None if there are none."""
        return ScaledScratch(self.fp8_rows, self.fp8_scales_T, self.shared) if self.fp8_rows.numel() else None

    def tensors(self) -> list[torch.Tensor]:
        """Return all memory whose contents need not outlive a step."""
        return [getattr(self, field.name) for field in fields(self) if field.name != "arrived"]


def expert_memory(spec: LayerExperts) -> list[tuple[int, int]]:
    """Return the slices of `shared` that experts take, as the rows of a token and their width.

    These are inner rows and results of its experts, then gates and ups and the result of a shared expert that is none
    of them, then norms of the stream for the router and for the shared expert. What an expert has not takes none.
    """
    routing, hidden_size = spec.gpu_routing, spec.down.expert_outputs
    shared = (0, 0) if spec.shared is None or routing.shared else (spec.shared.gate_up.num_outputs, hidden_size)
    norm = 0 if spec.router_norm is None else hidden_size
    widths = *shared, norm, norm
    pairs = (routing.num_pairs, spec.down.num_inputs), (routing.num_pairs, hidden_size)
    return [*pairs, *((1, width) for width in widths)]


def _feed_forward_width(spec: FeedForward | None) -> int:
    """Return the numbers of a token in `shared`."""
    if spec is None:
        return 0
    if isinstance(spec, LayerExperts):
        return sum(rows * width for rows, width in expert_memory(spec))
    assert isinstance(spec, LayerFeedForward)
    return spec.gate_up.num_outputs


def _attention_widths(spec: ModelSpec) -> tuple[int, int]:
    """Return the widths of the projections and of the mixer's output, the largest of all layers."""
    widths = [mixer_widths(mixer) for layer in spec.kinds for mixer in (layer.mixer, layer.beside)]
    return max(first for first, _ in widths), max(second for _, second in widths)


def mixer_widths(mixer: LayerAttention | StateMixer | None) -> tuple[int, int]:
    """Return the numbers of a token in a mixer's projections and scratch, and in its output."""
    if mixer is None:
        return 0, 0
    *projections, output = mixer.matrices
    return sum(matrix.num_outputs for matrix in projections) + mixer.scratch, output.num_inputs


def quantized_sizes(spec: ModelSpec, dtype: str, device: GemmDevice) -> tuple[int, int]:
    """Return the elements of the scratch for a dequantized matrix, and of the widest row of FP8 activations."""
    matrices = {matrix for layer in spec.kinds for matrix in layer.matrices} | {spec.head}
    # Experts have kernels of their own, which write no matrix out.
    quantized = [matrix for matrix in matrices if matrix.scheme is not None and matrix.num_experts is None]
    with_fp8_rows = [matrix for matrix in quantized if _has_fp8_rows(matrix, dtype, device)]
    others = [matrix for matrix in quantized if matrix not in with_fp8_rows]
    return (
        max((max(matrix.num_outputs, MAX_GROUPED_ROWS) * matrix.num_inputs for matrix in others), default=0),
        max((matrix.num_inputs for matrix in with_fp8_rows), default=0),
    )


def _has_fp8_rows(matrix: LayerMatrix, dtype: str, device: GemmDevice) -> bool:
    """Return True if products of many rows have FP8 activations. Then those of few need no room in 16 bits."""
    return choose(matrix.shape, matrix.weight_format(dtype), 2 * MAX_GROUPED_ROWS, device).fp8_rows
