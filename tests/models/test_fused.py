"""The forward pass of few tokens with one launch between two attention launches against the one with a launch each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from phonograph.kernels.triton import span_plan
from phonograph.kernels.triton.pdl import gluon_usable
from phonograph.kernels.triton.span_plan import ProductConfig, SpanConfig, StreamConfig
from phonograph.models import fused
from phonograph.models.decoder import Decoder
from phonograph.models.fused import FusedDecoder
from phonograph.models.spec import ModelSpec, read_model_spec

SMALL = SpanConfig(8, 1, 32, 64, *4 * (ProductConfig(8, 32, 1),))
LARGE = SpanConfig(
    8, 8, 64, 128, ProductConfig(8, 1024, 4), ProductConfig(8, 1024, 2), ProductConfig(8, 1024, 4),
    ProductConfig(32, 1024, 1),
)  # fmt: skip
STREAMED = StreamConfig(8, 128, 11, 6, (8, 2, 8, 2))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make_fused(spec: ModelSpec, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> FusedDecoder:
    """Random weights, which lie as on a GPU. The interpreter multiplies bfloat16 wrongly."""
    monkeypatch.setattr(Decoder, "_matrix", lambda self, size_in, size_out: self._allocate(size_out, size_in).t())
    decoder = Decoder(spec, torch.bfloat16 if device.type == "cuda" else torch.float16, device)
    generator = torch.Generator().manual_seed(0)
    for weight in decoder.parameters:
        drawn = torch.randn(weight.shape, generator=generator)
        weight.copy_(drawn / weight.shape[1] ** 0.5 if weight.dim() == 2 else drawn * 0.1 + 1)
    monkeypatch.setattr(fused, "has_span", lambda sizes: True)
    return FusedDecoder(decoder, max_num_tokens=16, max_num_logits=2, max_positions=64)


def run(model: FusedDecoder, num_tokens: int, device: torch.device, rows: torch.Tensor | None = None) -> torch.Tensor:
    """With something of the projection in place of attention."""
    layers: list[int] = []

    def attention(layer: int, projection_TF: torch.Tensor, out_TF: torch.Tensor) -> None:
        layers.append(layer)
        out_TF.copy_(projection_TF[:, -out_TF.shape[1] :])

    ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    hidden = model.forward(ids, attention, rows).double().clone()
    assert layers == list(range(model.spec.num_layers))
    return hidden


def compare(
    model: FusedDecoder,
    num_tokens: int,
    config: SpanConfig | StreamConfig,
    device: torch.device,
    patch: pytest.MonkeyPatch,
) -> None:
    wanted = run(model, num_tokens, device)
    calls, run_span = [], fused.run_span
    patch.setattr(fused, "run_span", lambda *args, **keywords: (calls.append(1), run_span(*args, **keywords)))
    config = config._replace(rows=8 if num_tokens <= 8 else 16)
    patch.setattr(fused, "choose_span", lambda *_: config)
    got = run(model, num_tokens, device)
    assert len(calls) == model.spec.num_layers
    # Each side rounds the stream of every layer for itself.
    limit = 2e-2 if model.decoder.dtype == torch.bfloat16 else 1e-2
    assert (got - wanted).norm() <= limit * wanted.norm()


@torch.inference_mode()
@pytest.mark.parametrize(("family", "num_tokens"), [("qwen3", 1), ("qwen3", 2), ("llama_bias", 11)])
def test_one_launch_between_attentions(
    family: str, num_tokens: int, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path)
    compare(make_fused(read_model_spec(tmp_path), device, monkeypatch), num_tokens, SMALL, device, monkeypatch)


@pytest.mark.gpu
@torch.inference_mode()
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 13])
def test_one_launch_between_attentions_of_a_real_size(
    num_tokens: int, streamed: bool, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if streamed and not gluon_usable():
        pytest.skip("needs a Hopper GPU")
    make_checkpoint("qwen3", tmp_path)
    spec = replace(
        read_model_spec(tmp_path),
        num_layers=4,
        windows=((-1, -1),) * 4,
        hidden_size=1024,
        intermediate_size=3072,
        num_query_heads=16,
        num_kv_heads=8,
        head_size=128,
        rope_frequencies=(1.0,) * 64,
    )
    config = STREAMED if streamed else LARGE._replace(gate_up=ProductConfig(8, 1024, 2 if num_tokens <= 8 else 1))
    compare(make_fused(spec, device, monkeypatch), num_tokens, config, device, monkeypatch)


@torch.inference_mode()
def test_what_was_measured_runs_so(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: not one token, not a class of rows or sizes that is not in the table."""
    make_checkpoint("qwen3", tmp_path)
    model = make_fused(read_model_spec(tmp_path), device, monkeypatch)
    model.decoder.dtype = torch.bfloat16
    chosen: list[int] = []
    monkeypatch.setattr(model, "_few", lambda ids, *_: chosen.append(len(ids)))
    monkeypatch.setattr(model, "_many", lambda *_: None)
    monkeypatch.setattr(model, "_one_token", lambda *_: None)
    monkeypatch.setitem(span_plan.MEASURED, (8, model.span_sizes), SMALL)
    for num_tokens in range(1, 12):
        model.forward(torch.zeros(num_tokens, dtype=torch.int32, device=device), lambda *_: None)
    assert chosen == list(range(2, 9))


@torch.inference_mode()
@pytest.mark.parametrize("family", ["qwen3", "llama_bias"])
def test_the_last_layer_of_only_the_rows_asked_for(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path)
    model = make_fused(read_model_spec(tmp_path), device, monkeypatch)
    wanted = run(model, 13, device)
    for memory in model.workspace.tensors():
        memory.fill_(float("nan"))
    rows = torch.tensor([12, 3], device=device)
    got = run(model, 13, device, rows)
    assert got.shape == (2, model.spec.hidden_size)
    # Two rows may go through other kernels than thirteen.
    limit = 2e-2 if model.decoder.dtype == torch.bfloat16 else 2e-3
    assert (got - wanted[rows]).norm() <= limit * wanted[rows].norm()
    assert (got - wanted[rows.flip(0)]).norm() > 0.1 * wanted[rows].norm()


def test_rows_are_left_out_of_long_steps_only(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("qwen3", tmp_path)
    decoder = make_fused(read_model_spec(tmp_path), device, monkeypatch).decoder

    def leaving(max_num_logits: int, *, batch_invariant: bool = False) -> list[int]:
        model = FusedDecoder(
            decoder,
            max_num_tokens=256,
            max_num_logits=max_num_logits,
            max_positions=64,
            batch_invariant=batch_invariant,
        )
        return [tokens for tokens in (1, 3, 4, 16, 128, 129, 199, 200, 256) if model.leaves_rows_out(tokens)]

    assert leaving(2) == [129, 199, 200, 256], "the weights of 128 take as long as of one"
    assert leaving(100) == [200, 256]
    assert leaving(2, batch_invariant=True) == []
