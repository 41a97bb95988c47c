"""Kernel set of Triton kernels for quantized weights.

A product writes its weights out into one scratch matrix, and torch's library multiplies that. So a norm, an activation
and a residual addition are launches of their own. Layers that are not quantized are multiplied in the same way.
"""

from __future__ import annotations

import torch

from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.gemm.dequantize import dequantize_into
from phonograph.models.layers.kernel_set import Stream
from phonograph.models.layers.linear import Linear, NormedLinear
from phonograph.models.layers.triton_kernels import TritonKernels
from phonograph.models.quantization.grouped_weight import GroupedWeight


class QuantizedKernels(TritonKernels):
    """`TritonKernels` with products of quantized weights."""

    def project(self, stream: Stream, layer: NormedLinear) -> torch.Tensor:
        out_TF = self.workspace.qkv_TF[: stream.hidden_TE.shape[0]]
        self._multiply(stream, layer, out_TF)
        return out_TF

    def project_gated(self, stream: Stream, layer: NormedLinear) -> torch.Tensor:
        rows = stream.hidden_TE.shape[0]
        gate_up_T2I, inner_TI = self.workspace.gate_up_T2I[:rows], self.workspace.inner_TI[:rows]
        self._multiply(stream, layer, gate_up_T2I)
        layers.silu_and_mul(gate_up_T2I, inner_TI)
        return inner_TI

    def add(self, stream: Stream, x: torch.Tensor, layer: Linear, then: NormedLinear | None) -> Stream:
        stream.hidden_TE.addmm_(x, self._matrix(layer))
        if layer.bias_O is not None:
            stream.hidden_TE.add_(layer.bias_O)
        if then is not None:
            assert stream.normed_TE is not None
            layers.rms_norm(stream.hidden_TE, then.norm_I, self._eps, stream.normed_TE)
        return stream

    def _multiply(self, stream: Stream, layer: NormedLinear, out_TO: torch.Tensor) -> None:
        assert stream.normed_TE is not None
        matrix_IO, bias_O = self._matrix(layer.linear), layer.linear.bias_O
        if bias_O is None:
            torch.mm(stream.normed_TE, matrix_IO, out=out_TO)
        else:
            torch.addmm(bias_O, stream.normed_TE, matrix_IO, out=out_TO)

    def _is_one_row(self, hidden_TE: torch.Tensor) -> bool:
        """Return False: no product computes the norm of one row inside."""
        return False

    def _matrix(self, layer: Linear) -> torch.Tensor:
        """Return the weights [I, O], which the next call may overwrite."""
        weight = layer.weight
        if not isinstance(weight, GroupedWeight):
            return layer.matrix
        inputs, outputs = weight.shape
        out_OI = self.workspace.dequantized[: outputs * inputs].view(outputs, inputs)
        dequantize_into(weight.values, out_OI)
        return out_OI.t()
