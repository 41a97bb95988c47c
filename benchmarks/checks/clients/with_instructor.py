"""instructor: models of pydantic by tools and by schemas."""

from __future__ import annotations

from typing import Literal

import instructor
from calls import DEMO, MODEL, QUESTION, call, run
from openai import OpenAI
from pydantic import BaseModel


class Choice(BaseModel):
    answer: Literal["19", "20"]


def made(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{DEMO}/v1", api_key="none"), mode=mode)
    ask = [{"role": "user", "content": QUESTION}]
    found = client.chat.completions.create(model=MODEL, response_model=Choice, messages=ask, max_tokens=60)  # type: ignore
    assert isinstance(found, Choice)


for mode in (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA):
    call(f"`{mode}`")(lambda mode=mode: made(mode))
run("instructor")
