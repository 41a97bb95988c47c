"""A streamed answer, which Ctrl-C ends between two steps."""

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
    """Runs one prompt of one sample and calls `show` with each new piece of text.

    Ctrl-C ends the answer after the step that is running; a second one before that interrupts as usual.

    Returns:
        the output (None if it was interrupted before the first token), and whether it was interrupted.

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
    """A piece of streamed text."""
    print(text, end="", flush=True)
