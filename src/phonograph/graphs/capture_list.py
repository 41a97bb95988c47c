"""List of the graphs to capture, which padding, eligibility, capture and `explain` all read.

It is made once, from the resolved mode and the limits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet

STEPS_PER_OCTAVE = 8
"""Mixed graphs from one power of two to the next; padding is at most 12.5%, on average 4%."""
_DRAFTING_SEQS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sequences of graphs for decodes with drafts. Padding costs them less than decodes of one token: drafts fill it."""
_SHARING_STEP = 32
"""Sequences from one graph for shared prefixes to the next."""


@dataclass(frozen=True, slots=True)
class CaptureRetry:
    """Graph whose first capture failed. A second one succeeded, after an eager run.

    Attributes:
        key: the graph.
        reason: the failure.
    """

    key: GraphKey
    reason: str

    def __str__(self) -> str:
        return f"{self.key} was captured at the second try, after an eager run: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureList:
    """Keys of each set in ascending order of tokens.

    Attributes:
        decode: graphs of decodes of one token.
        sharing: variants of some of them, for batches whose sequences have long prefixes in common.
        drafting: graphs of decodes some of which verify drafts; all their tokens have logits.
        mixed, piecewise: graphs of any batch, whole and in pieces.
        wide: variants of both with more rows of logits than requests, for the drafts beside a prefill, or with the
            passes of a draft model.
        ragged: True if a drafting graph holds decodes with different numbers of drafts.
        notes: sizes that were left out, with the reason.
    """

    decode: tuple[GraphKey, ...] = ()
    sharing: tuple[GraphKey, ...] = ()
    drafting: tuple[GraphKey, ...] = ()
    mixed: tuple[GraphKey, ...] = ()
    piecewise: tuple[GraphKey, ...] = ()
    wide: tuple[GraphKey, ...] = ()
    ragged: bool = True
    notes: tuple[str, ...] = ()

    def largest_first(self) -> tuple[GraphKey, ...]:
        """Return all graphs in the order of capture: later graphs then fit into the pool of the first."""
        every = self.decode + self.sharing + self.drafting + self.mixed + self.piecewise + self.wide
        return tuple(sorted(every, key=_capture_order, reverse=True))

    def in_pieces(self) -> CaptureList:
        """Return the list with pieces in the place of whole graphs."""
        pieces, wide = (
            tuple(replace(key, graphs=GraphSet.PIECEWISE) for key in keys)
            for keys in (self.piecewise or self.mixed, self.wide)
        )
        return CaptureList(piecewise=pieces, wide=wide, ragged=self.ragged, notes=self.notes)


def _capture_order(key: GraphKey) -> tuple[object, ...]:
    return key.num_tokens, key.kind, key.makes_drafts, key.shares, key.logits, key.num_reqs


def make_capture_list(
    mode: GraphMode,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_capture_tokens: int,
    most_step_tokens: int | None = None,
    sizes: tuple[int, ...] | None = None,
    speculative_tokens: int = 0,
    most_logits: int | None = None,
    ragged: bool = True,
    draft_passes: bool = False,
    pads_decodes: bool = True,
    decodes: bool = True,
    sharing_from: int = 0,
) -> CaptureList:
    """Make the list of graphs of `mode`.

    Args:
        mode: the resolved mode.
        max_num_seqs: largest number of sequences in a step.
        max_num_batched_tokens: largest number of tokens in a step.
        max_capture_tokens: largest mixed or piecewise graph of the default list; without `pads_decodes`, also the
            largest decode graph.
        most_step_tokens: tokens of the largest step that requests and cache have room for, if known.
        sizes: the user's numbers of tokens, instead of the default list.
        speculative_tokens: most draft tokens of a decode.
        most_logits: rows of logits of a step with drafts; one for each token of its decodes if None.
        ragged: a graph holds decodes with different numbers of drafts.
        draft_passes: the passes of a draft model end the graphs of steps that make drafts.
        pads_decodes: the default decode graphs go up to max_num_seqs, most of them 8 apart. False where a padded token
            costs more than a replay saves: their sizes are then as close as those of the mixed graphs.
        decodes: requests generate; otherwise there are no decode graphs.
        sharing_from: sequences of the smallest graph for shared prefixes; 0 for no such graphs.

    Returns:
        The keys of each set, and notes about sizes that were left out.

    Raises:
        ConfigError: a size is below 1, or all sizes are above the tokens of the largest step.

    Example:
        ```python
        captures = make_capture_list(
            GraphMode.FULL, max_num_seqs=4, max_num_batched_tokens=64, max_capture_tokens=8
        )
        assert [key.num_tokens for key in captures.decode] == [1, 2, 4]
        assert captures.mixed[-1] == GraphKey(GraphSet.MIXED, num_tokens=8, num_reqs=4)
        ```
    """
    if sizes is not None:
        _check_sizes(sizes, max_num_batched_tokens)
    notes: list[str] = []
    query_len = 1 + speculative_tokens
    most_logits = most_logits or max_num_seqs * query_len
    decode: tuple[GraphKey, ...] = ()
    drafting: list[GraphKey] = []
    if mode.decode_full and decodes:
        most_reqs = min(max_num_seqs, max_num_batched_tokens)
        if pads_decodes:
            counts = default_decode_sizes(most_reqs)
        else:
            counts = default_mixed_sizes(min(most_reqs, max_capture_tokens))
        wanted = counts if sizes is None else sizes
        fitting = sorted({size for size in wanted if size <= most_reqs})
        if sizes is None or not speculative_tokens:
            notes += _decode_note(sorted(set(wanted) - set(fitting)), max_num_seqs, most_reqs, max_num_batched_tokens)
        decode = tuple(GraphKey(GraphSet.DECODE, size, size, 1) for size in fitting)
        if speculative_tokens:
            most = min(max_num_batched_tokens, most_logits, max_num_seqs * query_len)
            if not pads_decodes:
                most = min(most, max(max_capture_tokens, query_len))
            shapes = _drafting_shapes(max_num_seqs, speculative_tokens, most, sizes, ragged=ragged)
            drafting = [
                GraphKey(GraphSet.DECODE, *shape, query_len, num_logits=shape[0], makes_drafts=draft_passes)
                for shape in shapes
            ]
            largest = max((key.num_tokens for key in drafting), default=0)
            if largest < min(max_num_seqs * query_len, max(sizes or (max_num_seqs * query_len,))):
                notes.append(
                    f"no graph of decodes with drafts of more than {largest} tokens: a step has at most {most} of them"
                )
    other: list[int] = []
    if mode.mixed_full or mode.piecewise:
        most, why = max_num_batched_tokens, f"max_num_batched_tokens={max_num_batched_tokens} tokens"
        if most_step_tokens is not None and most_step_tokens < most:
            most, why = most_step_tokens, f"{most_step_tokens} tokens where requests have full length"
        wanted = default_mixed_sizes(min(max_capture_tokens, most)) if sizes is None else sizes
        other = sorted({size for size in wanted if size <= most})
        left_out = sorted(set(wanted) - set(other))
        if left_out:
            notes.append(f"no mixed graph of {_join(left_out)} tokens: a step has at most {why}")
    mixed = tuple(GraphKey(GraphSet.MIXED, size, max_num_seqs) for size in other) if mode.mixed_full else ()
    pieces = tuple(GraphKey(GraphSet.PIECEWISE, size, max_num_seqs) for size in other) if mode.piecewise else ()
    most_seqs = max((key.num_reqs for key in decode), default=0)
    sharing = [
        replace(key, shares=True)
        for key in decode
        if 0 < sharing_from <= key.num_reqs and (key.num_reqs == most_seqs or key.num_reqs % _SHARING_STEP == 0)
    ]
    wide: list[GraphKey] = []
    for narrow in mixed + pieces if speculative_tokens else ():
        key = replace(narrow, num_logits=min(narrow.num_tokens, most_logits), makes_drafts=draft_passes)
        wide += [replace(narrow, makes_drafts=True)] if draft_passes else []
        wide += [key] if key.logits > narrow.logits else []
    return CaptureList(
        decode=decode,
        sharing=tuple(sharing),
        drafting=tuple(drafting),
        mixed=mixed,
        piecewise=pieces,
        wide=tuple(wide),
        ragged=ragged,
        notes=tuple(notes),
    )


def _decode_note(left_out: list[int], max_num_seqs: int, most_reqs: int, max_num_batched_tokens: int) -> list[str]:
    """Return a note about decode graphs that are larger than a batch of decodes."""
    sizes = _join(left_out)
    if most_reqs < max_num_seqs and not sizes:
        sizes = f"more than {most_reqs}"
    if not sizes:
        return []
    step = f", and a step at most max_num_batched_tokens={max_num_batched_tokens} tokens"
    return [
        f"no decode graph of {sizes} tokens: a decode batch has at most max_num_seqs={max_num_seqs} sequences of "
        "1 token" + (step if most_reqs < max_num_seqs else "")
    ]


def _drafting_shapes(
    max_num_seqs: int, most_drafts: int, most_tokens: int, sizes: tuple[int, ...] | None, *, ragged: bool
) -> list[tuple[int, int]]:
    """Return tokens and request slots of the graphs for decodes with drafts, in ascending order.

    For the sequences of `_DRAFTING_SEQS` there is one graph for all drafts, and one for half of them if the sequences
    may differ. A size of the user has the slots that its tokens fill.
    """
    query_len = 1 + most_drafts
    if sizes is not None:
        shapes = {(size, min(max_num_seqs, -(-size // query_len))) for size in sizes if ragged or size % query_len == 0}
    else:
        counts = [count for count in _DRAFTING_SEQS if count < max_num_seqs] + [max_num_seqs]
        lengths = {query_len, 1 + -(-most_drafts // 2)} if ragged else {query_len}
        shapes = {(count * length, count) for count in counts for length in lengths}
    return sorted(shape for shape in shapes if 1 < shape[0] <= most_tokens)


def default_decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the sequences of the decode graphs.

    They are 1, 2, 4, every 8 up to 1024, then 64 from one power of two to the next, and max_num_seqs at the end.

    Args:
        max_num_seqs: largest number of sequences in a step.

    Returns:
        The sizes in ascending order; none for a max_num_seqs of 0.

    Example:
        ```python
        assert default_decode_sizes(20) == [1, 2, 4, 8, 16, 20]
        ```
    """
    sizes = [size for size in (1, 2, 4) if size < max_num_seqs]
    size = 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 64)
    return [*sizes, max_num_seqs] if max_num_seqs else []


def default_mixed_sizes(limit: int) -> list[int]:
    """Return the tokens of the mixed graphs, from 1 to `limit` itself: all up to 16, then eight to an octave.

    Args:
        limit: tokens of the largest graph.

    Example:
        ```python
        assert default_mixed_sizes(20) == [*range(1, 17), 18, 20]
        ```
    """
    sizes: list[int] = []
    size = 1
    while size < limit:
        sizes.append(size)
        octave = 1 << (size.bit_length() - 1)
        size += max(1, octave // STEPS_PER_OCTAVE)
    return [*sizes, limit]


def _check_sizes(sizes: tuple[int, ...], largest: int) -> None:
    if not sizes:
        raise ConfigError("cudagraph_capture_sizes", list(sizes), "name at least one size, or set cudagraph_mode=NONE")
    smallest = min(sizes)
    if not 1 <= smallest <= largest:  # some of them may be larger: these are left out with a note
        raise ConfigError(
            "cudagraph_capture_sizes",
            smallest,
            f"a size must be from 1 to {largest}, the most tokens a step can have (max_num_batched_tokens)",
        )


def _join(sizes: list[int]) -> str:
    return ", ".join(str(size) for size in sizes)
