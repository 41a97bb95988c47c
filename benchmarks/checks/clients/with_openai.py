"""openai: chats, responses, completions, their streams and helpers."""

from __future__ import annotations

from typing import Any, Literal

from calls import ANSWER, DEMO, MODEL, QUESTION, SCRIPTED, call, run
from openai import OpenAI
from pydantic import BaseModel

demo = OpenAI(base_url=f"{DEMO}/v1", api_key="none", max_retries=0)
scripted = OpenAI(base_url=f"{SCRIPTED}/v1", api_key="none", max_retries=0)
ASK: Any = [{"role": "user", "content": QUESTION}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": SCHEMA}


class Choice(BaseModel):
    answer: Literal["19", "20"]


@call("`models.list`")
def models() -> None:
    assert [model.id for model in demo.models.list()] == [MODEL]


@call("`chat.completions.create`, streamed too")
def chat() -> None:
    whole = demo.chat.completions.create(model=MODEL, messages=ASK, temperature=0).choices[0].message.content
    chunks = demo.chat.completions.create(model=MODEL, messages=ASK, temperature=0, stream=True)
    assert whole and whole == "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert ANSWER in whole


@call("`chat.completions.stream`")
def helper() -> None:
    with demo.chat.completions.stream(model=MODEL, messages=ASK) as stream:
        assert [event.type for event in stream]
        assert stream.get_final_completion().choices[0].message.content


@call("`chat.completions.parse`")
def parse() -> None:
    found = demo.chat.completions.parse(model=MODEL, messages=ASK, response_format=Choice)
    assert isinstance(found.choices[0].message.parsed, Choice)


@call("tools by choice, with reasoning")
def tools() -> None:
    first = scripted.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL]).choices[0].message
    (made,) = first.tool_calls or []
    result: Any = {"role": "tool", "tool_call_id": made.id, "content": ANSWER}
    turns = [*ASK, first.model_dump(exclude_none=True), result]
    last = scripted.chat.completions.create(model=MODEL, messages=turns, tools=[TOOL]).choices[0].message
    assert ANSWER in (last.content or "") and last.model_dump()["reasoning_content"]


@call("a tool that must be called")
def forced() -> None:
    choice: Any = {"type": "function", "function": {"name": "add"}}
    asked = demo.chat.completions.create(model=MODEL, messages=ASK, tools=[TOOL], tool_choice=choice, max_tokens=40)
    assert [made.function.name for made in asked.choices[0].message.tool_calls or []] == ["add"]


@call("`responses.create`, streamed too")
def responses() -> None:
    whole = demo.responses.create(model=MODEL, input=QUESTION, temperature=0)
    kinds = [event.type for event in demo.responses.create(model=MODEL, input=QUESTION, stream=True)]
    assert ANSWER in whole.output_text and kinds[0] == "response.created" and kinds[-1] == "response.completed"


@call("`responses.stream` with tools")
def response_tools() -> None:
    with scripted.responses.stream(model=MODEL, input=QUESTION, tools=[FUNCTION]) as stream:
        output = stream.get_final_response().output
    (made,) = [item for item in output if item.type == "function_call"]
    turns: Any = [*ASK, *output, {"type": "function_call_output", "call_id": made.call_id, "output": ANSWER}]
    assert ANSWER in scripted.responses.create(model=MODEL, input=turns, tools=[FUNCTION]).output_text


@call("`responses.parse`")
def response_parse() -> None:
    assert isinstance(demo.responses.parse(model=MODEL, input=QUESTION, text_format=Choice).output_parsed, Choice)


@call("`completions.create`")
def completions() -> None:
    assert demo.completions.create(model=MODEL, prompt=QUESTION, max_tokens=8, logprobs=2).choices[0].logprobs


run("openai")
