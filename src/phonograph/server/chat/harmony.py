"""Harmony, the chat format of gpt-oss: prompts and answers by its publisher's library, the extra `harmony`.

An answer is a row of messages, each in a channel: analysis is reasoning, final is content, and commentary has calls of
functions, whose recipient is the function, or content. The library makes and reads token ids of its own vocabulary,
which is that of the model, so that the model's tokenizer and chat template are not used.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from phonograph.errors import ConfigError, quoted
from phonograph.server.chat.chat_request import ChatRequest
from phonograph.server.http.api_errors import invalid
from phonograph.text.formats.answer_parts import Found, ToolDelta
from phonograph.text.formats.find_formats import Formats

_LIBRARY = "openai_harmony"
EFFORTS = ("low", "medium", "high")
"""Efforts of reasoning that the model knows."""
MOST_CHARACTERS = 128
"""Characters of the longest token."""
HARMONY_FORMATS = Formats(None, None, ("reasoning and tool calls: harmony (set by chat_format)",))
"""Formats of a server whose answers `HarmonyReader` reads."""
_FUNCTIONS = "functions."
"""Beginning of the recipients that are functions of a request."""
_MOST_PARTS = 4
"""Most tokens of a character."""


class Harmony:
    """The format, with the library's vocabulary."""

    def __init__(self, encoding: Any) -> None:
        self.encoding, self._library = encoding, import_module(_LIBRARY)
        self.stop_token_ids: tuple[int, ...] = tuple(encoding.stop_tokens_for_assistant_actions())
        (self.message_id,) = encoding.encode("<|message|>", allowed_special="all")

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        effort: str | None = None,
        begins: bool = True,
    ) -> list[int]:
        """Return the token ids of a conversation.

        Args:
            messages: of `read_messages`.
            tools: functions of the request.
            effort: one of `EFFORTS`; None for the model's default.
            begins: end with the start of the assistant's answer.

        Raises:
            ApiError: a message has a role or a place that the format does not have.
        """
        module = self._library
        system = module.SystemContent.new().with_conversation_start_date(datetime.date.today().isoformat())
        if effort is not None:
            system = system.with_reasoning_effort(module.ReasoningEffort(effort.capitalize()))
        found = [module.Message.from_role_and_content(module.Role.SYSTEM, system)]
        roles = [message["role"] for message in messages]
        leading = next((at for at, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
        if leading or tools:
            found.append(self._developer([message["content"] for message in messages[:leading]], tools or ()))
        names: dict[str, str] = {}
        for index, message in enumerate(messages[leading:], leading):
            found += self._messages(message, names, f"messages[{index}]")
        conversation = module.Conversation.from_messages(found)
        if begins:
            return self.encoding.render_conversation_for_completion(conversation, module.Role.ASSISTANT)
        return self.encoding.render_conversation(conversation)

    def reader(self, functions: Collection[str], *, parallel: bool) -> HarmonyReader:
        """Return the reader of one answer, with the names of the request's functions."""
        parser = self._library.StreamableParser(self.encoding, self._library.Role.ASSISTANT, strict=False)
        return HarmonyReader(self, parser, functions, parallel=parallel)

    def _developer(self, instructions: list[str], tools: Sequence[Mapping[str, Any]]) -> Any:
        module = self._library
        content = module.DeveloperContent.new()
        if instructions:
            content = content.with_instructions("\n\n".join(instructions))
        if tools:
            functions = [tool["function"] for tool in tools]
            content = content.with_function_tools(
                [
                    module.ToolDescription.new(one["name"], one.get("description", ""), one.get("parameters"))
                    for one in functions
                ]
            )
        return module.Message.from_role_and_content(module.Role.DEVELOPER, content)

    def _messages(self, message: Mapping[str, Any], names: dict[str, str], where: str) -> list[Any]:
        """Return the messages of the format; `names` has the functions of earlier calls by the calls' ids."""
        module, role, content = self._library, message["role"], message["content"]
        if role == "user":
            return [module.Message.from_role_and_content(module.Role.USER, content)]
        if role == "tool":
            name = names.get(message.get("tool_call_id", ""))
            if name is None:
                problem = f"tool_call_id={message.get('tool_call_id')!r} is not the id of an earlier tool call"
                raise invalid(f"{where}.tool_call_id", problem)
            author = module.Author.new(module.Role.TOOL, _FUNCTIONS + name)
            result = module.Message.from_author_and_content(author, content)
            return [result.with_channel("commentary").with_recipient("assistant")]
        if role != "assistant":
            problem = f"a message of role {role} cannot be here: chat_format=harmony takes system and developer "
            raise invalid(f"{where}.role", problem + "messages before all others, and no function messages")
        calls = message.get("tool_calls") or []
        found: list[Any] = []

        def add(text: str, channel: str) -> Any:
            found.append(module.Message.from_role_and_content(module.Role.ASSISTANT, text).with_channel(channel))
            return found[-1]

        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            add(reasoning, "analysis")
        if content:
            add(content, "commentary" if calls else "final")
        for call in calls:
            function = call["function"]
            if "id" in call:
                names[call["id"]] = function["name"]
            one = add(json.dumps(function["arguments"], ensure_ascii=False), "commentary")
            one.with_recipient(_FUNCTIONS + function["name"]).with_content_type("<|constrain|>json")
        return found


class HarmonyReader:
    """Reads the messages of one answer. `has_calls` is True if its finish reason is "tool_calls".

    Tokens that the format does not allow, and all after them, are content.
    """

    def __init__(self, harmony: Harmony, parser: Any, functions: Collection[str], *, parallel: bool) -> None:
        self._harmony, self._parser, self._functions, self._parallel = harmony, parser, functions, parallel
        self._header: list[int] | None = []  # tokens since the end of the last message; None in a message
        self._num_calls = 0
        self._in_call = False
        self._plain = False
        self._undecoded: list[int] = []

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def read(self, token_ids: Sequence[int], *, ended: bool) -> Found:
        """Return the parts of new tokens; of all tokens, if `ended` is True at once."""
        found = Found()
        for token_id in token_ids:
            if self._plain:
                found.content += self._text([token_id])
            else:
                self._push(token_id, found)
        if ended:
            header = self._header or []
            is_text = not any(map(self._harmony.encoding.is_special_token, header))
            # Without special tokens it is an answer in another form.
            found.content += self._text(header if is_text else [], last=True)
            self._header = None
        if not self._parallel:
            found.calls = [call for call in found.calls if call.index == 0]
        return found

    def _push(self, token_id: int, found: Found) -> None:
        if self._header is not None:
            self._header.append(token_id)
        try:
            self._parser.process(token_id)
        except RuntimeError:  # the library's HarmonyError
            self._plain = True
            found.content += self._text(self._header or [token_id])
            self._header = None
            return
        if self._header is not None:
            if token_id == self._harmony.message_id:
                self._header = None
                self._begin(found)
            return
        channel, text = self._parser.current_channel, self._parser.last_content_delta or ""
        if self._parser.current_role is None:
            self._header, self._in_call = [], False  # the token was the end of the message
        elif self._in_call and text:
            found.calls.append(ToolDelta(self._num_calls - 1, text))
        elif channel == "analysis":
            found.reasoning += text
        else:
            found.content += text

    def _begin(self, found: Found) -> None:
        """Begin a message, whose header is complete."""
        recipient = self._parser.current_recipient or ""
        name = recipient.removeprefix(_FUNCTIONS)
        self._in_call = recipient.startswith(_FUNCTIONS) and name in self._functions
        if self._in_call:
            found.calls.append(ToolDelta(self._num_calls, name=name))
            self._num_calls += 1

    def _text(self, token_ids: Sequence[int], *, last: bool = False) -> str:
        """Return the text of tokens that are not read as messages, up to the last whole character."""
        encoding = self._harmony.encoding
        self._undecoded += (token_id for token_id in token_ids if not encoding.is_special_token(token_id))
        text = encoding.decode(self._undecoded)
        if text.endswith("\ufffd") and len(self._undecoded) < _MOST_PARTS and not last:
            return ""
        self._undecoded = []
        return text


def check_harmony(request: ChatRequest) -> None:
    """Check the parts of a request that the format restricts.

    Raises:
        ApiError: an effort that the model does not know; stop strings, grammars or forced calls, which would apply to
            reasoning and headers too; variables of a template, or a message that continues.
    """
    effort, name = request.thinking.effort, request.thinking.name("reasoning_effort")
    if effort not in (None, *EFFORTS):
        raise invalid(name, f"{name}={quoted(effort)} must be {', '.join(EFFORTS[:-1])} or {EFFORTS[-1]}")
    if request.thinking.enabled is False:
        name = request.thinking.name("thinking_token_budget")
        problem = f"{name}: chat_format=harmony cannot turn the model's reasoning off"
        raise invalid(name, problem, code="unsupported_parameter")
    field = None
    if request.tools is not None and request.tools.form != "parsed":
        field = "tool_choice"
    elif request.sampling.get("stop"):
        field = "stop"
    elif request.sampling.get("structured_outputs") is not None:
        field = "structured_outputs"
    if field is not None:
        field = request.name(field)
        problem = f"{field} is not supported with chat_format=harmony: it would apply to reasoning and headers too"
        raise invalid(field, problem, code="unsupported_parameter")


def load_harmony(vocab_size: int) -> Harmony:
    """Load the library with its vocabulary, which it keeps in a cache or finds in the folder TIKTOKEN_ENCODINGS_BASE.

    Raises:
        ConfigError: the library or its vocabulary is missing, or the model has another vocabulary.
    """
    if find_spec(_LIBRARY) is None:
        raise ConfigError("chat_format", "harmony", 'needs openai-harmony: pip install "phonograph[harmony]"')
    try:
        encoding = import_module(_LIBRARY).load_harmony_encoding("HarmonyGptOss")
    except RuntimeError as error:
        folder = os.environ.get("TIKTOKEN_ENCODINGS_BASE")
        where = "" if folder is None else f" from TIKTOKEN_ENCODINGS_BASE={folder}"
        problem = f"openai-harmony has no vocabulary{where} ({error}); set TIKTOKEN_ENCODINGS_BASE to a folder with "
        raise ConfigError("chat_format", "harmony", problem + "its file o200k_base.tiktoken") from None
    most = max(encoding.stop_tokens())
    if most >= vocab_size:
        problem = f"has tokens up to {most}, and the model has {vocab_size}; it is the format of gpt-oss"
        raise ConfigError("chat_format", "harmony", problem)
    return Harmony(encoding)
