"""Models of several ranks against the whole model: the same logits, for each family and weight format.

Ranks are threads.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXPERT_FAMILIES, FAMILIES, STATE_FAMILIES, VOCAB_SIZE, load_model, make_checkpoint
from dense import DenseSequences
from fp4_weights import make_file
from gguf_files import write_gguf
from kernel_sets import bind_torch
from quantized_checkpoints import FORMATS, quantize_checkpoint
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, on_ranks

from phonograph.errors import ConfigError, WeightError
from phonograph.models.layers.states.mamba_mixer import MambaMixer
from phonograph.models.quantization.quantization_config import choose_quantization
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.models.weights.gguf_experts import expert_pieces
from phonograph.models.weights.loading import begin_loading
from phonograph.models.weights.rank_tensors import RankTensors
from phonograph.models.weights.tensor_parallel import cut_model

CPU = torch.device("cpu")
TOLERANCE = 1e-4
SIZES: dict[str, dict[str, Any]] = {
    "llama_head": {"num_attention_heads": 6, "num_key_value_heads": 1},
    "gemma4_moe": {"vocab_size": VOCAB_SIZE},
}
"""Sizes that two ranks can share, where those of a family cannot be."""


def logits_on_ranks(spec: ModelSpec, folder: Path, chunks: list[list[int]], size: int) -> torch.Tensor:
    """Return the logits of all tokens of a sequence, which runs in chunks on several ranks."""

    def run(ranks: ThreadRanks) -> torch.Tensor:
        settings: dict[str, Any] = {"dtype": torch.float32, "device": CPU, "rank": (ranks.rank, size)}
        with begin_loading(spec, folder, **settings) as loading:
            loading.finish()
        sequences = DenseSequences(bind_torch(loading.model, ranks=ranks))
        sequences.add()
        found = [logits for chunk in chunks for logits in sequences.step([(0, chunk)])]
        assert ranks.num_sums == len(chunks) * (1 + sum(map(_num_sums, spec.layers)))
        return torch.cat(found)

    return on_ranks(size, run)[0]


def _num_sums(layer: Any) -> int:
    """Return the sums of a layer: of its parts, of a shared expert, and of norms over all heads."""
    shared = getattr(layer.feed_forward, "shared", None)
    joint = getattr(layer.mixer, "joint_norms", False)
    joint |= isinstance(layer.mixer, MambaMixer) and layer.mixer.sizes.norm_groups == 1
    return len(layer.parts) + (shared is not None) + joint


def check(folder: Path, size: int, least_spread: float = 0.5) -> None:
    spec = read_model_spec(folder)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB_SIZE, (31,), generator=generator).tolist()
    chunks = [tokens[:17], tokens[17:18], tokens[18:]]
    sequences = DenseSequences(load_model(spec, folder, dtype=torch.float32, device=CPU))
    sequences.add()
    expected = torch.cat([logits for chunk in chunks for logits in sequences.step([(0, chunk)])])
    assert expected.std() > least_spread
    actual = logits_on_ranks(spec, folder, chunks, size)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERT_FAMILIES])
def test_logits_of_two_ranks_are_those_of_one(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=3, **SIZES.get(family, {}))
    check(tmp_path, 2)


@pytest.mark.parametrize("family", STATE_FAMILIES)
def test_layers_with_a_state_are_cut_by_heads(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=6)
    check(tmp_path, 2, least_spread=0.2)


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "falcon_h1",
            {"mamba_n_groups": 1},
            "layer 0: Mamba 2 has norms over 1 parts of an output, no multiple of 2; 1 works",
        ),
        ("qwen3_5", {"linear_num_key_heads": 1}, "gated delta net has 1 heads of keys, no multiple of 2; 1 works"),
    ],
)
def test_layers_with_a_state_that_cannot_be_cut(
    family: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path, **changes)
    with pytest.raises(ConfigError) as raised:
        cut_model(read_model_spec(tmp_path), 2)
    assert words in str(raised.value)


@pytest.mark.parametrize("family", ["llama3", "qwen2", "mixtral", "olmo2"])
def test_four_ranks_repeat_two_kv_heads(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=5)
    check(tmp_path, 4)


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_weights_of_two_ranks(name: str, tmp_path: Path) -> None:
    kind = FORMATS[name]
    # Inner sizes of two ranks are whole groups.
    sizes = {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
    make_checkpoint("qwen2" if kind.scales else "llama3", tmp_path, seed=len(name), intermediate_size=768, **sizes)
    quantize_checkpoint(tmp_path, kind)
    spec = read_model_spec(tmp_path)
    if kind.group in (64, 128):
        with pytest.raises(ConfigError, match=r"self_attn.o_proj .* between groups of (64|128) only, and 96 is no"):
            cut_model(spec, 2)
        return
    check(tmp_path, 2)


@pytest.mark.parametrize(
    ("family", "name", "inner", "size", "permutes"),
    [
        ("llama3", "gptq order", 128, 4, True),
        ("llama3", "packed order", 96, 2, True),
        # Gates and ups are in one tensor.
        ("phi3", "packed order", 128, 4, True),
        # A rank would have parts of groups.
        ("llama3", "gptq order", 96, 2, False),
        # Biases of gates and ups would be permuted too.
        ("llama_bias", "gptq order", 128, 2, False),
    ],
)
def test_an_order_of_inputs(family: str, name: str, inner: int, size: int, permutes: bool, tmp_path: Path) -> None:
    """`down` keeps its format where each rank has whole groups; the attention's output does not."""
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    make_checkpoint(family, tmp_path, seed=7, intermediate_size=inner, **heads)
    quantize_checkpoint(tmp_path, FORMATS[name])
    for layer in cut_model(read_model_spec(tmp_path), size).layers:
        assert layer.attention.output.scheme is None
        assert (layer.feed_forward.down.scheme is not None) is permutes
    check(tmp_path, size)


def test_a_damaged_order_of_inputs(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path, intermediate_size=128)
    quantize_checkpoint(tmp_path, FORMATS["gptq order"])
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.g_idx"][:5] = 3
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(WeightError, match=r"layers.1.mlp.down_proj.g_idx does not put 32 inputs into each of 4 groups"):
        check(tmp_path, 2)


def gguf_kinds(**by_part: str) -> Callable[[str], str]:
    return lambda name: by_part.get(name.split(".")[-2].removesuffix("_proj"), by_part["rest"])


WIDE = {"hidden_size": 512, "intermediate_size": 512}
Q4_K = gguf_kinds(q="Q4_K", k="Q4_K", v="Q6_K", gate="Q5_K", up="Q4_K", down="Q4_K", o="Q5_K", rest="Q6_K")


@pytest.mark.parametrize(
    ("family", "sizes", "kind_of"),
    [
        ("llama2", WIDE, Q4_K),
        (
            "llama_bias",
            {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 128},
            gguf_kinds(rest="Q4_1"),
        ),
        ("qwen2", {"intermediate_size": 128}, gguf_kinds(v="F16", up="BF16", rest="Q8_0")),
        (
            "qwen3",
            {"num_attention_heads": 4, "intermediate_size": 96},
            gguf_kinds(rest="BF16", o="Q4_0", down="F32", embed_tokens="Q8_0"),
        ),
        # A file has value heads in an order of its own, of which a rank's are not next to each other.
        ("qwen3_5", {"vocab_size": VOCAB_SIZE, "linear_num_value_heads": 8}, gguf_kinds(rest="BF16")),
        # Rates and times are a matrix of their own.
        (
            "qwen3_5",
            {
                **{"vocab_size": VOCAB_SIZE, "linear_num_value_heads": 8, "linear_value_head_dim": 32},
                **{"linear_num_key_heads": 4, "linear_key_head_dim": 16, "num_attention_heads": 4, "head_dim": 32},
                **{"hidden_size": 64, "intermediate_size": 64},
            },
            gguf_kinds(rest="Q8_0", in_proj_a="F32", in_proj_b="F32"),
        ),
    ],
)
def test_gguf_files_of_two_ranks(family: str, sizes: dict[str, Any], kind_of: Any, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, seed=1, **sizes)
    write_gguf(tmp_path / "model.gguf", tmp_path, kind_of)
    check(tmp_path / "model.gguf", 2)


def test_blocks_of_gguf_files_are_not_cut(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path, hidden_size=256, intermediate_size=256)
    write_gguf(tmp_path / "model.gguf", tmp_path, Q4_K)
    with pytest.raises(ConfigError, match=r"self_attn.o_proj in Q5_K .* between groups of 256 only, and 128 is no"):
        cut_model(read_model_spec(tmp_path / "model.gguf"), 2)


SMALL = gguf_kinds(gate="Q4_1", up="Q5_0", down="Q8_0", rest="Q4_0")
DELTA = {"linear_num_value_heads": 4, "linear_value_head_dim": 64, "moe_intermediate_size": 64}


@pytest.mark.parametrize(
    ("family", "sizes", "kind_of", "size"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 64, "mlp_only_layers": []}, SMALL, 2),
        ("qwen3_moe", {"moe_intermediate_size": 384, "mlp_only_layers": []}, gguf_kinds(down="Q4_1", rest="F32"), 4),
        (
            "mixtral",
            {"hidden_size": 512, "intermediate_size": 512},
            gguf_kinds(gate="Q4_K", up="Q6_K", down="Q5_K", rest="Q6_K"),
            2,
        ),
        # Gates and ups are in one tensor of a checkpoint, as those of the shared expert.
        ("granitemoeshared", {"intermediate_size": 64, "shared_intermediate_size": 128}, SMALL, 2),
        # Outputs of a rank are no multiple of anything, and ups are dequantized.
        (
            "qwen2_moe",
            {
                **{"moe_intermediate_size": 70, "decoder_sparse_step": 1},
                **{"intermediate_size": 64, "shared_expert_intermediate_size": 128},
            },
            gguf_kinds(gate="F16", up="Q4_0", down="BF16", rest="Q8_0"),
            2,
        ),
        ("olmoe", {"intermediate_size": 74}, gguf_kinds(gate="Q8_0", up="Q4_0", rest="F32"), 2),
        ("qwen3_5_moe", {**DELTA, "shared_expert_intermediate_size": 64}, SMALL, 2),
        # Biases of outputs are added by one rank.
        ("gpt_oss", {"intermediate_size": 64}, gguf_kinds(gate="MXFP4", up="MXFP4", down="MXFP4", rest="F32"), 2),
        ("gpt_oss", {"intermediate_size": 64}, gguf_kinds(gate="MXFP4", up="Q8_0", down="Q5_0", rest="F16"), 2),
    ],
)
def test_experts_of_gguf_files_on_several_ranks(
    family: str, sizes: dict[str, Any], kind_of: Any, size: int, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path, seed=1, vocab_size=VOCAB_SIZE, **sizes)
    write_gguf(tmp_path / "model.gguf", tmp_path, kind_of)
    check(tmp_path / "model.gguf", size)


@pytest.mark.parametrize(
    ("inner", "kind", "size", "words"),
    [
        (256, "Q4_K", 2, "layer 0: mlp.experts.0.down_proj in Q4_K .* groups of 256 only, and 128 is no .*; 1 works"),
        (96, "Q8_0", 2, "layer 0: mlp.experts.0.down_proj in Q8_0 .* groups of 32 only, and 48 is no .*; 1 or 3 works"),
        (96, "MXFP4", 2, "layer 0: mlp.experts.0.down_proj in MXFP4, .* 48 is not a multiple of 32; 1 or 3 works"),
        (96, "F16", 5, "layer 0 has experts of an inner size of 96, no multiple of 5; 1 or 2 or 3 or 4 .* works"),
    ],
)
def test_blocks_of_experts_are_not_cut(inner: int, kind: str, size: int, words: str, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 60, "num_key_value_heads": 60, "head_dim": 8}
    make_checkpoint("qwen3_moe", tmp_path, moe_intermediate_size=inner, mlp_only_layers=[], **heads)
    write_gguf(tmp_path / "model.gguf", tmp_path, gguf_kinds(down=kind, rest="F16"))
    with pytest.raises(ConfigError, match=f"tensor_parallel_size={size}: {words}"):
        cut_model(read_model_spec(tmp_path / "model.gguf"), size)


def test_a_rank_views_its_part_of_experts_in_a_file(tmp_path: Path) -> None:
    """Parts are views, which have each number on one rank; those of the router are whole."""
    make_checkpoint("qwen2_moe", tmp_path, moe_intermediate_size=70, decoder_sparse_step=1)
    spec = read_model_spec(tmp_path)
    own_pieces = expert_pieces(cut_model(spec, 2).layers)
    for name, whole in expert_pieces(spec.layers).items():
        tensor = torch.arange(prod(whole.shape)).view(whole.shape)
        parts = [own_pieces[name].part(whole, rank, tensor) for rank in range(2)]
        assert all(part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for part in parts)
        times = 2 if "inp" in name else 1
        assert torch.equal(torch.cat([part.flatten() for part in parts]).sort()[0][::times], tensor.flatten()), name


def test_mxfp4_of_two_ranks_is_cut_between_its_groups(tmp_path: Path) -> None:
    make_file(tmp_path, 64)
    check(tmp_path, 2)
    with pytest.raises(
        ConfigError, match=r"experts.down_proj in MXFP4, groups of 32: .* 16 is not a multiple of 32; 1 or 2"
    ):
        cut_model(read_model_spec(tmp_path), 4)


def test_fp8_that_is_made_at_load(tmp_path: Path) -> None:
    """Scales of the parts of o and down are finer than those of whole outputs."""
    make_checkpoint("llama3", tmp_path, intermediate_size=96)
    spec = read_model_spec(tmp_path).with_quantization(choose_quantization(None, "fp8"))
    sequences = DenseSequences(load_model(spec, tmp_path, dtype=torch.float32, device=CPU))
    tokens = [5, 99, 3, 3, 42]
    expected = sequences.step([(sequences.add(), tokens)])[0]
    actual = logits_on_ranks(spec, tmp_path, [tokens], 2)
    assert (actual - expected).norm() < 0.1 * expected.norm()


def test_every_tensor_is_cut_into_disjoint_parts(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    spec = read_model_spec(tmp_path)
    parts = [RankTensors(spec, rank, 4) for rank in range(4)]
    for name, shape in spec.tensor_shapes().items():
        cuts = [part.cuts.get(name) for part in parts]
        if cuts[0] is None or cuts[0].dim is None:
            continue
        seen = [place for cut in cuts for first, last in cut.ranges for place in range(first, last)]
        times = 2 if name.split(".")[-2] in ("k_proj", "v_proj") else 1
        assert sorted(seen) == sorted([*range(shape[cuts[0].dim])] * times), name
