"""Work of a start that needs no imports and runs beside them, because they take seconds.

A process compiles kernels if some may be missing. A thread makes the device's context; the driver does not hold
Python's lock meanwhile. Failures are ignored here, because the later use of either reports them. The garbage collector
pauses until the engine is ready, because a start creates little garbage.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

from phonograph.kernels.triton.launch import compile_helper

DRIVER = "libcuda.so.1"
_paused = False


def start_early() -> None:
    """Start compiling and the device's context, if there is a GPU. Call it before the imports of an engine."""
    pause_collector()
    if Path("/dev/nvidiactl").exists():
        threading.Thread(target=make_context, name="device-context", daemon=True).start()
        compile_helper.start_early()


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


def make_context() -> bool:
    """Make the context of the first visible device, which torch then uses. Return True if it was made."""
    try:
        driver = ctypes.CDLL(DRIVER)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return not (
        driver.cuInit(0)
        or driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    )
