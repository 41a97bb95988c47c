"""Structural tags: free text, and JSON of a schema after each trigger."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from phonograph.config.engine_config import EngineConfig
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError
from phonograph.server.chat.tools import ToolChoice
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.formats.call_layouts import HERMES
from phonograph.text.tokenizer import Tokenizer, load_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
STRICT = {"type": "function", "function": {"name": 'a"dd', "parameters": SCHEMA, "strict": True}}
FREE = {"type": "function", "function": {"name": "now", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "a\\"dd", "arguments": {"a": 1}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(EngineConfig(model="demo"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    eos = (tokenizer.eos_token_id or 0,)
    compiler = GrammarCompiler(lambda: Vocabulary.of_tokenizer(tokenizer, 2048, eos), eos)
    yield compiler
    compiler.close()


def allowed(compiler: GrammarCompiler, tokenizer: Tokenizer, tags: StructuredOutputs, text: str) -> tuple[str, bool]:
    """Return the part of a text that the grammar allows, and whether the output may end after the text."""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    matcher = compiler.request(tags).result(30).matcher()
    count = matcher.validate(token_ids)
    return tokenizer.decode(token_ids[:count]), matcher.validate([*token_ids, tokenizer.eos_token_id or 0]) > len(
        token_ids
    )


@pytest.mark.parametrize("text", ["", "Hello.", CALL, f"I add. {CALL}\n{CALL} Done.", "x < y <tool", "{}\n"])
def test_text_and_whole_calls(compiler: GrammarCompiler, tokenizer: Tokenizer, text: str) -> None:
    tags = ToolChoice(form="parsed", tools=[STRICT, FREE]).tagged(HERMES[0], {})
    assert tags is not None and allowed(compiler, tokenizer, tags, text) == (text, True)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("a <tool_call>", "x"),
        (f"{CALL} <tool_call>", "\n\n"),
        ('<tool_call>\n{"name": "', "sub"),
        ('<tool_call>\n{"name": "a\\"dd", "arguments": {"a": ', "3"),
        ('<tool_call>\n{"name": "now", "arguments": ', "[3]"),
    ],
)
def test_wrong_calls_end_where_they_are_wrong(
    compiler: GrammarCompiler, tokenizer: Tokenizer, text: str, wrong: str
) -> None:
    tags = ToolChoice(form="parsed", tools=[STRICT, FREE]).tagged(HERMES[0], {})
    assert tags is not None
    whole, ends = allowed(compiler, tokenizer, tags, text)
    assert whole == text and not ends
    assert len(allowed(compiler, tokenizer, tags, text + wrong)[0]) < len(text + wrong)


def test_functions_that_are_not_strict_take_any_object(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    tags = ToolChoice(form="parsed", tools=[STRICT, FREE]).tagged(HERMES[0], {})
    text = '<tool_call>\n{"name": "now", "arguments": {"b": [3]}}\n</tool_call>'
    assert tags is not None and allowed(compiler, tokenizer, tags, text) == (text, True)


def test_several_triggers_and_no_end(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    structures = [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}, {"begin": "<g>1", "schema": True}]
    tags = StructuredOutputs(
        structural_tag={"type": "structural_tag", "triggers": ["<f", "<g>"], "structures": structures}
    )
    text = 'x <f>{"a": 2}</f> <g>1"y" z'
    assert allowed(compiler, tokenizer, tags, text) == (text, True)
    assert allowed(compiler, tokenizer, tags, "x <f>y")[0] == "x <f>"


@pytest.mark.parametrize(
    ("tags", "problem"),
    [
        ("{", "is not valid JSON"),
        ([], "must be a JSON schema"),
        (True, "lists of triggers and of structures"),
        ({"triggers": [], "structures": [{}]}, "lists of triggers"),
        ({"triggers": [""], "structures": [{"begin": "x", "schema": {}}]}, "lists of triggers"),
        ({"triggers": ["<"], "structures": []}, "lists of triggers"),
        ({"triggers": ["<"], "structures": [{"begin": "x", "schema": {}}]}, "a begin with a trigger"),
        ({"triggers": ["<"], "structures": [{"begin": "<x"}]}, "a schema and an end"),
        ({"triggers": ["<"], "structures": [{"begin": "<x", "schema": {}, "end": 5}]}, "a schema and an end"),
    ],
)
def test_wrong_tags(tags: Any, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        StructuredOutputs(structural_tag=tags)


def test_a_schema_that_cannot_be_enforced(compiler: GrammarCompiler) -> None:
    tags = {"triggers": ["<"], "structures": [{"begin": "<x", "schema": {"type": "array", "uniqueItems": True}}]}
    with pytest.raises(RequestError, match="structural_tag.*uniqueItems cannot be enforced"):
        compiler.request(StructuredOutputs(structural_tag=tags)).result(30)
    grammar = compiler.request(StructuredOutputs(structural_tag=tags, strictness="relaxed")).result(30)
    assert grammar.warnings
