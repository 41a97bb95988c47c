"""Weights of a matrix product, and their allocation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from phonograph.models.layers.layer_matrix import LayerMatrix
from phonograph.models.quantization.scheme import LinearWeight
from phonograph.models.quantization.unquantized import DenseWeight


@dataclass(slots=True)
class Linear:
    """Weights of a matrix product: x @ weight + bias.

    Attributes:
        spec: the matrix as a value.
        weight: the matrix, in the format of the model's files until a CPU converts it after loading.
        bias_O: [outputs], or None.
    """

    spec: LayerMatrix
    weight: LinearWeight
    bias_O: torch.Tensor | None = None

    @property
    def matrix(self) -> torch.Tensor:
        """The matrix [inputs, outputs] of a layer that is not quantized."""
        assert isinstance(self.weight, DenseWeight), "the layer is quantized"
        return self.weight.matrix_IO

    def product(self, x_TI: torch.Tensor) -> torch.Tensor:
        """Return x @ weight + bias, [T, O], by torch's operators."""
        return self.weight.product(x_TI, self.bias_O)

    def add_product(self, x_TI: torch.Tensor, hidden_TO: torch.Tensor) -> None:
        """Add x @ weight + bias to `hidden`, in place, by torch's operators."""
        self.weight.add_product(x_TI, self.bias_O, hidden_TO)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Return views of the outputs by the names of a checkpoint: [size, inputs] matrices and [size] biases.

        Those of all experts in one tensor have the numbers of the checkpoint's tensor in the same order, and maybe one
        dimension more.
        A quantized layer has views of its biases only; its weights are loaded by its scheme.
        """
        spec = self.spec
        whole = {} if spec.scheme is not None else {"weight": self.matrix.t()}
        if self.bias_O is not None:
            whole["bias"] = self.bias_O
        views: dict[str, torch.Tensor] = {}
        counts = [part.num_outputs for _, part in spec.projections()]
        for kind, outputs in whole.items():
            for (name, part), rows in zip(spec.projections(), outputs.split(counts), strict=True):
                if kind == "bias" and not part.bias:
                    continue
                views[spec.tensor_name(name, kind)] = rows if spec.fused is None else spec.fused.view(kind, rows)
        return views


def norm_views(name: str, norm: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the destinations of a norm's weights, and of its bias if it is a layer norm."""
    return {f"{name}.weight": norm} if norm.ndim == 1 else {f"{name}.weight": norm[0], f"{name}.bias": norm[1]}


@dataclass(slots=True)
class WeightAllocator:
    """Allocator of a model's weights, without contents.

    Weights of norms have a row for the bias if `layer_norms` is set; True if they have a bias, else it is 0.
    `parameters` lists the weights in memory layout, all contiguous, in the order of allocation; `quantized` lists those
    in another format. `make_empty` is called as `torch.empty`.
    """

    dtype: torch.dtype
    device: torch.device
    norm_dtype: torch.dtype | None = None
    make_empty: Callable[..., torch.Tensor] = torch.empty
    layer_norms: bool | None = None
    parameters: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    quantized: list[LinearWeight] = field(default_factory=list[LinearWeight])

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self.empty(*shape, dtype=dtype)
        self.parameters.append(tensor)
        return tensor

    def norm(self, *shape: int) -> torch.Tensor:
        """Return weights of a norm, in `norm_dtype`; None is the model's type."""
        if self.layer_norms is not None:
            return self.layer_norm(*shape, dtype=self.norm_dtype, bias=self.layer_norms)
        return self.tensor(*shape, dtype=self.norm_dtype)

    def layer_norm(self, size: int, *, dtype: torch.dtype | None = None, bias: bool) -> torch.Tensor:
        """Return weight and bias of a layer norm, [2, size]; zeros are the bias of one without."""
        both = self.tensor(2, size, dtype=dtype)
        if not bias:
            both[1].zero_()
        return both

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor that is not in `parameters`."""
        return self.make_empty(shape, dtype=dtype or self.dtype, device=self.device)

    @property
    def by_outputs(self) -> bool:
        """True if the rows of a matrix in memory are outputs, as on a GPU (`DenseWeight`)."""
        return self.device.type != "cpu"

    def matrix(self, size_in: int, size_out: int) -> torch.Tensor:
        """Return [size_in, size_out] in the memory layout of `DenseWeight`."""
        return self.tensor(size_out, size_in).t() if self.by_outputs else self.tensor(size_in, size_out)

    def joint(self, experts: LayerMatrix, shared: LayerMatrix) -> tuple[Linear, Linear, LinearWeight]:
        """Return layers of experts and of a shared expert like them, and the weights in which its rows come last."""
        assert experts.num_experts is not None
        whole, outputs = self.linear(replace(experts, num_experts=experts.num_experts + 1)).weight, experts.num_outputs
        of_shared = whole.rows(outputs, outputs + shared.num_outputs)
        return Linear(experts, whole.rows(0, outputs)), Linear(shared, of_shared), whole

    def linear(self, matrix: LayerMatrix) -> Linear:
        """Return a layer without contents, in the format of the matrix."""
        num_outputs, num_inputs, scheme = matrix.num_outputs, matrix.num_inputs, matrix.scheme
        if scheme is None and matrix.num_experts is not None:
            # The weights of an expert are in one place on a CPU too.
            weight: LinearWeight = DenseWeight(self.tensor(num_outputs, num_inputs).t())
        elif scheme is None:
            weight = DenseWeight(self.matrix(num_inputs, num_outputs))
        else:
            weight = scheme.allocate(num_outputs, num_inputs, self.empty)
            self.quantized.append(weight)
        bias_O = self.tensor(num_outputs) if matrix.bias else None
        if bias_O is not None and not all(part.bias for part in matrix.parts):
            bias_O.zero_()
        return Linear(matrix, weight, bias_O)
