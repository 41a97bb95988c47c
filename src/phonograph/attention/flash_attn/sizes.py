"""What launches of FlashAttention take of the device's memory, and the bound on splits that keeps it small. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.attention.backend import AttentionSpec, BatchLimits
from phonograph.graphs.modes import GraphKey, GraphSet

MAX_SPLITS = 32
"""Parts that the keys of a sequence are cut into at most."""
ACCUMULATOR_BYTES = 128 << 20
"""What the partial results of one launch may take, float32 [splits, H, T, D]: a graph keeps them in its pool."""
_HEURISTIC_SPLITS = 128
"""The most that the library's own choice comes to."""


def split_bound(num_tokens: int, spec: AttentionSpec) -> int:
    """The bound on splits for steps of `num_tokens` padded tokens: the same in capture, replay and eager runs.

    MAX_SPLITS, or fewer where the partial results would outgrow ACCUMULATOR_BYTES; 1 where that leaves less than 2. It
    depends on the shape alone, so that a replay can never need more room than its capture set aside.
    """
    fitting = ACCUMULATOR_BYTES // _accumulator_bytes(num_tokens, spec)
    return min(MAX_SPLITS, fitting) if fitting >= 2 else 1


def unbounded_splits_fit(num_tokens: int, spec: AttentionSpec) -> bool:
    """Whether the partial results stay within ACCUMULATOR_BYTES whatever the library chooses."""
    return _HEURISTIC_SPLITS * _accumulator_bytes(num_tokens, spec) <= ACCUMULATOR_BYTES


def plans(spec: AttentionSpec) -> bool:
    """Whether version 3 has an ahead-of-time schedule: it needs one window for all layers."""
    return len(spec.windows) == 1 and not spec.batch_invariant


def plan_length(limits: BatchLimits) -> int:
    """Numbers of the buffer that holds a plan: a semaphore and four for each request slot, in vectors of a multiple of
    four. No graph has more slots than there are sequences; tokens, of which a graph may have more, are counted to be
    safe from other layouts."""
    return 1 + -(-max(limits.max_num_seqs, limits.max_num_tokens) // 4) * 16


def kept_bytes(spec: AttentionSpec, limits: BatchLimits) -> int:
    """What a backend keeps: the plan, queries in FP8, and token numbers where the LSE is asked for."""
    queries = limits.max_num_tokens * spec.num_query_heads * spec.head_size
    return (
        4 * plan_length(limits)
        + (queries if spec.kv_cache_dtype.startswith("float8") else 0)
        + (4 * limits.max_num_tokens + 4 if spec.lse else 0)
    )


def partial_bytes(spec: AttentionSpec, limits: BatchLimits, graphs: Sequence[GraphKey]) -> int:
    """Partial results of version 3, with their LSE: once in the memory that graphs share, once for eager steps."""
    if spec.batch_invariant:
        return 0
    whole = [key.num_tokens for key in graphs if key.graphs is not GraphSet.PIECEWISE]
    in_graphs = max((_split_bytes(num_tokens, spec) for num_tokens in whole), default=0) if plans(spec) else 0
    most_splits = MAX_SPLITS if plans(spec) else _HEURISTIC_SPLITS
    eager = min(ACCUMULATOR_BYTES, most_splits * _accumulator_bytes(limits.max_num_tokens, spec))
    return in_graphs + eager + eager // spec.head_size


def _split_bytes(num_tokens: int, spec: AttentionSpec) -> int:
    splits = split_bound(num_tokens, spec)
    total = splits * _accumulator_bytes(num_tokens, spec)
    return total + total // spec.head_size if splits > 1 else 0


def _accumulator_bytes(num_tokens: int, spec: AttentionSpec) -> int:
    """Of one split."""
    return 4 * max(num_tokens, 1) * spec.num_query_heads * spec.head_size
