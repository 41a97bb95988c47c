"""Runs many requests through an engine at once and records when each token came, for evaluations and benchmarks."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.engine.outputs import CompletionOutput, RequestOutput


@dataclass(slots=True, kw_only=True)
class TimedAnswer:
    """One request with one sample.

    times: seconds from the start of the run to the end of each step that added tokens
    """

    output: RequestOutput
    times: list[float] = field(default_factory=list[float])

    @property
    def completion(self) -> CompletionOutput:
        return self.output.outputs[0]

    @property
    def ttft(self) -> float:
        """Seconds to the first token, time in the queue included."""
        return self.times[0]

    @property
    def itl(self) -> list[float]:
        """Seconds between neighbouring tokens."""
        return [late - early for early, late in itertools.pairwise(self.times)]


@dataclass(slots=True, kw_only=True)
class Run:
    """Answers in the order of the prompts, and the number of steps by kind of decision."""

    answers: list[TimedAnswer]
    seconds: float
    steps: Counter[str]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(answer.output.prompt_token_ids) for answer in self.answers)

    @property
    def output_tokens(self) -> int:
        return sum(len(answer.completion.token_ids) for answer in self.answers)


def run_requests(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    on_finish: Callable[[int, TimedAnswer], None] | None = None,
) -> Run:
    """Queue all prompts at once (n = 1 each) and step until all are answered.

    `on_finish` is called with the index of a prompt and its complete answer.

    Raises:
        RequestError: a prompt cannot be served; the queued ones have been aborted.
    """
    session = llm.session
    before = Counter(llm.step_counts)
    answers: list[TimedAnswer] = []
    start = time.perf_counter()
    try:
        for prompt, one in zip(prompts, params, strict=True):
            answers.append(TimedAnswer(output=session.add(list(prompt), one)))
        places = {answer.output.request_id: place for place, answer in enumerate(answers)}
        while session.has_unfinished:
            changed = session.step()
            now = time.perf_counter() - start
            for output in changed:
                place = places[output.request_id]
                answers[place].times.append(now)
                if output.finished and on_finish is not None:
                    on_finish(place, answers[place])
    except BaseException:
        for answer in answers:
            session.abort(answer.output)
        raise
    return Run(answers=answers, seconds=time.perf_counter() - start, steps=Counter(llm.step_counts) - before)
