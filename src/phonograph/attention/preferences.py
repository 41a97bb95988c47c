"""Measured preferences of `--backend auto`, by kind of device."""

from __future__ import annotations

from typing import NamedTuple


class Measured(NamedTuple):
    """A backend that is faster than the first in the order of preference.

    Attributes:
        backend: its name, or one for each part of a batch.
        version: of the backends that have versions.
        why: the measured times.
    """

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
"""By compute capability, fastest first, for shapes of Llama-3.1-8B. Tables are in docs/performance.md."""
