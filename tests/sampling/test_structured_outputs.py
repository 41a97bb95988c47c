"""Structured output of the demo model: valid JSON of random schemas, the other kinds, and refusals."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from schemas import random_schema

from phonograph import LLM, EngineConfig, SamplingParams, StructuredOutputs
from phonograph.engine.session import Session
from phonograph.engine.startup.start import start_engine
from phonograph.errors import RequestError


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    yield LLM(model="demo", max_model_len=1024, max_num_seqs=4, cudagraph_capture_sizes=[1, 2, 4], seed=0)


def answer(llm: LLM, structured: dict[str, Any], **params: Any) -> str:
    settings: dict[str, Any] = {"temperature": 1.0, "max_tokens": 300, "seed": 3, **params}
    (output,) = llm.generate("Answer:", SamplingParams(structured_outputs=StructuredOutputs(**structured), **settings))
    assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
    return output.outputs[0].text


def test_json_of_random_schemas_is_valid(llm: LLM) -> None:
    """Beside requests without a grammar, whose outputs are what they are alone."""
    rng = random.Random(5)
    schemas = [random_schema(rng) for _ in range(12)]
    free = [SamplingParams(temperature=0.8, seed=seed, max_tokens=20) for seed in range(4)]
    alone = [output.outputs[0].text for output in llm.generate(["Tom has"] * 4, free)]
    ruled = [
        SamplingParams(temperature=1.0, max_tokens=500, structured_outputs=StructuredOutputs(json=one))
        for one in schemas
    ]
    outputs = llm.generate(["Tom has"] * 16, [*free, *ruled])
    assert [output.outputs[0].text for output in outputs[:4]] == alone
    for schema, output in zip(schemas, outputs[4:], strict=True):
        (completion,) = output.outputs
        assert output.error is None and completion.finish_reason == "stop", (output.error, schema)
        value = json.loads(completion.text)
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        checker.validate(value)


def test_the_other_kinds(llm: LLM) -> None:
    assert re.fullmatch(r"[0-9]{3}-[a-f]{2,4}", answer(llm, {"regex": r"[0-9]{3}-[a-f]{2,4}"}))
    choices = ["yes", 'no "never"', "näher\n日", "yes indeed"]
    assert {answer(llm, {"choice": choices}, seed=seed) for seed in range(8)} <= set(choices)
    text = answer(llm, {"grammar": 'root ::= "[" item ("," item){2} "]"\nitem ::= [0-9] | "(" item ")"'})
    assert re.fullmatch(r"\[[()0-9]+(,[()0-9]+){2}\]", text)
    # Left to itself, the demo model breaks its lines for ever.
    for form, pattern in (("ipv4", r"(0|[1-9]\d{0,2})(\.(0|[1-9]\d{0,2})){3}"), ("date", r"[1-9]\d{3}-[01]\d-[0-3]\d")):
        assert re.fullmatch(pattern, json.loads(answer(llm, {"json": {"type": "string", "format": form}})))
    short = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(answer(llm, {"json": short}, temperature=0)) == {"a": 1}


def test_strings_hold_no_control_characters(llm: LLM) -> None:
    assert llm.tokenizer is not None
    matcher = (
        llm.session.grammars.request(StructuredOutputs(json={"type": "string", "maxLength": 9})).result().matcher()
    )
    matcher.accept(llm.tokenizer.encode('"', add_special_tokens=False)[0])
    bitmask = np.zeros((1, 2048 // 32), np.int32)
    matcher.fill(bitmask, 0)
    allowed = np.flatnonzero(np.unpackbits(bitmask.view(np.uint8), bitorder="little"))
    texts = [llm.tokenizer.decode([token]) for token in allowed.tolist()]
    assert len(texts) > 500 and not [text for text in texts if any(character < " " for character in text)]


def test_an_output_that_is_cut_is_a_beginning(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, structured_outputs={"regex": "ab{90}c"})  # pyright: ignore[reportArgumentType]
    (output,) = llm.generate("x", params)
    assert output.outputs[0].finish_reason == "length" and re.fullmatch("ab+", output.outputs[0].text)


def test_samples_have_their_own_matchers_and_preemption_changes_nothing(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=200, seed=1, structured_outputs=StructuredOutputs(regex="([a-z]{3} ){40}"))
    (whole,) = llm.generate("x", params)
    small = start_engine(EngineConfig(model="demo", max_model_len=128, max_num_seqs=3, block_size=16, num_kv_blocks=8))
    session = Session(small.core, small.plan.model, llm.tokenizer, 0, llm.session.grammars)
    output = session.add("x", params)
    while session.has_unfinished:
        session.step()
    assert small.core.scheduler.stats.num_preemptions > 0
    texts = [one.text for one in output.outputs]
    assert texts == [one.text for one in whole.outputs] and len(set(texts)) == 3
    assert all(re.fullmatch("([a-z]{3} ){40}", text) for text in texts)


@pytest.mark.parametrize(
    ("structured", "says"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "a$b"}, "lookarounds not supported"),
        ({"json": {"pattern": "a$b"}}, "lookarounds not supported"),
        ({"grammar": 'root ::= "a'}, "line 1"),
        ({"json": {"type": "nope"}}, "nope"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"enum": []}}, "empty"),
        (
            {"json": {"type": "array", "items": {"uniqueItems": True}}},
            "uniqueItems cannot be enforced; strictness='relaxed'",
        ),
        ({"json": {"properties": {"a": {"not": {}}}}}, "not cannot be enforced"),
        ({"json": {"properties": {"a": {"$ref": "http://example.org/a"}}}}, "leads elsewhere"),
        ({"json": {"required": [[]]}}, "Expected string for 'required'"),
        ({"json": {"type": "integer", "enum": ["a", 2.5]}}, "Unsatisfiable schema"),
        ({"json": {"pattern": 5}}, "Expected string for 'pattern'"),
        ({"json": {"type": "string", "pattern": "^(?=a)"}}, "look-ahead"),
        ({"json": False}, "allows nothing"),
    ],
)
def test_what_cannot_be_a_grammar_is_refused(llm: LLM, structured: dict[str, Any], says: str) -> None:
    for _ in range(2):  # the second time from what is known
        with pytest.raises(RequestError) as caught:
            answer(llm, structured)
        assert says in str(caught.value) and len(str(caught.value)) < 800
    assert not llm.session.has_unfinished


def test_a_one_of_whose_branches_overlap_is_taken_for_any_of_and_says_so(llm: LLM) -> None:
    kinds = [{"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b")]
    overlapping = {"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}
    for schema, warnings in (({"oneOf": kinds}, ()), (overlapping, ("oneOf is treated as anyOf",))):
        params = SamplingParams(structured_outputs=StructuredOutputs(json=schema), max_tokens=200, seed=3)
        (output,) = llm.generate("Answer:", params)
        assert json.loads(output.outputs[0].text) in ({"kind": "a"}, {"kind": "b"}, 1, 2, 3)
        assert output.warnings == warnings


def test_what_is_not_held_can_be_left_out(llm: LLM) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "minItems": 4, "maxItems": 4}
    structured = StructuredOutputs(json=schema, strictness="relaxed", disable_any_whitespace=True)
    (output,) = llm.generate("Answer:", SamplingParams(structured_outputs=structured, max_tokens=100))
    assert len(json.loads(output.outputs[0].text)) == 4 and output.warnings == ("uniqueItems cannot be enforced",)


def test_objects_are_closed_unless_asked(llm: LLM) -> None:
    schema, tokenizer = {"type": "object", "properties": {"a": {"type": "integer"}}}, llm.tokenizer
    assert tokenizer is not None
    for closed in (True, False):
        structured = StructuredOutputs(json=schema, disable_additional_properties=closed)
        matcher = llm.session.grammars.request(structured).result().matcher()
        token_ids = tokenizer.encode('{"b": 1}', add_special_tokens=False)
        assert (matcher.validate(token_ids) == len(token_ids)) is not closed


def test_a_schema_that_is_known_is_not_read_again(llm: LLM) -> None:
    first = llm.session.grammars.request(StructuredOutputs(json={"type": "string", "format": "date", "title": "x"}))
    again = StructuredOutputs(json='{"type":"string", "format": "date", "title": "x"}')
    assert first.result() is llm.session.grammars.request(again).result()


def test_one_bad_grammar_of_several_prompts(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=5, structured_outputs=StructuredOutputs(regex=one)) for one in ("a{3}", "[")]
    good, bad = llm.generate(["x", "x"], params)
    assert good.outputs[0].text == "aaa" and bad.error is not None and bad.outputs == [] and bad.finished


def test_the_end_of_a_grammar_wins_over_min_tokens(llm: LLM) -> None:
    for settings in ({"temperature": 0}, {"temperature": 1.0, "seed": 3}):
        common: dict[str, Any] = {**settings, "min_tokens": 6, "max_tokens": 12}
        fixed = SamplingParams(**common, structured_outputs=StructuredOutputs(choice=["a"]))
        longer = SamplingParams(**common, structured_outputs=StructuredOutputs(regex="[0-9]*"))
        one, several = (output.outputs[0] for output in llm.generate(["x", "x"], [fixed, longer]))
        assert (one.text, one.finish_reason) == ("a", "stop")
        assert len(several.token_ids) >= 6 and several.text.isdigit()


NOTHING = 'start: "a" never\nnever: never "x"'
EVERY_BIAS = dict.fromkeys(range(2048), -math.inf)


@pytest.mark.parametrize(
    "params, says",
    [
        ({"structured_outputs": {"grammar": "root ::= root"}}, "grammar='root ::= root': "),
        (
            {"structured_outputs": {"grammar": NOTHING}, "n": 2},
            "after 1 token no token can follow; check for rules that never end",
        ),
        (
            {"structured_outputs": {"choice": ["a"]}, "logit_bias": EVERY_BIAS},
            "logit_bias='...': bans every allowed token",
        ),
        ({"logit_bias": dict.fromkeys(range(2048), -1e300), "n": 3}, "logit_bias='...': bans every allowed token"),
        ({"stop_token_ids": range(2048), "min_tokens": 2}, "min_tokens=2: every allowed token"),
    ],
)
def test_parameters_that_leave_no_token_fail_their_request_only(llm: LLM, params: dict[str, Any], says: str) -> None:
    free = SamplingParams(temperature=0, max_tokens=12)
    (alone,) = llm.generate("Tom has", free)
    bad, good = llm.generate(["Tom has"] * 2, [SamplingParams(temperature=0, **params), free])
    assert says in str(bad.error) and bad.outputs == []
    assert good.outputs[0].text == alone.outputs[0].text and not llm.session.has_unfinished
    assert llm.engine.core.scheduler.stats.blocks_used == 0
    with pytest.raises(RequestError, match=re.escape(says)):
        llm.generate("Tom has", SamplingParams(temperature=0, **params))


def test_a_grammar_that_comes_to_a_limit_is_the_fault_of_its_request(llm: LLM) -> None:
    """Found as its matcher takes a token, or at the next mask."""
    many = {"grammar": 'start: e\ne: e e e e e | e e e | e e | "a"'}
    ends = dict.fromkeys(llm.plan.model.eos_token_ids, -100.0)
    params = SamplingParams(temperature=0, max_tokens=400, structured_outputs=many, logit_bias=ends)
    free = SamplingParams(temperature=0, max_tokens=12)
    bad, good = llm.generate(["Tom has"] * 2, [params, free])
    assert isinstance(bad.error, RequestError) and re.search("after [0-9]+ tokens .*items", str(bad.error))
    assert len(good.outputs[0].token_ids) == 12 and llm.engine.core.scheduler.stats.blocks_used == 0
