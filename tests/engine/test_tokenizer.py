"""A tokenizer that needs no class of its own is loaded without transformers, and is the one that it would load."""

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
from phonograph.text.light_tokenizer import LightTokenizer
from phonograph.text.tokenizer import Tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json", "config.json")


def make_folder(folder: Path, settings: dict[str, Any], model: dict[str, Any]) -> Path:
    for name in FILES:
        shutil.copy(MODEL_DIRECTORY / name, folder)
    for name, changes in (("tokenizer_config.json", settings), ("config.json", model)):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({**content, **changes}))
    return folder


BEGIN = {"content": "<|begin|>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
LIGHT: list[dict[str, Any]] = [{}, {"bos_token": BEGIN | {"__type": "AddedToken"}}, {"additional_special_tokens": None}]
OTHERS: list[dict[str, Any]] = [
    {"add_bos_token": True},
    {"clean_up_tokenization_spaces": True},
    {"pad_token": "<new>"},
    {"additional_special_tokens": ["apples"]},
    {"added_tokens_decoder": {"1": BEGIN | {"special": False}}},
    {"chat_template": {"default": "{{ messages[0].content }}", "other": ""}},
]


@pytest.mark.parametrize("added", LIGHT + OTHERS)
def test_it_equals_auto_tokenizer(added: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, added, {})
    assert module._tokenizer_class(folder) is PreTrainedTokenizerFast
    ours, theirs = Tokenizer.load(folder), Tokenizer(AutoTokenizer.from_pretrained(folder))
    assert type(ours._tokenizer) is (LightTokenizer if added in LIGHT else type(theirs._tokenizer))
    assert ours._backend.to_str() == theirs._backend.to_str()
    assert ours.bos_token_id == theirs.bos_token_id and ours.special_token_ids == theirs.special_token_ids
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


@pytest.mark.parametrize("name", ["added_tokens.json", "special_tokens_map.json", "chat_template.jinja"])
def test_further_files_are_left_to_transformers(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {}, {})
    (folder / name).write_text("{}")
    assert not isinstance(Tokenizer.load(folder)._tokenizer, LightTokenizer)


def test_tokens_that_a_library_adds_are_the_engines() -> None:
    ours = Tokenizer.load(MODEL_DIRECTORY)
    assert ours.hugging_face.model_max_length == 8192 and ours.hugging_face.add_tokens(["<added>"]) == 1
    assert ours.encode("<added>") == [2048] and ours.vocab_size == 2049 and ours.decode([2048]) == "<added>"


@pytest.mark.parametrize("missing", FILES)
def test_incomplete_folders_are_left_to_auto_tokenizer(missing: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {}, {})
    (folder / missing).unlink()
    assert module._tokenizer_class(folder) is AutoTokenizer


def test_the_demo_answers_without_imports_of_transformers() -> None:
    code = (
        "import sys\n"
        "from phonograph import LLM\n"
        "LLM('demo', max_num_seqs=1).chat([{'role': 'user', 'content': 'a'}])\n"
        "assert not {'torch._dynamo', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
