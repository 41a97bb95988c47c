"""EAGLE-3 heads against a plain implementation in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import DRAFTS, HEAD, TARGET, head_tensors, reference
from safetensors.torch import save_file
from torch.nn import functional

from phonograph.errors import UnsupportedModelError
from phonograph.models.eagle import DraftSpec, read_eagle
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import begin_loading


def target_spec(folder: Path) -> ModelSpec:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TARGET))
    return read_model_spec(folder)


class WholeSequence:
    """Attention over the tokens of one step."""

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor | None, v_TKD: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        assert k_TKD is not None and v_TKD is not None
        repeats = q_THD.shape[1] // k_TKD.shape[1]
        k, v = (x.transpose(0, 1).repeat_interleave(repeats, 0) for x in (k_TKD, v_TKD))
        out = functional.scaled_dot_product_attention(q_THD.transpose(0, 1), k, v, is_causal=True)
        return out.transpose(0, 1).contiguous()


def load(folder: Path, head: DraftSpec) -> Transformer:
    with begin_loading(head.model, folder, dtype=torch.float32, device=torch.device("cpu")) as loading:
        loading.finish()
        model = loading.model
    tables = rotary_tables(model.spec, 512, torch.float32, torch.device("cpu"))
    model.bind(TorchKernels(tables, model.spec.rms_norm_eps))
    return model


@pytest.mark.parametrize("layer", ["midlayer", "layers.0", "model.layers.0"])
@pytest.mark.parametrize(
    ("changes", "owns_embedding"),
    [
        ({}, False),
        ({"norm_before_residual": True}, True),
        ({"fc_bias": True, "draft_vocab_size": 300}, False),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 8]}}, True),
    ],
)
def test_logits_and_features_are_those_of_the_reference(
    layer: str, changes: dict[str, Any], owns_embedding: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    target, config = target_spec(tmp_path / "target"), HEAD | changes
    head = read_eagle_from(tmp_path, config, target, owns_embedding=owns_embedding)
    tensors = head_tensors(config, layer, owns_embedding=owns_embedding, states=len(head.taps))
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path, head)
    assert model.features is not None and model.feature_part is not None
    table = torch.randn(300, 64) if not owns_embedding else tensors["embed_tokens.weight"]
    model.features.embedding_VE = table
    ids, states = torch.randint(0, 300, (21,)), torch.randn(21, 64 * len(head.taps))
    wanted_stream, wanted_logits = reference(tensors, layer, config, states, table[ids])
    with torch.inference_mode():
        features = model.feature_part.join(states)
        stream = model.forward(ids, torch.arange(21), WholeSequence(), features_TE=features)
        logits = model.logits(stream)
    for found, wanted in ((stream, wanted_stream), (logits, wanted_logits)):
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    if "d2t" in tensors:
        assert model.features.target_ids is not None
        assert torch.equal(model.features.target_ids, tensors["t2d"].nonzero().flatten())


def read_eagle_from(
    folder: Path, config: dict[str, Any], target: ModelSpec, *, owns_embedding: bool = False
) -> DraftSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_eagle(folder, target, owns_embedding=owns_embedding)


def test_states_are_those_of_the_configuration(tmp_path: Path) -> None:
    target = target_spec(tmp_path / "target")
    head = read_eagle_from(tmp_path, HEAD, target)
    assert head.taps == (2, 4, 5) and "its config.json names none" in head.notes[0]
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}
    for changes in (ids, {"eagle_config": ids}):
        head = read_eagle_from(tmp_path, HEAD | changes, target)
        assert head.taps == (0, 3, 8) and not head.notes and head.model.vocab_size == DRAFTS


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": 301}, "vocab_size=301 is not the target's of 300"),
        ({"target_hidden_size": 63}, "target_hidden_size=63 is not the target's"),
        ({"eagle_config": {"new": 1}}, "eagle_config=.*has fields that are not known"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "leaves the states of several layers out"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, "must be ascending numbers from 0 to 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2]}, "must be ascending numbers from 0 to 8"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_heads_that_cannot_run(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    target = target_spec(tmp_path / "target")
    with pytest.raises(UnsupportedModelError, match=problem):
        read_eagle_from(tmp_path, HEAD | changes, target)
