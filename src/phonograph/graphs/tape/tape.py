"""Graph runtime of the CPU. It records calls once and replays them, with the hazards of a CUDA graph on purpose.

A capture runs the function under a TorchDispatchMode. Each operator is kept with its frozen Python arguments and with
aliases of its tensors, so a later change of a tensor's address or strides is not seen, as in a device graph. After the
capture all intermediates get addresses in one pool, which all graphs of the runtime share, and a replay runs the
operators into that pool. So the next replay of any graph overwrites outputs, stale scalars stay stale, and whatever a
capture on a device refuses is refused (`guards.py`).

The module relies on two facts. Under inference mode composite operators (linear, rms_norm) reach the mode whole. An
operator of torch.library reaches it as one call; its implementation runs unrecorded at each replay and may read the
contents of its tensors, as a device kernel would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from phonograph.errors import CaptureError
from phonograph.graphs.runtime import CapturedGraph
from phonograph.graphs.tape.guards import HostReadGuard, refuse_unless_capturable
from phonograph.graphs.tape.nested import map_tensors, tensors_in
from phonograph.graphs.tape.pool import PoolPlan, plan_pool, storage_id


@dataclass(slots=True)
class _Call:
    """One recorded operator or eager call, with its tensors."""

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    break_here: bool = False
    replayed: bool = True
    """False for an allocation, which claims memory but runs nothing."""

    def tensors(self) -> list[torch.Tensor]:
        return [*tensors_in((self.args, self.kwargs)), *self.outputs]


class TapeRuntime:
    """GraphRuntime of the CPU. `num_threads` are those of torch's operators within `scope`; None for torch's number."""

    runs_captured = True

    def __init__(self, num_threads: int | None = None) -> None:
        self._num_threads = num_threads
        self._pool = torch.empty(0, dtype=torch.uint8)
        self._pools: list[torch.Tensor] = []
        self._recorder: _Recorder | None = None

    def scope(self) -> AbstractContextManager[object]:
        return nullcontext() if self._num_threads is None else operator_threads(self._num_threads)

    def capture(self, function: Callable[[], tuple[torch.Tensor, ...]]) -> CapturedGraph:
        if self._recorder is not None:
            raise CaptureError("a capture was started inside another capture")
        recorder = _Recorder()
        self._recorder = recorder
        try:
            with torch.inference_mode(), HostReadGuard(), recorder:
                outputs = function()
        finally:
            self._recorder = None
        return self._bind(recorder, outputs)

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        if self._recorder is None:
            function(*tensors)
            return
        self._recorder.calls.append(_Call(function, tensors, {}, [], break_here=True))
        with _python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            function(*tensors)

    def synchronize(self) -> None:
        """Do nothing: each call returns when it is done."""

    def poison(self) -> None:
        for pool in self._pools:
            pool.fill_(0xFF)  # NaN in every floating-point format

    @property
    def memory_bytes(self) -> int:
        return sum(pool.numel() for pool in self._pools)

    def _bind(self, recorder: _Recorder, outputs: tuple[torch.Tensor, ...]) -> CapturedGraph:
        """Place the intermediates in the pool and make the calls of the replay."""
        plan = plan_pool([call.tensors() for call in recorder.calls], recorder.made_here, keep=outputs)
        if plan.num_bytes > self._pool.numel():
            # Captured largest first, later graphs fit what the first one claimed.
            self._pool = torch.empty(plan.num_bytes, dtype=torch.uint8)
            self._pools.append(self._pool)
        binder = _Binder(self._pool, plan)
        steps = [binder.step(call) for call in recorder.calls if call.replayed]
        return CapturedGraph(steps, tuple(binder.place(tensor) for tensor in outputs))


@contextmanager
def operator_threads(count: int) -> Generator[None]:
    """Give torch's operators `count` threads, and afterwards the number before. Setting it takes 0.1 us."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Recorder(TorchDispatchMode):
    """Mode that runs and records each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.made_here: set[int] = set()
        """Storages of the intermediates."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # True makes torch import its compiler, which is not used here, at the first capture: 0.8 s of a start.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        refuse_unless_capturable(func, args)
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **kwargs)
            # Aliases hold the present address, sizes and strides; lists of arguments are copied.
            frozen_args, frozen_kwargs = map_tensors(_freeze, (args, kwargs))
        outputs = tensors_in(result)
        known = {storage_id(tensor) for tensor in tensors_in((args, kwargs))}
        fresh = [output for output in outputs if storage_id(output) not in known]
        if fresh and (len(fresh) != len(outputs) or func._schema.is_mutable):
            raise CaptureError(f"{func} makes new tensors beside old ones, which the tape cannot replay")
        if func._schema.is_mutable:
            self.calls.append(_Call(func, frozen_args, frozen_kwargs, []))
            return result
        if not fresh:
            return result  # a view: nothing to do at replay
        self.made_here.update(storage_id(output) for output in fresh)
        is_allocation = func in _ALLOCATIONS
        self.calls.append(_Call(func, frozen_args, frozen_kwargs, outputs, replayed=not is_allocation))
        return result


_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Binder:
    """Placement of one capture's tensors, and of its calls as callables without arguments."""

    def __init__(self, pool: torch.Tensor, plan: PoolPlan) -> None:
        self._pool = pool
        self._plan = plan

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's alias in the pool, or the tensor itself if it is not an intermediate."""
        start = self._plan.offsets.get(storage_id(tensor))
        if start is None:
            return tensor
        item = tensor.element_size()
        alias = torch.empty(0, dtype=tensor.dtype)
        offset = start // item + tensor.storage_offset()
        return alias.set_(self._pool.untyped_storage(), offset, tensor.size(), tensor.stride())

    def step(self, call: _Call) -> Callable[[], object]:
        args, kwargs = map_tensors(self.place, (call.args, call.kwargs))
        if call.break_here:
            return functools.partial(call.function, *args)
        func = cast(Any, call.function)
        if not call.outputs:
            return functools.partial(_entry(func), *args, **kwargs)
        outputs = [self.place(output) for output in call.outputs]
        out = _out_overload(func)
        if out is not None:
            names, overload = out
            return functools.partial(_entry(overload), *args, **kwargs, **dict(zip(names, outputs, strict=True)))
        return functools.partial(_run_and_copy, _entry(func), args, kwargs, outputs)


def _freeze(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def _entry(overload: Any) -> Callable[..., Any]:
    """Return the fastest callable of an operator.

    torch's own binding takes half the time of the schema's, but only some are known to have the same arguments. An
    operator in Python may name its function as `python_function`, which takes 5 us less than torch's dispatch to it.
    """
    bound = _BINDINGS.get(overload) or getattr(overload, "python_function", None)
    return overload._op if bound is None else bound


_aten = torch.ops.aten
_BINDINGS: dict[Any, Callable[..., Any]] = {
    _aten.mm.out: torch.mm,
    _aten.addmm.out: torch.addmm,
    _aten.addmm_.default: torch.Tensor.addmm_,
    _aten.mul.out: torch.mul,
    _aten.mul_.Tensor: torch.Tensor.mul_,
    _aten.add_.Tensor: torch.Tensor.add_,
    _aten.addcmul.out: torch.addcmul,
    _aten.addcmul_.default: torch.Tensor.addcmul_,
    _aten.rsqrt_.default: torch.Tensor.rsqrt_,
    _aten.index_select.out: torch.index_select,
    _aten.silu.out: torch._C._nn.silu,  # pyright: ignore
    _aten.linalg_vector_norm.out: torch._C._linalg.linalg_vector_norm,  # pyright: ignore
}


def _run_and_copy(function: Callable[..., Any], args: Any, kwargs: dict[str, Any], outputs: list[torch.Tensor]) -> None:
    results = function(*args, **kwargs)
    for output, result in zip(outputs, tensors_in(results), strict=True):
        output.copy_(result)


@functools.cache
def _out_overload(func: Any) -> tuple[tuple[str, ...], Any] | None:
    """Return the names of the outputs and the overload that writes into them, or None if there is none."""
    wanted = [(argument.name, str(argument.type)) for argument in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        arguments = overload._schema.arguments
        inputs = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        outs = tuple(argument.name for argument in arguments if argument.is_out)
        if outs and inputs == wanted and len(outs) == len(func._schema.returns):
            return outs, overload
    return None
