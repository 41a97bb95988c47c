"""A stream and a tool call of a running server, with the openai package.

phonograph serve demo &
python examples/openai_client.py http://127.0.0.1:8000/v1
"""

from __future__ import annotations

import sys
from typing import Any

from openai import OpenAI

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
            "required": ["a", "b"],
        },
    },
}


def main() -> None:
    client = OpenAI(base_url=sys.argv[1], api_key="none")
    question: Any = {"role": "user", "content": "Tom has 12 apples and buys 7 more. How many apples does Tom have?"}
    for chunk in client.chat.completions.create(model="demo", messages=[question], temperature=0, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
    named: Any = {"type": "function", "function": {"name": "add"}}
    answer = client.chat.completions.create(
        model="demo", messages=[question], tools=[TOOL], tool_choice=named, temperature=0, max_tokens=100
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    print(f"{call.function.name} {call.function.arguments}")


if __name__ == "__main__":
    main()
