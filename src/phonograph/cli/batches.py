"""Batches as `explain` takes them: `1@65536,5@5` is two sequences, each query length @ sequence length.

`8x1@32064/32000` is eight sequences whose first 32000 tokens are in the same blocks.

The result is the scheduler's own type of batch, so that `explain` shows what an engine would run.
"""

from __future__ import annotations

import itertools
import re

from phonograph.core.batch import ScheduledBatch
from phonograph.core.limits import Limits
from phonograph.errors import ConfigError

_SEQUENCE = re.compile(r"\s*(?:(\d+)\s*x\s*)?(\d+)\s*@\s*(\d+)\s*(?:/\s*(\d+)\s*)?")


def read_batch(text: str, limits: Limits) -> tuple[ScheduledBatch, list[int]]:
    """Return the batch that `text` describes, decodes first, and the leading tokens that each sequence shares.

    Args:
        text: query length @ sequence length of each sequence, or count x both / shared tokens.
        limits: of the engine.

    Raises:
        ConfigError: the text is malformed, or the engine would never schedule the batch.
    """

    def is_decode(query: int, length: int) -> bool:
        return query == 1 or query <= min(1 + limits.draft_tokens, length - 1)

    parts = [_sequences(text, part, limits.max_model_len) for part in text.split(",")]
    sequences = sorted(itertools.chain(*parts), key=lambda one: not is_decode(*one[:2]))
    pairs = [(query, length) for query, length, _ in sequences]
    batch = ScheduledBatch(
        slots=list(range(len(pairs))),
        query_lens=[query for query, _ in pairs],
        context_lens=[length - query for query, length in pairs],
        samples=[True] * len(pairs),
        num_decodes=sum(is_decode(*pair) for pair in pairs),
        num_decode_tokens=sum(query for query, length in pairs if is_decode(query, length)),
        num_tokens=sum(query for query, _ in pairs),
    )
    if batch.num_reqs > limits.max_num_seqs:
        problem = f"has {batch.num_reqs} sequences; a step has at most max_num_seqs={limits.max_num_seqs}"
        raise ConfigError("batch", text, problem)
    if batch.num_tokens > limits.max_num_batched_tokens:
        limit = f"a step has at most max_num_batched_tokens={limits.max_num_batched_tokens}"
        problem = f"has {batch.num_tokens} query tokens; {limit}, and longer prefills are cut into chunks"
        raise ConfigError("batch", text, problem)
    return batch, [shared for *_, shared in sequences]


def batch_text(batch: ScheduledBatch) -> str:
    """Return the batch as text in the order it runs, repeated sequences counted: "3 x 1@100, 5@5"."""
    sequences = (
        f"{query}@{query + context}" for query, context in zip(batch.query_lens, batch.context_lens, strict=True)
    )
    counts = ((sequence, len(list(group))) for sequence, group in itertools.groupby(sequences))
    return ", ".join(sequence if count == 1 else f"{count} x {sequence}" for sequence, count in counts)


def _sequences(text: str, part: str, max_model_len: int) -> list[tuple[int, int, int]]:
    match = _SEQUENCE.fullmatch(part)
    count, query, length, shared = (int(word or 0) for word in match.groups("")) if match else (0, 0, 0, 0)
    if match is None:
        problem = "is not query length @ sequence length; 1@65536,5@5 has a decode and a prefill"
    elif match[1] and not count:
        problem = f"has no sequence; {query}@{length} has one"
    elif query < 1:
        problem = f"has no query token; 1@{max(1, length)} works"
    elif length < query:
        problem = f"has a sequence shorter than its query, which is part of it; {query}@{query} works"
    elif length > max_model_len:
        problem = f"is longer than max_model_len={max_model_len}"
    elif shared > length - query:
        problem = f"shares more than the {length - query} tokens that it has computed before the step"
    else:
        return [(query, length, shared)] * (count or 1)
    raise ConfigError("batch", text, f"{part!r} {problem}")
