"""Evaluation of the demo model: held-out word problems and recalls from long contexts, answered greedily.

All requests of a task are in the engine at once, so that the batches are those of serving: prefills beside decodes, and
sequences that come and go. Greedy answers do not depend on that; a comparison of two runs shows it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from demo_tasks import tasks
from phonograph.bench.run_requests import TimedAnswer, run_requests
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.errors import UNSET, ConfigError
from phonograph.text.tokenizer import Tokenizer

MAX_QUESTIONS = 100_000
"""Questions of one task at most; all are encoded before the first is answered."""
_SENTENCE = 64
"""Tokens by which the last sentence may exceed the budget of a recall."""
_PROBE_TOKENS, _PROBE_STEPS = 4096, 8
"""Tokens of prompts and steps of the measurement for an estimate."""

EvaluationProgress = Callable[[str, int, int, int], None]
"""Callback with the task, the number of its answers, of its questions, and of its correct answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One question and its answer, as in a result file; `expected` is the number or code that decides."""

    task: str
    index: int
    correct: bool
    expected: str
    text: str
    num_prompt_tokens: int
    token_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """Answers of a task, and the number of steps by kind of decision."""

    task: str
    items: list[Item]
    seconds: float
    steps: Counter[str]

    @property
    def num_correct(self) -> int:
        return sum(item.correct for item in self.items)

    @property
    def score(self) -> float:
        return self.num_correct / len(self.items)

    @property
    def standard_error(self) -> float:
        """Standard error of the score as a share of independent items."""
        return math.sqrt(self.score * (1 - self.score) / len(self.items))

    @property
    def prompt_tokens(self) -> int:
        return sum(item.num_prompt_tokens for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(len(item.token_ids) for item in self.items)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    prompt: str
    worked_answer: str
    expected: str
    is_right: Callable[[str], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Task:
    """Questions of one task, and their prompts as token ids."""

    name: str
    questions: list[_Question]
    prompts: list[list[int]]
    max_tokens: int


def evaluate_demo(
    llm: LLM,
    *,
    num_problems: int = tasks.EVALUATION_PROBLEMS,
    num_recalls: int = tasks.EVALUATION_RECALLS,
    recall_tokens: int = tasks.EVALUATION_CONTEXT,
    seed: int = tasks.EVALUATION_SEED,
    expect: Callable[[float], None] | None = None,
    progress: EvaluationProgress | None = None,
) -> list[TaskResult]:
    """Run both tasks, or the one whose number of questions is not 0.

    Args:
        llm: engine with the demo model, or another model with a chat template.
        num_problems: word problems to ask.
        num_recalls: recalls to ask.
        recall_tokens: least tokens of a recall's chat.
        seed: seed of the held-out problems and recalls; the same seed gives the same questions.
        expect: callback with the estimated seconds, which a short measurement before the first question gives.
        progress: callback after each answer.

    Raises:
        ConfigError: no question, more than MAX_QUESTIONS, or recalls that do not fit the context.
        RequestError: the model has no chat template.
    """
    for name, value in (("problems", num_problems), ("recalls", num_recalls)):
        if not 0 <= value <= MAX_QUESTIONS:
            raise ConfigError(name, value, f"must be a whole number >= 0 and <= {MAX_QUESTIONS}")
    if not num_problems + num_recalls:
        raise ConfigError("problems", num_problems, "with recalls=0 there is nothing to ask; give one of them")
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError("tokenizer", UNSET, "is required, since the evaluation asks in text; the model has none")
    longest = llm.plan.limits.max_model_len - tasks.RECALL_TOKENS - _SENTENCE
    if num_recalls and not _SENTENCE <= recall_tokens <= longest:
        problem = f"from {_SENTENCE} to {longest} leave room for the question and the answer (max_model_len)"
        raise ConfigError("recall_tokens", recall_tokens, problem)
    problems = [
        _Question(
            prompt=one.question,
            worked_answer=one.worked_answer,
            expected=str(one.answer),
            is_right=partial(tasks.score_problem, one),
        )
        for one in tasks.problems(seed, num_problems)
    ]
    drawn = tasks.recalls(seed, num_recalls, recall_tokens, count_tokens=lambda text: len(tokenizer.encode(text)))
    recalls = [
        _Question(
            prompt=one.prompt,
            worked_answer=tasks.recall_reply(one.key, one.answer),
            expected=one.answer,
            is_right=partial(tasks.score_recall, one),
        )
        for one in drawn
    ]
    every = [
        _Task(name=name, questions=questions, prompts=_encode(llm, questions), max_tokens=max_tokens)
        for name, questions, max_tokens in (
            ("problems", problems, tasks.PROBLEM_TOKENS),
            ("recalls", recalls, tasks.RECALL_TOKENS),
        )
        if questions
    ]
    if expect is not None:
        expect(sum(_expected_seconds(llm, tokenizer, task) for task in every))
    return [_evaluate(llm, task, progress) for task in every]


def _encode(llm: LLM, questions: Sequence[_Question]) -> list[list[int]]:
    return [llm.encode_chat([{"role": "user", "content": question.prompt}]) for question in questions]


def _expected_seconds(llm: LLM, tokenizer: Tokenizer, task: _Task) -> float:
    """Estimate the seconds of a task from a few prompts of its lengths and the answers of its training text.

    The prompts are the task's own in reverse, so that the prefix cache does not know the questions afterwards.
    """
    slots = min(llm.plan.limits.max_num_seqs, len(task.prompts))
    probe = [task.prompts[0][::-1]]
    for prompt in task.prompts[1:slots]:
        if sum(map(len, probe)) + len(prompt) > _PROBE_TOKENS:
            break
        probe.append(prompt[::-1])
    params = SamplingParams(temperature=0.0, max_tokens=_PROBE_STEPS, ignore_eos=True)
    run = run_requests(llm, probe, [params] * len(probe))
    prefill = max(answer.ttft for answer in run.answers)
    step = (run.seconds - prefill) / (_PROBE_STEPS - 1)
    answer_tokens = sum(len(tokenizer.encode(question.worked_answer)) for question in task.questions)
    prompt_tokens = sum(map(len, task.prompts))
    return prefill * prompt_tokens / run.prompt_tokens + step * max(answer_tokens / slots, _PROBE_STEPS)


def _evaluate(llm: LLM, task: _Task, progress: EvaluationProgress | None) -> TaskResult:
    questions = task.questions
    items: dict[int, Item] = {}
    correct = 0

    def finished(index: int, answer: TimedAnswer) -> None:
        nonlocal correct
        question, completion = questions[index], answer.completion
        items[index] = Item(
            task=task.name,
            index=index,
            correct=question.is_right(completion.text),
            expected=question.expected,
            text=completion.text,
            num_prompt_tokens=len(answer.output.prompt_token_ids),
            token_ids=completion.token_ids,
        )
        correct += items[index].correct
        if progress is not None:
            progress(task.name, len(items), len(questions), correct)

    params = SamplingParams(temperature=0.0, max_tokens=task.max_tokens)
    run = run_requests(llm, task.prompts, [params] * len(questions), finished)
    ordered = [items[index] for index in range(len(questions))]
    return TaskResult(task=task.name, items=ordered, seconds=run.seconds, steps=run.steps)
