"""The demo tasks: deterministic, right by an independent reckoning, and the held-out part really held out."""

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from demo_tasks.families import FAMILIES
from demo_tasks.tasks import (
    EVALUATION_PROBLEMS,
    EVALUATION_SEED,
    Problem,
    Recall,
    extract_answer,
    extract_code,
    fact_split,
    problem_split,
    problems,
    recall_reply,
    recalls,
    score_problem,
    score_recall,
)
from phonograph.demo import MODEL_DIRECTORY

ROOT = Path(__file__).parents[2]
EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)\.")
FACT = re.compile(r"(?:[Tt]he code of the (\w+ \w+) is (\d{4})\.)|(?:The (\w+ \w+) has the code (\d{4})\.)")
seeds = st.integers(min_value=0, max_value=2**32)

Wording = tuple[str, Callable[..., int]]
# Solvers that read the question alone. Every number is a group, in the order of the text.
WORDINGS: tuple[Wording, ...] = (
    (r"^\w+ has (\d+) (\w+) and (?:buys|finds) (\d+) more\. How many \2 does \w+ have", lambda a, _, b: a + b),
    (r"^\w+ has (\d+) (\w+) and gives (\d+) to \w+\. How many", lambda a, _, b: a - b),
    (r"^\w+ has (\d+) \w+ with (\d+) (\w+) in each\. How many \3 are there", lambda a, b, _: a * b),
    (r"^\w+ buys (\d+) \w+ for (\d+) dollars each\. ", lambda a, b: a * b),
    (r"^\w+ shares (\d+) \w+ equally among (\d+) friends\.", lambda a, b: a // b),
    (r"^\w+ has (\d+) (\w+)\. (\w+) has (\d+) more \2 than \w+\. How many \2 does \3", lambda a, _o, _n, b: a + b),
    (r"^\w+ has (\d+) (\w+)\. \w+ has (\d+) more \2 than \w+\. .*(?:together|total)", lambda a, _, b: a + a + b),
    (r"^\w+ has (\d+) (\w+)\. \w+ has (\d+) fewer \2 than \w+\. .*(?:together|total)", lambda a, _, b: a + a - b),
    (r"^\w+ has (\d+) (\w+)\. \w+ has (\d+) times as many \2 as \w+\.", lambda a, _, b: a + a * b),
    (r"^\w+ is (\d+) years old\. \w+ is (\d+) years older than \w+\. .*in (\d+) years", lambda a, b, c: a + b + c),
    (
        r"buys (\d+) \w+ for (\d+) dollars each and (\d+) \w+ for (\d+) dollars each\. (?!She pays|He pays)",
        lambda a, b, c, d: a * b + c * d,
    ),
    (
        r"buys (\d+) \w+ for (\d+) dollars each and (\d+) \w+ for (\d+) dollars each\. (?:She|He) pays with \$(\d+)",
        lambda a, b, c, d, e: e - a * b - c * d,
    ),
    (
        r"^\w+ has (\d+) \w+ with (\d+) \w+ in each\. \w+ gives (\d+) \w+ away, buys (\d+) more .* (\d+) friends",
        lambda a, b, c, d, e: (a * b - c + d) // e,
    ),
)


def words(text: str) -> int:
    """Stand in for a tokenizer, with about as many tokens as the real one."""
    return len(re.findall(r"\d|[^\s\d]+", text))


def check_work(item: Problem) -> None:
    """Follow the worked answer: every operand is known, every equation holds, every number asked about is used."""
    asked = {int(number) for number in re.findall(r"\d+", item.question)}
    known = asked | ({2} if "half" in item.question.lower() else set())
    used: set[int] = set()
    equations = EQUATION.findall(item.worked_answer)
    assert 1 <= len(equations) <= 4
    result = Fraction(-1)
    for left_text, operator, right_text, stated in equations:
        left, right = Fraction(left_text), Fraction(right_text)
        assert {int(left), int(right)} <= known, item
        used |= {int(left), int(right)}
        result = {"+": left + right, "-": left - right, "*": left * right, "/": left / right}[operator]
        assert result == Fraction(stated) and result >= 0, item
        known.add(int(result))
    assert result == item.answer
    assert asked <= used, item
    assert item.worked_answer.endswith(f" #### {item.answer}")


@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_worked_answers_hold(seed: int) -> None:
    for split in ("train", "held-out"):
        for item in problems(seed, 20, split=split):
            check_work(item)
            assert score_problem(item, item.worked_answer)
            assert not score_problem(item, item.worked_answer + "0")
            assert "{" not in item.question and item.question.endswith("?")


def test_answers_agree_with_solvers_that_read_only_the_question() -> None:
    solved = {pattern: 0 for pattern, _ in WORDINGS}
    for item in problems(7, 6_000):
        for pattern, solver in WORDINGS:
            if match := re.search(pattern, item.question):
                groups = [int(group) if group.isdigit() else group for group in match.groups()]
                assert solver(*groups) == item.answer, item
                solved[pattern] += 1
    assert min(solved.values()) >= 5, solved


def test_all_families_and_one_to_four_steps_occur() -> None:
    drawn = list(problems(11, 2_000))
    assert {item.family for item in drawn} == {family.name for family in FAMILIES}
    assert {len(EQUATION.findall(item.worked_answer)) for item in drawn} == {1, 2, 3, 4}
    assert len({item.question for item in drawn}) == len(drawn)


@given(seed=seeds)
@settings(max_examples=20, deadline=None)
def test_same_seed_same_tasks_and_a_part_is_a_prefix(seed: int) -> None:
    whole = list(problems(seed, 12))
    assert list(problems(seed, 5)) == whole[:5]
    assert list(problems(seed + 1, 12)) != whole
    recalled = list(recalls(seed, 2, 200, count_tokens=words))
    assert list(recalls(seed, 1, 200, count_tokens=words)) == recalled[:1]


def test_held_out_problems_never_occur_in_training() -> None:
    trained = list(problems("train", 30_000, split="train"))
    held_out = list(problems(EVALUATION_SEED, 1_000))
    assert {(item.family, item.numbers) for item in trained}.isdisjoint(
        (item.family, item.numbers) for item in held_out
    )
    assert {item.question for item in trained}.isdisjoint(item.question for item in held_out)
    assert {problem_split(item.family, item.numbers) for item in held_out} == {"held-out"}
    assert {problem_split(item.family, item.numbers) for item in trained} == {"train"}


@given(seed=seeds, tokens=st.integers(min_value=60, max_value=900))
@settings(max_examples=25, deadline=None)
def test_recalls_state_their_facts(seed: int, tokens: int) -> None:
    for split in ("train", "held-out"):
        for item in recalls(seed, 2, tokens, count_tokens=words, split=split):
            check_recall(item)
            assert all(fact_split(key, code) == split for key, code in item.facts.items())
            assert tokens - 4 <= words(item.prompt) + 4 <= tokens + 40


def check_recall(item: Recall) -> None:
    """Read the facts from the prompt's text again: each key once, and the one asked for among them."""
    notes, question = item.prompt.rsplit("\n", 1)
    read = [(a or c, b or d) for a, b, c, d in FACT.findall(notes)]
    assert read == list(item.facts.items())
    assert question == f"What is the code of the {item.key}?"
    assert item.answer == item.facts[item.key]
    assert score_recall(item, recall_reply(item.key, item.answer))
    assert not score_recall(item, recall_reply(item.key, str(int(item.answer) + 1)))


def test_the_recorded_evaluation_is_of_these_problems_and_this_model() -> None:
    """A changed word or weight makes training/demo/evaluation.json untrue: evaluate again, then change the digest."""
    questions = "\n".join(item.question for item in problems(EVALUATION_SEED, EVALUATION_PROBLEMS))
    digest = hashlib.sha256(questions.encode()).hexdigest()
    assert digest == "0686158555c18acbcc35869cb6f6346453b365c24045317cf70fd2ef606ef657"
    recorded = json.loads((ROOT / "training" / "demo" / "evaluation.json").read_text())
    weights = (MODEL_DIRECTORY / "model.safetensors").read_bytes()
    assert recorded["model_sha256"] == hashlib.sha256(weights).hexdigest()
    assert recorded["problems"]["seed"] == EVALUATION_SEED


def test_the_held_out_problems_are_kept_as_data() -> None:
    """The harness's demo tasks read the file; the generator draws the same problems."""
    file = ROOT / "benchmarks" / "demo_evaluation" / "tasks" / "held_out_problems.jsonl"
    drawn = problems(EVALUATION_SEED, EVALUATION_PROBLEMS)
    assert [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] == [
        {"question": one.question, "worked_answer": one.worked_answer, "answer": one.answer} for one in drawn
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("12 + 7 = 19. #### 19", 19),
        ("#### 1 then #### 20 \n", 20),
        ("####-4", -4),
        ("12 + 7 = 19.", None),
        ("#### 19 apples", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: int | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "code"), [("The code of the red fox is 4821.", "4821"), ("4821", "4821"), ("no code", None)]
)
def test_extract_code(text: str, code: str | None) -> None:
    assert extract_code(text) == code


def test_the_shipped_model_has_the_wanted_size() -> None:
    config = json.loads((MODEL_DIRECTORY / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["head_dim"] == 64
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["max_position_embeddings"] >= 4096
    assert (MODEL_DIRECTORY / "model.safetensors").stat().st_size <= 12 * 2**20
    tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|begin|>") == config["bos_token_id"]
    assert tokenizer.token_to_id("<|end|>") == config["eos_token_id"]


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_tokenizer_gives_any_text_back(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_the_trainer_encodes_as_the_tokenizer_does() -> None:
    tokenizer = Tokenizer.from_file(str(MODEL_DIRECTORY / "tokenizer.json"))
    writer = load_trainer_text().ChatWriter(tokenizer)
    drawn = [text for item in problems(5, 200) for text in (item.question, item.worked_answer)]
    drawn += [item.prompt for item in recalls(5, 2, 800, count_tokens=words)]
    assert [writer.encode(text) for text in drawn] == [tokenizer.encode(text).ids for text in drawn]


def load_trainer_text() -> ModuleType:
    """Load the trainer's module from its file; its scripts are no package."""
    spec = importlib.util.spec_from_file_location("demo_training_text", ROOT / "training" / "demo" / "text.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
