"""lm-evaluation-harness on the offline API: the same scores in every graph mode, and the adapter's corners."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'phonograph[eval]' to run this")

from harness import evaluate

from phonograph import LLM, SamplingParams
from phonograph.bench.harness.adapter import PhonographLM
from phonograph.cli.app import main
from phonograph.errors import ConfigError, RequestError
from phonograph.graphs.modes import GraphMode

LIMIT = 4


def requests(*arguments: tuple[Any, ...]) -> Any:
    return [SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(scope="module")
def adapter(demo_llm: LLM) -> PhonographLM:
    return PhonographLM(llm=demo_llm, max_gen_toks=12)


def test_every_graph_mode_scores_the_same() -> None:
    found = {}
    for mode in GraphMode:
        lm = PhonographLM(
            pretrained="demo", cudagraph_mode=mode.value, max_num_seqs=8, cudagraph_capture_sizes="4,8,512"
        )
        found[mode] = evaluate(lm, limit=LIMIT)
        ran = set(lm.llm.step_counts)
        assert lm.llm.plan.resolution.mode is mode
        assert ("eager" in ran) == (mode in (GraphMode.NONE, GraphMode.FULL_DECODE_ONLY)), (mode, ran)
    scores, samples = found[GraphMode.NONE]
    assert scores == {
        "demo_problems exact_match,strict-match": 1.0,
        "demo_problems exact_match,flexible-extract": 1.0,
        "demo_choices acc,none": 1.0,
    }
    assert len(samples) == 2 * LIMIT
    # Not the scores only: each text, and each log-likelihood to its last bit.
    assert all(one == (scores, samples) for one in found.values())


def test_log_likelihoods_are_those_of_the_tokens(adapter: PhonographLM, demo_llm: LLM) -> None:
    tokenizer = demo_llm.tokenizer
    assert tokenizer is not None
    pairs = [("Tom has", " 12 apples"), ("Tom has  ", "3"), ("", "The code of the red fox"), ("a b c", "")]
    answers = adapter.loglikelihood(requests(*pairs), disable_tqdm=True)
    whole = [tokenizer.encode("Tom has 12 apples", add_special_tokens=False)]
    whole.append(tokenizer.encode("Tom has  3", add_special_tokens=False))
    whole.append([adapter.prefix_token_id, *tokenizer.encode("The code of the red fox", add_special_tokens=False)])
    skipped = [len(tokenizer.encode("Tom has", add_special_tokens=False))] * 2 + [1]
    for ids, skip, (total, greedy) in zip(whole, skipped, answers, strict=False):
        (output,) = demo_llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert output.prompt_logprobs is not None
        positions = [position for position in output.prompt_logprobs[skip:] if position is not None]
        assert total == pytest.approx(sum(position.logprobs[0] for position in positions), abs=1e-4)
        assert greedy == all(position.token_ids[0] == position.token_ids[1] for position in positions)
    assert answers[3] == (0.0, True)
    # What the model writes greedily is greedy.
    prompt = adapter.apply_chat_template([{"role": "user", "content": "Tom has 12 apples and buys 7 more. How many?"}])
    (text,) = adapter.generate_until(requests((prompt, {"until": ["####"]})), disable_tqdm=True)
    assert text and "####" not in text
    ((total, greedy),) = adapter.loglikelihood(requests((prompt, text.rstrip())), disable_tqdm=True)
    assert greedy and -1 < total <= 0


def test_a_whole_text_is_scored_in_windows(adapter: PhonographLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Tom has 12 apples. He buys 7 more apples. How many apples does Tom have now?"
    (whole,) = adapter.loglikelihood_rolling(requests((text,)), disable_tqdm=True)
    ((same, _),) = adapter.loglikelihood(requests(("", text)), disable_tqdm=True)
    assert whole == pytest.approx(same, abs=1e-4) and math.isfinite(whole)
    monkeypatch.setattr(PhonographLM, "max_length", 9)
    first, second = adapter.loglikelihood_rolling(requests((text,), ("Tom",)), disable_tqdm=True)
    # The windows of a short context know less.
    assert math.isfinite(first) and first != pytest.approx(whole, abs=0.1) and second > first


def test_prompts_are_cut_from_the_left(
    adapter: PhonographLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = adapter.loglikelihood(requests(("e f g h", " i")), disable_tqdm=True)
    monkeypatch.setattr(PhonographLM, "max_length", len(adapter.tok_encode("e f g h i")) + 1)
    assert adapter.loglikelihood(requests(("a b c d e f g h", " i")), disable_tqdm=True) != []
    assert "cut from the left" in caplog.text
    assert short[0][0] < 0
    with pytest.raises(RequestError, match="max_gen_toks"):
        adapter.generate_until(requests(("a", {"until": [], "max_gen_toks": 99})), disable_tqdm=True)


def test_unknown_settings_are_refused(adapter: PhonographLM, demo_llm: LLM) -> None:
    with pytest.raises(RequestError, match="num_beams=4"):
        adapter.generate_until(requests(("a", {"until": [], "num_beams": 4})), disable_tqdm=True)
    with pytest.raises(ConfigError, match="llm="):
        PhonographLM(llm=demo_llm, max_num_seqs=3)


def test_the_command_reports_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", "run", "--model_args", "model=nowhere", "--tasks", "arc_easy"]
    asked: list[Any] = []

    def execute(_: object, parsed: Any) -> None:
        asked.append((parsed.model, parsed.tasks))
        PhonographLM(pretrained="/nowhere")

    monkeypatch.setattr("sys.argv", [])
    monkeypatch.setattr("lm_eval._cli.harness.HarnessCLI.execute", execute)
    assert main(arguments) == main([*arguments, "--model", "local-completions"]) == 2
    assert asked == [("phonograph", ["arc_easy"]), ("local-completions", ["arc_easy"])]
    assert capsys.readouterr().err.splitlines()[-1].startswith("phonograph: error: ")
