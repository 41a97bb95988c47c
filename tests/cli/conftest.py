"""Commands run in this process, with no settings from the environment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import plain_environment, run  # noqa: F401 - a fixture of every test here
from installed_backend import installed  # noqa: F401 - a fixture

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 200,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


def _folder(tmp_path_factory: pytest.TempPathFactory, name: str, config: dict[str, Any]) -> str:
    folder: Path = tmp_path_factory.mktemp(name)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return flags of an engine on a tiny model of random weights without a tokenizer."""
    folder = _folder(tmp_path_factory, "tiny", TINY)
    return ["--model", folder, "--load-format", "dummy", "--max-num-seqs", "4", "--max-cudagraph-capture-size", "24"]


@pytest.fixture
def demo() -> list[str]:
    """Return flags of an engine on the demo model with few graphs, which starts quickly."""
    return ["--model", "demo", "--max-num-seqs", "2", "--cudagraph-capture-sizes", "1,2,32"]


@pytest.fixture
def llama() -> list[str]:
    """Return flags for the configuration of Llama 3.1 8B, without weights, on an H200."""
    return ["--model", "llama-3.1-8b", "--device-name", "h200"]


@pytest.fixture
def run_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[dict[str, Any]]]:
    """Run a command with --json; check the exit code and that stdout has JSON only, and return its lines."""

    def lines(*tokens: str, code: int = 0) -> list[dict[str, Any]]:
        printed = run(capsys, *tokens, "--json", code=code)
        return [json.loads(line, parse_constant=_refuse) for line in printed.splitlines()]

    return lines


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")
