"""Graphs that ran for a few requests, and the reasons for the graph mode and for each graph or eager step, offline.

python examples/graph_decisions.py
"""

from __future__ import annotations

from collections import Counter

from phonograph import LLM, SamplingParams


def main() -> None:
    llm = LLM("demo", max_num_seqs=4, cudagraph_capture_sizes=[1, 2, 4])
    for reason in llm.plan.resolution.reasons:
        print(f"mode: {reason}")
    decisions = Counter[tuple[str, str]]()
    llm.engine.core.on_step = lambda step: decisions.update([(step.graph, step.cause)])
    llm.generate(["1 2 3", "4 5 6 7 8 9"], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    for (graph, cause), steps in decisions.most_common():
        print(f"{steps} step{'' if steps == 1 else 's'}: {graph}: {cause}")


if __name__ == "__main__":
    main()
