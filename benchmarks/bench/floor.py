"""Lower bounds on time: bytes to read at the memory's speed, or operations at the tensor cores' speed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.kernels.routing import Routing
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.states.state_mixer import slot_bytes
from phonograph.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Chip:
    """Measured speeds of a GPU: bytes read a second, and 16-bit operations a second in a matrix product."""

    bandwidth: float
    flops: float

    def seconds(self, num_bytes: float, num_operations: float) -> float:
        return max(num_bytes / self.bandwidth, num_operations / self.flops)


H200 = Chip(bandwidth=4.33e12, flops=800e12)


def this_chip(device_kind: str) -> Chip | None:
    """Return the speeds of the device in use, or None if they were not measured."""
    return H200 if device_kind == "cuda" and "H200" in torch.cuda.get_device_name() else None


class Work(NamedTuple):
    """Bytes to read, and operations: two for each multiplication and addition."""

    num_bytes: float
    num_operations: float


def decode_work(model: ModelSpec, attention: AttentionSpec, *, num_seqs: int, context: int) -> tuple[Work, Work]:
    """Return the work of one decode step of `num_seqs` sequences: products with all weights, and mixers of tokens.

    Attention reads the keys in its window, and a mixer with a state reads and writes that of each sequence. An
    embedding that is not the LM head too is left out, since a step reads one row a sequence of it. Of experts, the
    expected number of different ones is read, as if each token chose at random.
    """
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    num_bytes = float(model.weight_bytes(attention.dtype) - embedding * attention.element_bytes)
    weights = float(model.num_parameters - embedding)
    for layer in model.layers:
        experts = layer.feed_forward
        if isinstance(experts, LayerExperts):
            routing = experts.routing
            unread = 1 - expected_experts(routing, num_seqs) / routing.num_experts
            for matrix in (experts.gate_up, experts.down):
                num_bytes -= unread * matrix.nbytes(attention.element_bytes)
                weights -= (1 - routing.top_k / routing.num_experts) * matrix.num_outputs * matrix.num_inputs
    heads = next(iter(model.attentions.values()))
    windows = (one.window[0] for one in model.attentions.values())
    pairs = num_seqs * sum(context if window < 0 else min(context, window + 1) for window in windows)
    states = sum(slot_bytes(mixer, attention.element_bytes) for mixer in model.states.values())
    return (
        Work(num_bytes, 2.0 * weights * num_seqs),
        Work(
            pairs * attention.kv_token_bytes + 2.0 * num_seqs * states,
            4.0 * pairs * heads.num_query_heads * heads.head_size,
        ),
    )


def expected_experts(routing: Routing, num_tokens: int) -> float:
    """Return the expected number of different experts of tokens that choose at random: X * (1 - (1 - k / X) ** T)."""
    return routing.num_experts * (1 - (1 - routing.top_k / routing.num_experts) ** num_tokens)


def decode_floor(chip: Chip, model: ModelSpec, attention: AttentionSpec, **step: int) -> float:
    """Return the least seconds of one decode step: the products, then attention. See `decode_work` for `step`."""
    return sum(chip.seconds(*work) for work in decode_work(model, attention, **step))


def attention_work(spec: AttentionSpec, lengths: Sequence[tuple[int, int]], window: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes read and written and the operations of one layer's causal attention.

    Args:
        spec: heads and dtypes.
        lengths: (query length, sequence length) of each sequence.
        window: keys seen to the left and right of a query.
    """
    left = window[0] if window[0] >= 0 else math.inf
    rows = sum(query for query, _ in lengths)
    keys = sum(min(length, query + left) for query, length in lengths)
    pairs = sum(_visible(query, length, left) for query, length in lengths)
    queries = 2 * rows * spec.num_query_heads * spec.head_size * spec.element_bytes
    return int(keys * spec.kv_token_bytes + queries), int(4 * spec.num_query_heads * spec.head_size * pairs)


def _visible(query: int, length: int, left: float) -> float:
    """Count the pairs of a query and a key that it sees: itself, and at most `left` keys before it."""
    first, last = length - query + 1, length
    if last <= left + 1:
        return (first + last) * query / 2
    if first > left:
        return query * (left + 1)
    growing = left + 1 - first
    return (first + left) * growing / 2 + (query - growing) * (left + 1)
