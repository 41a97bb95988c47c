"""GGUF files of models with experts: a model computes what the file means, and a file that lies is rejected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import load_model, make_checkpoint
from dense import DenseSequences
from gguf_files import transformers_model, write_gguf
from router_gaps import LEAST_GAP, router_gaps
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from phonograph.errors import ModelError, PhonographError, UnsupportedModelError, WeightError
from phonograph.models.quantization.cpu_weights import CpuProducts, Int4Weight
from phonograph.models.spec import read_model_spec
from phonograph.models.weights.loading import begin_loading

CPU = torch.device("cpu")
PACKED = CpuProducts(int4=True, dequantize=False, operator_rows=4, reason="a test")
TOKENS = [5, 99, 3, 3, 42, 17, 200, 8, 1]
MIXTRAL = {"intermediate_size": 32}
MOE = {"intermediate_size": 32, "moe_intermediate_size": 64}
SHARED = {"shared_intermediate_size": 64}
OWN: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1},
    "qwen3_moe": {**MOE, "mlp_only_layers": []},
    "olmoe": MIXTRAL,
    "granitemoe": MIXTRAL,
    "granitemoeshared": {**MIXTRAL, **SHARED},
    "granite": MIXTRAL,
    "granite4": {**SHARED, "intermediate_size": 64},
    "qwen3_5_moe": {
        **{"linear_num_value_heads": 4, "linear_value_head_dim": 64, "moe_intermediate_size": 64},
        "shared_expert_intermediate_size": 96,
    },
}
"""Sizes that are multiples of 32, the smallest blocks; llama.cpp has no dense layers between others."""
MIXED = {"gate": "Q4_K", "up": "Q6_K", "down": "Q5_K", "rest": "Q6_K"}
MIXED_SMALL = {"gate": "Q4_1", "up": "Q5_0", "down": "Q8_0", "rest": "Q4_0"}


def kinds(by_part: dict[str, str]) -> Callable[[str], str]:
    """Return types of matrices by the part of their names."""
    return lambda name: by_part.get(name.split(".")[-2].removesuffix("_proj"), by_part["rest"])


def sizes_of(family: str, *, large: bool = False) -> dict[str, Any]:
    """Return sizes that are multiples of the blocks."""
    if not large:
        return OWN[family]
    own = {name: 256 if name.endswith("size") else value for name, value in OWN[family].items()}
    return {**own, "hidden_size": 256, "head_dim": 64}


def logits(path: Path, **settings: Any) -> torch.Tensor:
    sequences = DenseSequences(load_model(read_model_spec(path), path, dtype=torch.float32, device=CPU, **settings))
    return sequences.step([(sequences.add(), TOKENS)])[0]


def wanted_logits(folder: Path, meant: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return transformers' logits of the weights that a file means; skip weights whose routers choose by rounding."""
    save_file({name: tensor.contiguous().clone() for name, tensor in meant.items()}, folder / "model.safetensors")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad(), router_gaps(reference) as gap:
        wanted = reference(torch.tensor([TOKENS])).logits[0]
    assert gap() > LEAST_GAP, "routers choose by rounding; draw other weights"
    return wanted


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
@pytest.mark.parametrize("family", OWN)
def test_logits_are_those_of_the_weights_that_the_file_means(family: str, large: bool, tmp_path: Path) -> None:
    """Parts of a matrix have several types, in small blocks and in large ones."""
    make_checkpoint(family, tmp_path, seed=3, **sizes_of(family, large=large))
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, tmp_path, kinds(MIXED if large else MIXED_SMALL))
    wanted, quantization = wanted_logits(tmp_path, meant), read_model_spec(path).quantization
    # Gates and ups of some families are one module, which is counted under the type of the gates.
    kinds_there = {MIXED[part] if large else MIXED_SMALL[part] for part in ("gate", "down", "rest")}
    assert quantization is not None and all(kind in quantization.name for kind in kinds_there)
    found = logits(path)
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_in_mxfp4(family: str, tmp_path: Path) -> None:
    """They keep the type's own form in 4 bits; a shared expert and other matrices take 8 bits."""
    make_checkpoint(family, tmp_path, seed=3, **sizes_of(family))
    path = tmp_path / "model.gguf"
    wanted = wanted_logits(tmp_path, write_gguf(path, tmp_path, kinds({"rest": "MXFP4"})))
    spec = read_model_spec(path)
    formats = [matrix.scheme.name for matrix in spec.layers[0].feed_forward.matrices[1:]]
    assert formats[:2] == ["MXFP4, groups of 32"] * 2
    assert set(formats[2:]) <= {"MXFP4 (8 bits in groups of 32)"}
    assert (logits(path) - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("family", ["qwen2_moe", "granitemoeshared"])
def test_matrices_that_are_not_in_blocks_as_a_whole(family: str, tmp_path: Path) -> None:
    """A matrix with a part in floating point is in the model's type, with a note. Progress counts each tensor."""
    make_checkpoint(family, tmp_path, seed=3, **sizes_of(family))
    path = tmp_path / "model.gguf"
    meant = write_gguf(
        path, tmp_path, kinds({**dict.fromkeys("qkvo", "Q8_0"), "up": "Q4_0", "down": "BF16", "rest": "F16"})
    )
    spec = read_model_spec(path)
    assert spec.layers[0].feed_forward.gate_up.scheme is None and spec.layers[0].attention.qkv.scheme is not None
    assert any("blk.0.ffn_up_exps.weight (Q4_0)" in note for note in spec.notes)
    steps: list[tuple[int, int]] = []
    with begin_loading(
        spec, path, dtype=torch.float32, device=CPU, progress=lambda done, total: steps.append((done, total))
    ) as loading:
        loading.finish()
    assert steps[-1][0] == steps[-1][1] == len(steps)
    wanted, found = wanted_logits(tmp_path, meant), logits(path)
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_transformers_reads_the_same_weights(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    make_checkpoint(family, tmp_path, seed=3, **sizes_of(family))
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, kinds(MIXED_SMALL))
    reference = transformers_model(path, folder)
    # Its reader does not know that llama.cpp renormalises the weights of Qwen3.
    for module in reference.modules():
        if hasattr(module, "norm_topk_prob"):
            module.norm_topk_prob = family == "qwen3_moe"
    with torch.no_grad():
        wanted = reference(torch.tensor([TOKENS])).logits[0]
    found = logits(path)
    assert (found - wanted).norm() <= 1e-4 * wanted.norm()


@torch.inference_mode()
def test_blocks_packed_for_a_cpu(tmp_path: Path) -> None:
    """A matrix is converted when its last part is there."""
    make_checkpoint("qwen3_moe", tmp_path, seed=3, **sizes_of("qwen3_moe"))
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, kinds({"gate": "Q4_0", "up": "Q4_0", "rest": "Q4_0"}))
    spec = read_model_spec(path)
    model = load_model(spec, path, dtype=torch.float32, device=CPU, cpu_products=PACKED)
    plain = load_model(spec, path, dtype=torch.float32, device=CPU)
    for packed, unpacked in zip(model.weights, plain.weights, strict=True):
        for one, other in zip(packed.feed_forward.linears[1:], unpacked.feed_forward.linears[1:], strict=True):
            assert isinstance(one.weight, Int4Weight)
            x = torch.randn(3, one.spec.num_inputs)
            torch.testing.assert_close(one.product(x), other.product(x), rtol=0.02, atol=0.05)


@pytest.mark.parametrize(
    ("family", "header", "error", "message"),
    [
        ("qwen3_moe", {"qwen3moe.expert_count": None}, ModelError, "the header has no qwen3moe.expert_count"),
        ("qwen3_moe", {"qwen3moe.expert_used_count": 13}, ModelError, "num_experts_per_tok=13 must be at most num_exp"),
        ("qwen3_moe", {"qwen3moe.expert_count": 11}, WeightError, r"blk.0.ffn_gate_inp.* ask for \[11, 64\]"),
        ("qwen3_moe", {"qwen3moe.expert_weights_norm": False}, UnsupportedModelError, "expert_weights_norm=False"),
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, UnsupportedModelError, "expert_gating_func=2 is not supp"),
        ("qwen3_moe", {"qwen3moe.expert_weights_scale": 2.0}, UnsupportedModelError, "expert_weights_scale=2.0 is not"),
        ("qwen3_moe", {"qwen3moe.expert_group_count": 2}, UnsupportedModelError, "expert_group_count=2 is a key whose"),
        (
            "qwen2_moe",
            {"qwen2moe.expert_feed_forward_length": 32},
            WeightError,
            r"ffn_.*_exps.* ask for \[6, .*32",
        ),
        ("mixtral", {"llama.expert_count": 0}, ModelError, "expert_used_count=1 is not supported with"),
        ("mixtral", {"llama.expert_used_count": None}, ModelError, "the header has no llama.expert_used_count"),
        ("granitemoe", {"granitemoe.logit_scale": None}, ModelError, "the header has no granitemoe.logit_scale"),
        (
            "granite",
            {"granite.rope.scaling.finetuned": False},
            UnsupportedModelError,
            "finetuned=False is not supported",
        ),
        ("olmoe", {"olmoe.attention.clamp_kqv": 8.0}, UnsupportedModelError, "clamp_kqv=8.0 is a key whose effect"),
    ],
)
def test_refused_headers(
    family: str, header: dict[str, Any], error: type[PhonographError], message: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path, **sizes_of(family))
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, kinds({"rest": "Q8_0"}), header=header)
    with pytest.raises(error, match=message):
        logits(path)


@pytest.mark.parametrize("name", ["ffn_up_exps", "ffn_gate_inp", "ffn_gate_inp_shexp", "ffn_down_shexp"])
def test_refused_tensors(name: str, tmp_path: Path) -> None:
    """A piece that is missing, and tensors of single experts, as old files have them."""
    make_checkpoint("qwen2_moe", tmp_path, **sizes_of("qwen2_moe"))
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, kinds({"rest": "Q8_0"}), without=f"blk.1.{name}.weight")
    with pytest.raises(WeightError, match=f"tensor blk.1.{name}.weight is not in"):
        logits(path)
    write_gguf(path, tmp_path, kinds({"rest": "Q8_0"}), tensors={"blk.0.ffn_up.3.weight": np.zeros((64, 64))})
    with pytest.raises(WeightError, match="tensor blk.0.ffn_up.3.weight .* is not part of this Qwen2MoeForCausalLM"):
        logits(path)
