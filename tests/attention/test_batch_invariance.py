"""Batch invariance of attention: a token's output is the same bits alone, in any batch, and in any chunk of a prefill.

In Triton's interpreter on small sizes, on a GPU on those of real models. FlashAttention 3 has its own in
test_flash_attn_gpu.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attention_specs
import pytest
import torch
from alone import FEATURES, LLAMA, Sequences, batches, check_real_sizes, unlike

from phonograph.testing.conformance import check_backend
from phonograph.testing.conformance_batch import BatchShape

pytest.importorskip("triton")

from phonograph.attention.triton.backend import TritonBackend

FULL = (-1, -1)
TINY = replace(attention_specs.TINY, lse=False, batch_invariant=True)


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.usefixtures("every_row_alike")
@pytest.mark.parametrize("changes", [{}, {"windows": ((20, 0),)}, {"block_size": 64, "softcap": 5.0}], ids=str)
def test_small(changes: dict[str, Any], device: torch.device) -> None:
    lengths = (150, 40, 3)
    sequences = Sequences(TritonBackend, replace(TINY, **changes), lengths, device)
    assert not unlike(sequences, batches(lengths), keys=True)


@pytest.mark.usefixtures("every_row_alike")
def test_without_the_setting_the_batch_shows(device: torch.device) -> None:
    """Otherwise nothing here could fail."""
    lengths = (700, 40, 3)
    sequences = Sequences(TritonBackend, replace(TINY, batch_invariant=False), lengths, device)
    assert unlike(sequences, batches(lengths), keys=False)


def test_it_is_attention(device: torch.device) -> None:
    shapes = (
        BatchShape(
            name="mixed", query_lens=(1, 1, 3, 20, 16), seq_lens=(40, 1, 3, 33, 16), padded_reqs=2, padded_tokens=3
        ),
        BatchShape(name="decodes", query_lens=(1,) * 3, seq_lens=(70, 16, 1), padded_reqs=1, padded_tokens=1),
        BatchShape(name="empty", query_lens=(), seq_lens=(), padded_reqs=2, padded_tokens=3),
    )
    spec = replace(TINY, lse=True, windows=(FULL, (6, 0)), sinks=True)
    results = check_backend(TritonBackend, spec, device, shapes=shapes)
    assert all(result.passed for result in results), [str(result) for result in results if not result.passed]


@pytest.mark.gpu
@pytest.mark.parametrize("feature", FEATURES)
def test_real_sizes(feature: str, device: torch.device) -> None:
    check_real_sizes(TritonBackend, replace(LLAMA, **FEATURES[feature]), device, seed=len(feature))
