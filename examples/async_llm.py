"""Questions answered side by side on one event loop, each shown as soon as its text grows.

python examples/async_llm.py
"""

from __future__ import annotations

import asyncio

from phonograph import AsyncLLM, SamplingParams

QUESTIONS = (
    "Tom has 12 apples and buys 7 more. How many apples does Tom have?",
    "Anna has 30 cards and gives 4 to Ben. How many cards does Anna have?",
)


async def answer(llm: AsyncLLM, number: int, question: str) -> None:
    assert llm.tokenizer is not None
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    shown = 0
    async for output in llm.generate(prompt, SamplingParams(max_tokens=100, temperature=0)):
        text = output.outputs[0].text_from(shown)
        shown += len(text)
        if text:
            print(f"{number}: {text!r}")


async def main() -> None:
    async with AsyncLLM("demo", max_num_seqs=2, cudagraph_capture_sizes=[1, 2, 64]) as llm:
        await asyncio.gather(*(answer(llm, number, question) for number, question in enumerate(QUESTIONS)))


if __name__ == "__main__":
    asyncio.run(main())
