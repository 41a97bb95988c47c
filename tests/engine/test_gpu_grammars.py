"""Grammars on a GPU: masked and sampled behind the step; `test_grammar_rows.py` compares with the host's sampler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from device_checks import no_wait_or_allocation
from ladders import Ladder

from demo_tasks.tasks import problems
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.engine.llm import LLM
from phonograph.engine.metrics.step_record import StepRecord

pytestmark = pytest.mark.gpu

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 0.9}
NUCLEUS: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
RANKED: dict[str, Any] = {"temperature": 1.1, "top_k": 30}


def make_llm(**settings: object) -> LLM:
    return LLM(
        **{
            "model": "demo",
            "device": "cuda",
            "max_num_seqs": 16,
            "num_kv_blocks": 2048,
            "max_num_batched_tokens": 256,
            "max_cudagraph_capture_size": 128,
            **settings,
        }
    )


@pytest.fixture(scope="module")
def llms() -> dict[str, LLM]:
    """By graph mode, made when they are first needed."""
    return {}


def of_mode(llms: dict[str, LLM], mode: str) -> LLM:
    if mode not in llms:
        llms[mode] = make_llm(cudagraph_mode=mode)
    return llms[mode]


@pytest.fixture
def full(llms: dict[str, LLM]) -> LLM:
    return of_mode(llms, "FULL")


def prompts(llm: LLM, count: int) -> list[list[int]]:
    return [llm.encode_chat([{"role": "user", "content": problem.question}]) for problem in problems(3, count)]


def requests(
    llm: LLM, settings: dict[str, Any], count: int, *, ruled: bool = True, scored: bool = False, length: int = 0
) -> list[Request]:
    """Every third without a grammar. Those with one may ask for log-probabilities, which change no token.

    length: of outputs with a grammar, before their end; 0: from 5 on, each another
    """
    model, made = llm.plan.model, list[Request]()
    for number, prompt in enumerate(prompts(llm, count)):
        with_grammar = ruled and number % 3 != 2
        logprobs = 1 if scored and with_grammar else None
        one = Request(
            request_id=f"{number}",
            prompt_token_ids=prompt,
            params=SamplingParams(
                max_tokens=length + 30, seed=number, logprobs=logprobs, ignore_eos=not with_grammar, **settings
            ),
            arrival=0.0,
            eos_token_ids=model.eos_token_ids,
        )
        if with_grammar:
            one.grammar = Ladder(length or 5 + number % 20, model.vocab_size, model.eos_token_ids[0])
        made.append(one)
    return made


def run(llm: LLM, given: list[Request]) -> tuple[list[list[int]], list[StepRecord]]:
    """Their outputs, and the steps. From an empty prefix cache, so that the same requests make the same batches."""
    core, records = llm.engine.core, list[StepRecord]()
    core.scheduler.reset_prefix_cache()
    core.on_step = records.append
    try:
        for one in given:
            core.scheduler.add(one)
        while core.has_work:
            core.step()
    finally:
        core.on_step = None
    return [one.output_token_ids for one in given], records


def masked(records: list[StepRecord]) -> int:
    return sum("masked sampling" in record.cause for record in records)


@pytest.mark.parametrize("settings", [GREEDY, DRAWN, NUCLEUS, RANKED])
@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "NONE"])
def test_log_probabilities_change_no_token(mode: str, settings: dict[str, Any], llms: dict[str, LLM]) -> None:
    llm = of_mode(llms, mode)
    # More than there are slots: requests come and go, and batches have prefills.
    got, records = run(llm, requests(llm, settings, 40))
    given = requests(llm, settings, 40, scored=True)
    wanted, scored = run(llm, given)
    assert masked(records) > 10 and masked(scored) > 10
    assert all(len(one.logprobs) == len(one.output_token_ids) for one in given if one.grammar is not None)
    assert all(
        entry.token_ids[0] == token
        for one in given
        for entry, token in zip(one.logprobs, one.output_token_ids, strict=False)
    )
    if mode == "FULL":
        assert any("in a graph of 16" in record.reason for record in records)
    assert got == wanted


def test_tokens_are_those_of_the_cpu(full: LLM) -> None:
    cpu = LLM(model="demo", device="cpu", cudagraph_mode="NONE", max_num_seqs=16)
    (got, _), (wanted, _) = (run(llm, requests(llm, GREEDY, 20)) for llm in (full, cpu))
    assert [len(one) for one in got] == [len(other) for other in wanted]
    # bfloat16 against float32, over logits that are close, as a grammar may leave nothing but unlikely tokens.
    assert sum(one[0] == other[0] for one, other in zip(got, wanted, strict=True)) >= 14


def test_rows_without_a_grammar_do_not_change(full: LLM) -> None:
    got, _ = run(full, requests(full, GREEDY, 15))
    alone, records = run(full, requests(full, GREEDY, 15, ruled=False))
    assert masked(records) == 0
    # Other batches, other kernels: rounding may part them later.
    assert sum(got[number][:6] == alone[number][:6] for number in range(2, 15, 3)) >= 4


def test_aborts_leave_the_others_as_they_are(full: LLM) -> None:
    given = requests(full, GREEDY, 24)
    core = full.engine.core
    for one in given:
        core.scheduler.add(one)
    for number in range(12):
        core.step()
        assert core.scheduler.abort(f"{number}") or given[number].finished
    while core.has_work:
        core.step()
    wanted, _ = run(full, requests(full, GREEDY, 24, scored=True))
    ends, same = full.plan.model.eos_token_ids, 0
    for one, expected in list(zip(given, wanted, strict=True))[12:]:
        # Its matcher has asserted that every token was allowed. Batches differ, and rounding with them.
        assert one.finished and len(one.output_token_ids) == len(expected)
        assert one.grammar is None or one.output_token_ids[-1] in ends
        same += one.output_token_ids[0] == expected[0]
    assert same >= 9


@pytest.mark.parametrize("settings", [GREEDY, NUCLEUS])
def test_the_hot_path_with_grammars_neither_synchronises_nor_allocates(settings: dict[str, Any], full: LLM) -> None:
    core, given = full.engine.core, requests(full, settings, 8, length=60)
    for one in given:
        core.scheduler.add(one)
    for _ in range(6):
        core.step()
    with no_wait_or_allocation():
        for _ in range(32):
            core.step()
    while core.has_work:
        core.step()
    assert all(len(one.output_token_ids) == 61 for one in given if one.grammar is not None)


def test_nothing_is_compiled_for_a_grammar(full: LLM) -> None:
    from triton import knobs

    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    try:
        for settings in (GREEDY, DRAWN, NUCLEUS, RANKED):
            run(full, requests(full, settings, 16))
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_json_is_valid_and_the_hosts(full: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    structured = StructuredOutputs(json=schema, disable_any_whitespace=True)
    full.session.grammars.request(structured).result()  # or requests would wait for it, in other batches
    texts: list[list[str]] = []
    for logprobs in (None, 1):
        params = [
            SamplingParams(
                max_tokens=80, temperature=0.0 if seed % 2 else 1.0, seed=seed, logprobs=logprobs,
                structured_outputs=structured,
            )
            for seed in range(20)
        ]  # fmt: skip
        free = [SamplingParams(max_tokens=20, temperature=0.0)] * 4
        full.engine.core.scheduler.reset_prefix_cache()
        outputs = full.generate(prompts(full, 24), [*params, *free])
        texts.append([output.outputs[0].text for output in outputs[:20]])
    assert sum(one == other for one, other in zip(*texts, strict=True)) >= 19
    for text in texts[0]:
        value = json.loads(text)
        assert set(value) == {"name", "age"} and len(value["name"]) <= 8 and 0 <= value["age"] <= 120


def test_a_grammar_without_a_way_on_fails_its_request_only(full: LLM) -> None:
    """The row without a token is found on the device, with the next step in flight."""
    dead = StructuredOutputs(grammar='start: "ab" never\nnever: never "x"')
    asked = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True) for _ in range(3)]
    asked.insert(1, SamplingParams(temperature=0, max_tokens=20, n=2, structured_outputs=dead))
    outputs = full.generate(["Tom has"] * 4, asked)
    assert "no token can follow" in str(outputs[1].error) and outputs[1].outputs == []
    assert [len(output.outputs[0].token_ids) for output in (*outputs[:1], *outputs[2:])] == [20] * 3
    assert not full.session.has_unfinished and full.engine.core.scheduler.stats.blocks_used == 0
