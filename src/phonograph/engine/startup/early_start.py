"""Work of a start that needs no imports and runs beside them, because they take seconds.

A process compiles kernels if some may be missing. A thread makes the device's context; the driver does not hold
Python's lock meanwhile. Failures are ignored here, because the later use of either reports them. The garbage collector
pauses until the engine is ready, because a start creates little garbage.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

from phonograph.errors import ConfigError, counted
from phonograph.kernels.triton.launch import compile_helper

DRIVER = "libcuda.so.1"
_paused = False


def start_early(device: int = 0) -> None:
    """Start compiling and the context of a device, if there is a GPU. Call it before the imports of an engine."""
    pause_collector()
    if Path("/dev/nvidiactl").exists():
        threading.Thread(target=make_context, args=(device,), name="device-context", daemon=True).start()
        compile_helper.start_early()


def select_devices(rank: int, num_engines: int, num_ranks: int = 1, devices: Path = Path("/dev")) -> None:
    """Let this process see the GPUs of its engine only. It has no effect with one engine, or without GPUs.

    Call it before the device's context is made. CUDA reads the environment then, and each thread would have to select
    the device otherwise.

    Args:
        rank: number of the engine.
        num_engines: engines of this machine.
        num_ranks: GPUs of each.
        devices: folder of the device files.

    Raises:
        ConfigError: there are too few GPUs.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        count = sum(one.name[6:].isdigit() for one in devices.glob("nvidia*"))
        names = [str(index) for index in range(count)]
    else:
        names = [name for name in visible.split(",") if name.strip()]
    if num_engines == 1 or not names:
        return
    if len(names) < num_engines * num_ranks:
        where = "here" if visible is None else f"in CUDA_VISIBLE_DEVICES={visible}"
        problem = f"needs {counted(num_ranks, 'GPU')} for each engine, found {counted(len(names), 'GPU')} {where}"
        raise ConfigError("data_parallel_size", num_engines, f"{problem}; {max(1, len(names) // num_ranks)} works")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[rank * num_ranks : (rank + 1) * num_ranks])


def pause_collector() -> None:
    """Pause the garbage collector until `resume_collector`. It has no effect if the collector is off."""
    global _paused
    if gc.isenabled():
        _paused = True
        gc.disable()


def resume_collector() -> None:
    """End the pause, if there is one."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


def make_context(index: int = 0) -> bool:
    """Make the context of a visible device, which torch then uses. Return True if it was made."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return not (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), index)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )
