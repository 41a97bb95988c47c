"""What was measured to be faster than the first in the order of preference, by kind of device: for `--backend auto`."""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """A backend, or one for each part of a batch, and the version of those that have versions; why: the figures."""

    backend: str
    version: str | None
    why: str


MEASURED: dict[tuple[int, int], tuple[Measured, ...]] = {
    (9, 0): (
        Measured(
            "prefill=flash_attn,decode=triton",
            "3",
            "on an H200 a layer's prefill of 8192 tokens takes flash_attn 3 913 us and triton 1077, its decodes take "
            "triton 0.71 to 1.01 times as long",
        ),
    ),
}
"""By compute capability, the fastest first. Shapes of Llama-3.1-8B; docs/performance-gpu.md has the tables."""
