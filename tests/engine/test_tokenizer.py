"""A tokenizer that needs no class of its own is loaded without AutoTokenizer, and is the one that it would load."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from phonograph.demo import MODEL_DIRECTORY
from phonograph.text import tokenizer as module
from phonograph.text.tokenizer import Tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def make_folder(folder: Path, settings: dict[str, Any], model: dict[str, Any]) -> Path:
    for name in FILES:
        shutil.copy(MODEL_DIRECTORY / name, folder)
    for name, changes in (("tokenizer_config.json", settings), ("config.json", model)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **changes}))
    return folder


@pytest.mark.parametrize("added", [{}, {"add_bos_token": True}, {"clean_up_tokenization_spaces": True}])
def test_it_equals_auto_tokenizer(added: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, added, {})
    assert module._tokenizer_class(folder) is PreTrainedTokenizerFast
    ours, theirs = Tokenizer.load(folder), Tokenizer(AutoTokenizer.from_pretrained(folder))
    assert type(ours._tokenizer) is type(theirs._tokenizer)
    assert ours._backend.to_str() == theirs._backend.to_str()
    assert ours.eos_token_id == theirs.eos_token_id is not None
    text = "What is 12 + 7 ? <|end|> é"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
    messages = [{"role": "system", "content": "Answer."}, {"role": "user", "content": text}]
    assert ours.encode_chat(messages) == theirs.encode_chat(messages)


@pytest.mark.parametrize(
    ("settings", "model"),
    [
        ({"tokenizer_class": "LlamaTokenizerFast"}, {}),
        ({"tokenizer_class": None}, {}),
        ({"auto_map": {"AutoTokenizer": ["tokenization.Own", None]}}, {}),
        ({}, {"model_type": "qwen2"}),
    ],
)
def test_others_are_left_to_auto_tokenizer(settings: dict[str, Any], model: dict[str, Any], tmp_path: Path) -> None:
    assert module._tokenizer_class(make_folder(tmp_path, settings, model)) is AutoTokenizer


@pytest.mark.parametrize("missing", FILES)
def test_incomplete_folders_are_left_to_auto_tokenizer(missing: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {}, {})
    (folder / missing).unlink()
    assert module._tokenizer_class(folder) is AutoTokenizer


def test_the_demo_starts_without_imports_of_auto_tokenizer() -> None:
    code = (
        "import sys\n"
        "from phonograph.demo import MODEL_DIRECTORY\n"
        "from phonograph.text.tokenizer import Tokenizer\n"
        "Tokenizer.load(MODEL_DIRECTORY).encode('a')\n"
        "assert not {'torch._dynamo', 'transformers.models.auto'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
