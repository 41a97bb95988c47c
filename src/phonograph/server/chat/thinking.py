"""Fields of a chat that concern the model's reasoning: variables of the template, and tokens of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import quoted
from phonograph.server.http.api_errors import invalid
from phonograph.text.formats.find_formats import Formats
from phonograph.text.formats.reasoning import Opening
from phonograph.text.formats.template_variables import template_variables
from phonograph.text.tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts that clients send. A template with a variable for the effort may know others."""
_EFFORT = "reasoning_effort"
_SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates turn reasoning on and off."""
_SHOWN = 50
"""Characters of a variable's name in a header."""
_MOST_NAMES = 8
"""Variables that a header names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """Reasoning that a request asks for.

    effort:    effort of the model; "none" turns reasoning off
    enabled:   whether the model reasons; None is the template's default
    shown:     False leaves the reasoning out of the answer
    budget:    maximum tokens of reasoning
    template:  chat template in place of the server's
    variables: variables of the chat template
    names:     names of `reasoning_effort`, `thinking_token_budget`, `include_reasoning` and variables in the request,
        where they differ
    needed:    a budget for a model without reasoning is an error
    """

    effort: str | None = None
    enabled: bool | None = None
    shown: bool = True
    budget: int | None = None
    template: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    needed: bool = True

    def name(self, field: str) -> str:
        """Return the request's name of a field."""
        return self.names.get(field, field)


def template_options(
    thinking: Thinking, variables: frozenset[str] | None, formats: Formats
) -> tuple[dict[str, Any], list[str]]:
    """Return the variables that a request sets in the template, and names of what has no effect there.

    Args:
        thinking: reasoning that the request asks for.
        variables: those that the server's template reads; None if they are unknown.
        formats: formats of the model's answers.

    Raises:
        ApiError: the effort is unknown, or turns off reasoning that cannot be turned off.
    """
    options = dict(thinking.variables)
    if thinking.template is not None:
        variables = template_variables(thinking.template)
    ignored: list[str] = []
    if variables is not None:
        unread = [name for name in options if name not in variables]
        ignored += (thinking.name(f"chat_template_kwargs.{name[:_SHOWN]}") for name in unread[:_MOST_NAMES])
        if len(unread) > _MOST_NAMES:
            ignored.append(f"{len(unread) - _MOST_NAMES} more of chat_template_kwargs")
    known = variables or frozenset()
    reasons = formats.reasoning is not None
    switch = next((name for name in _SWITCHES if name in known), None)
    if not thinking.shown and not reasons:
        ignored.append(thinking.name("include_reasoning"))
    if thinking.enabled is not None and switch is not None:
        options = {switch: thinking.enabled, **options}
    if thinking.enabled and not reasons and not {switch, _EFFORT} & known:
        ignored.append(thinking.name("thinking_token_budget"))
    effort, name = thinking.effort, thinking.name(_EFFORT)
    if effort is None and thinking.enabled is False and switch is None:
        effort = "none"
    if effort is None:
        return options, ignored
    if _EFFORT in known:
        return {_EFFORT: effort, **options}, ignored
    if effort not in EFFORTS:
        raise invalid(name, f"{name}={quoted(effort)} must be one of {', '.join(EFFORTS)}")
    if switch is not None:
        options = {switch: effort != "none", **options}
    elif effort == "none" and reasons:
        problem = f"{name}=none: the model's chat template cannot turn its reasoning off"
        raise invalid(name, problem, code="unsupported_parameter")
    if effort != "none":
        ignored.append(name if switch is None else f"{name} but for turning reasoning on")
    return options, ignored


def reasoning_opening(
    thinking: Thinking,
    formats: Formats,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    continued: Mapping[str, object] | None,
) -> Opening:
    """Return the state in which the answer to a prompt begins.

    Args:
        thinking: reasoning that the request asks for.
        formats: formats of the model's answers.
        tokenizer: that of the prompt.
        prompt: token ids.
        continued: message that the answer continues, if it does.

    Raises:
        ApiError: the request limits reasoning of which the format is unknown.
    """
    if formats.reasoning is None:
        if thinking.budget is not None and thinking.needed:
            name = thinking.name("thinking_token_budget")
            problem = f"{name} needs a model whose format of reasoning is known; see --reasoning-parser"
            raise invalid(name, problem, code="unsupported_parameter")
        return Opening.OUTSIDE
    return formats.reasoning.opening(tokenizer, prompt, continued)


def with_formats(
    params: SamplingParams, budget: int | None, formats: Formats, opening: Opening, tokenizer: Tokenizer
) -> SamplingParams:
    """Return the parameters of a request whose answer has these formats.

    Raises:
        RequestError: the budget is out of range.
    """
    form = formats.reasoning
    if form is None and formats.tools is None:
        return params
    values: dict[str, Any] = {"shown_token_ids": tuple(_markers(formats, tokenizer))}
    if form is not None and opening is not Opening.OUTSIDE:
        values["reasoning_end_token_ids"] = (form.end_id,)
        values["thinking_token_budget"] = budget
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
