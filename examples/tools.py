"""Function calling with a running server: the model calls a function, the program runs it and sends the result.

The demo model was not trained with tools: its calls are valid, but their numbers are arbitrary.

phonograph serve demo &
python examples/tools.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from openai import OpenAI

NUMBER = {"type": "integer", "minimum": 0, "maximum": 99}
PARAMETERS = {"type": "object", "properties": {"a": NUMBER, "b": NUMBER}, "required": ["a", "b"]}
FUNCTIONS: dict[str, Callable[[int, int], int]] = {"add": lambda a, b: a + b, "subtract": lambda a, b: a - b}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in FUNCTIONS]


def main() -> None:
    client = OpenAI(base_url=sys.argv[1], api_key="none")
    messages: list[Any] = [
        {"role": "user", "content": "Tom has 12 apples and buys 7 more. How many apples does Tom have?"}
    ]
    # "required" and a named function make valid calls with any model. "auto" reads the model's own.
    answer = client.chat.completions.create(
        model="demo",
        messages=messages,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=100,
    )
    message = answer.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls or ():
        assert call.type == "function"
        result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
        print(f"{call.function.name} {call.function.arguments} = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    answer = client.chat.completions.create(model="demo", messages=messages, temperature=0, max_tokens=100)
    print(answer.choices[0].message.content)


if __name__ == "__main__":
    main()
