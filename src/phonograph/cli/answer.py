"""Streamed answers that Ctrl-C ends between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.offline.interrupts import deferred_interrupts

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.outputs import RequestOutput


@dataclass(slots=True, kw_only=True)
class StreamedAnswer:
    """Answer of one prompt with one sample.

    Attributes:
        output: the output; None if interrupted before the first token.
        interrupted: True if Ctrl-C ended it.
        ttft: seconds to the first tokens.
        num_first: number of the tokens that came first, at one time.
        seconds: seconds to the last token.
    """

    output: RequestOutput | None = None
    interrupted: bool = False
    ttft: float = 0.0
    num_first: int = 1
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second after the first ones; None if there are no others."""
        later = 0 if self.output is None else len(self.output.outputs[0].token_ids) - self.num_first
        return later / (self.seconds - self.ttft) if later > 0 and self.seconds > self.ttft else None


def stream_answer(
    llm: LLM, prompt: str | list[int], params: SamplingParams, show: Callable[[str], None]
) -> StreamedAnswer:
    """Run one prompt with one sample and pass each new piece of text to `show`.

    Ctrl-C ends the answer after the running step. A second Ctrl-C before that interrupts as usual.

    Raises:
        RequestError: the prompt cannot be served.
    """
    shown = 0
    answer = StreamedAnswer()
    began = time.perf_counter()
    with deferred_interrupts() as interrupted, closing(llm.stream(prompt, params)) as outputs:  # pyright: ignore[reportArgumentType]
        for output in outputs:
            answer.seconds = time.perf_counter() - began
            if answer.output is None:
                answer.output, answer.ttft = output, answer.seconds
                answer.num_first = len(output.outputs[0].token_ids)
            text = output.outputs[0].text
            if len(text) > shown:
                show(text[shown:])
                shown = len(text)
            if interrupted():
                break
        answer.interrupted = interrupted()
        return answer


def print_piece(text: str) -> None:
    """Print a piece of streamed text."""
    print(text, end="", flush=True)


def show_nothing(_: str) -> None:
    """Show no piece, for answers that are printed as a whole."""
