"""The capture list and the decisions made from it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phonograph.errors import ConfigError
from phonograph.graphs.capture_list import default_decode_sizes, default_mixed_sizes, make_capture_list
from phonograph.graphs.dispatch import BatchShape, Dispatcher
from phonograph.graphs.modes import GraphMode, GraphSet, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, Resolution, resolve_mode


def _resolution(mode: GraphMode) -> Resolution:
    return resolve_mode(mode, Support(GraphSupport.ALWAYS, "test"), Pieces(True, "test"))


def _dispatcher(mode: GraphMode, *, max_num_seqs: int = 16, tokens: int = 64, limit: int = 64, **more) -> Dispatcher:
    captures = make_capture_list(
        mode, max_num_seqs=max_num_seqs, max_num_batched_tokens=tokens, max_capture_tokens=limit, **more
    )
    return Dispatcher(_resolution(mode), captures, max_num_tokens=tokens)


def _shape(*query_lens: int) -> BatchShape:
    uniform = query_lens[0] if len(set(query_lens)) == 1 else None
    return BatchShape(num_tokens=sum(query_lens), num_reqs=len(query_lens), uniform_query_len=uniform)


@given(
    mode=st.sampled_from(list(GraphMode)),
    max_num_seqs=st.integers(1, 70),
    limit=st.integers(1, 300),
    tokens=st.integers(70, 300),
    query_lens=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    speculative=st.sampled_from([0, 0, 1, 3]),
)
def test_a_decision_holds_its_batch_and_is_the_closest(
    mode, max_num_seqs, limit, tokens, query_lens, speculative
) -> None:
    query_lens = query_lens[:max_num_seqs]
    while sum(query_lens) > tokens:
        query_lens.pop()
    shape = _shape(*(query_lens or [1]))
    dispatcher = _dispatcher(
        mode, max_num_seqs=max_num_seqs, tokens=tokens, limit=limit, speculative_tokens=speculative
    )
    captures = dispatcher.captures
    decision = dispatcher.decide(shape)
    assert decision.reason
    if decision.key is None:
        assert decision.mode is GraphMode.NONE
        assert decision.num_tokens == shape.num_tokens
        assert all(key.num_tokens < shape.num_tokens for key in captures.mixed + captures.piecewise)
        return
    key = decision.key
    assert decision.num_tokens == key.num_tokens >= shape.num_tokens
    assert key.num_reqs >= shape.num_reqs
    assert key in captures.largest_first()
    if key.graphs is GraphSet.DECODE:
        assert shape.uniform_query_len == captures.decode_query_len
        assert key.num_reqs <= max_num_seqs
    same = [other for other in captures.largest_first() if other.graphs is key.graphs]
    assert not any(shape.num_tokens <= other.num_tokens < key.num_tokens for other in same)


def test_modes_send_batches_where_they_should() -> None:
    decode, mixed = _shape(1, 1, 1), _shape(1, 1, 5)
    expected = {
        GraphMode.NONE: ("eager", "eager"),
        GraphMode.PIECEWISE: ("piecewise piecewise", "piecewise piecewise"),
        GraphMode.FULL: ("full decode", "full mixed"),
        GraphMode.FULL_DECODE_ONLY: ("full decode", "eager"),
        GraphMode.FULL_AND_PIECEWISE: ("full decode", "piecewise piecewise"),
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


def test_a_batch_larger_than_the_largest_graph_runs_eagerly_and_says_so() -> None:
    decision = _dispatcher(GraphMode.FULL, limit=32).decide(_shape(40))
    assert decision.key is None
    assert decision.num_tokens == 40
    assert "40 tokens" in decision.reason and "32" in decision.reason
    decode_only = _dispatcher(GraphMode.FULL_DECODE_ONLY).decide(_shape(1, 5))
    assert "not uniform" in decode_only.reason
    off = _dispatcher(GraphMode.NONE).decide(_shape(1))
    assert "graphs are off" in off.reason


@pytest.mark.parametrize("sizes", [(0,), (-1,), (4, 65), ()])
def test_sizes_outside_the_limits_are_errors(sizes) -> None:
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes"):
        _dispatcher(GraphMode.FULL, sizes=sizes)


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 256])
def test_every_decode_batch_has_a_graph_whatever_max_num_seqs(max_num_seqs) -> None:
    sizes = default_decode_sizes(max_num_seqs)
    assert sizes[-1] == max_num_seqs and sizes == sorted(set(sizes))


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


def test_speculative_decodes_are_uniform_batches() -> None:
    dispatcher = _dispatcher(GraphMode.FULL_AND_PIECEWISE, speculative_tokens=3)
    assert {key.query_len for key in dispatcher.captures.decode} == {4}
    assert dispatcher.decide(_shape(4, 4)).label == "full decode"
    assert dispatcher.decide(_shape(1, 1)).label == "piecewise piecewise"
