"""Counts and latencies of requests, recorded as their tokens arrive."""

from __future__ import annotations

from typing import get_args

from phonograph.core.request import FinishReason
from phonograph.engine.metrics.histogram import FEW, MILLISECONDS, SECONDS, TOKENS, Histogram
from phonograph.engine.process.calls import Prompt, Sample


class RequestLog:
    """Counts since the start. A request is one sample of a prompt. All but the first two are of completed requests.

    For a request that generates nothing, the time of its result stands for those of the first and the last token.

    first_token: seconds from the opening of the prompt to the first token of the answer
    inter_token: seconds from token to token, by the clock of the engine
    whole:       seconds from the opening of the prompt to the end of the answer
    queue:       seconds from the opening of the prompt to the admission to a step
    prefill:     seconds from the admission to the first token
    decode:      seconds from the first token to the last one
    inference:   seconds from the admission to the last token
    per_token:   seconds of `decode` for each token after the first
    num_ended:   by finish reason; "abort" includes every request that did not complete
    prompt_lens: tokens of prompts
    computed_lens: tokens of prompts without cached ones
    output_lens: tokens of outputs
    max_tokens:  requested limits of outputs
    preemptions: numbers of preemptions
    samples:     samples of each prompt
    longest:     tokens of the longest output of each prompt
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.first_token = Histogram(SECONDS)
        self.inter_token = Histogram(MILLISECONDS)
        self.whole = Histogram(SECONDS)
        self.queue = Histogram(SECONDS)
        self.prefill = Histogram(SECONDS)
        self.decode = Histogram(SECONDS)
        self.inference = Histogram(SECONDS)
        self.per_token = Histogram(MILLISECONDS)
        self.num_ended: dict[FinishReason, int] = dict.fromkeys(get_args(FinishReason), 0)
        self.prompt_lens = Histogram(TOKENS)
        self.computed_lens = Histogram(TOKENS)
        self.output_lens = Histogram(TOKENS)
        self.max_tokens = Histogram(TOKENS)
        self.preemptions = Histogram(FEW)
        self.samples = Histogram(FEW)
        self.longest = Histogram(TOKENS)

    def begun(self, prompt: Prompt) -> None:
        """Record a prompt whose first token has come."""
        self.num_prompt_tokens += len(prompt.token_ids)
        self.num_cached_tokens += prompt.num_cached_tokens

    def grown(self, prompt: Prompt, sample: Sample, num_new: int, *, made: float, seen: float) -> None:
        """Record new tokens of a sample, which has them already, and its end if it ended.

        The engine had them at the time `made`, and their text was assembled at `seen`.
        """
        if num_new:
            self.num_output_tokens += num_new
            if sample.last_token is None:
                sample.first_token = made
                self.first_token.observe(seen - prompt.opened)
                sample.first_token = made
            else:
                self.inter_token.observe((made - sample.last_token) / num_new, num_new)
            sample.last_token = made
        if sample.finish_reason is not None:
            self.num_ended[sample.finish_reason] += 1
            self.whole.observe(seen - prompt.opened)
            self._ended(prompt, sample, made)

    def _ended(self, prompt: Prompt, sample: Sample, made: float) -> None:
        admitted, first, last = sample.admitted, sample.first_token, sample.last_token
        if prompt.pooled is not None:
            first = last = made
        if admitted is not None and first is not None and last is not None:
            self.queue.observe(admitted - prompt.opened)
            self.prefill.observe(first - admitted)
            self.decode.observe(last - first)
            self.inference.observe(last - admitted)
            if len(sample.token_ids) > 1:
                self.per_token.observe((last - first) / (len(sample.token_ids) - 1))
        self.prompt_lens.observe(len(prompt.token_ids))
        self.computed_lens.observe(len(prompt.token_ids) - prompt.num_cached_tokens)
        self.output_lens.observe(len(sample.token_ids))
        self.preemptions.observe(sample.num_preemptions)
        if prompt.max_tokens is not None:
            self.max_tokens.observe(prompt.max_tokens)
        if all(one.finish_reason is not None for one in prompt.samples):
            self.samples.observe(len(prompt.samples))
            self.longest.observe(max(len(one.token_ids) for one in prompt.samples))
