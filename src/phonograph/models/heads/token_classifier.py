"""Classifiers made of rows of a language model's head: rerankers that answer "yes" or "no", as Qwen3-Reranker.

Source: `classifier_from_token`, `method` and `is_original_qwen3_reranker` of vLLM's hf_overrides. The softmax over the
logits of two tokens is the sigmoid of their difference, so that two rows of the head make one row of a classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.files.model_files import read_json
from phonograph.models.heads.pooler_spec import TokenRows

TOKENS, ORIGINAL, METHOD = "classifier_from_token", "is_original_qwen3_reranker", "method"
DIFFERENCE, PLAIN = "from_2_way_softmax", "no_post_processing"
QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    "{{ instruction | default(instruct | default('Given a web search query, retrieve relevant passages that answer "
    "the query', true), true) }}\n"
    '<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}\n'
    '<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>\n'
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"
)
"""Template of a pair of texts for Qwen3-Reranker, as its model card and vLLM's examples have it.

Rendering drops the last newline.
"""


def token_rows(raw: Mapping[str, Any], folder: Path, *, tied: bool) -> TokenRows | None:
    """Return the rows of the head that are the classifier, or None if it has weights of its own.

    Args:
        raw: content of config.json.
        folder: folder of the model, whose tokenizer.json knows the tokens.
        tied: the head is the embedding.

    Raises:
        UnsupportedModelError: the method is unknown.
        ModelError: the tokens are missing, or the tokenizer does not have them.
    """
    tokens, original = raw.get(TOKENS), raw.get(ORIGINAL) is True
    method = DIFFERENCE if original else raw.get(METHOD)
    if tokens is None and method is None:
        return None
    if method not in (DIFFERENCE, PLAIN):
        problem = f"must be {DIFFERENCE} or {PLAIN} with {TOKENS}; for Qwen3-Reranker set {ORIGINAL} to true"
        raise UnsupportedModelError(f"{METHOD}={method!r} {problem}")
    names = cast("list[object]", tokens) if isinstance(tokens, list) else []
    if not names or (method == DIFFERENCE and len(names) != 2):
        count = "two tokens, the one for no first" if method == DIFFERENCE else "one token or more"
        raise ModelError(f"{TOKENS}={shortened(repr(tokens))} must be a list of {count}")
    known = _vocabulary(folder)
    ids = [one if isinstance(one, int) else known.get(str(one)) for one in names]
    if None in ids:
        raise ModelError(f"{TOKENS}={names!r}: {folder / 'tokenizer.json'} has no token {names[ids.index(None)]!r}")
    labels = ("LABEL_0",) if method == DIFFERENCE else tuple(map(str, names))
    source = "embed_tokens.weight" if tied else "lm_head.weight"
    return TokenRows(cast("tuple[int, ...]", tuple(ids)), source, labels, QWEN3_RERANKER if original else None)


def _vocabulary(folder: Path) -> dict[str, int]:
    """Return the tokens of a folder's tokenizer by their pieces; empty without tokenizer.json."""
    path = folder / "tokenizer.json"
    content = read_json(path) if path.is_file() else {}
    vocabulary = content.get("model", {}).get("vocab", {})
    pairs = vocabulary if isinstance(vocabulary, dict) else {piece: at for at, (piece, _) in enumerate(vocabulary)}
    return {**pairs, **{one["content"]: one["id"] for one in content.get("added_tokens", ())}}
