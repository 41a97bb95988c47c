"""Batches as a person writes them for `explain`: `1@65536,5@5` is one of two sequences, query length @ sequence length.

They become the same host-side batch that the scheduler makes, so that what is explained is what would run.
"""

from __future__ import annotations

import re

from phonograph.core.batch import ScheduledBatch
from phonograph.errors import ConfigError

_SEQUENCE = re.compile(r"\s*(\d+)\s*@\s*(\d+)\s*")


def read_batch(text: str, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> ScheduledBatch:
    """The batch that `text` describes, decodes first.

    Raises:
        ConfigError: it is malformed, or the engine would never schedule it.
    """
    pairs = sorted((_sequence(text, part, max_model_len) for part in text.split(",")), key=lambda pair: pair[0] > 1)
    batch = ScheduledBatch(
        slots=list(range(len(pairs))),
        query_lens=[query for query, _ in pairs],
        context_lens=[length - query for query, length in pairs],
        samples=[True] * len(pairs),
        num_decodes=sum(query == 1 for query, _ in pairs),
        num_tokens=sum(query for query, _ in pairs),
    )
    if batch.num_reqs > max_num_seqs:
        raise ConfigError(
            "batch", text, f"has {batch.num_reqs} sequences; a step has at most max_num_seqs={max_num_seqs}"
        )
    if batch.num_tokens > max_num_batched_tokens:
        raise ConfigError(
            "batch",
            text,
            f"has {batch.num_tokens} query tokens; a step has at most max_num_batched_tokens={max_num_batched_tokens}, "
            "and longer prefills are cut into chunks",
        )
    return batch


def batch_text(batch: ScheduledBatch) -> str:
    """The batch as it is written, in the order it runs, repeated sequences counted: "3 x 1@100, 5@5"."""
    parts: list[tuple[str, int]] = []
    for query, context in zip(batch.query_lens, batch.context_lens, strict=True):
        one = f"{query}@{query + context}"
        count = parts.pop()[1] if parts and parts[-1][0] == one else 0
        parts.append((one, count + 1))
    return ", ".join(one if count == 1 else f"{count} x {one}" for one, count in parts)


def _sequence(text: str, part: str, max_model_len: int) -> tuple[int, int]:
    match = _SEQUENCE.fullmatch(part)
    if match is None:
        raise ConfigError(
            "batch", text, f"{part!r} is not query length @ sequence length; 1@65536,5@5 has a decode and a prefill"
        )
    query, length = int(match[1]), int(match[2])
    if query < 1:
        raise ConfigError("batch", text, f"{part!r} has no query token; 1@{max(1, length)} works")
    if length < query:
        raise ConfigError(
            "batch",
            text,
            f"{part!r}: the sequence counts the query too, so it is at least as long; {query}@{query} works",
        )
    if length > max_model_len:
        raise ConfigError("batch", text, f"{part!r} is longer than max_model_len={max_model_len}")
    return query, length
