"""A conversation of two turns, offline.

python examples/chat.py
"""

from __future__ import annotations

from phonograph import LLM, SamplingParams

QUESTIONS = (
    "Tom has 12 apples and buys 7 more. How many apples does Tom have?",
    "Anna has 30 cards and gives 4 to Ben. How many cards does Anna have?",
)


def main() -> None:
    llm = LLM("demo", max_num_seqs=1, cudagraph_capture_sizes=[1, 32, 64])
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        (output,) = llm.chat(messages, sampling_params=SamplingParams(temperature=0, max_tokens=64))
        answer = output.outputs[0].text
        messages.append({"role": "assistant", "content": answer})
        print(answer)


if __name__ == "__main__":
    main()
