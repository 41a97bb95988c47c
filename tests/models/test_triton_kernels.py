"""The forward pass of few kernels: by any kernels that a number of tokens chooses, and of the rows asked for alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from kernel_sets import OwnQueries
from product_problem import gemm_device
from resized import resized

from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.triton_parts import TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.models.transformer import Transformer


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_fused(
    spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch, max_num_tokens: int = 16
) -> Transformer:
    """Random weights, which lie as on a GPU. The interpreter multiplies bfloat16 wrongly."""
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    model = Transformer(spec, torch.bfloat16 if device.type == "cuda" else torch.float16, device)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters:
        drawn = torch.randn(weight.shape, generator=generator)
        weight.copy_(drawn / weight.shape[1] ** 0.5 if weight.dim() == 2 else drawn * 0.1 + 1)
    bind_triton(model, max_num_tokens)
    return model


def bind_triton(
    model: Transformer, max_num_tokens: int, max_num_logits: int = 2, *, batch_invariant: bool = False
) -> TritonKernels:
    spec = model.spec
    gpu = gemm_device()
    workspace = Workspace.make(spec, max_num_tokens, max_num_logits, model.dtype, model.device, gemm_device=gpu)
    table = rotary_tables(spec, max(64, max_num_tokens), torch.float32, model.device)
    kernels = TritonKernels(workspace, table, spec.rms_norm_eps, device=gpu, batch_invariant=batch_invariant)
    model.bind(kernels)
    return kernels


def poison(model: Transformer) -> None:
    assert isinstance(model.kernels, TritonKernels)
    for memory in model.kernels.workspace.tensors():
        memory.fill_(float("nan"))


def run(model: Transformer, num_tokens: int, device: torch.device, rows: torch.Tensor | None = None) -> torch.Tensor:
    """With the queries in place of attention."""
    attend = OwnQueries(model)
    ids = torch.arange(num_tokens, dtype=torch.int32, device=device) % model.spec.vocab_size
    positions = torch.arange(num_tokens, device=device)
    hidden = model.forward(ids, positions, attend, rows).double().clone()
    assert attend.layers == list(range(model.spec.num_layers))
    return hidden


def compare(model: Transformer, tokens: list[int], device: torch.device) -> None:
    """With kernels that are the same for all numbers of tokens, and none of which is for few."""
    kernels = model.kernels
    for num_tokens in tokens:
        bind_triton(model, max(tokens), batch_invariant=True)
        wanted = run(model, num_tokens, device)
        model.bind(kernels)
        poison(model)
        got = run(model, num_tokens, device)
        # Each side rounds the stream of every layer for itself.
        limit = 2e-2 if model.dtype == torch.bfloat16 else 1e-2
        assert (got - wanted).norm() <= limit * wanted.norm(), num_tokens


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3", "llama_bias"])
def test_few_tokens(family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(family, tmp_path)
    compare(make_fused(read_model_spec(tmp_path), device, monkeypatch), [1, 2, 11], device)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize(("hidden", "intermediate", "heads"), [(1024, 3072, 16), (2048, 8192, 16), (4096, 14336, 32)])
def test_few_tokens_of_real_sizes(
    hidden: int, intermediate: int, heads: int, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3", tmp_path)
    spec = resized(
        read_model_spec(tmp_path),
        num_layers=3,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_query_heads=heads,
        num_kv_heads=8,
        head_size=128,
    )
    model = make_fused(spec, device, monkeypatch, max_num_tokens=256)
    compare(model, [1, 2, 8, 13, 29, 64, 256], device)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3", "llama_bias"])
def test_the_last_layer_of_only_the_rows_asked_for(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path)
    model = make_fused(read_model_spec(tmp_path), device, monkeypatch)
    wanted = run(model, 13, device)
    poison(model)
    rows = torch.tensor([12, 3], device=device)
    got = run(model, 13, device, rows)
    assert got.shape == (2, model.spec.hidden_size)
    # Two rows may go through other kernels than thirteen.
    limit = 2e-2 if model.dtype == torch.bfloat16 else 2e-3
    assert (got - wanted[rows]).norm() <= limit * wanted[rows].norm()
    assert (got - wanted[rows.flip(0)]).norm() > 0.1 * wanted[rows].norm()


def test_rows_are_left_out_of_long_steps_only(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3", tmp_path)
    model = make_fused(read_model_spec(tmp_path), device, monkeypatch)

    def leaving(max_num_logits: int, *, batch_invariant: bool = False) -> list[int]:
        kernels = bind_triton(model, 256, max_num_logits, batch_invariant=batch_invariant)
        lengths = 1, 3, 4, 16, 128, 129, 199, 200, 256
        return [num_tokens for num_tokens in lengths if kernels.leaves_rows_out(num_tokens, max_num_logits)]

    assert leaving(2) == [129, 199, 200, 256], "the weights of 128 take as long as of one"
    assert leaving(100) == [200, 256]
    assert leaving(2, batch_invariant=True) == []
