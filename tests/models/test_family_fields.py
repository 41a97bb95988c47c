"""Fields of config.json by family: valid values, defaults that depend on other fields, spellings, and bounds."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from phonograph.errors import ModelError
from phonograph.models import config_fields as kinds
from phonograph.models.config_fields import FieldKind
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.registry import ARCHITECTURES
from phonograph.models.rope_parameters import PARTIAL
from phonograph.models.spec import ModelSpec, read_model_spec

SMALL = {
    **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 4, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "sliding_window": 9},
}
COUNT = ARCHITECTURES["Glm4MoeForCausalLM"].fields["n_shared_experts"].kind
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}


def read(folder: Path, architecture: str, **changes: Any) -> ModelSpec:
    family = ARCHITECTURES[architecture]
    sizes = {name: value for name, value in SMALL.items() if name in family.fields}
    config = {"architectures": [architecture], "model_type": family.model_type, **sizes, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return read_model_spec(folder)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (kinds.POSITIVE_INT, [1, 10**12], [0, -1, True, 1.0, "1"]),
        (kinds.LAYERS, [1, 10_000], [0, -1, 10_001, True, 1.0, "1"]),
        (kinds.POSITIVE_NUMBER, [1, 1e-9], [0, -1.0, True, inf, nan, "1"]),
        (kinds.POSITIVE_NUMBERS, [[], [1, 0.5]], [[1, 0], ["1", 1], [1, True], [inf], "1", 1, {}]),
        (kinds.NUMBER, [0, -1.5], [True, inf, -inf, nan, "1", [1]]),
        (kinds.EPSILON, [0.0, 1e-5], [0, 1, -1e-5, inf, nan, True, "0.0"]),
        (kinds.FLAG, [True, False], [0, 1, "true"]),
        (kinds.TEXT, ["", "a"], [1, ["a"]]),
        (kinds.TEXTS, [[], ["a", "b"]], [["a", 1], [1, "a"], "ab", {"a": 1}, 1]),
        (kinds.OBJECT, [{}, {"a": 1}], [[], "a", 0]),
        (kinds.INTS, [[], [1, -1]], [[1, True], [1.0, 1], "1", 1, {1: 1}]),
        (kinds.INT, [0, -1], [True, 1.0, "1"]),
        (PARTIAL.kind, [1, 1.0, 1e-3], [0, 0.0, 1.01, -0.5, True, "1", nan]),
        (COUNT, [0, 3], [-1, True, 1.0, "1"]),
    ],
)
def test_valid_values(kind: FieldKind, right: list[Any], wrong: list[Any]) -> None:
    for one in (kind, kind.or_null()):
        assert [value for value in right if not one.accepts(value)] == []
        assert [value for value in wrong if one.accepts(value)] == []
    assert kind.or_null().accepts(None) and (kind is PARTIAL.kind) == kind.accepts(None)


def test_null_and_any_value() -> None:
    assert kinds.NULL.accepts(None) and not any(kinds.NULL.accepts(value) for value in (0, False, "", []))
    assert all(kinds.ANY.accepts(value) for value in (None, 0, "a", [nan]))


@pytest.mark.parametrize(
    ("architecture", "changes", "has_window"),
    [
        ("MistralForCausalLM", {}, [True] * 4),
        ("Phi3ForCausalLM", {"sliding_window": None}, [False] * 4),
        ("Gemma2ForCausalLM", {}, [True, False, True, False]),
        ("Gemma3ForCausalLM", {"num_hidden_layers": 7}, [*[True] * 5, False, True]),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 3}, [True, True, False, True]),
        ("Olmo3ForCausalLM", {"num_hidden_layers": 5}, [*[True] * 3, False, True]),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}, [*[False] * 3, True]),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True}, [*[False] * 3, True]),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": None}, [False] * 4),
    ],
)
def test_layers_with_a_window_in_a_file_without_their_types(
    architecture: str, changes: dict[str, Any], has_window: list[bool], tmp_path: Path
) -> None:
    windows = [layer.attention.window for layer in read(tmp_path, architecture, **changes).layers]
    assert windows == [(8, 0) if one else (-1, -1) for one in has_window]


@pytest.mark.parametrize(
    ("changes", "has_rope"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [1, 0, 2, 0, 1]}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 0, 1]}, [False, True, False, True]),
    ],
)
def test_layers_with_a_rope(changes: dict[str, Any], has_rope: list[bool], tmp_path: Path) -> None:
    spec = read(tmp_path, "SmolLM3ForCausalLM", **changes)
    assert [layer.attention.rope is not None for layer in spec.layers] == has_rope


@pytest.mark.parametrize(
    ("architecture", "changes", "has_experts"),
    [
        ("Qwen2MoeForCausalLM", {}, [True] * 4),
        ("Qwen2MoeForCausalLM", {"decoder_sparse_step": 3}, [False, False, True, False]),
        ("Qwen3MoeForCausalLM", {"decoder_sparse_step": 2, "mlp_only_layers": [1]}, [False, False, False, True]),
        ("Glm4MoeForCausalLM", {}, [False, True, True, True]),
        ("Glm4MoeForCausalLM", {"first_k_dense_replace": 9}, [False] * 4),
    ],
)
def test_layers_with_experts(
    architecture: str, changes: dict[str, Any], has_experts: list[bool], tmp_path: Path
) -> None:
    spec = read(tmp_path, architecture, **changes)
    assert [isinstance(layer.feed_forward, LayerExperts) for layer in spec.layers] == has_experts


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 1),
        ({"num_nextn_predict_layers": 2}, 2),
        ({"num_nextn_predict_layers": 0, "num_mtp_layers": 3}, 0),
        ({"num_mtp_layers": 3}, 3),
        ({"num_mtp_layers": None}, 0),
    ],
)
def test_layers_of_prediction_that_are_skipped(changes: dict[str, Any], count: int, tmp_path: Path) -> None:
    spec = read(tmp_path, "Glm4MoeForCausalLM", **changes)
    assert spec.skipped == tuple(f"model.layers.{4 + extra}." for extra in range(count))


@pytest.mark.parametrize(
    ("architecture", "one", "other", "different"),
    [
        ("LlamaForCausalLM", {"hidden_act": "swish"}, {}, {"mlp_bias": True}),
        ("Qwen2ForCausalLM", {"head_dim": None}, {}, {"head_dim": 8}),
        (
            "Gemma3ForCausalLM",
            {"rope_local_base_freq": 300.0},
            {"rope_parameters": {"sliding_attention": {"rope_theta": 300.0}}},
            {"rope_local_base_freq": 10000.0},
        ),
        (
            "Gemma3ForCausalLM",
            {"num_hidden_layers": 6},
            {"num_hidden_layers": 6, "rope_local_base_freq": 10000.0},
            {"num_hidden_layers": 6, "rope_theta": 10000.0},
        ),
        *(
            (
                "Gemma3ForCausalLM",
                {"num_hidden_layers": 6, **one},
                {"num_hidden_layers": 6, "rope_parameters": {"full_attention": LINEAR}},
                {"num_hidden_layers": 6},
            )
            for one in (
                {"rope_scaling": LINEAR},
                {"rope_scaling": {**LINEAR, "type": "default", "other": None}},
                {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": None}},
            )
        ),
        (
            "Ministral3ForCausalLM",
            {},
            {
                "rope_parameters": {
                    **{"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 16384},
                    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "rope_theta": 1e6},
                }
            },
            {"rope_parameters": {"rope_theta": 1e6}},
        ),
        ("Ministral3ForCausalLM", {"rope_scaling": YARN}, {"rope_parameters": YARN}, {}),
        *(
            (
                "Phi3ForCausalLM",
                {field: {"type": name, **LONGROPE}},
                {"rope_scaling": {"rope_type": "longrope", **LONGROPE}},
                {},
            )
            for field in ("rope_scaling", "rope_parameters")
            for name in ("su", "yarn", "longrope")
        ),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 0.5}, {}, {"partial_rotary_factor": 1.0}),
        ("MixtralForCausalLM", {"num_experts": 5}, {"num_local_experts": 5}, {}),
        ("Qwen3MoeForCausalLM", {"num_local_experts": 50}, {"num_experts": 50}, {}),
        ("OlmoeForCausalLM", {"num_local_experts": 50}, {"num_experts": 50}, {}),
        ("Glm4MoeForCausalLM", {"num_local_experts": 50}, {"n_routed_experts": 50}, {}),
    ],
)
def test_spellings(
    architecture: str, one: dict[str, Any], other: dict[str, Any], different: dict[str, Any], tmp_path: Path
) -> None:
    layers = read(tmp_path, architecture, **one).layers
    assert layers == read(tmp_path, architecture, **other).layers
    assert layers != read(tmp_path, architecture, **different).layers


@pytest.mark.parametrize(
    ("architecture", "changes", "expected"),
    [
        ("GemmaForCausalLM", {}, (0.0, 0.0)),
        ("Gemma2ForCausalLM", {}, (50.0, 30.0)),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": 7.0}, (0.0, 7.0)),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 7.0, "final_logit_softcapping": None}, (7.0, 0.0)),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": None}, (0.0, 0.0)),
    ],
)
def test_caps(architecture: str, changes: dict[str, Any], expected: tuple[float, float], tmp_path: Path) -> None:
    spec = read(tmp_path, architecture, **changes)
    assert (spec.layers[0].attention.softcap, spec.factors.softcap) == expected


def glm(experts: int, groups: int, top_groups: int, top_k: int) -> dict[str, int]:
    return {"n_routed_experts": experts, "n_group": groups, "topk_group": top_groups, "num_experts_per_tok": top_k}


@pytest.mark.parametrize(
    ("architecture", "right", "wrong", "says"),
    [
        ("Glm4MoeForCausalLM", glm(12, 6, 6, 12), glm(12, 12, 1, 1), "n_group=12 must divide n_routed_experts=12"),
        ("Glm4MoeForCausalLM", glm(1, 1, 1, 1), glm(12, 5, 1, 1), "n_group=5 must divide n_routed_experts=12"),
        ("Glm4MoeForCausalLM", glm(12, 3, 3, 1), glm(12, 3, 4, 1), "topk_group=4 must be at most n_group=3"),
        ("Glm4MoeForCausalLM", glm(12, 3, 2, 8), glm(12, 3, 2, 9), "num_experts_per_tok=9 must be at most the 8"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 8}, {"num_experts_per_tok": 9}, "at most num_local_experts=8"),
        (
            "MixtralForCausalLM",
            {"num_experts_per_tok": 9, "num_experts": 9},
            {"num_experts": 1},
            "num_experts_per_tok=2 must be at most num_experts=1",
        ),
        ("Qwen2MoeForCausalLM", {"use_sliding_window": False}, {"use_sliding_window": 0}, "use_sliding_window=0 must"),
        ("Qwen2ForCausalLM", {"head_dim": 65536}, {"head_dim": 65538}, "head_dim=65538 must be"),
        ("Qwen2ForCausalLM", {"head_dim": 2}, {"head_dim": 3}, "head_dim=3 must be positive and even"),
        (
            "Qwen2ForCausalLM",
            {"head_dim": None, "hidden_size": 8},
            {"head_dim": None, "hidden_size": 2},
            "head_dim=0 must be positive and even",
        ),
        (
            "Qwen2ForCausalLM",
            {"hidden_size": 66, "num_key_value_heads": 4},
            {"num_key_value_heads": 3},
            "must be a multiple of num_key_value_heads=3",
        ),
        ("LlamaForCausalLM", {}, {"hidden_size": 66}, "hidden_size=66 must be a multiple of num_attention_heads=4"),
        (
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [1] * 4},
            {"no_rope_layers": [1] * 3},
            "must have a number for each of 4 layers",
        ),
        ("Olmo3ForCausalLM", {"rope_theta": 5e5}, {"rope_theta": 5e4}, "rope_theta=50000.0 is not supported"),
        *(
            (
                "Gemma3ForCausalLM",
                {"rope_parameters": {"full_attention": {}}},
                {"rope_parameters": wrong},
                "is not supp",
            )
            for wrong in ({"chunked_attention": LINEAR}, {"chunked_attention": None}, {"full_attention": 3})
        ),
        ("GemmaForCausalLM", {}, {"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
    ],
)
def test_the_last_value_that_goes_and_the_first_that_does_not(
    architecture: str, right: dict[str, Any], wrong: dict[str, Any], says: str, tmp_path: Path
) -> None:
    assert read(tmp_path, architecture, **right).num_layers == 4
    with pytest.raises(ModelError, match=says):
        read(tmp_path, architecture, **wrong)
