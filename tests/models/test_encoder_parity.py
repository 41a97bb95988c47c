"""Encoders next to transformers in float32: lengths around a page and at the limit, together, in all modes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from encoder_checkpoints import ENCODERS, POSITIONS, expected_rows, make_encoder, random_prompts
from public_encoder_configs import ENCODER_CONFIGS
from transformers import AutoConfig

from phonograph import LLM, PoolingParams
from phonograph.errors import ModelError
from phonograph.graphs.modes import GraphMode
from phonograph.models.spec import read_model_spec

RAW = PoolingParams(use_activation=False)
LABELS = {
    GraphMode.NONE: {"eager"},
    GraphMode.PIECEWISE: {"piecewise"},
    GraphMode.FULL: {"full mixed"},
    GraphMode.FULL_DECODE_ONLY: {"eager"},
    GraphMode.FULL_AND_PIECEWISE: {"piecewise"},
}


def make_llm(folder: Path, **settings: Any) -> LLM:
    defaults: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 96, "enforce_eager": True}
    if "cudagraph_mode" in settings:
        del defaults["enforce_eager"]
    return LLM(str(folder), **{**defaults, **settings})


@pytest.mark.parametrize("name", ENCODERS)
def test_rows_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = make_encoder(name, tmp_path)
    with make_llm(tmp_path) as llm:
        limit = llm.plan.limits.max_model_len
        assert limit == POSITIONS - 2 * ("roberta" in name)
        prompts = random_prompts(1, 2, 15, 16, 17, limit, 33)
        outputs = llm.encode(prompts, RAW, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        rows = expected_rows(model, prompt)
        wanted = rows if "classes" in name or "score" in name else rows.mean(0)
        assert torch.allclose(torch.from_numpy(output.outputs.data), wanted, rtol=0, atol=1e-4), len(prompt)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_five_modes_and_verify(name: str, tmp_path: Path) -> None:
    make_encoder(name, tmp_path)
    prompts = random_prompts(1, 9, 40, 3, 18, 1, 1)
    found: dict[GraphMode, list[np.ndarray]] = {}
    for mode in GraphMode:
        with make_llm(tmp_path, cudagraph_mode=mode, cudagraph_capture_sizes=[4, 48, 96]) as llm:
            found[mode] = [one.outputs.data for one in llm.embed(prompts, use_tqdm=False)]
            assert set(llm.step_counts) == LABELS[mode], mode
            if mode in (GraphMode.FULL, GraphMode.PIECEWISE):
                report = llm.verify(num_replays=5)
                assert report.ok, report.mismatches
    for mode, rows in found.items():
        assert all(np.allclose(*pair, rtol=0, atol=1e-6) for pair in zip(rows, found[GraphMode.NONE], strict=True)), (
            mode
        )


@pytest.mark.parametrize("name", ENCODER_CONFIGS)
def test_public_configurations(name: str, tmp_path: Path) -> None:
    content, positions, task = ENCODER_CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(content))
    spec = read_model_spec(tmp_path)
    assert spec.context_length == positions and spec.pooler is not None and task in spec.pooler.tasks
    theirs = AutoConfig.for_model(**content)
    with torch.device("meta"):
        architecture: Any = getattr(transformers, content["architectures"][0])
        parameters = sum(one.numel() for key, one in architecture(theirs).named_parameters() if "pooler" not in key)
    assert spec.num_parameters == parameters


def test_old_names_of_nomic_bert(tmp_path: Path) -> None:
    """The names of the class in nomic-ai/contrastors, which the published file has next to new ones."""
    make_encoder("nomic", tmp_path)
    file, new = tmp_path / "config.json", read_model_spec(tmp_path)
    content = json.loads(file.read_text())
    old = {"n_embd": 48, "n_head": 3, "n_inner": 72, "n_layer": 2, "layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000}
    names = ("hidden_size", "num_attention_heads", "intermediate_size", "num_hidden_layers", "layer_norm_eps")
    for name in (*names, "hidden_act", "max_position_embeddings", "rope_parameters"):
        del content[name]
    old |= {"activation_function": "swiglu", "max_trained_positions": POSITIONS, "n_positions": 8192}
    old |= {"qkv_proj_bias": False, "mlp_fc1_bias": False, "mlp_fc2_bias": False, "prenorm": False, "causal": False}
    old |= {"rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None, "rotary_emb_interleaved": False}
    old |= {"use_rms_norm": False, "parallel_block": False, "rotary_scaling_factor": None, "fused_bias_fc": True}
    file.write_text(json.dumps(content | old))
    assert read_model_spec(tmp_path) == new
    for name, value in (("rotary_emb_fraction", 0.5), ("qkv_proj_bias", True), ("activation_function", "gelu_fast")):
        file.write_text(json.dumps(content | old | {name: value}))
        with pytest.raises(ModelError, match=f"{name if name != 'activation_function' else 'hidden_act'}="):
            read_model_spec(tmp_path)


def test_alone_and_together(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path)
    prompts = random_prompts(5, 1, 30, 17, 16, 2, 60, seed=3)
    with make_llm(tmp_path) as llm:
        together = [one.outputs.data for one in llm.embed(prompts, use_tqdm=False)]
        for prompt, rows in zip(prompts, together, strict=True):
            (alone,) = llm.embed([prompt], use_tqdm=False)
            assert np.abs(alone.outputs.data - rows).max() < 1e-5
            assert abs(np.linalg.norm(rows) - 1) < 1e-5


def test_types_of_the_tokens_of_a_pair(tmp_path: Path) -> None:
    from phonograph.core.token_types import TypedTokens

    model = make_encoder("bert_classes", tmp_path)
    prompt, types = random_prompts(12)[0], [0] * 5 + [1] * 7
    with make_llm(tmp_path) as llm:
        (output,) = llm.encode([TypedTokens.of(prompt, types)], RAW, use_tqdm=False)
        assert output.prompt_token_ids == prompt
    wanted = expected_rows(model, prompt, token_type_ids=types)
    plain = expected_rows(model, prompt)
    assert torch.allclose(torch.from_numpy(output.outputs.data), wanted, rtol=0, atol=1e-4)
    assert not torch.allclose(wanted, plain, rtol=0, atol=1e-2), "the types must matter"


def test_rows_of_all_tokens(tmp_path: Path) -> None:
    model = make_encoder("xlm_roberta", tmp_path)
    prompts = random_prompts(3, 20, 7)
    with make_llm(tmp_path) as llm:
        outputs = llm.encode(prompts, RAW, pooling_task="token_embed", use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        wanted = expected_rows(model, prompt)
        assert torch.allclose(torch.from_numpy(output.outputs.data), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("bert", {"is_decoder": True}, "is_decoder"),
        ("bert", {"hidden_act": "gelu_fast"}, "hidden_act"),
        ("bert", {"architectures": ["MPNetModel"]}, "relative position bias"),
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, "BertForQuestionAnswering"),
        ("roberta", {"pad_token_id": None}, "pad_token_id"),
        ("modernbert", {"norm_bias": True}, "norm_bias"),
        ("modernbert_classes", {"classifier_pooling": "max"}, "classifier_pooling"),
        ("modernbert_classes", {"classifier_activation": "relu"}, "classifier_activation"),
        ("bert_classes", {"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ("bert_classes", {"problem_type": "ranking"}, "problem_type"),
        ("bert_classes", {"sbert_ce_default_activation_function": "torch.nn.Mish"}, "Mish"),
    ],
)
def test_configurations_that_are_refused(name: str, changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_encoder(name, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=problem):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "activation"),
    [
        ({"problem_type": "regression"}, "none"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({}, "softmax"),
    ],
)
def test_activations_of_classes(changes: dict[str, Any], activation: str, tmp_path: Path) -> None:
    make_encoder("bert_classes", tmp_path)
    file = tmp_path / "config.json"
    names = {"id2label": {"0": "bad", "1": "fair", "2": "good"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **names, **changes}))
    pooler = read_model_spec(tmp_path).pooler
    assert pooler is not None and pooler.activation == activation and pooler.labels == ("bad", "fair", "good")
