"""Runs one call of the offline API: queues its prompts and steps until all are answered."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from phonograph.core.pooling_params import PoolingParams
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import Prompt, tokenized_ahead
from phonograph.engine.offline.interrupts import deferred_interrupts
from phonograph.engine.offline.prompts import salt_of
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.session import Session
from phonograph.errors import RequestError, shortened

Input = TypeVar("Input")
Params = SamplingParams | PoolingParams
_MANY = 64
"""Inputs of a call that takes longer than to set the garbage collector aside."""


def answer_inputs(
    session: Session,
    inputs: Sequence[Input],
    encode: Callable[[Input], Prompt],
    *,
    sampling_params: Params | Sequence[Params],
    priority: Sequence[int] | int | None,
    use_tqdm: bool,
) -> list[RequestOutput]:
    """Answer inputs and return one output for each, in their order.

    However the call ends, none of its requests is left in the session. Inputs are prompts or conversations, which
    `encode` turns into prompts. There is one `sampling_params` for all of them, or one for each.

    Raises:
        RequestError: the only input cannot be served, or a parameter is wrong for all. Of several inputs, one that
            cannot be served has its `error` set in its output.
        KeyboardInterrupt: Ctrl-C was pressed; raised between two steps, so that the session can serve the next call.
    """
    _check_progress(use_tqdm)
    outputs: list[RequestOutput] = []
    queue = _queue(session, inputs, encode, sampling_params, priority)
    scheduler = session.core.scheduler
    # A step admits at most as many requests as there are slots. By priority, the last may run first.
    ahead = scheduler.limits.max_num_seqs if scheduler.policy == "fcfs" else len(inputs)
    with (
        deferred_interrupts() as interrupted,
        _aborts(session, outputs),
        _old_objects_frozen(len(inputs)),
        _progress_bar(len(inputs), use_tqdm) as report,
    ):
        while True:
            # Prompts are encoded between steps, so that the first step does not wait for the last prompt.
            while scheduler.num_waiting < ahead and not interrupted() and (output := next(queue, None)) is not None:
                outputs.append(output)
                report([output], 0)
            if interrupted():
                raise KeyboardInterrupt
            if not session.has_unfinished:
                break
            changed = session.step()
            report(changed, len(changed))
    if interrupted():
        raise KeyboardInterrupt
    if len(outputs) == 1 and outputs[0].error is not None:
        raise outputs[0].error
    return outputs


def enqueue_inputs(
    session: Session,
    inputs: Sequence[Input],
    encode: Callable[[Input], Prompt],
    *,
    sampling_params: Params | Sequence[Params],
    priority: Sequence[int] | int | None,
) -> list[RequestOutput]:
    """Queue inputs as `answer_inputs` does, and return their outputs, which later steps fill.

    Raises:
        RequestError: as `answer_inputs`; nothing has been queued.
    """
    outputs: list[RequestOutput] = []
    try:
        for output in _queue(session, inputs, encode, sampling_params, priority):
            outputs.append(output)
    except BaseException:
        for output in outputs:
            session.abort(output)
        raise
    return outputs


def complete_outputs(session: Session, outputs: Sequence[RequestOutput], *, use_tqdm: bool) -> None:
    """Step until queued outputs are complete. However the call ends, none of their requests is left in the session.

    Raises:
        KeyboardInterrupt: as `answer_inputs`.
    """
    _check_progress(use_tqdm)
    with (
        deferred_interrupts() as interrupted,
        _aborts(session, outputs),
        _progress_bar(len(outputs), use_tqdm) as report,
    ):
        report(outputs, 0)
        waiting = {id(output) for output in outputs}
        while not interrupted() and not all(output.finished for output in outputs):
            changed = session.step()
            report([output for output in changed if id(output) in waiting], len(changed))
    if interrupted():
        raise KeyboardInterrupt


def _check_progress(use_tqdm: object) -> None:
    if not isinstance(use_tqdm, bool):
        raise RequestError("use_tqdm", shortened(repr(use_tqdm)), "must be True or False")


def _queue(
    session: Session,
    inputs: Sequence[Input],
    encode: Callable[[Input], Prompt],
    sampling_params: Params | Sequence[Params],
    priority: Sequence[int] | int | None,
) -> Iterator[RequestOutput]:
    """Queue one request for each output that is taken. The output of a refused request has its error."""
    params = _per_input("sampling_params", sampling_params, inputs)
    for value in params:
        if not isinstance(value, Params):
            raise RequestError("sampling_params", shortened(repr(value)), "must be SamplingParams, or a list of them")
    priorities = _per_input("priority", 0 if priority is None else priority, inputs)
    prompts = _prompts(session, inputs, encode)
    for index, (item, made, one, rank) in enumerate(zip(inputs, prompts, params, priorities, strict=True)):
        prompt: Prompt = []
        try:
            if isinstance(made, RequestError):
                raise made
            prompt = made
            yield session.add(prompt, one, priority=rank, cache_salt=salt_of(item))
        except RequestError as error:
            if len(inputs) == 1:
                raise
            text = prompt if isinstance(prompt, str) else None
            ids: list[int] = [] if isinstance(prompt, str) else list(prompt)
            yield RequestOutput(request_id=f"refused-{index}", prompt=text, prompt_token_ids=ids, error=error)


def _prompts(
    session: Session, inputs: Sequence[Input], encode: Callable[[Input], Prompt]
) -> Iterator[Prompt | RequestError]:
    """Return what `encode` returns or raises for each input. Texts are tokenized ahead, in several threads."""

    def prompts() -> Iterator[Prompt | RequestError]:
        for item in inputs:
            try:
                yield encode(item)
            except RequestError as error:
                yield error

    return tokenized_ahead(session.tokenizer, prompts())


@contextmanager
def _aborts(session: Session, outputs: Sequence[RequestOutput]) -> Generator[None]:
    """End the unfinished requests when the context ends. Each abort runs, even after one that raises."""
    with ExitStack() as aborts:
        try:
            yield
        finally:
            aborts.callback(session.core.settle)
            for output in outputs:
                if not output.finished:
                    aborts.callback(session.abort, output)


@contextmanager
def _old_objects_frozen(num_inputs: int) -> Generator[None]:
    """Leave objects from before a call of many inputs out of the garbage collections of the call."""
    freezes = num_inputs >= _MANY and gc.isenabled() and not gc.get_freeze_count()
    if freezes:
        gc.collect(1)
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


@contextmanager
def _progress_bar(total: int, use_tqdm: bool) -> Generator[Callable[[Sequence[RequestOutput], int], None]]:
    """Show the number of answered requests and tokens per second on stderr, if that is a terminal.

    Yields:
        A function that takes the changed outputs and the number of their new tokens.
    """
    console = Console(stderr=True) if use_tqdm else None
    if console is None or not console.is_terminal:
        yield lambda changed, new_tokens: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    start = time.perf_counter()
    done = tokens = 0
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("requests", total=total)

        def report(changed: Sequence[RequestOutput], new_tokens: int) -> None:
            nonlocal done, tokens
            done += sum(output.finished for output in changed)
            tokens += new_tokens
            speed = tokens / (time.perf_counter() - start)
            bar.update(task, completed=done, description=f"requests, {speed:.0f} tok/s")

        yield report


def _per_input(name: str, value: Any, inputs: Sequence[object]) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return [value] * len(inputs)
    if len(value) != len(inputs):
        problem = f"must be one for all prompts, or one for each of {len(inputs)}"
        raise RequestError(name, f"{len(value)} of them", problem)
    return list(value)
