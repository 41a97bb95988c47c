"""Random weights without a file: activations stay of about unit size in every format and type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_model
from dense import DenseSequences
from quantized_checkpoints import FORMATS

from phonograph.files.catalog import CONFIGS_DIRECTORY, HUB_IDS
from phonograph.models.spec import ModelSpec, read_model_spec

CPU = torch.device("cpu")
SMALL = ("smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b", "tinyllama-1.1b", "qwen2.5-1.5b", "qwen3-1.7b")
"""Models whose layers take less than 100 MB each."""


def shipped(name: str, **overrides: Any) -> ModelSpec:
    """Return a model of the package with two layers and few tokens."""
    two_layers = {"num_hidden_layers": 2, "vocab_size": 512}
    return read_model_spec(CONFIGS_DIRECTORY / name, hf_overrides=two_layers | overrides)


class OnDevice(DenseSequences):
    """Sequences whose model may be on a GPU, and whose attention is computed on the CPU."""

    def _attention(self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, layer: int) -> Any:
        return super()._attention(query_THD.cpu(), key_TKD.cpu(), value_TKD.cpu(), layer).to(query_THD.device)


def check_a_step(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
    model = load_model(spec, Path("nowhere"), dtype=dtype, device=device, load_format="dummy")
    tokens = torch.randint(0, spec.vocab_size, (7,), device=device)
    sequences = OnDevice(model)
    sequences.add()
    sequences._step = [(0, 7)]
    with torch.inference_mode():
        hidden_TE = model.forward(tokens, torch.arange(7, device=device), sequences._attention)
        logits_TV = model.logits(hidden_TE).float()
    assert float(hidden_TE.float().abs().max()) < 20 + 0.01 * spec.hidden_size
    # The norm gives rows of unit size, so that a logit is a sum of products of random signs.
    assert 0.7 < float(logits_TV.std()) / (0.02 * spec.hidden_size**0.5) < 1.4


@pytest.mark.parametrize("name", SMALL)
def test_shipped_models(name: str) -> None:
    spec = shipped(name)
    check_a_step(spec, CPU, getattr(torch, spec.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(HUB_IDS) - set(SMALL)))
def test_large_shipped_models(name: str) -> None:
    spec = shipped(name)
    check_a_step(spec, torch.device("cuda"), getattr(torch, spec.dtype))


def check_formats(model: str, device: torch.device, dtype: torch.dtype, name: str) -> None:
    spec = shipped(model, quantization_config=FORMATS[name].config)
    assert spec.quantization is not None
    check_a_step(spec, device, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in FORMATS if FORMATS[name].method != "fp8"])
def test_formats(name: str, dtype: torch.dtype) -> None:
    """Weights whose mean is not 0 add the same number to every output, and layers multiply it."""
    check_formats("smollm2-360m", CPU, dtype, name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_formats_of_large_layers(name: str, dtype: torch.dtype) -> None:
    check_formats("qwen2.5-7b", torch.device("cuda"), dtype, name)
