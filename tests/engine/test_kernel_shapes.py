"""Shapes of steps that launch every kernel once before requests come."""

from __future__ import annotations

import pytest

from phonograph.graphs.capture_list import make_capture_list
from phonograph.graphs.dispatch import Dispatcher
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, resolve_mode
from phonograph.runner.kernel_shapes import eager_shapes, graph_shapes


def shapes(mode: GraphMode, *, most_tokens: int = 99) -> list[GraphKey]:
    """Return the shapes without a graph, of graphs of 1, 2, 4 and 8 sequences and of up to 16 tokens."""
    captures = make_capture_list(mode, max_num_seqs=8, max_num_batched_tokens=40, max_capture_tokens=16)
    resolution = resolve_mode(mode, Support(GraphSupport.ALWAYS, "a test"), Pieces(True, "a test"))
    dispatcher = Dispatcher(resolution, captures, max_num_tokens=40)
    return eager_shapes(dispatcher, num_slots=12, most_tokens=most_tokens)


def mixed(*sizes: int) -> list[GraphKey]:
    return [GraphKey(GraphSet.MIXED, size, 12) for size in sizes]


def decodes(*sizes: int) -> list[GraphKey]:
    return [GraphKey(GraphSet.DECODE, size, size, 1) for size in sizes]


EVERY = (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 40)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (GraphMode.NONE, [*decodes(1, 2, 3, 4, 7, 8), *mixed(*EVERY)]),
        (GraphMode.FULL, mixed(31, 32, 40)),
        (GraphMode.PIECEWISE, mixed(31, 32, 40)),
        (GraphMode.FULL_DECODE_ONLY, mixed(*EVERY)),
    ],
)
def test_both_ends_of_each_octave_run_where_no_graph_holds_them(mode: GraphMode, expected: list[GraphKey]) -> None:
    assert shapes(mode) == expected


def test_no_step_is_larger_than_the_cache_or_has_more_requests_than_slots() -> None:
    assert shapes(GraphMode.NONE, most_tokens=20) == [*decodes(1, 2, 3, 4, 7, 8), *mixed(1, 2, 3, 4, 7, 8, 15, 16, 20)]
    assert shapes(GraphMode.NONE, most_tokens=12)[6:7] == decodes(12)


def test_graphs_of_one_magnitude_share_their_kernels() -> None:
    captures = make_capture_list(GraphMode.FULL, max_num_seqs=2, max_num_batched_tokens=40, max_capture_tokens=20)
    sizes = [key.num_tokens for key in graph_shapes(captures) if key.graphs is GraphSet.MIXED]
    # Sizes of an octave, and its power of two, which may count with the octave above or below.
    magnitudes = {size: (size.bit_length(), (size - 1).bit_length()) for size in range(1, 21)}
    assert sorted(magnitudes[size] for size in sizes) == sorted(set(magnitudes.values()))
    assert sizes == sorted(sizes, reverse=True)
