"""Installations with exactly the FlashAttention packages that a test names, all of them stand-ins; quick KV writes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import fake_flash
import pytest
import torch

from phonograph.attention import kv_write
from phonograph.attention.flash_attn import providers

_TOP = ("cutlass", "vllm", "flash_attn", "flash_attn_2_cuda", "flash_attn_interface", "kernels", "flash_kernel")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Call it with names of fake_flash.PACKAGES; returns the folder they are in."""

    def install(*names: str) -> Path:
        fake_flash.write_packages(tmp_path, *names)
        monkeypatch.syspath_prepend(str(tmp_path))
        for name in list(sys.modules):
            if name.partition(".")[0] in _TOP:
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(providers, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)]))
        fake_flash.CALLS.clear()
        return tmp_path

    yield install
    for name in list(sys.modules):
        if name.partition(".")[0] in _TOP and str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def quick_kv_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the KV write, which takes the interpreter seconds, in one thread, and has tests of its own."""

    def write_kv(
        keys: torch.Tensor,
        values: torch.Tensor,
        cache: torch.Tensor,
        slots: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
    ) -> None:
        size, own, largest = cache.shape[2], slots >= 0, torch.finfo(cache.dtype).max
        at = slots[own] // size, slots[own] % size
        for plane, rows, scale in ((0, keys, k_scale), (1, values, v_scale)):
            assert scale is not None or cache.dtype.itemsize > 1
            written = rows[: len(slots)][own].float()
            scaled = written if scale is None else written / scale[:, None]
            cache[(plane, *at)] = scaled.clamp(-largest, largest).to(cache.dtype)

    monkeypatch.setattr(kv_write, "write_kv", write_kv)
