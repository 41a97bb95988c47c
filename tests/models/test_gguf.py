"""GGUF files: a model computes what the file means, and a file that lies or lacks a part is rejected."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, load_model, make_checkpoint
from dense import DenseSequences
from gguf_files import own_name, write_gguf

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.errors import ConfigError, ModelError, PhonographError, UnsupportedModelError, WeightError
from phonograph.kernels.torch.grouped import dequantize
from phonograph.models.quantization.gguf_blocks import BLOCK_TYPES, dequantize_rows, fused_schemes
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.models.weights.loading import begin_loading

CPU = torch.device("cpu")
LARGE = {"hidden_size": 256, "intermediate_size": 256}
"""Sizes of models with blocks of 256 numbers."""
SMALL = {"intermediate_size": 96}


def kinds(**by_part: str) -> Callable[[str], str]:
    """Return types of matrices by the part of their names; `rest` for others."""
    return lambda name: by_part.get(name.split(".")[-2].removesuffix("_proj"), by_part["rest"])


GEMMA3 = {
    **SMALL,
    "num_hidden_layers": 7,
    "layer_types": None,
    "query_pre_attn_scalar": 16,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
QWEN3_5 = {"linear_num_value_heads": 6, "linear_value_head_dim": 16, "intermediate_size": 96}
"""Widths are whole blocks; more heads of values than of keys have an order."""
GEMMA3_HEADER = {
    "gemma3.attention.sliding_window": 9,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 4.0,
}
"""A file has neither the pattern of windows, nor the base of the layers with one."""


MIXED = kinds(q="Q4_K", k="Q4_K", v="Q6_K", gate="Q5_K", up="Q4_K", embed_tokens="Q6_K", lm_head="Q6_K", rest="Q6_K")
MIXED_SMALL = kinds(q="Q8_0", k="Q4_1", v="Q5_1", o="Q5_0", gate="Q4_0", up="Q4_1", rest="Q4_0")
LLAMA3_FACTORS = {"rope_freqs.weight": np.linspace(1, 8, 8)}


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a checkpoint."""
    folder = tmp_path_factory.mktemp("qwen2")
    make_checkpoint("qwen2", folder, **SMALL)
    return folder


@pytest.fixture(scope="module")
def content(qwen2: Path) -> bytes:
    """Return a GGUF file whose attention is in Q8_0."""
    write_gguf(qwen2 / "whole.gguf", qwen2, lambda name: "Q8_0" if "attn" in own_name(name) else "F16")
    return (qwen2 / "whole.gguf").read_bytes()


def logits(spec: ModelSpec, path: Path, tokens: list[int]) -> torch.Tensor:
    sequences = DenseSequences(load_model(spec, path, dtype=torch.float32, device=CPU))
    sequences.add()
    return sequences.step([(0, tokens)])[0]


@pytest.mark.parametrize(
    ("family", "sizes", "kind_of", "header"),
    [
        ("llama2", LARGE, MIXED, {}),
        ("llama_bias", SMALL, kinds(rest="Q4_1"), {}),
        ("llama_head", {"hidden_size": 160, "head_dim": 64} | SMALL, MIXED_SMALL, {}),
        ("mistral", SMALL, kinds(rest="F16"), {"llama.attention.sliding_window": 9}),
        ("qwen2", LARGE, MIXED, {}),
        ("qwen2", SMALL, kinds(v="F16", up="BF16", rest="Q8_0"), {}),
        ("qwen3", SMALL, kinds(rest="BF16", o="Q4_0", down="F32"), {}),
        ("gemma3", GEMMA3, kinds(v="Q8_0", rest="Q5_0"), GEMMA3_HEADER),
        ("qwen3_5", QWEN3_5, kinds(rest="BF16"), {}),
        ("qwen3_5", QWEN3_5, kinds(rest="Q8_0", out="Q5_0", in_proj_a="F32", in_proj_b="F32"), {}),
    ],
)
def test_logits_are_those_of_the_weights_that_the_file_means(
    family: str, sizes: dict[str, Any], kind_of: Any, header: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_checkpoint(family, tmp_path, seed=len(family), **sizes)
    path = tmp_path / "model.gguf"
    meant = write_gguf(path, tmp_path, kind_of, header=header)
    reference.load_state_dict(meant, strict=False)
    reference.tie_weights()
    tokens = torch.randint(0, VOCAB_SIZE, (14,)).tolist()
    spec = read_model_spec(path)
    assert (spec.quantization is None) == ({kind_of(name) for name in meant} <= {"F16", "BF16", "F32"})
    got = logits(spec, path, tokens)
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    assert (got - wanted).norm() <= 1e-4 * wanted.norm()


def test_gemma_3_has_what_llama_cpp_adds(tmp_path: Path) -> None:
    make_checkpoint("gemma3", tmp_path, **GEMMA3)
    path = tmp_path / "model.gguf"

    def spec_of(**header: Any) -> ModelSpec:
        keys = {f"gemma3.{name.replace('__', '.')}": value for name, value in header.items()}
        write_gguf(path, tmp_path, kinds(rest="Q8_0"), header={**GEMMA3_HEADER, **keys})
        return read_model_spec(path)

    plain = spec_of()
    assert [layer.attention.window for layer in plain.layers] == [(8, 0)] * 5 + [(-1, -1), (8, 0)]
    assert plain.context_length == 512 and plain.norms.wide
    local = spec_of(rope__freq_base_swa=50.0, attention__sliding_window_pattern=6)
    assert local.layers[0].attention.rope != plain.layers[0].attention.rope
    assert local.layers[5].attention.rope == plain.layers[5].attention.rope
    with pytest.raises(UnsupportedModelError, match="sliding_window_pattern=2 is not supported"):
        spec_of(attention__sliding_window_pattern=2)
    with pytest.raises(ModelError, match=r"the header has no gemma3\.attention\.sliding_window"):
        spec_of(attention__sliding_window=None)


@pytest.mark.parametrize(("num_layers", "scale"), [(7, 32**-0.5), (62, 16**-0.5)])
def test_the_scale_of_scores_of_gemma_3(num_layers: int, scale: float, tmp_path: Path) -> None:
    """llama.cpp knows the largest model, which has another scale, by its layers."""
    sizes = {"intermediate_size": 32, "num_hidden_layers": num_layers, "head_dim": 32}
    make_checkpoint("gemma3", tmp_path, **{**GEMMA3, **sizes})
    write_gguf(tmp_path / "model.gguf", tmp_path, kinds(rest="Q8_0"), header=GEMMA3_HEADER)
    spec = read_model_spec(tmp_path / "model.gguf")
    assert {layer.attention.scale for layer in spec.layers} == {scale}


def frequencies(spec: ModelSpec) -> tuple[float, ...]:
    rope = spec.layers[0].attention.rope
    assert rope is not None
    return rope.frequencies


def test_rotary_factors_are_those_of_llama_3(tmp_path: Path) -> None:
    """The conversion of llama.cpp stores Llama 3.1's scaling as numbers that divide the frequencies."""
    make_checkpoint("llama3", tmp_path, **SMALL)
    wanted = frequencies(read_model_spec(tmp_path))
    plain = [5000.0 ** (-index / 8) for index in range(8)]
    factors = np.array(plain) / np.array(wanted)
    path = tmp_path / "a" / "model.gguf"
    path.parent.mkdir()
    write_gguf(path, tmp_path, kinds(rest="Q4_0"), tensors={"rope_freqs.weight": factors})
    spec = read_model_spec(path.parent)
    assert np.allclose(frequencies(spec), wanted, rtol=1e-6) and spec.context_length == 512
    write_gguf(path, tmp_path, kinds(rest="Q4_0"), tensors={"rope_freqs.weight": factors[:3]})
    with pytest.raises(ModelError, match="rope_freqs.weight F32 .3. must have 8"):
        read_model_spec(path)


@pytest.mark.parametrize(
    ("header", "scaling"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"scaling.type": "linear", "scaling.factor": 4.0, "scaling.yarn_beta_fast": 8.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 1.0}, None),
        ({"scaling.type": "linear", "scaling.factor": 4.0, "scale_linear": 2.0}, {"type": "linear", "factor": 4.0}),
        (
            {
                **{"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 128},
                "scaling.finetuned": True,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_scaling_of_positions(header: dict[str, Any], scaling: Any, qwen2: Path, tmp_path: Path) -> None:
    keys = {f"qwen2.rope.{name}": value for name, value in header.items()}
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen2, kinds(rest="Q4_0"), header=keys)
    got = read_model_spec(path)
    wanted = read_model_spec(qwen2, hf_overrides={"rope_scaling": scaling})
    assert got.layers[0].attention.rope == wanted.layers[0].attention.rope
    assert got.context_length == wanted.context_length


def oracle(kind: str, block: bytes) -> list[float]:
    """Return the numbers of a block of 256, number by number after ggml's C code."""

    def half(place: int) -> float:
        return struct.unpack_from("<e", block, place)[0]

    values: list[float] = []
    for index in range(256):
        if kind == "Q6_K":
            part, place = divmod(index, 128)
            group, lane = divmod(place, 32)
            low = block[64 * part + 32 * (group % 2) + lane] >> (4 * (group // 2)) & 15
            high = block[128 + 32 * part + lane] >> (2 * group) & 3
            scale = struct.unpack_from("b", block, 192 + index // 16)[0]
            values.append(half(208) * scale * ((low | high << 4) - 32))
            continue
        group, lane = divmod(index, 32)
        if group < 4:
            scale, minimum = block[4 + group] & 63, block[8 + group] & 63
        else:
            scale = (block[8 + group] & 15) | (block[group] >> 6) << 4
            minimum = (block[8 + group] >> 4) | (block[4 + group] >> 6) << 4
        numbers = 16 if kind == "Q4_K" else 48
        value = block[numbers + 32 * (group // 2) + lane] >> (4 * (group % 2)) & 15
        if kind == "Q5_K":
            value |= (block[16 + lane] >> group & 1) << 4
        values.append(half(0) * scale * value - half(2) * minimum)
    return values


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_blocks(kind: str) -> None:
    """Alone, and beside parts of other types in one matrix: the numbers are those of llama.cpp's package."""
    block = BLOCK_TYPES[kind]
    rng = np.random.default_rng()
    blocks = rng.integers(0, 256, (24, 3, block.nbytes), dtype=np.uint8)
    places = {"Q6_K": (208,), "MXFP4": (), **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0"), (0,))}
    for place in places.get(kind, (0, 2)):
        numbers = rng.uniform(-2, 2, (24, 3)).astype(np.float16)
        blocks[:, :, place : place + 2] = numbers[..., None].view(np.uint8)
    if kind == "MXFP4":
        blocks[:, :, 0] = rng.integers(115, 135, (24, 3))
    blocks[0, 0] = 0
    rows = torch.from_numpy(blocks.reshape(24, -1))
    wanted = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
    bound = 1e-6 * np.abs(wanted).max()
    if block.inputs == 256:
        assert np.abs(wanted[1, :256] - oracle(kind, blocks[1, 0].tobytes())).max() <= bound
    assert np.abs(block.dequantize(rows).numpy() - wanted).max() <= bound
    for beside in ((), ("Q4_1",), ("Q6_K", "Q4_1"), ("Q8_0",)):
        scheme = fused_schemes([kind, *beside])[kind]
        weight = scheme.allocate(26, 3 * block.inputs, lambda *shape, dtype=None: torch.zeros(shape, dtype=dtype))
        scheme.load("module", {"weight": rows}, weight, 2)
        assert np.abs(dequantize(weight.values)[2:].numpy() - wanted).max() <= bound
        if not beside:
            assert scheme.bits == (4 if kind in ("Q4_0", "Q4_1", "Q4_K") else 8)


def test_dummy_weights_bytes_and_notes(tmp_path: Path) -> None:
    make_checkpoint("qwen2", tmp_path, **LARGE)
    path = tmp_path / "model.gguf"
    write_gguf(path, tmp_path, MIXED)
    spec = read_configured_model(EngineConfig(model=str(path), load_format="dummy"), config_only=True)
    with begin_loading(spec, path, dtype=torch.float32, device=CPU, load_format="dummy") as loading:
        loading.finish()
    weights: list[Any] = loading.model.quantized
    tensors = [tensor for weight in weights for tensor in weight.values if isinstance(tensor, torch.Tensor)]
    taken = sum(tensor.nbytes for tensor in (*tensors, *loading.model.parameters))
    assert taken == spec.weight_bytes("float32") < read_model_spec(tmp_path).weight_bytes("float32")
    assert all(0.01 < float(dequantize(weight.values).std()) < 0.04 for weight in weights)
    assert spec.quantization is not None and "4 Q6_K (8 bits in groups of 16)" in spec.quantization.name
    assert any("token_embd.weight" in note and "Q6_K" in note for note in spec.notes)
    assert spec.num_parameters == read_model_spec(tmp_path).num_parameters


def test_files_and_folders(qwen2: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_gguf(folder / "a.gguf", qwen2, kinds(rest="F16"))
    assert read_model_spec(folder) == read_model_spec(folder / "a.gguf")
    assert not read_model_spec(folder).notes, "no tensor changes its type"
    assert read_model_spec(folder).dtype == "float16"
    (folder / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"2 GGUF files; give the path of one: a.gguf, b.gguf"):
        read_model_spec(folder)
    with pytest.raises(ConfigError, match="load_format='safetensors'.*GGUF file"):
        load_model(
            read_model_spec(folder / "a.gguf"),
            folder / "a.gguf",
            dtype=torch.float32,
            device=CPU,
            load_format="safetensors",
        )
    with pytest.raises(ModelError, match="no such folder"):
        read_model_spec(folder / "c.gguf")


def test_without_the_package(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"pip install 'phonograph\[gguf\]'"):
        read_model_spec(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("without", "words"),
    [
        ("model.layers.0.self_attn.k_proj.weight", "tensor blk.0.attn_k.weight is not in"),
        ("model.norm.weight", "tensor output_norm.weight is not in"),
        ("model.embed_tokens.weight", "no matrix token_embd.weight"),
    ],
)
def test_missing_tensors(without: str, words: str, qwen2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen2, kinds(rest="Q8_0"), without=without)
    with pytest.raises(ModelError, match=words):
        load_model(read_model_spec(path), path, dtype=torch.float32, device=CPU)


def test_fp8_is_made_of_a_file_in_16_bits(qwen2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen2, kinds(rest="F16"))
    spec = read_configured_model(EngineConfig(model=str(path), quantization="fp8"), config_only=False)
    weights: list[Any] = load_model(spec, path, dtype=torch.float32, device=CPU).quantized
    assert len(weights) == 4 * spec.num_layers and weights[0].values.packed_OW.dtype == torch.float8_e4m3fn
    write_gguf(path, qwen2, kinds(rest="Q8_0"))
    with pytest.raises(ConfigError, match="quantization='fp8'.*in gguf; leave it out"):
        read_configured_model(EngineConfig(model=str(path), quantization="fp8"), config_only=False)


def changed(place: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:place] + data + content[place + len(data) :]


def behind(text: bytes, shift: int, data: bytes) -> Callable[[bytes], bytes]:
    """Replace the bytes that follow a text at a distance."""
    return lambda content: changed(content.index(text) + len(text) + shift, data)(content)


COUNT = struct.pack("<Q", 1 << 40)
Q_NAME = b"blk.1.attn_q.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: b"PK\x03\x04" + content[4:], "not a GGUF file: it begins with b'PK"),
        (lambda content: b"", "not a GGUF file"),
        (lambda content: content[:20], "truncated"),
        (lambda content: content[:300], "refers to byte"),
        (lambda content: content[:-100], r"refers to byte \d+, and the file has"),
        (changed(4, struct.pack("<I", 9)), "version 9"),
        (changed(4, struct.pack(">I", 3)), "byte order"),
        (changed(8, COUNT), "1099511627776 tensors"),
        (changed(16, COUNT), "1099511627776 keys"),
        (behind(b"general.architecture", 4, COUNT), "refers to byte"),
        # Of a tensor's entry: the number of dimensions, two sizes, the type and the place.
        (behind(Q_NAME, 4, COUNT), "truncated or corrupt"),
        (behind(Q_NAME, 12, struct.pack("<Q", 32)), r"attn_q.weight has shape \[32, 64\].*\[64, 64\]"),
        (behind(Q_NAME, 20, struct.pack("<I", 20)), "blk.1.attn_q.weight has the type IQ4_NL.*supported are Q4_0"),
        (behind(Q_NAME, 20, struct.pack("<I", 77)), "77"),
        (behind(Q_NAME, 24, COUNT), "refers to byte"),
        (lambda content: content.replace(b"blk.1.attn_k.weight", b"blk.1.attn_r.weight"), "attn_r.weight.*not part"),
        (lambda content: content.replace(b"blk.1.attn_k.weight", Q_NAME), "duplicated"),
        (lambda content: content.replace(b"blk.1.attn_q.bias", b"blk.1.attn_r.bias"), "attn_r.bias.*not part"),
        (behind(b"blk.1.attn_k.weight", 12, struct.pack("<Q", 16)), r"attn_k.weight in .* has shape \[16, 64\]"),
        (behind(b"output_norm.weight", 12, struct.pack("<I", 8)), "output_norm.weight in .* not a matrix.*Q8_0"),
    ],
)
def test_damaged_files(change: Callable[[bytes], bytes], words: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(change(content))
    with pytest.raises(ModelError, match=f"(?s){words}"):
        load_model(read_model_spec(path), path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("header", "error", "words"),
    [
        ({"general.architecture": "phi3"}, UnsupportedModelError, "'phi3' is not supported; supported are llama, mist"),
        ({"qwen2.block_count": None}, ModelError, "no qwen2.block_count"),
        ({"qwen2.block_count": 3}, ModelError, "block_count=3, and the file has no tensor blk.2.attn_q.weight"),
        ({"qwen2.block_count": 1}, WeightError, "blk.1.attn_norm.weight in .* is not part of"),
        ({"qwen2.block_count": 1 << 31}, ModelError, "block_count=2147483648"),
        ({"qwen2.attention.key_length": 1 << 31}, ModelError, r"shape \[64, 64\].*8589934592"),
        ({"qwen2.vocab_size": 99}, UnsupportedModelError, "vocab_size=99"),
        ({"qwen2.embedding_length": "64"}, UnsupportedModelError, "embedding_length='64'"),
        ({"qwen2.feed_forward_length": [96, 64]}, UnsupportedModelError, "feed_forward_length=.96, 64."),
        ({"qwen2.attention.head_count": 8}, ModelError, "blk.0.attn_q.weight|head"),
        ({"qwen2.rope.scaling.type": "longrope"}, UnsupportedModelError, "longrope"),
        ({"qwen2.expert_count": 4}, UnsupportedModelError, "expert_count=4"),
        ({"qwen2.final_logit_softcapping": 30.0}, UnsupportedModelError, "final_logit_softcapping=30.0"),
        ({"split.count": 2}, ModelError, "one of 2 parts.*does not end with -00001-of-00002.gguf.*--merge"),
    ],
)
def test_headers(header: dict[str, Any], error: type[PhonographError], words: str, qwen2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen2, kinds(rest="F16"), header={k: v for k, v in header.items() if k[0] != "g"})
    if "general.architecture" in header:
        path.write_bytes(path.read_bytes().replace(struct.pack("<Q", 5) + b"qwen2", struct.pack("<Q", 5) + b"phi3 ", 1))
        words = words.replace("'phi3'", "'phi3 '")
    with pytest.raises(error, match=f"(?s){words}"):
        load_model(read_model_spec(path), path, dtype=torch.float32, device=CPU)


def test_a_header_whose_sizes_are_no_whole_blocks(qwen2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen2, kinds(rest="Q8_0"), header={"qwen2.feed_forward_length": 100})
    with pytest.raises(UnsupportedModelError, match="100 inputs are not a multiple of 32, the block of Q8_0"):
        load_model(read_model_spec(path), path, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("family", "without"),
    [
        ("llama_bias", ["self_attn.o_proj"]),
        ("llama_bias", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"]),
        ("qwen2", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
        ("qwen2", ["self_attn.k_proj"]),
    ],
)
@pytest.mark.parametrize("layers", [[0, 1], [0]])
def test_biases_that_a_file_lacks_are_zero(
    family: str, without: list[str], layers: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_checkpoint(family, tmp_path, **SMALL)
    names = {f"model.layers.{layer}.{module}.bias" for layer in layers for module in without}
    path = tmp_path / "model.gguf"
    add_tensor = gguf.GGUFWriter.add_tensor

    def add(self: Any, name: str, *args: Any, **kwargs: Any) -> None:
        if name not in {own_name(one) for one in names}:
            add_tensor(self, name, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add)
    meant = write_gguf(path, tmp_path, kinds(rest="F32"))
    assert names < meant.keys()
    for name in names:
        meant[name] = torch.zeros_like(meant[name])
    reference.load_state_dict(meant, strict=False)
    reference.tie_weights()
    tokens = torch.randint(0, VOCAB_SIZE, (9,)).tolist()
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    got = logits(read_model_spec(path), path, tokens)
    assert (got - wanted).norm() <= 1e-4 * wanted.norm()


TEXTS = ["a", "<|end|>", "<|end_of_text|>", "<end_of_turn>", "<EOT>", "<|fim_pad|>", "</s>", "<|im_start|>", "b"]


@pytest.mark.parametrize(
    ("texts", "header", "ends"),
    [
        (TEXTS, {}, {1, 2, 3, 4, 5, 6}),
        (TEXTS, {"tokenizer.ggml.eos_token_id": 8}, {1, 2, 3, 4, 5, 6, 8}),
        # Within an answer of gpt-oss <|end|> ends a message.
        (["<|return|>", "<|end|>", "<|call|>", "<|message|>"], {}, {0, 2}),
        (["x", "y"], {"tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.fim_pad_token_id": 0}, {0, 1}),
    ],
)
@pytest.mark.parametrize("kind", [1, 3, 4])
def test_ends_of_turns(
    texts: list[str], header: dict[str, Any], ends: set[int], kind: int, qwen2: Path, tmp_path: Path
) -> None:
    """Tokens at which llama.cpp ends a turn, whatever their type in the header is."""
    path = tmp_path / "model.gguf"
    tokens = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": [kind] * len(texts)}
    write_gguf(path, qwen2, kinds(rest="F16"), header=tokens | header)
    assert set(read_model_spec(path).eos_token_ids) == ends


@pytest.mark.parametrize("count", [1, 2])
def test_one_value_for_each_layer_is_the_value_of_the_model(count: int, qwen2: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, qwen2, kinds(rest="Q4_0"))
    plain = read_model_spec(path)
    sizes = [plain.layers[0].feed_forward.down.num_inputs] * count
    write_gguf(path, qwen2, kinds(rest="Q4_0"), header={"qwen2.feed_forward_length": sizes})
    assert read_model_spec(path) == plain
    write_gguf(path, qwen2, kinds(rest="Q4_0"), header={"qwen2.feed_forward_length": [*sizes, 160]})
    with pytest.raises(UnsupportedModelError, match="feed_forward_length=.*160.* supported is one number"):
        read_model_spec(path)


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        (kinds(rest="F16"), "float16"),
        (kinds(o="F32", rest="F16"), "float16"),
        (kinds(rest="F32"), "bfloat16"),
        (kinds(rest="BF16"), "bfloat16"),
        (kinds(o="F16", rest="BF16"), "bfloat16"),
        (kinds(o="F16", rest="Q8_0"), "bfloat16"),
    ],
)
def test_a_model_in_float16_alone_stays_in_it(types: Any, dtype: str, qwen2: Path, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", qwen2, types)
    assert read_model_spec(tmp_path).dtype == dtype


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_rows_with_numbers_that_are_not_finite_are_refused(number: float) -> None:
    """The last block of the last row, of a scale that is finite in float16 but for the damaged one."""
    blocks = np.zeros((5, 3, BLOCK_TYPES["Q8_0"].nbytes), np.uint8)
    blocks[:, :, :2] = np.full((5, 3, 1), 0.5, np.float16).view(np.uint8)
    rows, into = torch.from_numpy(blocks.reshape(5, -1)), torch.full((5, 3 * BLOCK_TYPES["Q8_0"].inputs), torch.nan)
    dequantize_rows("t", "Q8_0", rows, into)
    assert not into.any()
    blocks[4, 2, :2] = np.full(1, number, np.float16).view(np.uint8)
    blocks[4, 2, 2] = 1
    with pytest.raises(WeightError, match="tensor t has numbers that are infinite or not a number"):
        dequantize_rows("t", "Q8_0", rows, into)
