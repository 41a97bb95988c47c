"""Results of a step, as requests take them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import compress

from phonograph.core.batch import ScheduledBatch, StepOutput
from phonograph.core.request import FinishReason, Request, RequestState


def correct_bounds(batch: ScheduledBatch, requests: list[Request], output: StepOutput) -> list[Request]:
    """Correct the bounds of decodes whose step with drafts is known.

    Args:
        batch: the step.
        requests: its requests, in batch order.
        output: its result.

    Returns:
        The requests that end with the steps in flight, whatever these accept.
    """
    ending: list[Request] = []
    decodes = zip(requests[: batch.num_decodes], batch.query_lens, output.token_ids, strict=False)
    for request, query_len, run in decodes:
        if request.state is not RequestState.RUNNING:
            continue
        assert 1 <= len(run) <= query_len, "a step accepted more tokens than it had"
        # The last token is never computed, even if steps in flight come after it.
        request.min_computed = min(request.min_computed + len(run) - 1, request.max_len - 1)
        request.max_computed -= query_len - len(run)
        if request.min_computed + 1 == request.max_len:
            ending.append(request)
    return ending


def take_logprobs(batch: ScheduledBatch, requests: list[Request], output: StepOutput) -> list[Request]:
    """Append the log-probabilities of a step's tokens to their requests, also of those after the end of a request.

    Args:
        batch: the step.
        requests: its requests, in batch order.
        output: its result.

    Returns:
        The requests that got any. Those that had ended get none.
    """
    scored: list[Request] = []
    for slot, request in zip(batch.slots, requests, strict=True):
        if slot in output.logprobs and not request.finished:
            request.logprobs += output.logprobs[slot]
            scored.append(request)
    return scored


def take_prompts(batch: ScheduledBatch, requests: list[Request], output: StepOutput) -> list[Request]:
    """Append the log-probabilities of prompt tokens to their requests, and give others the rows of their prompts.

    Args:
        batch: the step.
        requests: its requests, in batch order.
        output: its result.

    Returns:
        The requests that generate nothing and have their rows now, but those that had ended.
    """
    pooled: list[Request] = []
    for slot, request in zip(batch.slots, requests, strict=True):
        # A request resumed after a preemption computes its prompt again; complete logprobs are kept.
        if slot in output.prompt_logprobs and len(request.prompt_logprobs) < request.prompt_len - 1:
            request.prompt_logprobs.extend(output.prompt_logprobs[slot])
        if slot in output.pooled and not request.finished:
            request.pooled = output.pooled[slot]
            pooled.append(request)
    return pooled


def take_failures(batch: ScheduledBatch, requests: list[Request], output: StepOutput) -> list[Request]:
    """Return the requests that failed in a step and have not ended, each with its failure."""
    failed: list[Request] = []
    for slot, request in zip(batch.slots, requests, strict=True):
        if slot in output.failures and not request.finished:
            request.failure = output.failures[slot]
            failed.append(request)
    return failed


def take_tokens(
    batch: ScheduledBatch,
    requests: list[Request],
    output: StepOutput,
    finish: Callable[[Request, FinishReason, int | str | None], None],
) -> list[Request]:
    """Append the tokens of a step to their requests, and end those that are complete.

    Tokens after the end of a request are dropped: those of a request that ended meanwhile, and the rest of a run after
    a token that ends it.

    Args:
        batch: the step.
        requests: its requests, in batch order.
        output: its result.
        finish: ends a request, with the reason and the stop token.

    Returns:
        The requests that got tokens.
    """
    finished = RequestState.FINISHED
    news: list[Request] = []
    for request, run in zip(compress(requests, batch.samples), output.token_ids, strict=True):
        if request.state is finished:
            continue
        news.append(request)
        tokens = request.output_token_ids
        for token_id in run:
            tokens.append(token_id)
            if token_id in request.end_token_ids and request.may_end:
                stop_reason = token_id if token_id in request.params.stop_token_ids else None
                finish(request, "stop", stop_reason)
                break
            if request.prompt_len + len(tokens) == request.max_len:
                finish(request, "length", None)
                break
            if request.repetition is not None and request.repetition.push(token_id) and request.may_end:
                finish(request, "repetition", "repetition_detected")
                break
    return news
