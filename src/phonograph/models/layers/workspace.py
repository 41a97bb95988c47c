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

from phonograph.kernels.scaled_products import ScaledScratch, device_has_scaled_products, takes_scaled_product
from phonograph.kernels.torch.grouped import MAX_GROUPED_ROWS
from phonograph.models.spec import ModelSpec


@dataclass(slots=True, kw_only=True)
class Workspace:
    """Intermediates of a step of T tokens with N rows of logits. Sampling reads `logits_NV`.

    `dequantized` has what a product with quantized weights makes for itself: the numbers of the matrix, or its input in
    the order of the weights. `fp8_rows` and `fp8_scales_T` have one product's activations in FP8, with room for none if
    the device or the weights have no such products.
    """

    hidden_TE: torch.Tensor
    normed_TE: torch.Tensor
    qkv_TF: torch.Tensor
    attention_TF: torch.Tensor
    gate_up_T2I: torch.Tensor
    inner_TI: torch.Tensor
    rows_NE: torch.Tensor
    logits_NV: torch.Tensor
    dequantized: torch.Tensor
    fp8_rows: torch.Tensor
    fp8_scales_T: torch.Tensor
    product: torch.Tensor
    has_quantized_layers: bool

    @classmethod
    def make(
        cls,
        spec: ModelSpec,
        num_tokens: int,
        num_logits: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        capability: tuple[int, int] = (0, 0),
    ) -> Workspace:
        """Allocate the workspace of a device of this compute capability."""
        qkv, attention, gate_up = _widths(spec)
        shapes = cls._shapes(spec, num_tokens, num_logits, dtype, capability)
        made = {
            name: torch.zeros(*shape, dtype=its_dtype, device=device) for name, (*shape, its_dtype) in shapes.items()
        }
        shared = made["shared"].view(-1)
        gate_up_T2I = shared[: num_tokens * gate_up].view(num_tokens, gate_up)
        return cls(
            hidden_TE=made["hidden"],
            normed_TE=made["normed"],
            qkv_TF=shared[: num_tokens * qkv].view(num_tokens, qkv),
            attention_TF=shared[num_tokens * qkv :][: num_tokens * attention].view(num_tokens, attention),
            gate_up_T2I=gate_up_T2I,
            inner_TI=gate_up_T2I[:, : spec.intermediate_size],
            rows_NE=made["rows"],
            logits_NV=made["logits"],
            dequantized=made["dequantized"].view(-1),
            fp8_rows=made["fp8_rows"].view(-1),
            fp8_scales_T=made["fp8_scales"].view(-1),
            product=shared[: num_tokens * spec.hidden_size],
            has_quantized_layers=spec.quantization is not None,
        )

    @classmethod
    def nbytes(
        cls, spec: ModelSpec, num_tokens: int, num_logits: int, dtype: str, *, capability: tuple[int, int] = (0, 0)
    ) -> int:
        shapes = cls._shapes(spec, num_tokens, num_logits, getattr(torch, dtype), capability).values()
        return sum(rows * width * its_dtype.itemsize for rows, width, its_dtype in shapes)

    @staticmethod
    def _shapes(
        spec: ModelSpec, num_tokens: int, num_logits: int, dtype: torch.dtype, capability: tuple[int, int]
    ) -> dict[str, tuple[int, int, torch.dtype]]:
        """Return the shapes and types of the allocations; "shared" serves attention and the MLP."""
        qkv, attention, gate_up = _widths(spec)
        written_out, fp8_inputs = quantized_sizes(spec, str(dtype).removeprefix("torch."), capability)
        return {
            "hidden": (num_tokens, spec.hidden_size, dtype),
            "normed": (num_tokens, spec.hidden_size, dtype),
            "shared": (num_tokens, max(qkv + attention, gate_up, spec.hidden_size), dtype),
            "rows": (num_logits, spec.hidden_size, dtype),
            "logits": (num_logits, spec.vocab_size, dtype),
            "dequantized": (1, written_out, dtype),
            "fp8_rows": (num_tokens, fp8_inputs, torch.float8_e4m3fn),
            "fp8_scales": (num_tokens, min(fp8_inputs, 1), torch.float32),
        }

    def scaled_scratch(self) -> ScaledScratch | None:
        """Return the scratch of products with FP8 activations; None if there are none."""
        if not self.fp8_rows.numel():
            return None
        return ScaledScratch(self.fp8_rows, self.fp8_scales_T, self.product)

    def tensors(self) -> list[torch.Tensor]:
        members = (getattr(self, field.name) for field in fields(self))
        return [one for one in members if isinstance(one, torch.Tensor)]


def _widths(spec: ModelSpec) -> tuple[int, int, int]:
    """Return the widths of the fused projection, of the attention's output, and of gates and up of the MLP."""
    q_size, kv_size = spec.num_query_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    return q_size + 2 * kv_size, q_size, 2 * spec.intermediate_size


def quantized_sizes(spec: ModelSpec, dtype: str, capability: tuple[int, int]) -> tuple[int, int]:
    """Return the room for a matrix that is written out or rows in its order, and the inputs of FP8 activations.

    Both are numbers of elements, the largest of all products.
    """
    scaled = device_has_scaled_products(capability, dtype)
    written_out, fp8_inputs = 0, 0
    for matrix in (matrix for layer in range(spec.num_layers) for matrix in spec.matrices(layer)):
        scheme, outputs, inputs = spec.matrix_scheme(matrix), sum(matrix.parts.values()), matrix.inputs
        if scheme is not None and scaled and scheme.has_output_scales(inputs) and takes_scaled_product(outputs, inputs):
            fp8_inputs = max(fp8_inputs, inputs)
        elif scheme is not None:
            written_out = max(written_out, max(outputs, MAX_GROUPED_ROWS) * inputs)
    if spec.lm_head_scheme is not None and scaled:
        fp8_inputs = max(fp8_inputs, spec.hidden_size)
    return written_out, fp8_inputs
