"""Refusals of a capture on the CPU, with reasons: whatever a capture on a device refuses.

Most of it shows as an operator (`refuse_unless_capturable`). Reads of a CPU tensor's memory from Python do not: no
operator runs in `.tolist()` or `.numpy()`. `HostReadGuard` catches them, and tensors made from host data, at the Python
API. `torch.utils.dlpack.to_dlpack` escapes both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph.errors import CaptureError
from phonograph.graphs.tape.nested import tensors_in

_HOST_READS: dict[Callable[..., Any], str] = {
    torch.Tensor.tolist: "tolist()",
    torch.Tensor.numpy: "numpy()",
    torch.Tensor.__array__: "numpy.asarray()",
    torch.Tensor.__dlpack__: "__dlpack__(), as of numpy.from_dlpack(),",
    torch.Tensor.item: "item()",
    torch.Tensor.__bool__: "bool()",
    torch.Tensor.__int__: "int()",
    torch.Tensor.__float__: "float()",
    torch.Tensor.__index__: "use as an index",
}
_HOST_DATA: dict[Callable[..., Any], str] = {
    torch.tensor: "torch.tensor()",
    torch.as_tensor: "torch.as_tensor()",
    torch.from_numpy: "torch.from_numpy()",
}
# Reads without a tag that shows them, since they stay composite under inference mode.
_READ_OPERATORS = {
    "aten::item",
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::equal",
    "aten::allclose",
    "aten::narrow.Tensor",
}
# Composites that hide an operator with a dynamic shape: they reach the tape whole, without its tag.
_DYNAMIC_COMPOSITES = {
    "aten::repeat_interleave.self_Tensor",
    "aten::where",
    "aten::argwhere",
    "aten::nonzero_numpy",
    "aten::tensor_split.tensor_indices_or_sections",
}
_INDEX_OPERATORS = {"aten::index", "aten::index_put", "aten::index_put_"}
_READS_ON_HOST = (
    "an attention backend that must read on the host sets reads_on_host = True and declares GraphSupport.NEVER; its "
    "schedule and write_kv then run between graphs"
)


class HostReadGuard(TorchFunctionMode):
    """Mode that raises CaptureError for reads of tensor contents and for tensors made from Python data."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HOST_READS:
            raise CaptureError(
                f"host read inside a capture: {_HOST_READS[func]} would freeze today's contents into the graph; keep "
                f"the value in a tensor, or read it before the capture; {_READS_ON_HOST}"
            )
        if func in _HOST_DATA:
            raise CaptureError(
                f"host data inside a capture: {_HOST_DATA[func]} would freeze today's data into the graph; write it to "
                "a static buffer before the replay"
            )
        return func(*args, **(kwargs or {}))


def refuse_unless_capturable(func: Any, args: Any) -> None:
    """Raise CaptureError if operator `func` cannot be part of a graph."""
    name: str = func._schema.name
    tags = func.tags
    if _full_name(func) in _READ_OPERATORS or torch.Tag.data_dependent_output in tags:
        raise CaptureError(f"host read inside a capture: {func} brings tensor contents to the host; {_READS_ON_HOST}")
    if name in _INDEX_OPERATORS:
        if any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1])):
            raise CaptureError(
                f"data-dependent shape inside a capture: {func} with a mask; use torch.where; {_READS_ON_HOST}"
            )
    elif torch.Tag.dynamic_output_shape in tags or _full_name(func) in _DYNAMIC_COMPOSITES:
        raise CaptureError(
            f"data-dependent shape inside a capture: the result of {func} depends on tensor contents; {_READS_ON_HOST}"
        )
    # Dropout outside of training returns its input.
    if torch.Tag.nondeterministic_seeded in tags and not (name == "aten::dropout" and not args[2]):
        raise CaptureError(f"random numbers inside a capture: a replay of {func} could not be compared with eager")


class CaptureProbe(TorchDispatchMode):
    """Mode that runs all operators and keeps what the first refused one does; see `refuse_unless_capturable`.

    Attributes:
        problem: the refusal, without advice; None if a graph can hold everything.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problem: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        try:
            refuse_unless_capturable(func, args)
        except CaptureError as error:
            self.problem = self.problem or str(error).partition(";")[0]
        return func(*args, **(kwargs or {}))


def _full_name(func: Any) -> str:
    overload: str = func._schema.overload_name
    return f"{func._schema.name}.{overload}" if overload else func._schema.name
