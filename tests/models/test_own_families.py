"""Families that are one value each: they load, run on both kernel sets, and are served, without a change elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import load_model
from kernel_sets import OwnQueries
from own_families import FAMILIES, registered
from product_problem import gemm_device
from safetensors.torch import load_file, save_file

from phonograph import LLM, SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.layers.triton_parts import TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.spec import ModelSpec, read_model_spec

EPS, TOKENS = 1e-5, 7
CONFIG = {
    "vocab_size": read_model_spec("demo").vocab_size,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of random weights."""
    with registered():
        family = FAMILIES[request.param]
        config = {**CONFIG, "architectures": [request.param], "model_type": family.model_type}
        (tmp_path / "config.json").write_text(json.dumps(config))
        generator = torch.Generator().manual_seed(3)
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in read_model_spec(tmp_path).tensor_shapes().items():
            drawn = torch.randn(shape, generator=generator)
            tensors[name] = drawn / shape[-1] ** 0.5 if len(shape) == 2 else 0.3 * drawn + ("norm" in name)
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        yield tmp_path


def expected(spec: ModelSpec, weights: dict[str, torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Return the stream after all layers in float64, if the output of attention is the query at position 0."""
    weights = {name: tensor.double() for name, tensor in weights.items()}

    def normed(x: torch.Tensor, norm: str | None, prefix: str) -> torch.Tensor:
        if norm is None:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weights[f"{prefix}{norm}.weight"]

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].t() + weights.get(f"{name}.bias", 0)

    hidden = weights["model.embed_tokens.weight"][ids] * spec.factors.embedding
    for index, layer in enumerate(spec.layers):
        prefix, attention, feed_forward = f"model.layers.{index}.", layer.attention, layer.feed_forward
        query = product(normed(hidden, attention.input_norm, prefix), f"{prefix}self_attn.q_proj")
        added = normed(product(query, f"{prefix}self_attn.o_proj"), attention.output_norm, prefix)
        hidden = hidden + spec.factors.residual * added
        x = normed(hidden, feed_forward.input_norm, prefix)
        gated = torch.nn.functional.silu(product(x, f"{prefix}mlp.gate_proj")) * product(x, f"{prefix}mlp.up_proj")
        added = normed(product(gated, f"{prefix}mlp.down_proj"), feed_forward.output_norm, prefix)
        hidden = hidden + spec.factors.residual * added
    return hidden


@torch.inference_mode()
@pytest.mark.parametrize("kernel_set", ["torch", "triton"])
@pytest.mark.parametrize("rows", [1, TOKENS])
def test_layers_are_the_formula(folder: Path, kernel_set: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kernel_set == "triton":
        monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    spec = read_model_spec(folder)
    model = load_model(spec, folder, dtype=torch.float32, device=device)
    table = rotary_tables(spec, 64, torch.float32, device)
    if kernel_set == "torch":
        model.bind(TorchKernels(table, EPS, spec.factors))
    else:
        space = Workspace.make(spec, TOKENS, TOKENS, torch.float32, device, gemm_device=gemm_device())
        for memory in space.tensors():
            memory.fill_(torch.nan)
        model.bind(TritonKernels(space, table, EPS, device=gemm_device(), factors=spec.factors))
    ids = torch.arange(rows, dtype=torch.int32, device=device) * 11 % spec.vocab_size
    found = model.forward(ids, torch.zeros(rows, dtype=torch.int64, device=device), OwnQueries(model))
    weights = {name: tensor.to(device) for name, tensor in load_file(folder / "model.safetensors").items()}
    wanted = expected(spec, weights, ids)
    assert (found.double() - wanted).norm() <= 1e-5 * wanted.norm()
    hidden = found.double()
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + EPS) * weights["model.norm.weight"].double()
    logits = normed @ weights["lm_head.weight"].double().t() * spec.factors.logits
    assert (model.logits(found).double() - logits).norm() <= 1e-5 * logits.norm()


def test_an_engine_serves_them(folder: Path) -> None:
    """In graphs as eagerly; kernels of all kinds of layers are seen before."""
    answers: list[Any] = []
    for mode in ("FULL", "NONE"):
        llm = LLM(str(folder), tokenizer=str(MODEL_DIRECTORY), device="cpu", cudagraph_mode=mode, max_num_seqs=2)
        outputs = llm.generate([[5, 6, 7], [9] * 20], SamplingParams(max_tokens=6, ignore_eos=True, temperature=0))
        answers.append([output.outputs[0].token_ids for output in outputs])
        assert all(len(tokens) == 6 for tokens in answers[-1])
    assert answers[0] == answers[1]


def test_kinds_of_layers(folder: Path) -> None:
    """Equal layers are one object, and both families have two kinds."""
    spec = read_model_spec(folder)
    assert len(spec.kinds) == len({id(layer) for layer in spec.layers}) == 2
    assert sum(layer is spec.layers[0] for layer in spec.layers) >= 3
