"""The capture list and the decisions made from it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.errors import ConfigError
from phonograph.graphs.capture_list import default_decode_sizes, default_mixed_sizes, make_capture_list
from phonograph.graphs.dispatch import Dispatcher, StepShape
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, Resolution, resolve_mode


def _resolution(mode: GraphMode) -> Resolution:
    return resolve_mode(mode, Support(GraphSupport.ALWAYS, "test"), Pieces(True, "test"))


def _dispatcher(mode: GraphMode, *, max_num_seqs: int = 16, tokens: int = 64, limit: int = 64, **more) -> Dispatcher:
    captures = make_capture_list(
        mode, max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens, max_capture_tokens=limit, **more
    )
    return Dispatcher(_resolution(mode), captures, max_num_tokens=tokens)


def _shape(*query_lens: int) -> StepShape:
    """Decodes of one token, or else prefills."""
    longest = 1 if set(query_lens) == {1} else None
    return StepShape(num_tokens=sum(query_lens), num_reqs=len(query_lens), decode_query_len=longest)


def _drafts(*query_lens: int, prefills: tuple[int, ...] = ()) -> StepShape:
    """Decodes of these tokens beside prefills."""
    return StepShape(
        num_tokens=sum(query_lens + prefills),
        num_reqs=len(query_lens + prefills),
        decode_query_len=None if prefills else max(query_lens),
        num_logits=sum(query_lens) + len(prefills),
    )


def test_graphs_for_shared_prefixes() -> None:
    """Some sizes have one; batches that share take the next, where there is one, and others never do."""
    dispatcher = _dispatcher(GraphMode.FULL, max_num_seqs=100, tokens=128, limit=128, sharing_from=48)
    sizes = [key.num_tokens for key in dispatcher.captures.sharing]
    assert sizes == [64, 96, 100] and {*dispatcher.captures.sharing} < {*dispatcher.captures.largest_first()}
    for count in range(1, 101):
        shape = _shape(*[1] * count)
        plain, sharing = dispatcher.decide(shape).key, dispatcher.decide(replace(shape, shares=True)).key
        assert plain is not None and sharing is not None and not plain.shares and sharing.shares
        assert sharing.num_tokens == min(size for size in sizes if size >= count)
        assert str(sharing).endswith(", shared prefixes]")
    shape = replace(_shape(5, 6), shares=True)
    assert dispatcher.decide(shape).key == GraphKey(GraphSet.MIXED, 11, 100)
    without = _dispatcher(GraphMode.FULL, max_num_seqs=100, tokens=128, limit=128)
    shape = _shape(*[1] * 64)
    assert without.captures.sharing == () and without.decide(replace(shape, shares=True)) == without.decide(shape)


@given(
    mode=st.sampled_from(list(GraphMode)),
    max_num_seqs=st.integers(1, 70),
    limit=st.integers(1, 300),
    tokens=st.integers(70, 300),
    query_lens=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    drafts=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    speculative=st.sampled_from([0, 0, 1, 3]),
    ragged=st.booleans(),
)
def test_a_decision_holds_its_batch_and_is_the_closest(
    mode, max_num_seqs, limit, tokens, query_lens, drafts, speculative, ragged
) -> None:
    query_lens = query_lens[:max_num_seqs]
    while sum(query_lens) > tokens:
        query_lens.pop()
    shape = _shape(*(query_lens or [1]))
    decodes = [1 + min(count, speculative) for count in drafts[:max_num_seqs]]
    if sum(decodes) > len(decodes) and sum(decodes) <= tokens:
        prefills = (5,) if len(decodes) < max_num_seqs and sum(decodes) + 5 <= tokens and len(query_lens) % 2 else ()
        shape = _drafts(*decodes, prefills=prefills)
    dispatcher = _dispatcher(
        mode, max_num_seqs=max_num_seqs, tokens=tokens, limit=limit, speculative_tokens=speculative, ragged=ragged
    )
    captures = dispatcher.captures
    decision = dispatcher.decide(shape)
    assert decision.reason
    if decision.key is None:
        assert decision.mode is GraphMode.NONE
        assert decision.num_tokens == shape.num_tokens
        general = captures.mixed + captures.piecewise + captures.wide
        assert all(key.num_tokens < shape.num_tokens or key.logits < shape.num_logits for key in general)
        return
    key = decision.key
    assert decision.num_tokens == key.num_tokens >= shape.num_tokens
    assert key.num_reqs >= shape.num_reqs
    assert key in captures.largest_first()
    assert key.logits >= shape.num_logits
    if key.graphs is GraphSet.DECODE:
        assert shape.decode_query_len is not None and shape.decode_query_len <= key.query_len
        assert key.num_reqs <= max_num_seqs and (key in captures.drafting) == (shape.num_logits > shape.num_reqs)
    same = [
        other
        for other in captures.largest_first()
        if (other.graphs, other.query_len) == (key.graphs, key.query_len)
        and other.num_reqs >= shape.num_reqs
        and other.logits >= shape.num_logits
    ]
    assert not any(shape.num_tokens <= other.num_tokens < key.num_tokens for other in same)


def test_modes_send_batches_where_they_should() -> None:
    decode, mixed = _shape(1, 1, 1), _shape(1, 1, 5)
    expected = {
        GraphMode.NONE: ("eager", "eager"),
        GraphMode.PIECEWISE: ("piecewise", "piecewise"),
        GraphMode.FULL: ("full decode", "full mixed"),
        GraphMode.FULL_DECODE_ONLY: ("full decode", "eager"),
        GraphMode.FULL_AND_PIECEWISE: ("full decode", "piecewise"),
    }
    for mode, labels in expected.items():
        dispatcher = _dispatcher(mode)
        assert (dispatcher.decide(decode).label, dispatcher.decide(mixed).label) == labels


def test_a_captured_size_above_max_num_seqs_never_enters_the_decode_table() -> None:
    dispatcher = _dispatcher(GraphMode.FULL, max_num_seqs=6, sizes=(1, 4, 8, 16))
    captures = dispatcher.captures
    assert [key.num_tokens for key in captures.decode] == [1, 4]
    assert [key.num_tokens for key in captures.mixed] == [1, 4, 8, 16]
    assert any("max_num_seqs=6" in note and "8, 16" in note for note in captures.notes)
    above = dispatcher.decide(_shape(1, 1, 1, 1, 1))
    assert above.key is not None
    assert (above.key.graphs, above.key.num_tokens) == (GraphSet.MIXED, 8), "a mixed graph serves any batch"
    assert above.reason.endswith("; 3 of 8 tokens are padding")
    assert dispatcher.decide(_shape(1, 1, 1, 1)).reason.endswith("; no padding")


def test_a_batch_larger_than_the_largest_graph_runs_eagerly_and_says_so() -> None:
    decision = _dispatcher(GraphMode.FULL, limit=32).decide(_shape(40))
    assert decision.key is None
    assert decision.num_tokens == 40
    assert "40 tokens" in decision.reason and "32" in decision.reason
    decode_only = _dispatcher(GraphMode.FULL_DECODE_ONLY).decide(_shape(1, 5))
    assert "not of decodes alone" in decode_only.reason
    off = _dispatcher(GraphMode.NONE).decide(_shape(1))
    assert "graphs are off" in off.reason


@pytest.mark.parametrize("sizes", [(0,), (-1,), (65, 99), (0, 65), ()])
def test_sizes_outside_the_limits_are_errors(sizes) -> None:
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
        _dispatcher(GraphMode.FULL, sizes=sizes)


@pytest.mark.parametrize("mode", [mode for mode in GraphMode if mode is not GraphMode.NONE])
def test_sizes_above_the_largest_step_are_left_out_with_a_note(mode) -> None:
    captures = _dispatcher(mode, sizes=(1, 2, 9999)).captures
    assert {key.num_tokens for key in captures.largest_first()} == {1, 2}
    assert captures.notes and all("9999" in note and "at most" in note for note in captures.notes)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 256])
def test_every_decode_batch_has_a_graph_for_any_max_num_seqs(max_num_seqs) -> None:
    sizes = default_decode_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs and sizes == sorted(set(sizes))


def test_decode_graphs_of_many_sequences_grow_sparser() -> None:
    assert default_decode_sizes(0) == []
    assert default_decode_sizes(1024) == [1, 2, 4, *range(8, 1025, 8)]
    sizes = default_decode_sizes(131_072)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 131_072 and len(sizes) < 600
    assert all(after <= before + max(8, before // 64) for before, after in itertools.pairwise(sizes[3:]))


@pytest.mark.parametrize("limit", [2, 64, 512, 2048, 8192])
def test_token_padding_stays_within_ten_percent_on_average(limit) -> None:
    sizes = np.array(default_mixed_sizes(limit))
    tokens = np.random.default_rng(1).integers(1, limit + 1, 10_000)
    padded = sizes[np.searchsorted(sizes, tokens)]
    assert (padded / tokens - 1).mean() <= 0.10
    assert len(sizes) <= 90


def test_largest_first() -> None:
    captures = _dispatcher(GraphMode.FULL_AND_PIECEWISE).captures
    tokens = [key.num_tokens for key in captures.largest_first()]
    assert tokens == sorted(tokens, reverse=True)


def test_decodes_with_drafts() -> None:
    dispatcher = _dispatcher(GraphMode.FULL, speculative_tokens=3)
    keys = dispatcher.captures.drafting
    assert [(key.num_tokens, key.num_reqs) for key in keys[:5]] == [(3, 1), (4, 1), (6, 2), (8, 2), (12, 4)]
    assert {key.query_len for key in keys} == {4} and all(key.logits == key.num_tokens for key in keys)
    decision = dispatcher.decide(_drafts(2, 1, 4))
    assert decision.key == GraphKey(GraphSet.DECODE, 12, 4, 4, num_logits=12) and decision.label == "full decode"
    assert decision.reason == "decodes with drafts; 5 of 12 tokens are padding"
    assert dispatcher.decide(_shape(1, 1)).key == GraphKey(GraphSet.DECODE, 2, 2, 1)
    # A prefill beside drafts needs more rows of logits than requests only in large graphs.
    beside = dispatcher.decide(_drafts(4, 2, prefills=(9,)))
    assert beside.key == GraphKey(GraphSet.MIXED, 15, 16) and beside.cause == "prefill or mixed batch, with drafts"
    wide = dispatcher.decide(_drafts(*[4] * 6, prefills=(4,)))
    assert wide.key == GraphKey(GraphSet.MIXED, 28, 16, num_logits=28) and str(wide.key).endswith(", 28 logits]")
    assert dispatcher.decide(_shape(28)).key == GraphKey(GraphSet.MIXED, 28, 16)
    equal = _dispatcher(GraphMode.FULL_AND_PIECEWISE, speculative_tokens=3, ragged=False)
    assert equal.decide(_drafts(4, 4)).label == "full decode"
    ragged = equal.decide(_drafts(4, 3))
    assert ragged.label == "piecewise" and ragged.cause == "decodes with different numbers of drafts"
    few = _dispatcher(GraphMode.FULL_DECODE_ONLY, speculative_tokens=3, sizes=(8,))
    decision = few.decide(_drafts(2, 2, 2, 1))
    assert decision.key is None and "more sequences, drafts or rows of logits" in decision.reason


@pytest.mark.parametrize("mode", list(GraphMode))
def test_causes_are_few(mode: GraphMode) -> None:
    """Counts by cause need few series, not one for each size."""
    dispatcher = _dispatcher(mode)
    shapes = [_shape(*[1] * count) for count in range(1, 25)]
    shapes += [_shape(1, *[2] * count) for count in range(1, 32)]
    decisions = [dispatcher.decide(shape) for shape in shapes]
    assert len({decision.cause for decision in decisions}) <= 4
    assert len({decision.reason for decision in decisions}) > 20 or mode is GraphMode.NONE
