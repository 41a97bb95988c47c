"""Result of routing on a GPU: the experts of each token, and the work that they make for the experts' products.

A pair is one of a token's experts; pair p belongs to token p // k. Sorted by expert, pairs become items: at most
`block` pairs of one expert, which one tile of a product computes. All sizes are bounds that depend on shapes only, so
that a graph needs no knowledge of counts.

    pairs       | expert 2: p0 p5 p9 | expert 3: p1 | expert 7: p2 p3 ... |      in the order of the tokens
    items       | 2, 0, 3            | 3, 3, 1      | 7, 4, block | 7, 4 + block, rest |      expert, first, pairs

A shared expert is expert X. Each token that is not padding has one pair of it, and its pairs and items are the last.

Shapes: T tokens, X experts, k experts of a token, with a shared one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.gemm.product_plan import cdiv

ONE_LAUNCH_TOKENS = 256
"""Most tokens that one launch routes. The program that arrives last makes the lists."""
SMALL_TILE, TILE, LARGE_TILE = 8, 16, 32
"""Tokens of a mask of one launch of up to `SMALL_TILES_TOKENS`, of one launch, and of two."""
SMALL_TILES_TOKENS = 32
"""Most tokens in small tiles, whose programs choose for one token a warp."""
LIST_TILES = 4
"""Masks of an expert whose pairs a program of the second launch lists."""
LEAST_BLOCK = 8
"""Least pairs of a whole item."""
EXPERTS, MOST_EXPERTS = 32, 128
"""Experts of a program of the router's product in one launch, and most in two."""
PROGRAMS = 256
"""Most programs that the router's product is split over by its inputs."""


class ExpertLists(NamedTuple):
    """Memory of one routing, for up to T tokens. Only `arrived` must have its contents before a routing.

    Attributes:
        experts_Tk: int32, highest score first, then a shared expert; -1 for padding.
        weights_Tk: float32, of each expert's result.
        shared_T: float32, weight of the shared expert.
        pairs_P: int32 [T * k], sorted by expert.
        items_I3: int32, expert, first of its pairs in `pairs_P`, and number of pairs.
        num_items: int32 [1].
        masks_NX: int32 [tiles, X], by expert the bits of a tile's tokens that have it.
        starts_NX: int32 [tiles, X], place in `pairs_P` of the expert's first pair of a tile.
        partials: float32, logits of parts of the inputs.
        arrived: int32, counters of programs, zero between launches.
    """

    experts_Tk: torch.Tensor
    weights_Tk: torch.Tensor
    shared_T: torch.Tensor
    pairs_P: torch.Tensor
    items_I3: torch.Tensor
    num_items: torch.Tensor
    masks_NX: torch.Tensor
    starts_NX: torch.Tensor
    partials: torch.Tensor
    arrived: torch.Tensor

    @staticmethod
    def num_words(num_tokens: int, routing: Routing) -> int:
        """Return the words of 32 bits of the memory."""
        return sum(aligned(rows * width) for rows, width in _shapes(num_tokens, routing))

    @classmethod
    def over(cls, words: torch.Tensor, num_tokens: int, routing: Routing, arrived: torch.Tensor) -> ExpertLists:
        """Return the lists of T tokens in `words`, float32, with `counters` of zeros."""
        views: list[torch.Tensor] = []
        start = 0
        for rows, width in _shapes(num_tokens, routing):
            views.append(words[start : start + rows * width].view(rows, width))
            start += aligned(rows * width)
        experts, weights, shared, pairs, items, num_items, masks, starts, partials = views
        return cls(
            experts.view(torch.int32),
            weights,
            shared.view(-1),
            pairs.view(torch.int32).view(-1),
            items.view(torch.int32),
            num_items.view(torch.int32).view(-1),
            masks.view(torch.int32),
            starts.view(torch.int32),
            partials.view(-1),
            arrived,
        )

    @staticmethod
    def counters(num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return counters of zero for up to T tokens: of tiles, and of each tile's parts."""
        tiles = max(
            cdiv(min(num_tokens, ONE_LAUNCH_TOKENS), TILE), cdiv(num_tokens, LARGE_TILE), _small_tiles(num_tokens)
        )
        return torch.zeros(1 + tiles, dtype=torch.int32, device=device)


def max_items(num_tokens: int, routing: Routing, block: int) -> int:
    """Return the most items of T tokens: each expert has one that is not full."""
    pairs = num_tokens * routing.num_pairs
    return min(pairs, routing.num_matrices) + pairs // block


def aligned(words: int) -> int:
    """Return the words up to the next address that kernels may take 16 bytes from, so that one kernel serves all T."""
    return cdiv(words, 4) * 4


def _small_tiles(num_tokens: int) -> int:
    """Return the most small tiles of a launch for up to so many tokens."""
    return cdiv(min(num_tokens, SMALL_TILES_TOKENS), SMALL_TILE)


def _shapes(num_tokens: int, routing: Routing) -> list[tuple[int, int]]:
    pairs, outputs = num_tokens * routing.num_pairs, aligned(routing.num_experts + 1)
    tiles = max(cdiv(num_tokens, TILE), _small_tiles(num_tokens))
    return [
        (num_tokens, routing.num_pairs),
        (num_tokens, routing.num_pairs),
        (1, num_tokens),
        (1, pairs),
        (max_items(num_tokens, routing, LEAST_BLOCK), 3),
        (1, 1),
        (tiles, routing.num_experts),
        (tiles, routing.num_experts),
        # A router without a gate has one output less, and may be in fewer parts of experts.
        (max(num_tokens, PROGRAMS * LARGE_TILE // cdiv(routing.num_experts, MOST_EXPERTS)), outputs),
    ]
