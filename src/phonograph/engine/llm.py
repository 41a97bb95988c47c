"""The offline API: `LLM(...).generate` and `.chat`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phonograph.config import EngineConfig
from phonograph.engine.build import BuildProgress, Engine
from phonograph.engine.grammars.compiler import GrammarCompiler
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.plan import EnginePlan
from phonograph.engine.session import Prompt, Session
from phonograph.engine.start import start_engine, verify_engine
from phonograph.engine.tokenizer import ChatMessage, Tokenizer, load_tokenizer
from phonograph.errors import ConfigError, RequestError
from phonograph.graphs.verify import VerifyReport
from phonograph.sampling_params import SamplingParams

VERIFY_REPLAYS = 200
Asked = TypeVar("Asked")


class LLM:
    """A model, loaded and captured, that answers prompts.

    `LLM(model="demo", max_num_seqs=8)` takes every setting of EngineConfig as a keyword; `LLM(config=...)` takes one
    that is made already. The engine is ready when the constructor returns. With `serves=False` it is for `verify`
    alone, which also allows settings whose graphs can be captured but not yet served (num_speculative_tokens).

    Raises:
        PhonographError: the configuration, the model or the machine does not allow it; the message says what would.
    """

    def __init__(
        self,
        *,
        config: EngineConfig | None = None,
        progress: BuildProgress | None = None,
        serves: bool = True,
        **settings: Any,
    ) -> None:
        if config is not None and settings:
            raise ConfigError(next(iter(settings)), next(iter(settings.values())), "give settings or config, not both")
        self.config = config or EngineConfig(**settings)
        drafts = self.config.num_speculative_tokens
        if drafts and serves:
            problem = "speculation can be explained and its graphs verified, not run yet; 0 works"
            raise ConfigError("num_speculative_tokens", drafts, problem)
        start = time.perf_counter()
        self._engine: Engine = start_engine(self.config, progress)
        tokenizer = load_tokenizer(self.config)
        model = self._engine.plan.model.with_tokenizer_end(None if tokenizer is None else tokenizer.eos_token_id)
        grammars = GrammarCompiler(lambda: tokenizer, model)
        self._session = Session(self._engine.core, model, tokenizer, self.config.seed, grammars)
        self.start_seconds = time.perf_counter() - start

    @property
    def plan(self) -> EnginePlan:
        """What was decided at the start, with the reasons."""
        return self._engine.plan

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def session(self) -> Session:
        """The requests in flight; for callers that drive the steps themselves."""
        return self._session

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._session.tokenizer

    @property
    def step_counts(self) -> Counter[str]:
        """Steps so far, by the kind of decision that ran them ("full decode", "full mixed", "eager", ...)."""
        return self._engine.core.runner.counts

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continues prompts, given as text or as token ids; results in their order.

        Args:
            params: one for all, or one a prompt.
            progress: show a bar on stderr.
            priorities: one a prompt, smaller first, with scheduling_policy "priority".

        Raises:
            RequestError: the only prompt cannot be served. Of several, one that cannot be served has its `error` set in
                its output, and the others are answered. With any other error none of them is left in the engine.
        """
        single = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        many = cast("list[Prompt]", [prompts] if single else list(prompts))
        return self._answer(many, lambda prompt: prompt, params, priorities, progress)

    def chat(
        self,
        messages: Sequence[ChatMessage] | Sequence[Sequence[ChatMessage]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answers conversations (lists of {"role", "content"}), one or several, through the model's chat template.

        Raises:
            RequestError: as `generate`; a conversation that the template refuses is one that cannot be served.
        """
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = cast("list[Sequence[ChatMessage]]", [messages] if single else list(messages))
        return self._answer(conversations, self.encode_chat, params, None, progress)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continues one prompt and yields its growing output after each step that added to it.

        Leaving the loop early ends the request.
        """
        output = self._session.add(prompt, params or SamplingParams())
        try:
            # Others may step the session between two of these, so what changed is not what its step says.
            seen = 0
            while True:
                if output.error is not None:
                    raise output.error
                ended, tokens = output.finished, sum(len(one.token_ids) for one in output.outputs)
                if ended or tokens > seen:
                    seen = tokens
                    yield output
                if ended:
                    return
                if not output.finished:
                    self._session.step()
        finally:
            self._session.abort(output)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, up to where the answer begins."""
        if self.tokenizer is None:
            raise RequestError("messages", "...", "chat needs a tokenizer")
        return self.tokenizer.encode_chat(messages)

    def verify(
        self,
        *,
        num_replays: int = VERIFY_REPLAYS,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport:
        """Compares replays of every captured graph on random batches with eager runs. No request may be in flight.

        Raises:
            RequestError: requests are in flight.
            ConfigError: the mode has no graphs.
        """
        if self._session.has_unfinished:
            raise RequestError("verify", "now", "overwrites the KV cache; let the requests in flight end first")
        return verify_engine(self._engine, num_replays=num_replays, seed=seed, progress=progress)

    def _answer(
        self,
        many: list[Asked],
        encode: Callable[[Asked], Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priorities: Sequence[int] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        """Queues what is asked, each made a prompt by `encode`, and steps until all is answered."""
        each = _one_per_prompt("params", params if params is not None else SamplingParams(), len(many))
        ranks = _one_per_prompt("priorities", priorities if priorities is not None else 0, len(many))
        outputs: list[RequestOutput] = []
        try:
            self._run(self._queue(many, encode, each, ranks), outputs, len(many), progress)
        except BaseException:
            # Nobody will see what the others become.
            for output in outputs:
                self._session.abort(output)
            raise
        if len(outputs) == 1 and outputs[0].error is not None:
            raise outputs[0].error
        return outputs

    def _queue(
        self, many: Sequence[Asked], encode: Callable[[Asked], Prompt], each: list[SamplingParams], ranks: list[int]
    ) -> Iterator[RequestOutput]:
        """Queues one with each output that is taken from it; those refused come with their error."""
        for index, (asked, one, rank) in enumerate(zip(many, each, ranks, strict=True)):
            prompt: Prompt = []
            try:
                prompt = encode(asked)
                yield self._session.add(prompt, one, priority=rank)
            except RequestError as error:
                if len(many) == 1:
                    raise
                text = prompt if isinstance(prompt, str) else None
                ids: list[int] = [] if isinstance(prompt, str) else list(prompt)
                yield RequestOutput(request_id=f"refused-{index}", prompt=text, prompt_token_ids=ids, error=error)

    def _run(self, queue: Iterator[RequestOutput], outputs: list[RequestOutput], count: int, progress: bool) -> None:
        """Steps while it takes outputs from the queue, so far ahead that each step is what it would be with all of them
        there: the device need not wait until thousands of prompts have been encoded."""
        done = tokens = 0
        scheduler = self._engine.core.scheduler
        # No step admits more than there are slots. By priority the last may be the first.
        ahead = scheduler.limits.max_num_seqs if scheduler.limits.policy == "fcfs" else count
        start = time.perf_counter()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) if progress else nullcontext() as bar:
            task = None if bar is None else bar.add_task("requests", total=count)
            while True:
                while scheduler.num_waiting < ahead and (output := next(queue, None)) is not None:
                    outputs.append(output)
                    done += output.finished
                unfinished = self._session.has_unfinished
                changed = self._session.step() if unfinished else []
                if bar is not None and task is not None:
                    tokens += len(changed)
                    done += sum(output.finished for output in changed)
                    speed = tokens / (time.perf_counter() - start)
                    bar.update(task, completed=done, description=f"requests, {speed:.0f} tok/s")
                if not unfinished:
                    return


def _one_per_prompt(name: str, given: Any, count: int) -> list[Any]:
    if not isinstance(given, Sequence):
        return [given] * count
    if len(given) != count:
        raise RequestError(name, f"{len(given)} of them", f"must be one for all prompts, or one for each of {count}")
    return list(given)
