"""An installation with exactly the FlashAttention packages that a test names, all of them stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path

import fake_flash
import pytest

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
