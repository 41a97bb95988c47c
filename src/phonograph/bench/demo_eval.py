"""Evaluation of the demo model: held-out word problems and recalls from long contexts, answered greedily.

All requests of a task are in the engine at once, so that the batches are those of serving: prefills beside decodes, and
sequences that come and go. Greedy answers do not depend on that; a comparison of two runs shows it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from phonograph.bench.run_requests import Answer, run_requests
from phonograph.core.sampling_params import SamplingParams
from phonograph.demo import tasks
from phonograph.engine.llm import LLM
from phonograph.errors import UNSET, ConfigError

MAX_QUESTIONS = 100_000
"""Questions of one task at most; all are encoded before the first is answered."""
_SENTENCE = 64
"""Tokens by which the last sentence may exceed the budget of a recall."""

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
    expected: str
    is_right: Callable[[str], bool]


def evaluate_demo(
    llm: LLM,
    *,
    num_problems: int = tasks.EVALUATION_PROBLEMS,
    num_recalls: int = tasks.EVALUATION_RECALLS,
    recall_tokens: int = tasks.EVALUATION_CONTEXT,
    seed: int = tasks.EVALUATION_SEED,
    progress: EvaluationProgress | None = None,
) -> list[TaskResult]:
    """Run both tasks, or the one whose number of questions is not 0.

    Args:
        llm: engine with the demo model, or another model with a chat template.
        num_problems: word problems to ask.
        num_recalls: recalls to ask.
        recall_tokens: least tokens of a recall's chat.
        seed: seed of the held-out problems and recalls; the same seed gives the same questions.
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
        _Question(prompt=one.question, expected=str(one.answer), is_right=partial(tasks.score_problem, one))
        for one in tasks.problems(seed, num_problems)
    ]
    drawn = tasks.recalls(seed, num_recalls, recall_tokens, count_tokens=lambda text: len(tokenizer.encode(text)))
    recalls = [
        _Question(prompt=one.prompt, expected=one.answer, is_right=partial(tasks.score_recall, one)) for one in drawn
    ]
    return [
        _evaluate(llm, task, questions, max_tokens, progress)
        for task, questions, max_tokens in (
            ("problems", problems, tasks.PROBLEM_TOKENS),
            ("recalls", recalls, tasks.RECALL_TOKENS),
        )
        if questions
    ]


def _evaluate(
    llm: LLM, task: str, questions: list[_Question], max_tokens: int, progress: EvaluationProgress | None
) -> TaskResult:
    prompts = [llm.encode_chat([{"role": "user", "content": question.prompt}]) for question in questions]
    items: dict[int, Item] = {}
    correct = 0

    def finished(index: int, answer: Answer) -> None:
        nonlocal correct
        question, completion = questions[index], answer.completion
        items[index] = Item(
            task=task,
            index=index,
            correct=question.is_right(completion.text),
            expected=question.expected,
            text=completion.text,
            num_prompt_tokens=len(answer.output.prompt_token_ids),
            token_ids=completion.token_ids,
        )
        correct += items[index].correct
        if progress is not None:
            progress(task, len(items), len(questions), correct)

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    run = run_requests(llm, prompts, [params] * len(prompts), finished)
    ordered = [items[index] for index in range(len(questions))]
    return TaskResult(task=task, items=ordered, seconds=run.seconds, steps=run.steps)
