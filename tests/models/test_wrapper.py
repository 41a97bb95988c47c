"""Checkpoints with a text model inside: it runs as in transformers, and tensors of other parts are skipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import COMMON, FAMILIES, VOCAB_SIZE, draw_weights, load_model, make_checkpoint
from dense import DenseSequences
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
)

from phonograph.errors import ConfigError, ModelError, UnsupportedModelError, WeightError
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.scheme import Quantization
from phonograph.models.registry import find_architecture
from phonograph.models.spec import read_model_spec
from phonograph.models.weights.loading import begin_loading
from phonograph.models.weights.wrapper import TEXT_PREFIXES, WRAPPERS

CPU = torch.device("cpu")
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 2],
    "output_proj_dims": 16,
}
WRAPPED: dict[str, tuple[type, type, str, str, bool]] = {
    "gemma3": (Gemma3Config, Gemma3ForConditionalGeneration, "gemma3", "siglip_vision_model", True),
    "gemma4": (Gemma4Config, Gemma4ForConditionalGeneration, "gemma4", "gemma4_vision", True),
    "mistral": (Mistral3Config, Mistral3ForConditionalGeneration, "mistral", "pixtral", False),
    "ministral3": (Mistral3Config, Mistral3ForConditionalGeneration, "ministral3", "pixtral", False),
}
"""Classes of transformers, family of the text model, type of the tower, tied embeddings."""


def make(name: str, folder: Path) -> PreTrainedModel:
    """Write a checkpoint, and return transformers' model of it."""
    config_class, model_class, family, tower, tied = WRAPPED[name]
    text_class, _, settings = FAMILIES[family]
    # Gemma 4's class of several parts needs a padding token.
    padding = {"pad_token_id": 0} if name == "gemma4" else {}
    text = text_class(**{**COMMON, **settings, **padding})
    vision = {**TOWER, "model_type": tower}
    sound = {"audio_config": AUDIO} if name == "gemma4" else {}
    config = config_class(text_config=text.to_dict(), vision_config=vision, tie_word_embeddings=tied, **sound)
    model = model_class(config).to(torch.float32).eval()
    draw_weights(model, family, text.hidden_size, seed=0)
    model.save_pretrained(folder)
    return model


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rename(folder: Path, old: bool) -> int:
    """Write the tensors by their older names or by their newer ones. Return the number of those of other parts."""
    tensors: dict[str, torch.Tensor] = {}
    others = 0
    for name, tensor in load_file(folder / "model.safetensors").items():
        inner = name.removeprefix("model.").removeprefix("language_model.model.").removeprefix("language_model.")
        is_text = inner.startswith(("layers", "embed_tokens", "norm", "lm_head"))
        others += not is_text
        if not is_text:
            new = name.removeprefix("model.") if old else f"model.{name.removeprefix('model.')}"
        elif inner.startswith("lm_head"):
            new = f"language_model.{inner}" if old else inner
        else:
            new = f"language_model.model.{inner}" if old else f"model.language_model.{inner}"
        tensors[new] = tensor
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return others


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", WRAPPED)
def test_the_text_model_is_that_of_transformers(name: str, old: bool, tmp_path: Path) -> None:
    reference = make(name, tmp_path)
    others = rename(tmp_path, old)
    spec = read_model_spec(tmp_path)
    assert spec.wrapper in WRAPPERS and spec.architecture != spec.wrapper
    with begin_loading(spec, tmp_path, dtype=torch.float32, device=CPU) as loading:
        (note,) = loading.notes
    counts = [int(part.rsplit(" ", 1)[1]) for part in note.rpartition(": ")[2].split(", ")]
    parts = ("vision_tower", "embed_vision", "audio_tower") if name == "gemma4" else ("multi_modal_projector",)
    assert "skipped" in note and all(part in note for part in parts)
    assert sum(counts) == others > 2
    sequences = DenseSequences(load_model(spec, tmp_path, dtype=torch.float32, device=CPU))
    prompt = torch.randint(3, VOCAB_SIZE, (50,)).tolist()
    (actual,) = sequences.step([(sequences.add(), prompt)])
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert expected.std() > 0.5
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("wrapped", [False, True])
def test_tensors_of_layers_that_read_anothers_keys(wrapped: bool, tmp_path: Path) -> None:
    """Published files have projections of keys and values for layers that use none; they are skipped with a note."""
    make_checkpoint("gemma4_shared", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{name}.weight"] = torch.ones(32, 64)
    if wrapped:
        text = json.loads((tmp_path / "config.json").read_text())
        outer = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
        (tmp_path / "config.json").write_text(json.dumps(outer))
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(tensors, path, {"format": "pt"})
    with begin_loading(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU) as loading:
        (note,) = loading.notes
        loading.finish()
    assert "skipped" in note and " 3" in note
    # Those of a layer with keys of its own are no others.
    first = next(name for name in tensors if "layers.0.self_attn.k_proj" in name)
    tensors[first.replace("k_proj", "v_norm")] = torch.ones(16)
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(WeightError, match=r"layers\.0\.self_attn\.v_norm\.weight in .* is not part of this Gemma4"):
        load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


def test_fields_outside_of_the_text_model(tmp_path: Path) -> None:
    """Fields outside of text_config count; overrides are of the text model."""
    make("mistral", tmp_path)
    (tmp_path / "generation_config.json").unlink()
    change(tmp_path, eos_token_id=[7, 9], dtype="bfloat16")
    spec = read_model_spec(tmp_path, hf_overrides={"max_position_embeddings": 99})
    assert spec.eos_token_ids == (7, 9) and spec.dtype == "bfloat16" and spec.context_length == 99
    assert not spec.tie_word_embeddings
    change(tmp_path, tie_word_embeddings=None)
    with pytest.raises(ModelError, match="tie_word_embeddings=None must be true or false"):
        read_model_spec(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_model_spec(tmp_path)
    assert spec.tie_word_embeddings
    # The head of the file differs from the embeddings.
    assert not load_model(spec, tmp_path, dtype=torch.float32, device=CPU).spec.tie_word_embeddings
    with pytest.raises(ConfigError, match="hf_overrides"):
        read_model_spec(tmp_path, hf_overrides={"text_config": {}})


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"text_config": None}, ModelError, "text_config=None must be an object"),
        ({"model_type": "mistral"}, UnsupportedModelError, "model_type='mistral' and architectures="),
        ({"draft_heads": 3}, UnsupportedModelError, "draft_heads=3 is a field"),
        ({"is_encoder_decoder": True}, UnsupportedModelError, "is_encoder_decoder=True is a field"),
        (
            {"text_config": {"model_type": "qwen2"}},
            UnsupportedModelError,
            "'qwen2' of text_config .* mistral, ministral3",
        ),
        ({"text_config": {"model_type": "mistral", "odd": 1}}, UnsupportedModelError, "odd=1 is a field"),
    ],
)
def test_refusals(changes: dict[str, Any], error: type[ModelError], message: str, tmp_path: Path) -> None:
    make("mistral", tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(error, match=message):
        read_model_spec(tmp_path)


@pytest.mark.parametrize("name", ["model.other_tower.weight", "model.language_model.layers.0.self_attn.g_proj.weight"])
def test_tensors_of_unknown_parts_are_refused(name: str, tmp_path: Path) -> None:
    make("gemma3", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, name: torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(WeightError, match=r"_tower.weight|layers\.0\.self_attn\.g_proj\.weight"):
        load_model(read_model_spec(tmp_path), tmp_path, dtype=torch.float32, device=CPU)


def test_lists_of_quantization_in_either_spelling() -> None:
    scheme = Fp8(origin="FP8", scales="channel")
    for entry in ("re:.*language_model.*layers.0.*", *(f"{prefix}layers.0" for prefix in TEXT_PREFIXES)):
        quantization = Quantization("fp8", scheme, ((entry, None),), prefixes=TEXT_PREFIXES)
        assert quantization.scheme_of("model.layers.0.mlp.down_proj") is None
        assert quantization.scheme_of("model.layers.1.mlp.down_proj") is scheme


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepseekV3ForCausalLM", "multi-head latent attention"),
        ("Llama4ForConditionalGeneration", "chunked attention"),
        ("Gemma3nForConditionalGeneration", "AltUp"),
    ],
)
def test_architectures_that_are_refused_by_their_feature(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name}' is not supported .*{reason}.*Gemma3ForConditionalGen"):
        find_architecture(name)
