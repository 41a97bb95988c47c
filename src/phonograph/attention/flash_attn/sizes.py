"""Device memory of FlashAttention's launches, and the bound on splits that limits it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet

MAX_SPLITS = 32
"""Largest number of parts that the keys of a sequence are cut into."""
ACCUMULATOR_BYTES = 128 << 20
"""Budget for the partial results of one launch, float32 [splits, H, T, D]. A graph keeps them in its pool."""
_HEURISTIC_SPLITS = 128
"""Largest number of splits that the library chooses itself."""


def split_bound(num_tokens: int, spec: AttentionSpec) -> int:
    """Return the bound on splits for steps of `num_tokens` padded tokens.

    It is MAX_SPLITS, or fewer if the partial results would exceed ACCUMULATOR_BYTES. It depends on the shape alone, so
    a replay never needs more memory than its capture.
    """
    fitting = ACCUMULATOR_BYTES // _accumulator_bytes(num_tokens, spec)
    return min(MAX_SPLITS, fitting) if fitting >= 2 else 1


def unbounded_splits_fit(num_tokens: int, spec: AttentionSpec) -> bool:
    """Return True if the partial results stay within ACCUMULATOR_BYTES for every choice of the library."""
    return _HEURISTIC_SPLITS * _accumulator_bytes(num_tokens, spec) <= ACCUMULATOR_BYTES


def plans(spec: AttentionSpec) -> bool:
    """Return True if version 3 has an ahead-of-time schedule, which needs one window for all layers."""
    return len(spec.windows) == 1 and not spec.batch_invariant


def plan_length(limits: Limits) -> int:
    """Return the length of the plan's buffer: a semaphore and four numbers for each slot, rounded up to four slots.

    It counts tokens if there are more of them than slots, to be safe from other layouts.
    """
    return 1 + -(-max(limits.max_num_seqs, limits.max_num_batched_tokens) // 4) * 16


def kept_bytes(spec: AttentionSpec, limits: Limits) -> int:
    """Return the bytes of a backend's buffers: the plan, FP8 queries, and two vectors of tokens for the LSE."""
    queries = limits.max_num_batched_tokens * spec.num_query_heads * spec.head_size
    return (
        4 * plan_length(limits)
        + (queries if spec.has_fp8_cache else 0)
        + (5 * limits.max_num_batched_tokens if spec.lse else 0)
    )


def partial_bytes(spec: AttentionSpec, limits: Limits, graphs: Sequence[GraphKey]) -> int:
    """Return the bytes of version 3's partial results and LSE: in the graphs' shared memory, and in eager steps."""
    if spec.batch_invariant:
        return 0
    whole = [key.num_tokens for key in graphs if key.graphs is not GraphSet.PIECEWISE]
    in_graphs = max((_split_bytes(num_tokens, spec) for num_tokens in whole), default=0) if plans(spec) else 0
    most_splits = MAX_SPLITS if plans(spec) else _HEURISTIC_SPLITS
    eager = min(ACCUMULATOR_BYTES, most_splits * _accumulator_bytes(limits.max_num_batched_tokens, spec))
    return in_graphs + eager + eager // spec.head_size


def _split_bytes(num_tokens: int, spec: AttentionSpec) -> int:
    splits = split_bound(num_tokens, spec)
    total = splits * _accumulator_bytes(num_tokens, spec)
    return total + total // spec.head_size if splits > 1 else 0


def _accumulator_bytes(num_tokens: int, spec: AttentionSpec) -> int:
    """Return the bytes of one split."""
    return 4 * max(num_tokens, 1) * spec.num_query_heads * spec.head_size
