"""Runs Gluon kernels without a GPU: each group of warps of each program is a thread, its tensors are torch's.

Triton's interpreter does not know Gluon. This knows what our kernels use of it, with the waits, counts and parities of
its barriers and the copy engine's tiles, so that shares, rings and barriers are tried as they are written. Not tried
here: layouts, and the order in which writes become visible. Threads change places at random.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from triton.language import constexpr
from triton.runtime.jit import KernelInterface

_PATIENCE = 60.0
"""Seconds that a wait may take; more is a deadlock."""
_DELAY = 0.0, 1e-4
"""Seconds that the copy engine takes, at least and at most."""
_here = threading.local()
_memory = threading.Lock()


class _Stuck(Exception):
    pass


def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + _PATIENCE
    while not holds():
        if _here.failed or time.monotonic() > end:
            raise _Stuck(f"{threading.current_thread().name} waits for {what}")
        time.sleep(random.random() * 1e-4)


@dataclass
class Pointer:
    """Elements of a tensor's storage, counted from its start."""

    memory: torch.Tensor
    at: Any = 0

    @classmethod
    def to(cls, tensor: torch.Tensor) -> Pointer:
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())  # pyright: ignore[reportArgumentType]
        return cls(whole, tensor.storage_offset())

    def __add__(self, other: Any) -> Pointer:
        """Offsets may have 32 bits, addresses have 64."""
        return Pointer(self.memory, self.at + (other.long() if isinstance(other, torch.Tensor) else other))

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.memory.dtype)


class Shared:
    """A tensor in shared memory, poisoned."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.dtype = values, list(values.shape), values.dtype
        self.type = types.SimpleNamespace(shape=list(values.shape))

    def index(self, at: Any) -> Shared:
        return Shared(self.values[int(at)])

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.values.permute(order))

    def slice(self, first: int, length: int, axis: int) -> Shared:
        return Shared(self.values.narrow(axis, first, length))

    def _reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared | Boxes:
        same_size = math.prod(shape) == self.values.numel()
        if len(shape) == 3 and same_size:
            return Boxes(self.values, *shape[1:])
        if dtype == self.values.dtype and same_size:
            return Shared(self.values.view(shape))
        # More or less of the memory that begins here, which must not end before.
        first = self.values.storage_offset() * self.values.element_size() // dtype.itemsize
        return Shared(torch.empty(0, dtype=dtype).set_(self.values.untyped_storage(), first, shape))

    def load(self, layout: Any) -> torch.Tensor:
        return self.values.clone()

    def store(self, values: torch.Tensor) -> None:
        self.values.copy_(values)


@dataclass
class Boxes:
    """A matrix in pieces of so many rows and columns, in the order in which they lie: columns outside."""

    values: torch.Tensor
    height: int
    width: int

    def index(self, at: Any) -> Shared:
        column, row = divmod(int(at), len(self.values) // self.height)
        rows = self.values[row * self.height : (row + 1) * self.height]
        return Shared(rows[:, column * self.width : (column + 1) * self.width])


class Barrier:
    """Barrier in shared memory: a phase ends when all threads and all bytes have arrived."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0
        self.lock = threading.Lock()

    def arrive(self, *, bytes_expected: int = 0, arrivals: int = 0, bytes_come: int = 0) -> None:
        with self.lock:
            self.left -= arrivals
            self.bytes += bytes_expected - bytes_come
            assert self.left >= 0, "more arrivals than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase + 1, self.count


class _Barriers:
    def __init__(self, number: int) -> None:
        self.all = [Barrier() for _ in range(number)]

    def index(self, at: Any) -> Barrier:
        return self.all[int(at)]


class _Mbarrier:
    @staticmethod
    def MBarrierLayout() -> str:
        return "barriers"

    @staticmethod
    def init(barrier: Barrier, *, count: int) -> None:
        barrier.count = barrier.left = count

    @staticmethod
    def expect(barrier: Barrier, size: int, *, pred: Any = True) -> None:
        if pred:
            barrier.arrive(arrivals=1, bytes_expected=size)

    @staticmethod
    def arrive(barrier: Barrier, *, count: int = 1) -> None:
        barrier.arrive(arrivals=count)

    @staticmethod
    def wait(barrier: Barrier, parity: Any) -> None:
        _until(lambda: barrier.phase % 2 != int(parity), f"a barrier at phase {barrier.phase}, {barrier.left} missing")


class Descriptor:
    """Tensor as the copy engine sees it: tiles beyond its edges read as zeros."""

    def __init__(self, given: Any) -> None:
        self.tensor = torch.as_strided(given.base, given.shape, given.strides)
        self.layout, self.dtype = given.layout, given.base.dtype
        size = math.prod(given.block_shape) * given.base.element_size()
        self.block_type = types.SimpleNamespace(shape=given.block_shape, nbytes=size)


_copy_engine = ThreadPoolExecutor(4)


class _Tma:
    @staticmethod
    def async_copy_global_to_shared(
        descriptor: Descriptor, place: list[Any], barrier: Barrier, to: Shared, *, pred: Any = True
    ) -> None:
        """Copy some time later, while other threads continue."""
        failed = _here.failed
        box = tuple(slice(int(at), int(at) + size) for at, size in zip(place, descriptor.block_type.shape, strict=True))

        def bring() -> None:
            time.sleep(random.uniform(*_DELAY))
            try:
                to.values.zero_()
                found = descriptor.tensor[box]
                to.values[tuple(map(slice, found.shape))] = found
                barrier.arrive(bytes_come=descriptor.block_type.nbytes)
            except BaseException as error:
                failed.append(error)

        if pred:
            _copy_engine.submit(bring)


class _Language:
    """Stands for `triton.experimental.gluon.language`."""

    int8, int16, int32, int64 = torch.int8, torch.int16, torch.int32, torch.int64
    float16, bfloat16, float32 = torch.float16, torch.bfloat16, torch.float32
    reshape, permute = staticmethod(torch.reshape), staticmethod(torch.permute)
    static_range = range
    NVMMADistributedLayout = BlockedLayout = SliceLayout = staticmethod(lambda *args, **keywords: None)
    DotOperandLayout = SwizzledSharedLayout = staticmethod(lambda *args, **keywords: None)
    NVMMASharedLayout = types.SimpleNamespace(get_default_for=lambda *args: None)
    to_tensor = staticmethod(torch.as_tensor)
    convert_layout = staticmethod(lambda values, layout, **_: values)
    exp, exp2, log2 = staticmethod(torch.exp), staticmethod(torch.exp2), staticmethod(torch.log2)
    rsqrt = staticmethod(torch.rsqrt)

    @staticmethod
    def thread_barrier() -> None:
        time.sleep(random.random() * 1e-5)

    @staticmethod
    def program_id(axis: int) -> int:
        return _here.program[axis]

    @staticmethod
    def join(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.stack((one, other), -1)

    @staticmethod
    def reduce(values: torch.Tensor, axis: int, combine: Callable[..., torch.Tensor]) -> torch.Tensor:
        return functools.reduce(combine, values.unbind(axis))

    @staticmethod
    def split(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return values.unbind(-1)

    @staticmethod
    def arange(first: int, end: int, *, layout: Any) -> torch.Tensor:
        return torch.arange(first, end, dtype=torch.int32)

    @staticmethod
    def zeros(shape: list[int], dtype: torch.dtype, layout: Any) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    @staticmethod
    def sum(values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.sum(axis)

    @staticmethod
    def full(shape: list[int], value: float, dtype: torch.dtype, layout: Any) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    @staticmethod
    def max(values: torch.Tensor, axis: int) -> torch.Tensor:
        return values.amax(axis)

    @staticmethod
    def maximum(left: Any, right: Any) -> Any:
        if isinstance(left, torch.Tensor) and left.dim():
            return torch.maximum(left, torch.as_tensor(right, dtype=left.dtype))
        return max(left, right)

    @staticmethod
    def minimum(left: Any, right: Any) -> Any:
        return left.clamp(max=right) if isinstance(left, torch.Tensor) else min(left, right)

    @staticmethod
    def where(condition: Any, left: Any, right: Any) -> Any:
        if isinstance(condition, bool) or not condition.dim():
            return left if condition else right
        return torch.where(condition, left, right)

    @staticmethod
    def load(pointer: Pointer, *, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> torch.Tensor:
        at = torch.as_tensor(pointer.at)
        mask = torch.as_tensor(True if mask is None else mask).expand_as(at)
        with _memory:
            found = torch.where(mask, pointer.memory[torch.where(mask, at, 0)], other).to(pointer.memory.dtype)
        return found

    @staticmethod
    def store(pointer: Pointer, values: Any, *, mask: Any = None) -> None:
        at = torch.as_tensor(pointer.at)
        values = torch.as_tensor(values, dtype=pointer.memory.dtype).expand_as(at)
        mask = torch.as_tensor(True if mask is None else mask).expand_as(at)
        with _memory:
            pointer.memory[at[mask]] = values[mask]

    @staticmethod
    def atomic_add(pointer: Pointer, value: int, *, sem: str, scope: str) -> int:
        assert (sem, scope) == ("acq_rel", "gpu")
        with _memory:
            before = int(pointer.memory[pointer.at])
            pointer.memory[pointer.at] = before + value
        return before

    @staticmethod
    def inline_asm_elementwise(text: str, constraints: str, arguments: list[Any], **others: Any) -> Any:
        if "%never" in text:
            return arguments[0]
        assert "griddepcontrol" in text, text
        return None

    @staticmethod
    def allocate_shared_memory(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if layout == "barriers":
            return _Barriers(shape[0])
        return Shared(
            torch.full(shape, torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 2, dtype=dtype)
        )

    @staticmethod
    def warp_specialize(groups: list[tuple[Any, tuple[Any, ...]]], warps: list[int], registers: list[int]) -> None:
        threads = [_Thread(_here.program, _here.failed, work, arguments) for work, arguments in groups]
        _run_all(threads)


class _Thread(threading.Thread):
    def __init__(
        self, program: tuple[int, int], failed: list[BaseException], work: Any, arguments: tuple[Any, ...]
    ) -> None:
        super().__init__(name=f"program {program}, {work.__name__}", daemon=True)
        self.program, self.failed, self.work, self.arguments = program, failed, work, arguments

    def run(self) -> None:
        _here.program, _here.failed = self.program, self.failed
        try:
            self.work(*self.arguments)
        except BaseException as error:
            self.failed.append(error)


def _run_all(threads: list[_Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _multiply(a: Any, b: Shared, sums: torch.Tensor, *, is_async: bool) -> torch.Tensor:
    left = a.values if isinstance(a, Shared) else a
    return sums + left.float() @ b.values.float()


def _unpacked(words: torch.Tensor, magic: int, bits: int, kind: torch.dtype) -> torch.Tensor:
    """Stands for the Triton function of this name, whose cast of bits torch's tensors do not have."""
    bias = 128 if kind == torch.bfloat16 else 16
    values = (words[..., None] >> (bits * torch.arange(32 // bits))) & ((1 << bits) - 1)
    return values.unflatten(-1, (2, 2, 2)).to(kind) + bias


def _multiply_in_registers(left: torch.Tensor, right: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    if sums.dtype == torch.int32:
        return sums + (left.double() @ right.double()).to(torch.int32)
    return sums + left.float() @ right.float()


def _larger_halves(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    low, high = (torch.maximum(one >> at & 0xFFFF, other >> at & 0xFFFF) for at in (0, 16))
    return low | high << 16


def _bytes_of(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    def words(bits: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(bits, -1).to(torch.int8).view(torch.int32).squeeze(-1)

    return words([one + 128 >> 8 for one in values]), words(list(values))


def _signed_bytes(words: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values = words[..., 0].contiguous().view(torch.uint8).unflatten(-1, (-1, 4)).int()
    return tuple((16 * (half - 8)).to(torch.int8) for half in (values & 15, values >> 4))


_IN_ASSEMBLY = {
    "unpacked": _unpacked,
    "_reinterpreted": torch.Tensor.view,
    "_larger_halves": _larger_halves,
    "_bytes_of": _bytes_of,
    "_signed_bytes": _signed_bytes,
}
"""Stand for functions that torch has no cast of bits for, or that are inline assembly."""


def _surroundings(given: dict[str, Any], known: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the globals of a module's kernels as plain Python; imported modules have their own."""
    if id(given) in known:
        return known[id(given)]
    names = known[id(given)] = dict(given)
    for key, value in given.items():
        if isinstance(value, constexpr):
            names[key] = value.value
        elif isinstance(value, KernelInterface):
            around = _surroundings(value.fn.__globals__, known)
            names[key] = types.FunctionType(value.fn.__code__, around, key, value.fn.__defaults__)
    # What kernels of both languages call is in Triton's.
    names |= {"gl": _Language, "tl": _Language, "mbarrier": _Mbarrier, "tma": _Tma, "fence_async_shared": lambda: None}
    names |= {key: value for key, value in _IN_ASSEMBLY.items() if key in names}
    names["warpgroup_mma"] = _multiply
    names["mma_v2"] = _multiply_in_registers
    names["warpgroup_mma_init"] = lambda sums: sums
    names["warpgroup_mma_wait"] = lambda number, *, deps: deps[0] if len(deps) == 1 else deps
    return names


def _parameters(function: Any) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def launcher(module: types.ModuleType, name: str) -> Any:
    """In place of the module's kernel of this name, what runs it so.

    Raises (at the launch) what a thread raised first; a deadlock is one too.
    """
    names = _surroundings(vars(module), {})

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        if isinstance(value, torch.Tensor):
            return Pointer.to(value)
        return Descriptor(value) if hasattr(value, "block_shape") else value

    class Grid:
        arg_names = _parameters(getattr(module, name).fn)

        def __getitem__(self, grid: tuple[int] | tuple[int, int]) -> Callable[..., None]:
            def launch(*arguments: Any, **keywords: Any) -> None:
                kernel = names[name]
                # Other keywords are options of the launch.
                given = [*arguments, *(keywords[key] for key in _parameters(kernel)[len(arguments) :])]
                given = [convert(value) for value in given]
                failed: list[BaseException] = []
                programs = itertools.product(range(grid[0]), range(grid[1] if len(grid) > 1 else 1))
                threads = [_Thread(program, failed, kernel, tuple(given)) for program in programs]
                random.shuffle(threads)
                _run_all(threads)
                if failed:
                    raise failed[0]

            return launch

    return Grid()
