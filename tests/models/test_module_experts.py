"""Experts of transformers' modules by our kernels, against transformers' own code in float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from module_families import make_module_checkpoint
from transformers.activations import GELUActivation

from phonograph.models.layers.experts import chosen_experts as torch_experts
from phonograph.models.layers.triton_experts import chosen_experts as triton_experts
from phonograph.models.modules import module_experts
from phonograph.models.modules.module_experts import ChosenExperts, experts_notes, set_experts
from phonograph.models.spec import read_model_spec

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS: dict[str, ChosenExperts] = {"torch": torch_experts, "triton": triton_experts}


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """New memory is NaN on a CPU."""
    torch.use_deterministic_algorithms(DEVICE.type == "cpu", warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite", "dots1", "phimoe"])
def test_logits_of_modules(family: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = make_module_checkpoint(family, tmp_path).to(DEVICE)
    ids = torch.randint(VOCAB_SIZE, (1, 37), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    model.set_experts_implementation("eager")
    with torch.inference_mode():
        expected = model.double()(ids, use_cache=False).logits
        # Without transformers' products only ours are left.
        monkeypatch.setattr(module_experts, "grouped_mm_experts_forward", None)
        set_experts(model.float(), KERNELS[kernels])
        got = model(ids, use_cache=False).logits
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "size", "inner_size"),
    [(1, 5, 2, 50, 20), (33, 6, 6, 32, 17), (70, 40, 8, 24, 33), (9, 4, 1, 48, 16)],
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_sums_of_chosen_experts(
    activation: Any, num_tokens: int, num_experts: int, top_k: int, size: int, inner_size: int, kernels: str
) -> None:
    x = torch.randn(num_tokens, size)
    experts = torch.rand(num_tokens, num_experts).argsort(-1)[:, :top_k]
    weights = torch.rand(num_tokens, top_k).half()
    gate_up, down = torch.randn(num_experts, 2 * inner_size, size) * 0.3, torch.randn(num_experts, size, inner_size)
    chosen = KERNELS[kernels]
    inputs: list[Any] = [one.to(DEVICE) for one in (x, experts, weights, gate_up, down)]
    got = chosen(*inputs, activation)
    expected = torch.zeros(num_tokens, size, dtype=torch.float64)
    for token in range(num_tokens):
        for expert, weight in zip(experts[token], weights[token].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
            if activation == "clamped_swiglu":
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = gate * (1.702 * gate).sigmoid() * (up + 1)
            elif activation == "silu":
                inner = torch.nn.functional.silu(gate) * up
            else:
                inner = torch.nn.functional.gelu(gate, approximate="tanh") * up
            expected[token] += weight * (down[expert].double() @ inner)
    torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-4, atol=1e-3)


def test_experts_that_our_kernels_lack(tmp_path: Path) -> None:
    """They run by transformers' products, with a note."""
    model: Any = make_checkpoint("gpt_oss", tmp_path)
    ids = torch.arange(3, 20)[None]
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits
        set_experts(model)
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected, rtol=1e-4, atol=1e-4)
    (_, note, *_) = read_model_spec(tmp_path, model_impl="transformers").notes
    assert note == "transformers' products run its experts: they have biases"
    make_module_checkpoint("dots1", tmp_path)
    assert "our kernels run its experts" in read_model_spec(tmp_path).notes


def _interleaved_gate(gate_up_T2I: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate_up_T2I[:, ::2]) * gate_up_T2I[:, 1::2]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"has_gate": False}, "they have no gates"),
        ({"is_transposed": True}, "their weights are transposed"),
        ({"is_concatenated": False}, "their weights are interleaved"),
        ({"act_fn": GELUActivation()}, "our kernels have not their activation"),
        ({"_apply_gate": _interleaved_gate}, "our kernels have not"),
    ],
)
def test_reasons(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = make_module_checkpoint("dots1", tmp_path)
    assert experts_notes(model) == ("our kernels run its experts",)
    for one in model.modules():
        if hasattr(one, "gate_up_proj"):
            for name, value in changes.items():
                setattr(one, name, value)
    (note,) = experts_notes(model)
    assert note.startswith(f"transformers' products run its experts: {reason}")
