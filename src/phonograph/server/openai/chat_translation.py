"""Translation of OpenAI's chats, and of conversations to tokenize, to the server's own chat request."""

from __future__ import annotations

from phonograph.config.server_config import ServerConfig
from phonograph.server.chat.chat_request import ChatRequest
from phonograph.server.chat.conversation import read_messages
from phonograph.server.chat.tools import read_tools
from phonograph.server.http.json_meter import JsonMeter
from phonograph.server.openai.protocol import ChatBody, TokenizeBody


def chat_request(body: ChatBody, config: ServerConfig) -> ChatRequest:
    """Return the request of a chat.

    Args:
        body: fields of the request.
        config: limits of the server.

    Raises:
        ApiError: a field is wrong.
    """
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    names = body.names()
    if body.max_tokens is None:
        names["max_tokens"] = "max_completion_tokens"
    return ChatRequest(
        messages=read_messages(body.messages, JsonMeter(config)),
        tools=tools,
        thinking=body.requested_thinking(),
        sampling=body.sampling(
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            max_logprobs=config.max_logprobs,
            structured=None if tools is None else tools.structured,
        ),
        max_tokens=body.requested_tokens(),
        truncate=body.truncate_prompt_tokens,
        keeps_first=body.truncation_side == "right",
        adds_special=bool(body.add_special_tokens),
        continues=bool(body.continue_final_message),
        begins=body.add_generation_prompt,
        names=names,
    )


def tokenize_request(body: TokenizeBody, config: ServerConfig) -> ChatRequest:
    """Return the request of a conversation to tokenize.

    Raises:
        ApiError: a message is wrong.
    """
    return ChatRequest(
        messages=read_messages(body.messages or [], JsonMeter(config)),
        tools=read_tools(body.tools, None, None),
        thinking=body.requested_thinking(),
        continues=bool(body.continue_final_message),
        begins=body.add_generation_prompt,
        adds_special=bool(body.add_special_tokens),
    )
