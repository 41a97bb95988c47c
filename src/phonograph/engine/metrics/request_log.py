"""Counts and latencies of requests, recorded as their tokens arrive."""

from __future__ import annotations

from phonograph.core.request import FinishReason
from phonograph.engine.metrics.histogram import MILLISECONDS, SECONDS, TOKENS, Histogram
from phonograph.engine.process.calls import Prompt, Sample


class RequestLog:
    """Counts since the start. A request is one sample of a prompt.

    first_token: seconds from the opening of the prompt to the first token of the answer
    inter_token: seconds from token to token, by the clock of the engine
    whole:       seconds from the opening of the prompt to the end of the answer
    num_ended:   by finish reason; "abort" includes every request that did not complete
    prompt_lens: tokens of the prompts of completed requests
    output_lens: tokens of their outputs
    """

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        self.first_token = Histogram(SECONDS)
        self.inter_token = Histogram(MILLISECONDS)
        self.whole = Histogram(SECONDS)
        self.num_ended: dict[FinishReason, int] = {"stop": 0, "length": 0, "abort": 0}
        self.prompt_lens = Histogram(TOKENS)
        self.output_lens = Histogram(TOKENS)

    def grown(self, prompt: Prompt, sample: Sample, num_new: int, *, made: float, seen: float) -> None:
        """Record new tokens of a sample, which has them already, and its end if it ended.

        The engine had them at the time `made`, and their text was assembled at `seen`.
        """
        if num_new:
            self.num_output_tokens += num_new
            if sample.last_token is None:
                self.first_token.observe(seen - prompt.opened)
                sample.first_token = made
            else:
                self.inter_token.observe((made - sample.last_token) / num_new, num_new)
            sample.last_token = made
        if sample.finish_reason is not None:
            self.num_ended[sample.finish_reason] += 1
            self.whole.observe(seen - prompt.opened)
            self.prompt_lens.observe(len(prompt.token_ids))
            self.output_lens.observe(len(sample.token_ids))
