"""Embeddings, classes or scores, whichever a model has.

python examples/embeddings.py [MODEL [TEXT ...]]
"""

from __future__ import annotations

import sys

from phonograph import LLM

TEXTS = ["Tom has 12 apples.", "Ann has 5 apples.", "1 2 3"]


def main() -> None:
    model, *texts = sys.argv[1:] or ["demo"]
    texts = texts or TEXTS
    with LLM(model, convert="embed", max_num_seqs=8) as llm:
        pooler = llm.plan.model.pooler
        assert pooler is not None
        print(f"{', '.join(pooler.tasks)}: {pooler.origin}")
        if "classify" in pooler.tasks:
            for text, output in zip(texts, llm.classify(texts), strict=True):
                print(f"{text!r}: {dict(zip(pooler.labels, output.outputs.probs, strict=True))}")
        else:
            for text, output in zip(texts, llm.score(texts[0], texts), strict=True):
                print(f"{texts[0]!r}, {text!r}: {output.outputs.score:.3f}")


if __name__ == "__main__":
    main()
