"""Return of an engine's memory after its last reference is gone."""

from __future__ import annotations

import gc

import torch


def release_memory() -> None:
    """Collect engines that nothing refers to, and give the memory that torch keeps on the GPU back to the driver.

    An engine has cycles, so that it is freed by the garbage collector only.
    """
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
