"""GGUF files of gpt-oss: logits of transformers' model of the same weights, and the weights of its own files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, load_model, make_checkpoint
from dense import DenseSequences
from fp4_weights import make_file
from gguf_files import write_gguf
from router_gaps import LEAST_GAP, router_gaps
from safetensors.torch import save_file

from phonograph.errors import ModelError, PhonographError, UnsupportedModelError, WeightError
from phonograph.kernels.torch.grouped import dequantize
from phonograph.models.quantization import mxfp4
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.quantization.gguf_blocks import BLOCK_TYPES, GgufBlocks, dequantize_rows
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.models.weights.loading import begin_loading

CPU = torch.device("cpu")
PRODUCTS = [
    None,
    CpuProducts(int4=False, dequantize=True, reason="a test"),
    CpuProducts(int4=False, dequantize=False, reason="a test"),
]
SIZES = {"intermediate_size": 96}
MXFP4 = {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4"}


def kinds(by_part: dict[str, str], rest: str = "Q8_0") -> Callable[[str], str]:
    """Return types of matrices by the part of their names."""
    return lambda name: by_part.get(name.split(".")[-2].removesuffix("_proj"), rest)


def logits(spec: ModelSpec, path: Path, tokens: list[int], **settings: Any) -> torch.Tensor:
    sequences = DenseSequences(load_model(spec, path, dtype=torch.float32, device=CPU, **settings))
    return sequences.step([(sequences.add(), tokens)])[0]


def without_formats(spec: ModelSpec) -> list[Any]:
    return [layer.with_schemes(lambda _: None) for layer in spec.layers]


@pytest.mark.parametrize(
    ("by_part", "rest", "sizes", "formats"),
    [
        (MXFP4, "Q8_0", SIZES, [Mxfp4Scheme, Mxfp4Scheme]),
        (MXFP4, "F16", SIZES, [Mxfp4Scheme, Mxfp4Scheme]),
        (MXFP4, "MXFP4", SIZES, [Mxfp4Scheme, Mxfp4Scheme]),
        # Parts of one matrix have one layout in memory, of 8 bits.
        ({**MXFP4, "up": "Q8_0"}, "F32", SIZES, [GgufBlocks, Mxfp4Scheme]),
        ({"gate": "Q4_1", "up": "MXFP4", "down": "Q5_0"}, "BF16", SIZES, [GgufBlocks, GgufBlocks]),
        ({"gate": "MXFP4", "up": "F16", "down": "BF16"}, "Q8_0", SIZES, [type(None), type(None)]),
        (
            {"gate": "Q4_K", "up": "Q6_K", "down": "Q5_K"},
            "Q6_K",
            {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64},
            [GgufBlocks, GgufBlocks],
        ),
    ],
)
def test_logits_and_configuration_are_those_of_transformers(
    by_part: dict[str, str], rest: str, sizes: dict[str, Any], formats: list[type], tmp_path: Path
) -> None:
    """On prompts that are longer than the window, with all forms of the weights on a CPU."""
    reference = make_checkpoint("gpt_oss", tmp_path, seed=5, **sizes)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, tmp_path, kinds(by_part, rest))
    reference.load_state_dict(meant)
    tokens = torch.randint(0, VOCAB_SIZE, (23,), generator=torch.Generator().manual_seed(4)).tolist()
    with torch.inference_mode(), router_gaps(reference) as gap:
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert gap() > LEAST_GAP, "routers choose by rounding; draw other weights"
    spec, published = read_model_spec(path), read_model_spec(tmp_path)
    assert without_formats(spec) == without_formats(published)
    assert spec.context_length == published.context_length and spec.num_parameters == published.num_parameters
    feed_forward = spec.layers[0].feed_forward
    assert [type(matrix.scheme) for matrix in feed_forward.matrices[1:]] == formats
    for products in PRODUCTS:
        found = logits(spec, path, tokens, cpu_products=products)
        assert (found - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_weights_are_those_of_the_publishers_files(
    on_a_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales, in the order of a CPU and of a GPU, and biases. Progress counts each tensor."""
    monkeypatch.setattr(mxfp4, "_in_order_of_gpu", lambda _: on_a_gpu)
    whole = make_file(tmp_path, 64)
    published = load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float16, device=CPU)
    plain = tmp_path / "plain"
    plain.mkdir()
    save_file(whole, plain / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    path = plain / "model.gguf"
    meant = write_gguf(path, plain, kinds(MXFP4, "F32"))
    assert all(torch.equal(tensor, whole[name].float()) for name, tensor in meant.items())
    steps: list[tuple[int, int]] = []
    with begin_loading(
        read_model_spec(path),
        path,
        dtype=torch.float16,
        device=CPU,
        progress=lambda done, total: steps.append((done, total)),
    ) as loading:
        loading.finish()
    assert steps[-1][0] == steps[-1][1] == len(steps)
    for one, other in zip(loading.model.weights, published.weights, strict=True):
        assert isinstance(one.feed_forward.gate_up.spec.scheme, Mxfp4Scheme)
        for mine, theirs in zip(one.feed_forward.linears, other.feed_forward.linears, strict=True):
            assert torch.equal(mine.bias_O, theirs.bias_O)
        for mine, theirs in zip(one.feed_forward.linears[1:], other.feed_forward.linears[1:], strict=True):
            assert mine.weight.values.interleaved == on_a_gpu
            # The package's quantizer writes another code for a negative 0, and scales of its own for zeros alone.
            assert torch.equal(dequantize(mine.weight.values), dequantize(theirs.weight.values))


def test_biases_that_a_file_lacks_are_0(tmp_path: Path) -> None:
    reference = make_checkpoint("gpt_oss", tmp_path, seed=5, **SIZES)
    path, tokens = tmp_path / "model.gguf", [5, 99, 3, 42]
    meant = write_gguf(path, tmp_path, kinds(MXFP4), without="blk.1.ffn_up_exps.bias")
    meant["model.layers.1.mlp.experts.gate_up_proj_bias"][:, 1::2] = 0
    reference.load_state_dict(meant)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert (logits(read_model_spec(path), path, tokens) - wanted).norm() <= 1e-4 * wanted.norm()


def test_rotary_frequencies_are_those_of_the_publisher(tmp_path: Path) -> None:
    """Bounds of YaRN are not rounded, unlike llama.cpp's. Old files have no bounds, and a file may have no scaling."""
    rope = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "rope_theta": 150000.0}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    sizes = {**SIZES, "head_dim": 64, "max_position_embeddings": 131072, "rope_parameters": rope}
    make_checkpoint("gpt_oss", tmp_path, **sizes)
    path, published = tmp_path / "model.gguf", read_model_spec(tmp_path)
    bounds = {"gpt-oss.rope.scaling.yarn_beta_fast": 32.0, "gpt-oss.rope.scaling.yarn_beta_slow": 1.0}
    for header in ({}, bounds):
        write_gguf(path, tmp_path, kinds(MXFP4), header=header)
        spec = read_model_spec(path)
        assert without_formats(spec) == without_formats(published) and spec.context_length == 131072
    write_gguf(path, tmp_path, kinds(MXFP4), header={"gpt-oss.rope.scaling.type": "none"})
    plain = read_model_spec(path).layers[0].attention.rope
    assert plain is not None and plain.factor == 1
    assert np.allclose(plain.frequencies, 150000.0 ** (-np.arange(32) / 32))


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"header": {"gpt-oss.expert_count": None}}, ModelError, "the header has no gpt-oss.expert_count"),
        ({"header": {"gpt-oss.attention.sliding_window": None}}, ModelError, "no gpt-oss.attention.sliding_window"),
        (
            {"header": {"gpt-oss.expert_feed_forward_length": 64}},
            UnsupportedModelError,
            "feed_forward_length=64 is not",
        ),
        ({"header": {"gpt-oss.swiglu_limit": 6.0}}, UnsupportedModelError, "swiglu_limit=6.0 is a key whose effect"),
        ({"without": "blk.1.attn_sinks.weight"}, WeightError, "tensor blk.1.attn_sinks.weight is not in"),
        ({"without": "blk.2.ffn_gate_exps.weight"}, WeightError, "tensor blk.2.ffn_gate_exps.weight is not in"),
        ({"without": "blk.0.post_attention_norm.weight"}, WeightError, "tensor blk.0.post_attention_norm.weight is"),
        (
            {"tensors": {"blk.0.ffn_gate_up_exps.bias": np.zeros((6, 192))}},
            WeightError,
            "blk.0.ffn_gate_up_exps.bias .* is not part of this GptOssForCausalLM",
        ),
        (
            {"without": "blk.0.ffn_up_exps.bias", "tensors": {"blk.0.ffn_up_exps.bias": np.zeros((6, 64))}},
            WeightError,
            r"blk.0.ffn_up_exps.bias .* has shape \[6, 64\]; .* ask for \[6, 96\]",
        ),
    ],
)
def test_refused_files(settings: dict[str, Any], error: type[PhonographError], message: str, tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path, **SIZES)
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, kinds(MXFP4), **settings)
    with pytest.raises(error, match=message):
        logits(read_model_spec(path), path, [1, 2])


@pytest.mark.parametrize(
    ("name", "place", "data", "message"),
    [
        ("blk.1.ffn_down_exps.weight", None, b"\xff", r"blk.1.ffn_down_exps has scales that are not a number \(255\)"),
        # Of a tensor's entry: the number of dimensions, two sizes and the type.
        ("blk.0.ffn_up_exps.bias", 20, b"\x08", "blk.0.ffn_up_exps.bias in .* is not a matrix, and has the type Q8_0"),
    ],
)
def test_damaged_files(name: str, place: int | None, data: bytes, message: str, tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path, **SIZES)
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, kinds(MXFP4))
    content = bytearray(path.read_bytes())
    if place is None:
        (tensor,) = (one for one in gguf.GGUFReader(path).tensors if one.name == name)
        start = tensor.data_offset + 17 * 5
    else:
        start = content.index(name.encode()) + len(name) + place
    content[start : start + len(data)] = data
    path.write_bytes(content)
    with pytest.raises(WeightError, match=message):
        logits(read_model_spec(path), path, [1, 2])


def test_blocks_at_both_ends() -> None:
    """Scales of 255 are not a number, and the smallest weights are below the exponents of float32."""
    blocks = torch.zeros(4, 17, dtype=torch.uint8)
    blocks[2, 0] = 255
    with pytest.raises(WeightError, match="tensor a has numbers that are infinite or not a number"):
        dequantize_rows("a", "MXFP4", blocks, torch.empty(4, 32))
    blocks[2, 0] = 0
    blocks[3] = torch.tensor([0, *[0x71] * 16])
    numbers = BLOCK_TYPES["MXFP4"].dequantize(blocks)
    assert numbers[3].tolist() == [2.0**-128] * 16 + [6 * 2.0**-127] * 16 and not numbers[:3].any()
