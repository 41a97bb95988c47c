"""llama-index: completions, chats, streams and tools of OpenAILike."""

from __future__ import annotations

from typing import Any

from calls import ANSWER, DEMO, MODEL, QUESTION, SCRIPTED, call, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def model(url: str = DEMO, **settings: Any) -> Any:
    return OpenAILike(model=MODEL, api_base=f"{url}/v1", api_key="none", context_window=1024, max_retries=0, **settings)


@call("`complete`")
def complete() -> None:
    assert model(max_tokens=8).complete("Tom has 12 apples.").text


@call("`chat` and `stream_chat`")
def chat() -> None:
    ask = [ChatMessage(role="user", content=QUESTION)]
    assert ANSWER in str(model(is_chat_model=True).chat(ask))
    assert ANSWER in str([*model(is_chat_model=True).stream_chat(ask)][-1])


@call("`predict_and_call`")
def tools() -> None:
    asked = model(SCRIPTED, is_chat_model=True, is_function_calling_model=True)
    assert ANSWER in str(asked.predict_and_call([FunctionTool.from_defaults(fn=add)], QUESTION))


run("llama-index-llms-openai-like")
