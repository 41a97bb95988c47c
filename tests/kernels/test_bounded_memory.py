"""The watch over memory in the interpreter, which `conftest` turns on for all tests of kernels."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="is about Triton's interpreter")


@triton.jit
def _copy_kernel(x_ptr, y_ptr, shift, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at + shift, mask=at < n, other=0.0)
    tl.store(y_ptr + at, x, mask=at < n)


def test_reads_outside_of_arguments_are_found() -> None:
    memory, y = torch.randn(40), torch.zeros(8)
    _copy_kernel[(1,)](memory[8:16], y, 0, 8, BLOCK=16)
    # A view may be left, its storage not.
    _copy_kernel[(1,)](memory[8:16], y, -8, 8, BLOCK=16)
    for x, shift in ((memory[:8], -1), (memory[32:], 1)):
        with pytest.raises(InterpreterError, match="1 of 8 addresses are in no argument"):
            _copy_kernel[(1,)](x, y, shift, 8, BLOCK=16)
    with pytest.raises(InterpreterError, match="2 of 10 addresses"):
        _copy_kernel[(1,)](memory, y, 0, 10, BLOCK=16)
