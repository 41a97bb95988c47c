"""Fields of a chat that concern the model's reasoning: variables of the template, and tokens of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import quoted
from phonograph.server.http.api_errors import invalid
from phonograph.server.openai.protocol import ChatBody, TokenizeBody
from phonograph.text.formats.find_formats import Formats
from phonograph.text.formats.reasoning import Opening
from phonograph.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""Efforts that clients send. A template with a variable for the effort may know others."""
_EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""
_SHOWN = 50
"""Characters of a variable's name in a header."""
_MOST_NAMES = 8
"""Variables that a header names."""


def template_options(
    body: ChatBody | TokenizeBody, variables: frozenset[str] | None, formats: Formats
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables that a request sets in the template, and names of what has no effect there.

    Args:
        body: the request.
        variables: those that the template reads; None if they are unknown.
        formats: formats of the model's answers.

    Raises:
        ApiError: the effort is unknown, or turns off reasoning that cannot be turned off.
    """
    options = dict(body.chat_template_kwargs or {})
    ignored: list[str] = []
    if variables is not None:
        unread = [name for name in options if name not in variables]
        ignored += (f"chat_template_kwargs.{name[:_SHOWN]}" for name in unread[:_MOST_NAMES])
        if len(unread) > _MOST_NAMES:
            ignored.append(f"{len(unread) - _MOST_NAMES} more of chat_template_kwargs")
    effort = None
    if isinstance(body, ChatBody):
        effort = body.reasoning_effort
        if body.include_reasoning is False and formats.reasoning is None:
            ignored.append("include_reasoning")
    if effort is None:
        return options, ignored
    known = variables or frozenset()
    if _EFFORT in known:
        return {_EFFORT: effort, **options}, ignored
    if effort not in EFFORTS:
        raise invalid(_EFFORT, f"{_EFFORT}={quoted(effort)} must be one of {', '.join(EFFORTS)}")
    switch = next((name for name in _SWITCHES if name in known), None)
    if switch is not None:
        options = {switch: effort != "none", **options}
    elif effort == "none" and formats.reasoning is not None:
        problem = f"{_EFFORT}=none: the model's chat template cannot turn its reasoning off"
        raise invalid(_EFFORT, problem, code="unsupported_parameter")
    if effort != "none":
        ignored.append(_EFFORT if switch is None else f"{_EFFORT} but for turning reasoning on")
    return options, ignored


def reasoning_opening(body: ChatBody, formats: Formats, tokenizer: Tokenizer, prompt: Sequence[int]) -> Opening:
    """Return the state in which the answer to a prompt begins.

    Raises:
        ApiError: the request limits reasoning of which the format is unknown.
    """
    if formats.reasoning is None:
        if body.thinking_token_budget is not None:
            problem = "thinking_token_budget needs a model whose format of reasoning is known; see --reasoning-parser"
            raise invalid("thinking_token_budget", problem, code="unsupported_parameter")
        return Opening.OUTSIDE
    continued = body.messages[-1] if body.continue_final_message else None
    return formats.reasoning.opening(tokenizer, prompt, continued)


def with_formats(
    params: SamplingParams, body: ChatBody, formats: Formats, opening: Opening, tokenizer: Tokenizer
) -> SamplingParams:
    """Return the parameters of a request whose answer has these formats.

    Raises:
        RequestError: the budget is out of range.
    """
    values: dict[str, Any] = {"shown_token_ids": tuple(_markers(formats, tokenizer))}
    form = formats.reasoning
    if form is not None and opening is not Opening.OUTSIDE:
        values["reasoning_end_token_ids"] = (form.end_id,)
        values["thinking_token_budget"] = body.thinking_token_budget
        if opening is Opening.OPEN and not form.always:
            values["reasoning_start_token_id"] = form.start_id
    return replace(params, **values) if len(values) > 1 else params.with_checked(**values)


def _markers(formats: Formats, tokenizer: Tokenizer) -> Iterator[int]:
    if formats.reasoning is not None:
        yield from (formats.reasoning.start_id, formats.reasoning.end_id)
    for marker in () if formats.tools is None else formats.tools.markers:
        token_id = tokenizer.token_id(marker)
        if token_id is not None:
            yield token_id
