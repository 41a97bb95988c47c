"""The engine on a GPU: one answer in all modes and on the CPU, graphs equal to eager, a hot path without waits."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from device_checks import no_wait_or_allocation

from demo_tasks.tasks import problems
from phonograph.bench.step_bench import StepRecorder
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.engine.outputs import RequestOutput

pytestmark = pytest.mark.gpu

MODES = ["FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)


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


def questions(llm: LLM) -> list[list[int]]:
    """Prompts through the chat template, without which the model ends at once."""
    return [llm.encode_chat([{"role": "user", "content": problem.question}]) for problem in problems(3, 40)]


def same_beginnings(one: list[RequestOutput], other: list[RequestOutput], length: int) -> int:
    """Count the answers that begin with the same tokens; all have that length, and are text."""
    pairs = [(a.outputs[0], b.outputs[0]) for a, b in zip(one, other, strict=True)]
    assert all(len(answer.token_ids) >= length and answer.text for pair in pairs for answer in pair)
    return sum(a.token_ids[:length] == b.token_ids[:length] for a, b in pairs)


@pytest.fixture(scope="module")
def full() -> LLM:
    return make_llm()


def test_answers_agree_with_the_cpu_and_between_modes(full: LLM) -> None:
    cpu = LLM(model="demo", device="cpu", cudagraph_mode="NONE", max_num_seqs=16)
    wanted = cpu.generate(questions(cpu), GREEDY)
    for mode in MODES:
        llm = full if mode == "FULL" else make_llm(cudagraph_mode=mode)
        same = same_beginnings(llm.generate(questions(llm), GREEDY), wanted, 12)
        assert same >= 37, f"{mode}: {same} of 40 answers as on the CPU in float32"


def test_reference_runs_between_pieces() -> None:
    """The reference reads the batch on the host, so that its schedule, too, stays outside of graphs."""
    cpu = LLM(model="demo", device="cpu", cudagraph_mode="NONE", max_num_seqs=16)
    llm = make_llm(attention_backend="reference", cudagraph_capture_sizes=[1, 8, 64, 128])
    same = same_beginnings(llm.generate(questions(llm), GREEDY), cpu.generate(questions(cpu), GREEDY), 12)
    assert same >= 38
    assert set(llm.step_counts) <= {"piecewise", "eager"} and llm.step_counts["piecewise"] > 20
    assert llm.verify(num_replays=20).ok


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_every_graph_equals_eager_bit_by_bit(mode: str, full: LLM) -> None:
    llm = full if mode == "FULL" else make_llm(cudagraph_mode=mode)
    report = llm.verify(num_replays=300)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]
    assert set(report.replays) == set(llm.plan.captures.largest_first())


def test_the_hot_path_neither_waits_nor_allocates(full: LLM) -> None:
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.0, detokenize=False)
    for prompt in questions(full)[:8]:
        full.session.add(prompt, params)
    core = full.engine.core
    for _ in range(6):
        core.step()
    with no_wait_or_allocation():
        for _ in range(32):
            core.step()
    while full.session.has_unfinished:
        full.session.step()


def test_steps_are_reported_as_they_ran(full: LLM) -> None:
    core, records, before = full.engine.core, list[StepRecord](), full.step_counts.copy()
    core.on_step = records.append
    try:
        full.generate(questions(full), GREEDY)
    finally:
        core.on_step = None
    assert Counter(record.graph for record in records) == full.step_counts - before
    assert all(record.graph_tokens >= record.num_tokens > 0 for record in records)
    assert all(record.mode == ("FULL" if record.num_tokens <= 128 else "NONE") for record in records)
    kv_heads = full.plan.attention.num_kv_heads
    assert {step.own_units - kv_heads * step.num_decodes for step in records if step.kind == "decode"} == {0}
    assert not any(step.shared_units for step in records), "the demo model is too small for that to be worth it"
    # Steps overlap; their times do not.
    assert all(step.ended - step.seconds >= last.ended - 1e-9 for last, step in pairwise(records))


def test_samples_copy_the_end_of_their_prompt(full: LLM) -> None:
    """And answer as those that compute it."""
    records = list[StepRecord]()
    params = SamplingParams(n=16, max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    prompt = [5 + position * position % 190 for position in range(128)]
    full.engine.core.on_step = records.append
    try:
        (answer,) = full.generate([prompt], params)
    finally:
        full.engine.core.on_step = None
    assert [record.prefill_lens for record in records if record.prefill_lens] == [[128], [1] * 15]
    (wanted,) = make_llm(enable_prefix_caching=False).generate([prompt], params)
    same = sum(one.token_ids == other.token_ids for one, other in zip(answer.outputs, wanted.outputs, strict=True))
    assert same >= 14, f"{same} of 16 samples are those of an engine that copies nothing"


def test_nothing_is_compiled_while_serving(full: LLM) -> None:
    from triton import knobs

    compiled: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda **facts: compiled.append(facts["repr"])
    try:
        prompts = [[5 + token % 50 for token in range(length)] for length in (1, 3, 17, 100, 300, 700)]
        full.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, top_p=0.8, seed=3))
        full.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0))
    finally:
        knobs.runtime.jit_post_compile_hook = before
    assert not compiled


def test_penalties_and_log_probabilities(full: LLM) -> None:
    cpu = LLM(model="demo", device="cpu", cudagraph_mode="NONE", max_num_seqs=16)
    params = SamplingParams(max_tokens=12, temperature=0.0, repetition_penalty=1.2, logprobs=3, min_tokens=4)
    got, wanted = (llm.generate(questions(llm)[:8], params) for llm in (full, cpu))
    assert same_beginnings(got, wanted, 4) >= 7
    for output in got:
        answer = output.outputs[0]
        assert answer.logprobs is not None and len(answer.logprobs) == len(answer.token_ids)
        for token_id, position in zip(answer.token_ids, answer.logprobs, strict=True):
            assert position.token_ids[0] == token_id and len(position.token_ids) == 4


def test_prompts_of_any_length_are_scored(full: LLM) -> None:
    """Graphs and long steps compute only rows with logits in the last layer; these need all, and run without."""
    cpu = LLM(model="demo", device="cpu", cudagraph_mode="NONE", max_num_seqs=16)
    prompts = [[5 + token * 7 % 50 for token in range(length)] for length in (9, 60, 128, 300)]
    before = full.step_counts.copy()
    got, wanted = (
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)) for llm in (full, cpu)
    )
    assert (full.step_counts - before)["eager"] >= 2
    for one, other in zip(got, wanted, strict=True):
        assert one.prompt_logprobs is not None and other.prompt_logprobs is not None
        pairs = list(zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True))
        values = torch.tensor([[a.logprobs[0], b.logprobs[0]] for a, b in pairs if a is not None and b is not None])
        assert len(values) == len(one.prompt_logprobs) - 1 and values.std() > 0.5
        assert (values[:, 0] - values[:, 1]).abs().mean() < 0.03 * values.std()


def test_seeded_sampling_repeats_in_any_company(full: LLM) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.8, top_k=20, seed=11)
    alone = full.generate(questions(full)[:1], params)[0].outputs[0].token_ids
    among = full.generate(questions(full)[:16], params)[0].outputs[0].token_ids
    assert len(alone) and alone[:4] == among[:4], "the draws are the same; rounding may part them later"


def test_recorded_steps_have_the_time_of_the_device(full: LLM) -> None:
    """The host sees the end of a decode late while it launches the eager prefill that follows."""
    recorder, session = StepRecorder(), full.session
    with recorder.watching(full.engine.core):
        for index in range(12):
            session.add([40 + index] * 200, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
            for _ in range(3):
                session.step()
        while session.has_unfinished:
            session.step()
    eager = [seconds for work, seconds in recorder.steps if work.graph == "eager"]
    decodes = sorted(seconds for work, seconds in recorder.steps if work.kind == "full decode")
    assert len(eager) == 12 and len(decodes) > 20
    assert decodes[len(decodes) * 9 // 10] < min(eager) / 2
