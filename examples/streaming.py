"""An answer that is printed while it grows, offline.

python examples/streaming.py
"""

from __future__ import annotations

from phonograph import LLM, SamplingParams


def main() -> None:
    llm = LLM("demo", max_num_seqs=1, cudagraph_capture_sizes=[1, 32, 64])
    question = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
    prompt = llm.encode_chat([{"role": "user", "content": question}])
    shown = 0
    for output in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=64)):
        text = output.outputs[0].text_from(shown)
        shown += len(text)
        print(text, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
