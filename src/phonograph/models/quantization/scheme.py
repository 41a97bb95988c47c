"""Protocols of weight formats: a scheme describes and loads a format, and a weight is what a layer then holds.

A new format is a module with a scheme, and its entry in `quantization_config.py`. Formats that differ only in how files
pack their numbers share a weight, so that each kernel is written once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from phonograph.errors import UnsupportedModelError
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.triton.gemm.product_plan import WeightFormat
from phonograph.models.weights.expert_tensors import ExpertTensors


class Stored(NamedTuple):
    """A tensor of a checkpoint: its shape, the types that it may have, and False if files may lack it."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    required: bool = True


class Allocate(Protocol):
    """Allocation of a tensor of a model without contents; None is the model's type."""

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor: ...


class LinearWeight(Protocol):
    """Weights of a matrix product in memory."""

    @property
    def shape(self) -> tuple[int, int]:
        """Inputs and outputs."""
        ...

    @property
    def device(self) -> torch.device: ...

    @property
    def operand(self) -> torch.Tensor | Grouped:
        """The weights as the products in Triton take them: a matrix [outputs, inputs], or groups."""
        ...

    def product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        """Return x @ weight + bias, [T, O], by torch's operators."""
        ...

    def add_product(self, x_TI: torch.Tensor, bias_O: torch.Tensor | None, hidden_TO: torch.Tensor) -> None:
        """Add x @ weight + bias to `hidden`, in place, by torch's operators."""
        ...

    def rows(self, first: int, last: int) -> LinearWeight:
        """Return the weights of the outputs from `first` up to `last`, in the same memory."""
        ...

    def draw(self, std: float, generator: torch.Generator) -> None:
        """Fill the weights with random numbers of about this standard deviation."""
        ...


class Scheme(Protocol):
    """Format of quantized weights. Schemes are plain values, which may be compared and sent to another process."""

    @property
    def name(self) -> str:
        """Name for people, with bits and group size."""
        ...

    def stored(self, outputs: int, inputs: int) -> dict[str, Stored]:
        """Return the tensors of one module in a checkpoint, by the ends of their names.

        Raises:
            UnsupportedModelError: the format has no matrix of these sizes.
        """
        ...

    def allocate(self, outputs: int, inputs: int, allocate: Allocate) -> LinearWeight:
        """Return a weight without contents."""
        ...

    def load(self, module: str, tensors: Mapping[str, torch.Tensor], weight: LinearWeight, first: int) -> None:
        """Convert a module's tensors, which are on the device of `weight`, into its outputs from `first` on.

        Raises:
            WeightError: the contents are not those of the format; the message names the tensor.
        """
        ...

    def nbytes(self, outputs: int, inputs: int, element: int) -> int:
        """Return the bytes of a weight in memory; `element` is the size of the model's type."""
        ...

    def weight_format(self, inputs: int, dtype: str) -> WeightFormat:
        """Return the layout of the weights on a GPU; `dtype` is the model's type."""
        ...


_MOST_SHOWN = 3
"""Parts of a matrix that an error names one by one."""
Rules = tuple[tuple[str, Scheme | None], ...]
"""Formats of some modules, each with the name or pattern that the rule is for; None for the model's type."""


@dataclass(frozen=True, slots=True)
class QuantizedModule:
    """A projection of a checkpoint, and its place in a fused weight: `outputs` from `first` on.

    `loaded` is called after the last part of a weight is loaded; parts are loaded in order. `fused` is the layout of
    tensors that have the part of all experts, or None.
    """

    name: str
    scheme: Scheme
    weight: LinearWeight
    first: int
    outputs: int
    loaded: Callable[[], None] | None = None
    fused: ExpertTensors | None = None

    def stored(self) -> dict[str, Stored]:
        """Return the tensors of the checkpoint by the ends of their names."""
        inputs, _ = self.weight.shape
        stored = self.scheme.stored(self.outputs, inputs)
        if self.fused is None:
            return stored
        return {kind: one._replace(shape=self.fused.shape(kind, one.shape)) for kind, one in stored.items()}

    def tensor_name(self, kind: str) -> str:
        """Return the name of a tensor of the checkpoint."""
        return f"{self.name}.{kind}" if self.fused is None else self.fused.name(self.name, kind)

    @torch.inference_mode()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Convert the module's tensors, on the device of the weight; raises WeightError as `Scheme.load`."""
        there = {kind: tensor.to(self.weight.device) for kind, tensor in tensors.items()}
        if self.fused is not None:
            there = {kind: self.fused.rows(kind, tensor) for kind, tensor in there.items()}
        self.scheme.load(self.name, there, self.weight, self.first)
        if self.loaded is not None:
            self.loaded()


@dataclass(frozen=True, slots=True)
class Quantization:
    """Weight format of a model's projections.

    Attributes:
        method: quant_method of config.json, or "gguf".
        scheme: the format of modules without a rule, or the formats of modules by name; None for the model's type.
        rules: formats of some modules, of which the first that matches counts; None for the model's type. A rule is for
            components of a name that follow each other ("layers.1", "mlp"), or for "re:" and a pattern.
        only: modules that are quantized, as in `rules`; all if there are none.
        lists: settings that `rules` and `only` come from.
        head: format of the blocks of the head in a GGUF file, or None.
        fp8_kv_cache: True if the checkpoint has scales for keys and values in FP8.
        prefixes: other spellings of the prefix "model." in names and patterns of `rules` and `only`.
    """

    method: str
    scheme: Scheme | Mapping[str, Scheme] | None = field(hash=False)
    rules: Rules = ()
    only: tuple[str, ...] = ()
    lists: tuple[str, ...] = ()
    fp8_kv_cache: bool = False
    head: Scheme | None = None
    prefixes: tuple[str, ...] = ()

    @property
    def has_schemes(self) -> bool:
        """True if there may be modules that are quantized."""
        return bool(self.scheme) or any(scheme is not None for _, scheme in self.rules)

    @property
    def name(self) -> str:
        """Name for people; of several formats each, with the number of modules if it is known."""
        if isinstance(self.scheme, Mapping):
            counts = Counter(scheme.name for scheme in self.scheme.values())
            return f"{self.method.upper()}: " + ", ".join(f"{count} {name}" for name, count in counts.most_common())
        schemes = (self.scheme, *(scheme for _, scheme in self.rules))
        return " and ".join(dict.fromkeys(scheme.name for scheme in schemes if scheme is not None))

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the format of a module's weights; None for the model's type."""
        if isinstance(self.scheme, Mapping):
            return self.scheme.get(module)
        if self.only and not any(self._matches(entry, module) for entry in self.only):
            return None
        return next((scheme for entry, scheme in self.rules if self._matches(entry, module)), self.scheme)

    def _matches(self, entry: str, module: str) -> bool:
        inner = module.removeprefix("model.")
        return _matches(entry, module) or any(_matches(entry, prefix + inner) for prefix in self.prefixes)

    def check_parts(self, prefix: str, parts: Iterable[str]) -> None:
        """Check that the parts of a fused matrix have one layout in memory.

        Args:
            prefix: prefix of the parts' names in a checkpoint.
            parts: the rest of the names.

        Raises:
            UnsupportedModelError: they have not.
        """
        schemes = {part: self.scheme_of(f"{prefix}.{part}") for part in parts}
        # Types of GGUF files that differ have the same layout.
        several = not isinstance(self.scheme, Mapping) and len(set(schemes.values())) > 1
        if several or (None in schemes.values() and any(schemes.values())):
            shown: dict[object, str] = {}
            for part, scheme in schemes.items():
                # Experts have many parts; the first of each format shows the difference.
                shown.setdefault(scheme if len(schemes) > _MOST_SHOWN else part, part)
            formats = ", ".join(
                f"{part} is {scheme.name if scheme else 'in 16 bits'}"
                for part, scheme in ((part, schemes[part]) for part in shown.values())
            )
            raise UnsupportedModelError(
                f"quantization_config gives the parts of {prefix} several formats: {formats}; they run as one matrix, "
                "and that is not supported"
            )


def _matches(entry: str, module: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), module) is not None
    return f".{entry.strip('.')}." in f".{module}."
