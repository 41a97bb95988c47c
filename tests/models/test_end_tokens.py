"""End-of-sequence tokens in configuration files: the values that are read, and those that are refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.errors import ModelError
from phonograph.models.end_tokens import read_end_tokens, split_end_tokens
from phonograph.models.spec import ModelSpec, read_model_spec

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 259,
}
FILES = ("config.json", "generation_config.json")


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> ModelSpec:
    for name, content in zip(FILES, ({**CONFIG, **config}, generation), strict=True):
        (folder / name).write_text(json.dumps(content))
    return read_model_spec(folder)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("value", ["258", 256.0, True, [256, None], [256, True], [[256]], {"id": 2}, "</s>", ["258"]])
def test_a_value_that_is_no_token_id_is_refused_with_its_file(tmp_path: Path, file: str, value: Any) -> None:
    values = [{"eos_token_id": value} if name == file else {} for name in FILES]
    with pytest.raises(ModelError, match=rf"(?s){tmp_path}/{file}: eos_token_id=.*must be a token id"):
        read(tmp_path, *values)


def test_a_long_value_is_shortened_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError) as raised:
        read(tmp_path, {}, {"eos_token_id": ["x" * 10_000]})
    assert len(str(raised.value)) < 500


TOKEN_IDS = st.one_of(st.none(), st.integers(-3, 300), st.lists(st.integers(-3, 300), max_size=4))


@given(TOKEN_IDS, TOKEN_IDS, TOKEN_IDS.filter(lambda value: not isinstance(value, list)))
def test_the_union_within_the_vocabulary_ends_outputs(config: Any, generation: Any, tokenizer: Any) -> None:
    named = [read_end_tokens(value, Path("f")) for value in (config, generation)]
    ids, note = split_end_tokens((*named[0], *named[1]), 259)
    values = [value if isinstance(value, list) else [value] for value in (config, generation)]
    expected = {token_id for value in values for token_id in value if token_id is not None}
    assert set(ids) == expected & set(range(259)) and len(set(ids)) == len(ids)
    assert (note is None) == (expected <= set(range(259)))
    assert note is None or all(str(token_id) in note for token_id in expected - set(range(259)))


def test_ids_outside_the_vocabulary_are_left_out_with_a_note(tmp_path: Path) -> None:
    spec = read(tmp_path, {"eos_token_id": [256, 300]}, {"eos_token_id": -1})
    assert spec.eos_token_ids == (256,)
    assert spec.notes == ("eos_token_id 300, -1 ignored: the model's token ids are 0 to 258",)
    assert read(tmp_path, {"eos_token_id": [256, 256]}, {"eos_token_id": [7]}).eos_token_ids == (256, 7)


def test_other_special_ids_do_not_matter(tmp_path: Path) -> None:
    plain = read(tmp_path, {}, {})
    assert read(tmp_path, {"bos_token_id": 10**6, "pad_token_id": -1}, {"pad_token_id": -100}) == plain


def test_the_token_of_the_tokenizer_joins(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = read(tmp_path, {"eos_token_id": 7}, {})
    assert spec.with_tokenizer_end(None) == spec == spec.with_tokenizer_end(7)
    assert spec.with_tokenizer_end(258).eos_token_ids == (7, 258)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert spec.with_tokenizer_end(259).eos_token_ids == (7,)
    assert "eos_token_id 259 ignored: the model's token ids are 0 to 258" in caplog.text
