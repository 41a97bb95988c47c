"""Step shapes that together launch every kernel of an engine, so that none is compiled while serving."""

from __future__ import annotations

from phonograph.graphs.capture_list import CaptureList
from phonograph.graphs.dispatch import Dispatcher, StepShape
from phonograph.graphs.modes import GraphKey, GraphSet


def graph_shapes(captures: CaptureList) -> list[GraphKey]:
    """Return graph keys whose steps use every kernel of the captured graphs.

    The choice of kernels depends on the kind of graph and the magnitude of the step only. A step of exactly a power of
    two counts with the magnitude above or below.
    """
    keys = captures.largest_first()
    samples = {
        (
            key.kind,
            key.query_len,
            key.num_logits > 0,
            key.shares,
            *_magnitude(key.num_tokens),
            # Later passes of a draft model have a row a sequence.
            *(_magnitude(key.num_reqs) if key.makes_drafts else ()),
        ): key
        for key in keys
    }
    return list(samples.values())


def _magnitude(number: int) -> tuple[int, int]:
    return number.bit_length(), (number - 1).bit_length()


def eager_shapes(dispatcher: Dispatcher, *, num_slots: int, most_tokens: int) -> list[GraphKey]:
    """Return shapes of steps without a graph: both ends of every octave of tokens.

    Args:
        dispatcher: decides which steps have a graph.
        num_slots: request slots.
        most_tokens: tokens of the largest step that the cache holds.
    """
    most = min(dispatcher.max_num_tokens, most_tokens)
    sizes = sorted({min(size, most) for bit in range(most.bit_length()) for size in (1 << bit, (2 << bit) - 1)})
    decodes = [
        GraphKey(GraphSet.DECODE, size, size, 1)
        for size in sizes
        if size <= num_slots
        and dispatcher.decide(StepShape(num_tokens=size, num_reqs=size, decode_query_len=1)).key is None
    ]
    mixed = [
        GraphKey(GraphSet.MIXED, size, num_slots)
        for size in sizes
        if dispatcher.decide(StepShape(num_tokens=size, num_reqs=1, decode_query_len=None)).key is None
    ]
    return decodes + mixed
