"""Reading configurations: what they mean, and what is said about those that cannot be used."""

from __future__ import annotations

import dataclasses
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import FAMILIES, LLAMA3_ROPE, VOCAB_SIZE, make_checkpoint
from public_configs import PUBLIC_CONFIGS
from public_family_configs import FAMILY_CONFIGS
from transformers import CONFIG_MAPPING, AutoConfig, GenerationConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from phonograph.errors import ConfigError, ModelError, UnsupportedModelError
from phonograph.files import model_files as folder_module
from phonograph.models.config_fields import FIXED, IGNORED
from phonograph.models.layers.rope import rope_table
from phonograph.models.registry import ARCHITECTURES
from phonograph.models.rope_parameters import read_rope
from phonograph.models.spec import ModelSpec, read_model_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "bos_token_id": 128000,
    "eos_token_id": 128009,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 152064,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "vocab_size": 151936,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "vocab_size": 32000,
}


def read(tmp_path: Path, config: dict[str, Any], **changes: Any) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    return read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("config", "published_parameters"),
    [(LLAMA, 8_030_261_248), (QWEN2, 7_615_616_512), (QWEN3, 596_049_920), (MISTRAL, 7_241_732_096)],
)
def test_published_models(tmp_path: Path, config: dict[str, Any], published_parameters: int) -> None:
    spec = read(tmp_path, config)
    assert spec.num_parameters == published_parameters
    assert spec.weight_bytes("bfloat16") == 2 * published_parameters
    assert spec.weight_bytes("float32") == 4 * published_parameters
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))


MODEL_TYPES = {family.model_type: family for family in ARCHITECTURES.values()}


@pytest.mark.parametrize("name", [*PUBLIC_CONFIGS, *FAMILY_CONFIGS])
def test_public_checkpoints_are_accepted(tmp_path: Path, name: str) -> None:
    config, length = {**PUBLIC_CONFIGS, **FAMILY_CONFIGS}[name]
    assert read(tmp_path, config).context_length == length


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_declared_defaults_are_those_of_transformers(model_type: str) -> None:
    aliases = MODEL_TYPES[model_type].aliases
    fields = dataclasses.fields(CONFIG_MAPPING[model_type])
    theirs = {aliases.get(field.name, field.name): field.default for field in fields}
    ours = {name: field.default for name, field in MODEL_TYPES[model_type].fields.items()}
    shared = theirs.keys() & ours.keys()
    assert {name: ours[name] for name in shared - {"architectures"}} == {
        name: theirs[name] for name in shared - {"architectures"}
    }
    # Fields that the class lacks are those that its files have, or that the model reads, beside them.
    others = {"rope_theta", "global_head_dim", "is_causal"}
    assert all(ours[name] is None for name in ours.keys() - theirs.keys() - others)
    theta = CONFIG_MAPPING[model_type].default_theta
    assert ours["rope_theta"] == (theta["global"] if isinstance(theta, dict) else theta)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_field_of_transformers_is_declared_once(model_type: str) -> None:
    family = MODEL_TYPES[model_type]
    # A family has a feature that others must not ask for.
    declared = [*family.fields, *(FIXED.keys() - family.fields.keys()), *IGNORED, *family.ignored, *family.aliases]
    assert len(declared) == len(set(declared))
    assert {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])} <= set(declared)
    assert GenerationConfig._get_default_generation_params().keys() <= set(declared)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
ONE_OF_EACH = pytest.mark.parametrize("config", [LLAMA, MISTRAL, QWEN2, QWEN3], ids=lambda config: config["model_type"])


def spec_by_transformers(folder: Path) -> ModelSpec:
    """Return the spec of the file that transformers writes of what it read."""
    again = folder / "again"
    AutoConfig.from_pretrained(folder).save_pretrained(again)
    return read_model_spec(again)


@ONE_OF_EACH
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rms_norm_eps": 3e-5, "tie_word_embeddings": True, "vocab_size": 1000, "max_position_embeddings": 777},
        {"eos_token_id": [3, 4], "bos_token_id": None, "pad_token_id": 5, "use_cache": False},
        {"eos_token_id": None, "dtype": "float16", "torch_dtype": "float32"},
        {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 512, "num_hidden_layers": 3},
        {"rope_theta": 1000000, "rope_scaling": None},
        {"rope_theta": 5e5, "rope_scaling": YARN, "torch_dtype": None},
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 3e4}},
        {"rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    ],
)
def test_a_file_is_read_as_by_transformers(config: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, config, **changes) == spec_by_transformers(tmp_path)


@ONE_OF_EACH
def test_defaults_are_those_of_transformers(config: dict[str, Any], tmp_path: Path) -> None:
    """Each setting of each family missing, and all of them, as in a file that names the architecture only."""
    whole = {**config, "use_sliding_window": True} if "qwen" in config["model_type"] else config
    named = {"architectures", "model_type"}
    for missing in [*({key} for key in whole.keys() - named), whole.keys() - named]:
        kept = {key: value for key, value in whole.items() if key not in missing}
        if "num_key_value_heads" in missing and "num_attention_heads" not in missing and "qwen" in config["model_type"]:
            continue  # 32 KV heads for fewer query heads
        assert read(tmp_path, kept) == spec_by_transformers(tmp_path), missing


def test_a_start_without_a_tokenizer_does_without_transformers() -> None:
    code = (
        "import sys, phonograph.engine.llm\n"
        "from phonograph.models.spec import read_model_spec\n"
        "read_model_spec('demo')\n"
        "assert not {'transformers', 'torch._dynamo', 'sympy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss"])
def test_parameters_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = make_checkpoint(family, tmp_path)
    spec = read_model_spec(tmp_path)
    tensors = {**dict(reference.named_parameters()), **reference.state_dict()}
    if spec.tie_word_embeddings:
        del tensors["lm_head.weight"]
    assert spec.tensor_shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def switches(spec: ModelSpec) -> tuple[bool, bool, bool, bool]:
    """Return which matrices have biases (qkv, output, MLP), and whether heads are normed; all layers agree."""
    (layer,) = set(spec.layers)
    qkv, output, gate_up, down = (matrix.bias for matrix in layer.matrices)
    assert gate_up == down
    return qkv, output, down, layer.attention.head_norms


def windows_of(spec: ModelSpec) -> list[tuple[int, int]]:
    return [layer.attention.window for layer in spec.layers]


def test_fields(tmp_path: Path) -> None:
    spec = read(tmp_path, LLAMA, rms_norm_eps=3e-5)
    assert (
        spec.num_layers,
        spec.layers[0].attention.num_query_heads,
        spec.layers[0].attention.num_kv_heads,
        spec.layers[0].attention.head_size,
    ) == (32, 32, 8, 128)
    assert (spec.rms_norm_eps, spec.context_length, spec.dtype) == (3e-5, 131072, "bfloat16")
    assert switches(spec) == (False, False, False, False)
    biased = read(tmp_path, LLAMA, attention_bias=True, mlp_bias=True)
    assert switches(biased) == (True, True, True, False)
    qwen2 = read(tmp_path, QWEN2)
    assert switches(qwen2) == (True, False, False, False) and qwen2.layers[0].attention.head_size == 128
    assert switches(read(tmp_path, QWEN3)) == (False, False, False, True)
    assert read(tmp_path, {key: value for key, value in LLAMA.items() if key != "torch_dtype"}).dtype == "float32"


@pytest.mark.parametrize(
    ("config", "changes", "windows"),
    [
        (LLAMA, {"sliding_window": None}, {(-1, -1): 32}),
        (MISTRAL, {"layer_types": ["full_attention"] * 30 + ["sliding_attention"] * 2}, {(-1, -1): 30, (4095, 0): 2}),
        (MISTRAL, {}, {(4095, 0): 32}),
        (MISTRAL, {"sliding_window": None}, {(-1, -1): 32}),
        (QWEN2, {}, {(-1, -1): 28}),
        (
            QWEN2,
            {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 20},
            {(-1, -1): 20, (99, 0): 8},
        ),
    ],
)
def test_windows(
    tmp_path: Path, config: dict[str, Any], changes: dict[str, Any], windows: dict[tuple[int, int], int]
) -> None:
    found = windows_of(read(tmp_path, config, **changes))
    assert {window: found.count(window) for window in found} == windows


def test_layer_types_decide_layer_by_layer(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    spec = read(tmp_path, QWEN3, num_hidden_layers=4, layer_types=kinds, use_sliding_window=True, sliding_window=5)
    assert windows_of(spec) == [(4, 0), (-1, -1), (-1, -1), (4, 0)]
    assert spec.layers[0] is spec.layers[3] and spec.layers[0] is not spec.layers[1]


LLAMA3_SCALING = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_theta": 7e4},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_SCALING},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    ],
)
def test_rope_in_both_spellings_is_that_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    spec = read(tmp_path, LLAMA, **changes)
    reference = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path))
    rope = spec.layers[0].attention.rope
    assert rope is not None and all(layer.attention.rope is rope for layer in spec.layers)
    torch.testing.assert_close(torch.tensor(rope.frequencies), reference.inv_freq, rtol=1e-6, atol=0)
    assert rope.factor == pytest.approx(reference.attention_scaling)


@pytest.mark.parametrize(
    ("family", "changes", "length"),
    [
        # For Gemma 3 max_position_embeddings includes the scaling of full attention.
        ("gemma3", {}, 512),
        ("olmo3", {}, 32 * 16),
        ("ministral3", {}, 32 * 16),
        ("smollm3", {"max_position_embeddings": 99}, 99),
    ],
)
def test_context_of_several_ropes(family: str, changes: dict[str, Any], length: int, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path, **changes)
    assert read_model_spec(tmp_path).context_length == length


def test_ropes_by_layer(tmp_path: Path) -> None:
    make_checkpoint("smollm3", tmp_path)
    spec = read_model_spec(tmp_path)
    assert [layer.attention.rope is None for layer in spec.layers] == [False, True, False]
    assert spec.layers[0] is spec.layers[2] and len(spec.kinds) == 2
    with pytest.raises(ModelError, match=r"no_rope_layers=\[1\] must have a number for each of 3 layers"):
        read_model_spec(tmp_path, hf_overrides={"no_rope_layers": [1]})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma", {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported is gelu_pytorch_tanh"),
        ("gemma2", {"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 must be null"),
        ("gemma3", {"use_bidirectional_attention": True}, "generates nothing; convert=embed works"),
        ("gemma3", {"rope_parameters": {"rope_theta": 1.0}}, "rope_theta=1.0 in rope_parameters is not supported"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "su"}}},
            "rope_type='su' in rope_parameters.sliding_attention=",
        ),
        (
            "gemma3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "type and no rope_type",
        ),
        ("olmo3", {"rope_theta": 1e4}, "rope_theta=10000.0 is not supported, as readers differ"),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {**YARN, "truncate": False}}},
            "truncate=False in the rope of full_attention",
        ),
        ("olmo3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*chunked_attention"),
        (
            "phi3",
            {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "supported are default, longrope",
        ),
        (
            "phi3",
            {"rope_parameters": None, "partial_rotary_factor": 1.5},
            "partial_rotary_factor=1.5 must be a number above 0",
        ),
        (
            "phi3",
            {"rope_parameters": None, "partial_rotary_factor": 0},
            "partial_rotary_factor=0 must be a number above",
        ),
        ("phi3", {"partial_rotary_factor": "0.5"}, "partial_rotary_factor='0.5' must be a number above 0"),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 0.2}, "partial_rotary_factor=0.2 leaves 3 of 16"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
            "short_factor in rope_scaling has 1 numbers; the heads have 8 pairs",
        ),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be a positive number"),
        (
            "gemma4",
            {"use_bidirectional_attention": "all"},
            "use_bidirectional_attention='all' must be null or 'vision'",
        ),
        ("gemma4", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}, "layer_types=.* ends with sliding"),
        ("gemma4", {"per_layer_config": None, "global_head_dim": 31}, "global_head_dim=31 must be even"),
        (
            "gemma4",
            {"per_layer_config": None, "num_global_key_value_heads": 3},
            "num_attention_heads=4 must be a multiple of num_global_key_value_heads=3",
        ),
        ("gemma4", {"per_layer_config": {"3": {"head_dim": 8}}}, r"per_layer_config\['3'\] names no layer; .* 0 to 2"),
        ("gemma4", {"per_layer_config": {"2": 8}}, r"per_layer_config\['2'\]=8 must be an object"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": "8"}}}, r"head_dim='8' in per_layer_config\['2'\] must be"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 7}}}, r"per_layer_config\['2'\].head_dim=7 must be even"),
        ("gemma4", {"per_layer_config": {"2": {"rms_norm_eps": 1e-3}}}, "rms_norm_eps=0.001 .* is not supported"),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 8}}}, "gives layers with sliding_attention several sizes"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "has no sliding_attention with a rope",
        ),
        (
            "gemma4",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1.0, "partial_rotary_factor": 0.5},
                    "sliding_attention": {"rope_theta": 1.0},
                }
            },
            "partial_rotary_factor=0.5 in rope_parameters.full_attention of rope_type 'default' must be 1.0",
        ),
        ("gemma4", {"enable_moe_block": True}, "num_experts=None must be a positive integer, as enable_moe_block=True"),
        (
            "gemma4",
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            "top_k_experts=5 must be at most num_experts=4",
        ),
        ("gemma4", {"num_kv_shared_layers": 3}, "num_kv_shared_layers=3 must be below num_hidden_layers=3"),
        ("gemma4", {"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1 must be an integer of 0 or more"),
        (
            "gemma4",
            {"num_kv_shared_layers": 1},
            "num_kv_shared_layers=1: layer 2 has full_attention, and none of the 2",
        ),
        (
            "gemma4_shared",
            {"vocab_size_per_layer_input": 99},
            "vocab_size_per_layer_input=99 must be at least vocab_si",
        ),
        ("gemma4", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling=.* must be null"),
        ("ministral3", {"layer_types": ["full_attention"] * 2}, "layer_types=.* is a field that"),
    ],
)
def test_features_that_a_family_has_not(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    with pytest.raises(ModelError, match=message):
        read_model_spec(tmp_path, hf_overrides=changes)


@pytest.mark.parametrize(("window", "expected"), [(511, (510, 0)), (512, (-1, -1)), (4096, (-1, -1))])
def test_a_window_that_holds_the_context_is_none(window: int, expected: tuple[int, int], tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    spec = read_model_spec(tmp_path, hf_overrides={"sliding_window": window})
    assert spec.context_length == 512 and {layer.attention.window for layer in spec.layers} == {expected}


def test_heads_of_gemma_4_in_both_spellings(tmp_path: Path) -> None:
    """per_layer_config is transformers' form of the fields of full layers, which older files have."""
    make_checkpoint("gemma4", tmp_path)
    spec, path = read_model_spec(tmp_path), tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert config.pop("per_layer_config") == {"2": {"head_dim": 32, "num_key_value_heads": 1}}
    path.write_text(json.dumps({**config, "global_head_dim": 32, "num_global_key_value_heads": 1}))
    assert read_model_spec(tmp_path) == spec
    sliding, full = (layer.attention for layer in spec.layers[1:])
    assert spec.layers[0] is spec.layers[1] and len(spec.kinds) == 2
    assert (sliding.head_size, sliding.num_kv_heads, sliding.window) == (16, 2, (8, 0))
    assert (full.head_size, full.num_kv_heads, full.window) == (32, 1, (-1, -1))
    assert [part.name for part in full.qkv.parts] == ["q_proj", "k_proj"]
    # Only a model whose values are its keys has KV heads of its own in full layers.
    other = read_model_spec(tmp_path, hf_overrides={"attention_k_eq_v": False}).layers[2].attention
    assert other.num_kv_heads == 2 and not other.keys_are_values
    path.write_text(json.dumps({**config, "per_layer_config": {"02": {"head_dim": 8}}}))
    assert read_model_spec(tmp_path).layers[2].attention.head_size == 8


def test_layers_of_gemma_4_that_share(tmp_path: Path) -> None:
    make_checkpoint("gemma4_shared", tmp_path)
    spec = read_model_spec(tmp_path)
    assert [layer.attention.kv_layer for layer in spec.layers] == [None, None, None, 1, 1, 2]
    assert spec.layers[3] is spec.layers[4] and len(spec.kinds) == 4
    assert [layer.feed_forward.down.num_inputs for layer in spec.layers] == [88] * 3 + [176] * 3
    assert [part.name for part in spec.layers[5].attention.qkv.parts] == ["q_proj"]
    assert spec.layer_embeddings == (VOCAB_SIZE + 2, 12)


@pytest.mark.parametrize(
    "rope",
    [
        {"partial_rotary_factor": 0.25},
        {"partial_rotary_factor": 0.3, "factor": 3.0},
        {"partial_rotary_factor": 1.0},
        {},
    ],
)
def test_proportional_ropes_are_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": "proportional", "rope_theta": 5000.0, **rope}
    ropes = {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
    reference = make_checkpoint("gemma4", tmp_path, rope_parameters=ropes, global_head_dim=64)
    table = read_model_spec(tmp_path).layers[-1].attention.rope
    expected = reference.model.rotary_emb.full_attention_inv_freq
    assert table is not None and table.distance in (0, 32)
    found = torch.nn.functional.pad(torch.tensor(table.frequencies), (0, 32 - len(table.frequencies)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert (table.distance == 32) == (len(table.frequencies) < 32)


def test_a_window_that_no_layer_has(tmp_path: Path) -> None:
    """Layer types decide, and a note says so; a model without layer types has the window."""
    make_checkpoint("gemma2", tmp_path)
    spec = read_model_spec(tmp_path, hf_overrides={"layer_types": ["full_attention"] * 3})
    assert {layer.attention.window for layer in spec.layers} == {(-1, -1)}
    assert spec.notes == ("sliding_window=9 ignored: layer_types has no sliding_attention",)
    assert not read_model_spec(tmp_path).notes


@pytest.mark.parametrize("head_size", [64, 80, 128])
@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "linear", "factor": 7},
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "original_max_position_embeddings": 8192, "rope_theta": 500000.0},
        {**LLAMA3_ROPE, "factor": 32, "low_freq_factor": 2, "high_freq_factor": 3.5},
        YARN,
        {**YARN, "factor": 1.0},
        {**YARN, "factor": None},
        {**YARN, "attention_factor": 0.7, "beta_fast": 20, "beta_slow": 2.5},
        {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        {**YARN, "mscale": 0.7},
        {**YARN, "beta_fast": 1e-9, "beta_slow": 1e-9},
        {**YARN, "beta_fast": 476, "beta_slow": 635},  # for 32 pairs both are the fourth
        {**YARN, "original_max_position_embeddings": 16, "factor": 40.0, "rope_theta": 500},
    ],
)
def test_rotary_formulas_are_those_of_transformers(parameters: dict[str, Any], head_size: int) -> None:
    parameters = {"rope_theta": 10000.0, **parameters}
    config = LlamaConfig(head_dim=head_size, max_position_embeddings=20000)
    config.rope_parameters = dict(parameters)
    settings = {"rope_scaling": parameters, "max_position_embeddings": 20000, "original_max_position_embeddings": None}
    expected, expected_factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    rope = rope_table(read_rope({**settings, "rope_theta": None}), head_size)
    torch.testing.assert_close(torch.tensor(rope.frequencies), expected, rtol=1e-6, atol=0)
    assert rope.factor == pytest.approx(expected_factor, rel=1e-9)


@pytest.mark.parametrize(
    ("parameters", "outside", "length"),
    [
        (YARN, None, 8192),
        (YARN, 1000, 1000),
        ({"rope_type": "yarn", "factor": 2.0}, 1000, 1000),
        ({"rope_type": "yarn", "factor": 2.0}, None, 20000),
        ({"rope_type": "default", "original_max_position_embeddings": 500, "llama_4_scaling_beta": 0.1}, 1000, 500),
        ({"rope_type": "default", "llama_4_scaling_beta": 0.1}, 1000, 20000),
    ],
)
def test_the_length_before_scaling(parameters: dict[str, Any], outside: int | None, length: int) -> None:
    """The number outside of the parameters takes precedence, for types of which it is a parameter."""
    settings = {
        **{"rope_scaling": None, "rope_parameters": parameters, "rope_theta": 1e4},
        **{"max_position_embeddings": 20000, "original_max_position_embeddings": outside},
    }
    rope = read_rope(settings, has_beta=True)
    assert rope.values["original_max_position_embeddings"] == length
    assert rope.query_beta == parameters.get("llama_4_scaling_beta", 0.0)


@pytest.mark.parametrize(
    ("inside", "outside", "share"), [(0.5, 0.25, 0.5), (None, 0.25, 0.25), (0.5, None, 0.5), (None, None, 1.0)]
)
def test_the_rotated_share_of_a_head(inside: float | None, outside: float | None, share: float) -> None:
    """The number in the parameters takes precedence."""
    settings = {"rope_scaling": None, "rope_parameters": {"partial_rotary_factor": inside}, "rope_theta": 1e4}
    assert read_rope({**settings, "partial_rotary_factor": outside}).share == share


@pytest.mark.parametrize("share", [1.0, 1, None])
def test_a_share_of_whole_heads_is_harmless(share: float | None, tmp_path: Path) -> None:
    parameters = {**YARN, "rope_theta": 1e4}
    whole = read(tmp_path, LLAMA, rope_parameters={**parameters, "partial_rotary_factor": share})
    assert whole == read(tmp_path, LLAMA, rope_parameters=parameters)


def test_end_of_sequence_tokens_come_from_both_files(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA).eos_token_ids == (128009,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [128001, 128009]}))
    spec = read(tmp_path, LLAMA)
    assert spec.eos_token_ids == (128009, 128001)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, LLAMA, eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": ["OtherForCausalLM"]}, UnsupportedModelError, "OtherForCausalLM.*LlamaForCausalLM.*Qwen3"),
        ({"architectures": None}, UnsupportedModelError, "none named.*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act='gelu'.*silu"),
        ({"quantization_config": {"quant_method": "bitnet"}}, UnsupportedModelError, "quantization_config"),
        ({"torch_dtype": "float64"}, UnsupportedModelError, "float64.*bfloat16"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, UnsupportedModelError, "dynamic.*llama3"),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * 64,
                    "long_factor": [2.0] * 64,
                    "original_max_position_embeddings": 4096,
                }
            },
            UnsupportedModelError,
            "longrope",
        ),
        ({"rope_scaling": {"rope_type": "llama3"}}, ModelError, "llama3.*factor"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModelError, "partial_rotary_factor=0.5"),
        *(
            (
                {field: {"rope_type": kind, "factor": 2.0, "partial_rotary_factor": 0.5}},
                ModelError,
                f"partial_rotary_factor=0.5 in {field}",
            )
            for field in ("rope_scaling", "rope_parameters")
            for kind in ("linear", "yarn")
        ),
        ({"num_key_value_heads": 5}, ModelError, "num_key_value_heads=5"),
        ({"head_dim": 63}, ModelError, "head_dim=63"),
        ({"num_hidden_layers": 0}, ModelError, "num_hidden_layers=0"),
        ({"vocab_size": "many"}, ModelError, "vocab_size"),
        (
            {"model_type": "granite", "logits_scaling": 8.0},
            UnsupportedModelError,
            "'granite'.*LlamaForCausalLM.*'llama'",
        ),
        ({"model_type": None}, UnsupportedModelError, "model_type=None.*LlamaForCausalLM"),
        ({"is_causal": False}, UnsupportedModelError, "is_causal=False.*True"),
        ({"is_causal": None}, UnsupportedModelError, "is_causal=None"),
        ({"sliding_window": 7}, UnsupportedModelError, "sliding_window=7 .*null"),
        ({"embedding_multiplier": 12.0}, UnsupportedModelError, "embedding_multiplier=12.0 .*hf-overrides"),
        ({"per_layer_config": {"0": {"num_key_value_heads": 4}}}, UnsupportedModelError, "per_layer_config"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, ModelError, "factor=0 in rope_scaling.*positive"),
        ({"rope_theta": 0}, ModelError, "rope_theta=0 must be a positive number"),
        ({"rope_theta": -1}, ModelError, "rope_theta=-1 must be a positive number"),
        ({"rope_theta": None}, ModelError, "rope_theta=None must be a positive number"),
        ({"rope_parameters": {"rope_theta": -1}}, ModelError, "rope_theta=-1 must be a positive number"),
        # Only the first frequencies are beyond float32.
        ({"rope_scaling": {"rope_type": "linear", "factor": 1e-39}}, ModelError, "cannot be used: a frequency is not"),
        ({"rope_scaling": {"rope_type": None, "type": "linear"}}, UnsupportedModelError, "rope_type=None.*linear"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, UnsupportedModelError, r"rope_type=\['linear'\] in rope_scaling"),
        ({"rope_scaling": {**YARN, "llama_4_scaling_beta": 0.1}}, UnsupportedModelError, "llama_4_scaling_beta=0.1"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            UnsupportedModelError,
            "full_attention=.*single layers",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1}},
            ModelError,
            "rope_parameters=.*rope_theta=1 cannot be used",
        ),
        ({"rope_scaling": {"mrope_section": [16, 24, 24]}}, UnsupportedModelError, "mrope_section=.*rope_scaling"),
        ({"torch_dtype": "torch.float16"}, UnsupportedModelError, "dtype='torch.float16'.*float16"),
        ({"num_hidden_layers": 10**9}, ModelError, "num_hidden_layers=1000000000 must be .* at most 10000"),
        ({"head_dim": 2 * 10**12}, ModelError, "head_dim=2000000000000 must be .* at most 65536"),
        ({"head_dim": None, "hidden_size": 32 * 10**12}, ModelError, "head_dim=1000000000000 .* at most 65536"),
        ({"output_router_logits": True}, UnsupportedModelError, "output_router_logits=True"),
        ({"vocab_size": 1000.0}, ModelError, "vocab_size=1000.0 must be a positive integer"),
        ({"vocab_size": True}, ModelError, "vocab_size=True"),
        ({"rms_norm_eps": "1e-5"}, ModelError, "rms_norm_eps='1e-5'"),
        # transformers refuses these too, and 0.0 is a valid epsilon.
        ({"rms_norm_eps": 0}, ModelError, "rms_norm_eps=0 must be a float .*with a point or an exponent such as 0.0"),
        ({"bos_token_id": [1]}, ModelError, r"config.json: bos_token_id=\[1\] must be an integer or null"),
        ({"pad_token_id": "x"}, ModelError, "pad_token_id='x' must be an integer or null"),
        ({"hidden_size": 4097}, ModelError, "hidden_size=4097.*num_attention_heads=32"),
        ({"head_dim": 0}, ModelError, "head_dim=0"),
        ({"max_seq_len": "long"}, ModelError, "max_seq_len='long'"),
    ],
)
def test_unusable_configurations(
    tmp_path: Path, changes: dict[str, Any], error: type[ModelError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){message}") as raised:
        read(tmp_path, LLAMA, **changes)
    assert type(raised.value) is error


def test_an_epsilon_of_zero_is_valid_as_a_float(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, rms_norm_eps=0.0).rms_norm_eps == 0


@pytest.mark.parametrize("config", [MISTRAL, QWEN3], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("count", [-1, 0])
@pytest.mark.parametrize("kind", ["full_attention", "linear_attention", "sliding_attention"])
def test_unusable_layer_types(tmp_path: Path, config: dict[str, Any], count: int, kind: str) -> None:
    types = [kind] * (config["num_hidden_layers"] + count)
    changes = {"layer_types": types, "sliding_window": None}
    if count == 0 and kind == "full_attention":
        assert set(windows_of(read(tmp_path, config, **changes))) == {(-1, -1)}
        return
    with pytest.raises(ModelError, match="layer_types=.*list of texts"):
        read(tmp_path, config, layer_types=[*types[:-1], 3])
    with pytest.raises(
        ModelError, match="layer_types" if count or kind == "linear_attention" else "sliding_window=None"
    ):
        read(tmp_path, config, **changes)


def test_model_code_of_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    read(tmp_path, LLAMA, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    with pytest.raises(UnsupportedModelError, match="auto_map=.*trust_remote_code"):
        read_model_spec(tmp_path, trust_remote_code=True)
    assert read_model_spec(tmp_path, trust_remote_code=True, hf_overrides={"auto_map": None}).num_layers == 32


def test_overrides_replace_fields(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    (tmp_path / "config.json").write_text(json.dumps({**QWEN2, "some_field": 3}))
    with pytest.raises(UnsupportedModelError, match="some_field=3"):
        read_model_spec(tmp_path)
    spec = read_model_spec(tmp_path, hf_overrides={"some_field": None, "rope_scaling": yarn, "vocab_size": 1000})
    assert (spec.context_length, spec.vocab_size) == (131072, 1000)
    assert spec.context_source == "original_max_position_embeddings 32768 x factor 4.0 of yarn rope scaling"
    with pytest.raises(ConfigError, match="hf_overrides=.*rope_thetas.*did you mean rope_theta"):
        read_model_spec(tmp_path, hf_overrides={"rope_thetas": None})
    with pytest.raises(ModelError, match="hf_overrides=.*vocab_size=-3 must be a positive integer"):
        read_model_spec(tmp_path, hf_overrides={"some_field": None, "vocab_size": -3})


def test_unusable_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no config.json"):
        read_model_spec(tmp_path)
    for content in ("{", "[1]", b"\xff\xfe\x00"):
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
        with pytest.raises(ModelError, match="JSON"):
            read_model_spec(tmp_path)
    with pytest.raises(ModelError, match="is a file"):
        read_model_spec(tmp_path / "config.json")
    with pytest.raises(ModelError, match="no such folder"):
        read_model_spec(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="no such folder"):
        read_model_spec("./nowhere")


def test_a_hub_id_downloads_only_needed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []

    def download(repository: str, **settings: Any) -> str:
        asked.append((repository, settings))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert switches(read_model_spec("owner/name-1.5", revision="abc"))[3]
    folder_module.model_path("name", weights=True)
    # Where an earlier download lies is asked too.
    (first, first_settings), (second, second_settings) = (one for one in asked if not one[1].get("local_files_only"))
    assert (first, first_settings["revision"]) == ("owner/name-1.5", "abc")
    assert {"config.json", "generation_config.json", "modules.json"} < {*first_settings["allow_patterns"]}
    assert not any("safetensors" in pattern for pattern in first_settings["allow_patterns"])
    assert second == "name"
    assert {"*.safetensors", "config.json"} < set(second_settings["allow_patterns"])
    assert not any(".bin" in pattern for pattern in second_settings["allow_patterns"])


def test_an_unreachable_hub_is_a_model_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repository: str, **settings: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"owner/name.*revision 'v2'.*cannot be reached.*folder"):
        read_model_spec("owner/name", revision="v2")


def test_fields_that_tools_add_are_harmless(tmp_path: Path) -> None:
    extra = {
        **{"_name_or_path": "x", "_experts_implementation": "eager", "_from_a_tool": {"a": 1}},
        **{"output_router_logits": False, "tensor_parallel_size": 1},
        **{"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": None},
    }
    assert read(tmp_path, LLAMA, **extra) == read(tmp_path, LLAMA)
