"""Streamed answers that Ctrl-C ends between two steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.offline.interrupts import deferred_interrupts

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.outputs import RequestOutput


def stream_answer(
    llm: LLM, prompt: str | list[int], params: SamplingParams, show: Callable[[str], None]
) -> tuple[RequestOutput | None, bool]:
    """Run one prompt with one sample and pass each new piece of text to `show`.

    Ctrl-C ends the answer after the running step. A second Ctrl-C before that interrupts as usual.

    Returns:
        The output (None if interrupted before the first token), and True if it was interrupted.

    Raises:
        RequestError: the prompt cannot be served.
    """
    shown = 0
    output = None
    with deferred_interrupts() as interrupted, closing(llm.stream(prompt, params)) as outputs:  # pyright: ignore[reportArgumentType]
        for output in outputs:
            text = output.outputs[0].text
            if len(text) > shown:
                show(text[shown:])
                shown = len(text)
            if interrupted():
                break
        return output, interrupted()


def print_piece(text: str) -> None:
    """Print a piece of streamed text."""
    print(text, end="", flush=True)
