"""What an engine's start waits for and needs no import: begun beside the imports, which take seconds.

The process that compiles kernels, if any may be missing; and the device's context, in a thread, which holds no lock of
Python's while the driver makes it. Where either fails nothing is said: whoever needs it finds out, and has the error.
The garbage collector pauses until the engine is ready, as next to nothing of what a start makes is garbage.
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
    """To be called before the imports of a process that will start an engine on a GPU, if one is here."""
    pause_collector()
    if Path("/dev/nvidiactl").exists():
        threading.Thread(target=make_context, name="device-context", daemon=True).start()
        compile_helper.start_early()


def pause_collector() -> None:
    """Until `resume_collector`. Nothing happens where it is off already."""
    global _paused
    if gc.isenabled():
        _paused = True
        gc.disable()


def resume_collector() -> None:
    """Ends a pause, if there is one."""
    global _paused
    if _paused:
        _paused = False
        gc.enable()


def make_context() -> bool:
    """The context of the first device that this process sees, which torch then finds; whether it could be made."""
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
