"""Configurations that ship with the package: their sizes, their names, and what they are refused for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phonograph import EngineConfig
from phonograph.cli.app import main
from phonograph.errors import ModelError
from phonograph.files.catalog import CONFIGS_DIRECTORY, HUB_IDS, catalog_name
from phonograph.files.model_files import model_path
from phonograph.models.spec import read_model_spec
from phonograph.text.tokenizer import load_tokenizer

# Parameters of the published checkpoints, as the hub counts them in their safetensors files, tied embeddings once.
PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_those_of_the_published_checkpoint(name: str) -> None:
    spec = read_model_spec(name, config_only=True)
    assert spec.num_parameters == PARAMETERS[name]
    assert spec.notes[0] == f"the configuration is that of {HUB_IDS[name]}, as it ships with the package"


def test_each_name_has_a_folder_and_each_folder_a_name() -> None:
    assert {folder.name for folder in CONFIGS_DIRECTORY.iterdir()} == set(HUB_IDS) == set(PARAMETERS)


def test_upper_and_lower_case_mean_the_same_and_hub_ids_count_where_asked_for() -> None:
    assert catalog_name("Llama-3.1-8B") == catalog_name("llama-3.1-8b") == "llama-3.1-8b"
    assert catalog_name("qwen/QWEN3-0.6b", hub_ids=True) == "qwen3-0.6b"
    assert catalog_name("Qwen/Qwen3-0.6B") is catalog_name("Qwen/Qwen3-0.6B-Base", hub_ids=True) is None


def test_a_name_without_its_weights_is_refused_with_the_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options in ({}, {"weights": True}, {"config_only": True, "revision": "main"}):
        with pytest.raises(ModelError, match="'qwen3-0.6b' is a configuration .*give its hub id, Qwen/Qwen3-0.6B"):
            model_path("Qwen3-0.6B", **options)
    assert load_tokenizer(EngineConfig(model="qwen3-0.6b", load_format="dummy")) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-0.6b").mkdir()
    assert model_path("qwen3-0.6b", weights=True) == Path("qwen3-0.6b"), "a folder of that name goes before it"


def test_explain_resolves_hub_ids_without_the_network(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    facts = []
    for model in ("qwen3-0.6b", "Qwen/Qwen3-0.6B"):
        assert main(["explain", model, "--device-name", "h200", "--json"]) == 0
        facts.append(json.loads(capsys.readouterr().out))
        assert facts[-1]["model"].pop("name") == model
    assert facts[0] == facts[1] and any("that of Qwen/Qwen3-0.6B" in note for note in facts[0]["notes"])
    assert main(["explain", "Qwen/Qwen3-0.6B", "--device-name", "h200", "--revision", "main"]) == 2
    assert "no network" in capsys.readouterr().err


def test_random_weights_need_the_name_alone(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "smollm2-135m", "--token-ids", "1,2,3", "--max-tokens", "2", "--ignore-eos", "--json"]
    small = ["--hf-overrides", '{"num_hidden_layers": 1}', "--enforce-eager", "--max-model-len", "64"]
    assert main([*command, *small, "--load-format", "dummy", "--device", "cpu", "--max-num-seqs", "1"]) == 0
    (output,) = json.loads(capsys.readouterr().out)["outputs"]
    assert len(output["token_ids"]) == 2
    assert main([*command, *small]) == 2
    assert "give its hub id, HuggingFaceTB/SmolLM2-135M-Instruct" in capsys.readouterr().err
