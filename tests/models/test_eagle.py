"""EAGLE heads against plain implementations and against files of speculators, in float32.

`scripts/tool-files` let speculators 0.9.0 write heads of random weights (tests/data/tool_files/speculators-0.9.0), and
kept logits of the package's own forward pass for three steps of drafting: of layers of Llama with and without biases
and scaled rope, and of two layers of Qwen3; with a smaller vocabulary; with `norm_before_residual`, `norm_before_fc`,
`fc_norm` and `norm_output`. Two runs of the package differ by up to 4e-6. EAGLE-1 is compared with the plain
implementation only.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_heads import DRAFTS, FIRST, HEAD, TARGET, first_reference, first_tensors, head_tensors, norm, reference
from safetensors.torch import load_file, save_file
from torch.nn import functional

from phonograph.errors import ModelError, UnsupportedModelError, WeightError
from phonograph.models.heads.eagle import DraftSpec, read_eagle
from phonograph.models.heads.eagle_config import method_of
from phonograph.models.heads.shared_weights import share
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.quantization.float8 import Fp8Head
from phonograph.models.spec import ModelSpec, read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import begin_loading

FILES = Path(__file__).parents[1] / "data" / "tool_files" / "speculators-0.9.0"

GRANITE = {"architectures": ["GraniteForCausalLM"], "model_type": "granite", "head_dim": None, "logits_scaling": 8.0}
LAST_STATE = {"eagle_config": {"use_aux_hidden_state": False, "eagle_aux_hidden_state_layer_ids": []}}
MODEL_OPTIMIZER = {
    "use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True, "use_last_layernorm": True,
    "use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1,
    "parallel_draft_heads_num_layers": None,
}  # fmt: skip
"""Fields of `eagle_config` in files of Model Optimizer."""


def target_spec(folder: Path, **changes: Any) -> ModelSpec:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(TARGET | changes))
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


def load(folder: Path, head: DraftSpec, target: Transformer | None = None) -> Transformer:
    with begin_loading(head.model, folder, dtype=torch.float32, device=torch.device("cpu")) as loading:
        loading.finish()
        model = loading.model
    if target is not None:
        share(model, target)
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
        ({"norm_before_fc": True, "norm_output": True}, False),
        ({"fc_norm": True}, True),
    ],
)
def test_logits_and_features_are_those_of_the_reference(
    layer: str, changes: dict[str, Any], owns_embedding: bool, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    target, config = target_spec(tmp_path / "target"), HEAD | changes
    states = len(config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", "123"))
    tensors = head_tensors(config, layer, owns_embedding=owns_embedding, states=states)
    save_file(tensors, tmp_path / "model.safetensors")
    head = read_eagle_from(tmp_path, config, target, tensors=tensors)
    model = load(tmp_path, head)
    assert model.features is not None and model.feature_part is not None and len(head.taps) == states
    table = torch.randn(300, 64) if not owns_embedding else tensors["embed_tokens.weight"]
    model.features.embedding_VE = table
    ids, rows = torch.randint(0, 300, (21,)), torch.randn(21, 64 * states)
    wanted_said, wanted_logits = reference(tensors, layer, config, rows, table[ids])
    said, logits = run(model, ids, model.feature_part.join(rows))
    for found, wanted in ((said, wanted_said), (logits, wanted_logits)):
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    if "d2t" in tensors:
        assert model.features.target_ids is not None
        assert torch.equal(model.features.target_ids, tensors["t2d"].nonzero().flatten())


def run(model: Transformer, ids: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the next features and the logits of one whole sequence."""
    assert model.feature_part is not None
    with torch.inference_mode():
        stream = model.forward(ids, torch.arange(len(ids)), WholeSequence(), features_TE=features)
        said = torch.empty_like(stream)
        model.feature_part.next_features(stream, None, said)
        return said, model.logits(stream)


def test_a_shared_head_has_the_targets_format(tmp_path: Path) -> None:
    """A matrix in FP8 is there once, and the head plans its products with it."""
    plain = target_spec(tmp_path / "target")
    target = plain.with_head_scheme(Fp8Head(origin="made at load", scales="channel"))
    ours, other = (read_eagle_from(tmp_path, FIRST, one, method="eagle").model for one in (target, plain))
    assert ours.head == target.head and other.head == plain.head != target.head
    assert ours.weight_bytes("bfloat16") == other.weight_bytes("bfloat16")
    assert ours.num_parameters == other.num_parameters and ours.tensor_shapes() == other.tensor_shapes()


def test_norms_of_random_weights_are_one(tmp_path: Path) -> None:
    head = read_eagle_from(tmp_path, HEAD | {"fc_norm": True}, target_spec(tmp_path / "target"))
    shape = {"dtype": torch.float32, "device": torch.device("cpu")}
    with begin_loading(head.model, "any", load_format="dummy", **shape) as loading:
        weights = loading.model.features
    assert weights is not None and len(weights.state_norms) == 3 and len(weights.norms) == 5
    assert all(bool((one == 1).all()) for one in weights.norms.values())


def test_weights_that_were_never_loaded(tmp_path: Path) -> None:
    """speculators writes an embedding of NaN if its target was not there."""
    target, tensors = target_spec(tmp_path / "target"), head_tensors(HEAD, "midlayer", owns_embedding=True, states=3)
    tensors["embed_tokens.weight"].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="tensor embed_tokens.weight in .* has NaN"):
        load(tmp_path, read_eagle_from(tmp_path, HEAD, target, tensors=tensors))


def test_logits_by_the_embedding(tmp_path: Path) -> None:
    """A head has its own embedding for them or, without one in its files, that of a target that ties its own."""
    torch.manual_seed(5)
    target, config = target_spec(tmp_path / "target"), {**HEAD, "draft_vocab_size": 300, "tie_word_embeddings": True}
    assert not read_eagle_from(tmp_path, config, target, tensors={"lm_head.weight"}).model.tie_word_embeddings
    with pytest.raises(UnsupportedModelError, match="tie_word_embeddings=True makes logits of an embedding, and its"):
        read_eagle_from(tmp_path, config, target, tensors={"norm.weight"})
    tied = target_spec(tmp_path / "tied", tie_word_embeddings=True)
    assert not read_eagle_from(tmp_path, config, tied, tensors={"norm.weight"}).model.owns_head
    tensors = head_tensors(config, "midlayer", owns_embedding=True, states=3)
    tensors["embed_tokens.weight"] *= 3
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    head = read_eagle_from(tmp_path, config, target, tensors=tensors)
    assert head.model.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    ids, states, table = torch.randint(0, 300, (21,)), torch.randn(21, 192), tensors["embed_tokens.weight"]
    wanted = reference(tensors | {"lm_head.weight": table}, "midlayer", config, states, table[ids])[1]
    model = load(tmp_path, head, Transformer(target, torch.float32, torch.device("cpu")))
    assert model.feature_part is not None
    logits = run(model, ids, model.feature_part.join(states))[1]
    assert (logits - wanted).norm() < 1e-5 * wanted.norm()


def read_eagle_from(
    folder: Path,
    config: dict[str, Any],
    target: ModelSpec,
    *,
    method: str = "eagle3",
    tensors: Collection[str] | None = None,
) -> DraftSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return read_eagle(folder, target, method=method, tensors=tensors)


@pytest.mark.parametrize("case", ["llama", "llama-norms", "qwen3"])
def test_drafting_is_that_of_speculators(case: str, tmp_path: Path) -> None:
    folder = FILES / case
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    expected = load_file(folder / "expected.safetensors")
    target = target_spec(tmp_path / "target", hidden_size=32, vocab_size=64)
    assert method_of(config) == "eagle3"
    head = read_eagle(folder, target, method="eagle3", tensors=tensors)
    ids = config["eagle_aux_hidden_state_layer_ids"]
    assert list(head.taps) == (ids or [2, 4, 5]) and len(head.notes) == (ids is None)
    model = load(folder, head)
    assert model.feature_part is not None
    tokens = expected["tokens"].long()
    for first in (1, 4, 9):
        features = model.feature_part.join(expected["states"][:first].clone())
        for step in range(3):
            said, logits = run(model, tokens[: first + step], features)
            if first + step <= len(tokens):
                wanted = expected[f"logits_{step}"][first - 1]
                assert (logits[-1] - wanted).norm() < 2e-5 * wanted.norm(), (first, step)
            features = torch.cat([features, said[-1:]])


@pytest.mark.parametrize("owns_embedding", [False, True])
def test_first_version_is_that_of_the_reference(owns_embedding: bool, tmp_path: Path) -> None:
    """EAGLE-1: a join of embedding and state, no norm before attention nor logits, the target's norm and head."""
    torch.manual_seed(2)
    spec = target_spec(tmp_path / "target")
    target = Transformer(spec, torch.float32, torch.device("cpu"))
    for parameter in target.parameters:
        parameter.normal_()
    assert isinstance(target.embedding_VE, torch.Tensor) and target.final_norm is not None
    tensors = first_tensors(FIRST, owns_embedding=owns_embedding, bias=owns_embedding)
    save_file(tensors, tmp_path / "model.safetensors")
    head = read_eagle_from(tmp_path, FIRST | {"bias": owns_embedding}, spec, method="eagle", tensors=tensors)
    assert head.taps == (8,)
    assert head.model.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    model = load(tmp_path, head, target)
    assert model.feature_part is not None
    table = tensors["embed_tokens.weight"] if owns_embedding else target.embedding_VE
    ids, states = torch.randint(0, 300, (21,)), torch.randn(21, 64)
    features = norm(states, target.final_norm)
    wanted = first_reference(tensors, FIRST, features, table[ids], target.lm_head.matrix.t())
    for found, expected in zip(run(model, ids, model.feature_part.join(states)), wanted, strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_features_that_are_the_last_state(tmp_path: Path) -> None:
    """Without states of several layers there is no join."""
    torch.manual_seed(4)
    spec = target_spec(tmp_path / "target")
    target = Transformer(spec, torch.float32, torch.device("cpu"))
    for parameter in target.parameters:
        parameter.normal_()
    assert isinstance(target.embedding_VE, torch.Tensor) and target.final_norm is not None
    tensors = head_tensors(HEAD, "midlayer", owns_embedding=False, states=1)
    del tensors["fc.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    head = read_eagle_from(tmp_path, HEAD | LAST_STATE, spec, tensors=tensors)
    assert head.taps == (8,) and not head.notes
    model = load(tmp_path, head, target)
    assert model.feature_part is not None
    ids, states = torch.randint(0, 300, (21,)), torch.randn(21, 64)
    wanted = reference(tensors, "midlayer", HEAD, norm(states, target.final_norm), target.embedding_VE[ids])
    for found, expected in zip(run(model, ids, model.feature_part.join(states)), wanted, strict=True):
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_a_head_without_logits_of_its_own_has_the_targets(tmp_path: Path) -> None:
    torch.manual_seed(3)
    spec, config = target_spec(tmp_path / "target"), {**HEAD, "draft_vocab_size": 300}
    target = Transformer(spec, torch.float32, torch.device("cpu"))
    for parameter in target.parameters:
        parameter.normal_()
    assert isinstance(target.embedding_VE, torch.Tensor)
    tensors = head_tensors(config, "midlayer", owns_embedding=False, states=3)
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path, read_eagle_from(tmp_path, config, spec, tensors=tensors), target)
    assert model.feature_part is not None
    ids, states = torch.randint(0, 300, (21,)), torch.randn(21, 192)
    own = tensors | {"lm_head.weight": target.lm_head.matrix.t()}
    wanted = reference(own, "midlayer", config, states, target.embedding_VE[ids])[1]
    logits = run(model, ids, model.feature_part.join(states))[1]
    assert (logits - wanted).norm() < 1e-5 * wanted.norm()


def test_states_are_those_of_the_configuration(tmp_path: Path) -> None:
    target = target_spec(tmp_path / "target")
    head = read_eagle_from(tmp_path, HEAD, target)
    assert head.taps == (2, 4, 5) and "its config.json names none" in head.notes[0]
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 3, 8]}
    for changes in (ids, {"eagle_config": ids}):
        head = read_eagle_from(tmp_path, HEAD | changes, target)
        assert head.taps == (0, 3, 8) and not head.notes and head.model.vocab_size == DRAFTS


def test_states_by_the_outputs_of_layers(tmp_path: Path) -> None:
    """SpecForge and Model Optimizer write their default so; other numbers are those of the layers that states enter."""
    target, name = target_spec(tmp_path / "target"), "eagle_aux_hidden_state_layer_ids"
    for changes in ({name: [1, 3, 4]}, {"eagle_config": MODEL_OPTIMIZER | {name: [4, 1, 3]}}):
        head = read_eagle_from(tmp_path, HEAD | changes, target)
        assert head.taps == (2, 4, 5) and "are outputs of layers" in head.notes[0]
    for ids in ([1, 3, 5], [2, 4, 5], [1, 4]):
        head = read_eagle_from(tmp_path, HEAD | {"eagle_config": MODEL_OPTIMIZER | {name: ids}}, target)
        assert list(head.taps) == ids and not head.notes
    config = json.loads((FILES / "llama" / "config.json").read_text()) | {name: [1, 3, 4]}
    target = target_spec(tmp_path / "small", hidden_size=32, vocab_size=64)
    assert read_eagle_from(tmp_path, config, target).taps == (1, 3, 4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"vocab_size": 301}, "vocab_size=301 is not the target's of 300"),
        ({"target_hidden_size": 63}, "target_hidden_size=63 is not the target's"),
        ({"eagle_config": {"new": 1}}, "new=1 is a field of eagle_config that is not known"),
        ({"eagle_config": {"use_aux_hidden_state": 0}}, "use_aux_hidden_state=0 must be true or false"),
        (LAST_STATE | {"fc_norm": True}, "fc_norm=True and use_aux_hidden_state=False contradict each other"),
        (LAST_STATE | {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not the target's of 1e-05"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm=False of .* not supported; True is"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step=4 of eagle_config is not supported; 1 is"),
        ({"eagle_config": {"norm_output": 3}}, "norm_output=3 must be true or false"),
        ({"eagle_config": [1]}, r"eagle_config=\[1\] must be an object"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9]}, "must be different numbers from 0 to 8"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 2]}, "must be different numbers from 0 to 8"),
        ({"eagle_aux_hidden_state_layer_ids": []}, "must be different numbers from 0 to 8"),
        ({"eagle_aux_hidden_state_layer_ids": 2}, "layer_ids=2 must be a list of integers"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"add_para_norm": True}, "add_para_norm=True"),
        ({"fc_norm": True, "norm_before_fc": True}, "fc_norm=True and norm_before_fc=True"),
        ({"norm_output": "yes"}, "norm_output='yes' must be true or false"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0 must be a positive integer"),
        ({"hidden_size": 32}, "hidden_size=32 is not the target's, whose embedding"),
    ],
)
def test_heads_that_cannot_run(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    target = target_spec(tmp_path / "target")
    with pytest.raises(ModelError, match=f"config.json: .*{problem}"):
        read_eagle_from(tmp_path, HEAD | changes, target)


@pytest.mark.parametrize(
    ("changes", "of_layers", "problem"),
    [
        ({"logit_scale": 0.5}, {}, "logit_scale=0.5"),
        ({"eagle_config": {"new": 1}}, {}, "new=1 is a field of eagle_config that is not known"),
        ({}, {"qk_norm_scale": 2}, "qk_norm_scale=2"),
        ({}, {"model_type": "gemma"}, "model_type='gemma' of transformer_layer_config is not supported; llama and"),
        ({}, {"vocab_size": 65}, "vocab_size=65 is not the target's of 64"),
        ({"transformer_layer_config": None}, {}, "transformer_layer_config=None must be an object"),
        ({"norm_output": 1}, {}, "norm_output=1 must be true or false"),
    ],
)
def test_files_of_speculators_that_cannot_run(
    changes: dict[str, Any], of_layers: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    config = json.loads((FILES / "llama" / "config.json").read_text())
    config["transformer_layer_config"] |= of_layers
    target = target_spec(tmp_path / "target", hidden_size=32, vocab_size=64)
    with pytest.raises(ModelError, match=problem):
        read_eagle_from(tmp_path, config | changes, target)


def test_fields_of_a_head_among_those_of_its_layers_have_no_effect(tmp_path: Path) -> None:
    """speculators reads them outside only."""
    config = json.loads((FILES / "llama" / "config.json").read_text())
    target = target_spec(tmp_path / "target", hidden_size=32, vocab_size=64)
    plain = read_eagle_from(tmp_path, config, target)
    config["transformer_layer_config"] |= {"norm_before_residual": True, "draft_vocab_size": 50, "fc_norm": "yes"}
    del config["norm_before_residual"]
    assert read_eagle_from(tmp_path, config, target) == plain


def test_other_heads_of_speculators_are_refused() -> None:
    for kind in ("dflash", "peagle", "mtp", None):
        with pytest.raises(UnsupportedModelError, match=f"speculators_model_type={kind!r} is not supported; eagle3 is"):
            method_of({"speculators_model_type": kind, "architectures": ["Eagle3DraftModel"]})


@pytest.mark.parametrize(
    ("changes", "of_target", "problem"),
    [
        ({"vocab_size": 301}, {}, "vocab_size=301 is not the target's of 300"),
        ({"hidden_size": 32}, {}, "hidden_size=32 is not the target's of 64"),
        ({"rms_norm_eps": 1e-6}, {}, "rms_norm_eps=1e-06 is not the target's of 1e-05"),
        ({"add_para_norm": True}, {}, "add_para_norm=True"),
        ({"norm_before_residual": True}, {}, "norm_before_residual=True"),
        ({}, GRANITE, "GraniteForCausalLM: a head that reads its last state does not work yet"),
    ],
)
def test_heads_of_the_first_version_that_cannot_run(
    changes: dict[str, Any], of_target: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    target = target_spec(tmp_path / "target", **of_target)
    with pytest.raises(UnsupportedModelError, match=problem):
        read_eagle_from(tmp_path, FIRST | changes, target, method="eagle")
