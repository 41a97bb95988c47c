"""Work of a chat request before the engine: its prompt and parameters, checked against the model and the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import admitted_bad_words
from phonograph.errors import RequestError
from phonograph.server.chat.chat_request import ChatRequest, sampling_params
from phonograph.server.chat.harmony import check_harmony
from phonograph.server.chat.serving import Serving
from phonograph.server.chat.thinking import reasoning_opening, with_formats
from phonograph.server.chat.tools import ToolChoice
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.text.formats.call_layouts import CallLayout
from phonograph.text.formats.reasoning import Opening

_STRICT = ("strict of tools that the model chooses",)
_FORMAT = ("format of custom tools",)
"""Names of what has no effect where no grammar holds it."""


class PreparedChat(NamedTuple):
    """A request that the engine can answer.

    opening: state of the answer at its beginning
    ignored: fields of the request without effect
    """

    prompt: list[int]
    params: SamplingParams
    tools: ToolChoice | None
    opening: Opening
    ignored: tuple[str, ...] = ()


def prepared_chat(serving: Serving, request: ChatRequest) -> PreparedChat:
    """Return the prompt and the parameters of a request.

    Raises:
        ApiError: the request does not fit the model, its formats, or its context.
        RequestError: the chat template rejects the messages.
    """
    tools, names = request.tools, request.names
    if serving.harmony is not None:
        check_harmony(request)
    elif tools is not None and tools.form == "parsed" and serving.formats.tools is None:
        raise invalid(request.name("tool_choice"), _no_calls(serving, request.name("tool_choice")))
    prompt = serving.encode_chat(request)
    sampling, ignored = _with_strict_calls(serving, request)
    params = fitted_params(serving, prompt, sampling, request.max_tokens, names, cuts=request.cuts)
    continued = request.messages[-1] if request.continues else None
    opening = reasoning_opening(request.thinking, serving.formats, serving.tokenizer, prompt, continued)
    if serving.harmony is not None:
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *serving.harmony.stop_token_ids))
        return PreparedChat(prompt, params, tools, opening, ignored)
    formats = serving.formats
    if tools is None or tools.form != "parsed":
        formats = replace(formats, tools=None)
    try:
        params = with_formats(params, request.thinking.budget, formats, opening, serving.tokenizer)
    except RequestError as error:
        raise api_error(error, names) from None
    return PreparedChat(prompt, params, tools, opening, ignored)


def _with_strict_calls(serving: Serving, request: ChatRequest) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the sampling parameters with the constraint on strict functions, and what has no effect."""
    tools = request.tools
    if tools is None:
        return request.sampling, ()
    if tools.form != "parsed":
        return request.sampling, _FORMAT if tools.grammars and tools.form == "required" else ()
    if not (tools.has_strict or tools.custom):
        return request.sampling, ()
    found = None
    if serving.harmony is None and request.sampling.get("structured_outputs") is None:
        found = _call_layout(serving)
    if found is None:
        return request.sampling, (*(_FORMAT if tools.formed else ()), *(_STRICT if tools.has_strict else ()))
    layout, tokens = found
    ignored = _FORMAT if tools.grammars and layout.form != "tags" else ()
    return {**request.sampling, "structured_outputs": tools.tagged(layout, tokens)}, ignored


def _call_layout(serving: Serving) -> tuple[CallLayout, dict[str, int]] | None:
    """Return the layout of the model's calls with the special tokens in it; None if a grammar cannot hold it."""
    form, layout, tokenizer = serving.formats.tools, serving.formats.layout, serving.tokenizer
    if form is None or layout is None:
        return None
    special = tokenizer.special_token_ids
    ids = {name: tokenizer.token_id(name) for name in (*layout.triggers, *layout.markers, *layout.around)}
    tokens = {name: token_id for name, token_id in ids.items() if token_id is not None and token_id in special}
    # A trigger that the text of an answer does not show is none.
    return None if any(name in tokens and name not in form.markers for name in layout.triggers) else (layout, tokens)


def fitted_params(
    serving: Serving,
    prompt: list[int],
    values: Mapping[str, Any],
    max_tokens: int | None,
    names: Mapping[str, str],
    *,
    cuts: bool,
) -> SamplingParams:
    """Return the sampling parameters of a request, of which `max_tokens` fits the context.

    Args:
        serving: the server.
        prompt: token ids.
        values: sampling parameters of the request.
        max_tokens: tokens to generate; None is up to the context.
        names: the request's names of parameters, where they differ.
        cuts: a `max_tokens` that does not fit is reduced, not refused.

    Raises:
        ApiError: a value is out of range, or does not fit.
    """
    room = serving.engine.facts.context_len - len(prompt)
    if cuts and max_tokens is not None and max_tokens > room:
        max_tokens = max(room, 1)
    max_tokens = serving.max_tokens([prompt], max_tokens, field=names.get("max_tokens", "max_tokens"))
    return admitted_bad_words(sampling_params(serving.defaults, values, max_tokens, names), serving.tokenizer)


def _no_calls(serving: Serving, field: str) -> str:
    """Return the reason why calls cannot be left to the model."""
    if serving.config.enable_auto_tool_choice:
        problem = f"{field} auto needs the form of the model's calls, which its chat template does not show; start "
        return f"{problem}the server with --tool-call-parser, or use {field} required"
    return f"{field} auto is turned off by --no-enable-auto-tool-choice; required and a named function work"
