"""Embedding, matrix of logits and final norm that a draft head does not own, and takes of its target.

Each rank of tensor parallelism has a part of the embedding and of the matrix of logits. The head runs on rank 0 alone.
It has copies there in the model's type, which are gathered when all ranks have loaded their weights.

Shapes: E hidden size, V vocabulary, P the part of the vocabulary that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from phonograph.kernels.ranks import Ranks
from phonograph.models.heads.feature_input import FeatureInput
from phonograph.models.layers.linear import Linear, WeightAllocator
from phonograph.models.quantization.block_embedding import BlockEmbedding
from phonograph.models.quantization.unquantized import DenseWeight
from phonograph.models.spec import ModelSpec
from phonograph.models.transformer import Transformer

_ROWS = 16
"""Rows of a matrix [E, P] that are gathered at a time: few, which bounds the memory, and a tile of products of FP8."""


def num_copied(features: FeatureInput, target: ModelSpec) -> int:
    """Return the numbers in the copies of a head on rank 0."""
    return sum(_copied(features, target)) * target.vocab_size * target.hidden_size


def share(head: Transformer, target: Transformer) -> None:
    """Give a head what it does not own. Call it before `Transformer.bind`.

    Args:
        head: the head.
        target: its target, or the part of rank 0; `gather_shared` then writes the contents.
    """
    assert head.features is not None
    spec, sizes = head.features.spec, (target.spec.vocab_size, target.spec.hidden_size)
    is_part = target.spec.head.num_outputs < target.spec.vocab_size
    allocate, copies = WeightAllocator(head.dtype, head.device), _copied(spec, target.spec)
    if not spec.owns_head:
        head.lm_head = target.lm_head
        if is_part:
            whole = head.spec.head.with_schemes(lambda _: None)
            head.lm_head = Linear(whole, DenseWeight(allocate.matrix(*reversed(sizes))))
            head.gathered.append(head.lm_head.matrix)
    if not spec.owns_embedding:
        embedding_VE = target.embedding_VE
        if is_part:
            embedding_VE = allocate.tensor(*sizes) if copies[0] else head.lm_head.matrix.t()
            head.gathered.append(embedding_VE)
        head.embedding_VE = head.features.embedding_VE = embedding_VE
    if spec.of_last_state:
        assert target.final_norm is not None
        head.features.state_norms = [target.final_norm]


@torch.inference_mode()
def gather_shared(features: FeatureInput, target: Transformer, ranks: Ranks, head: Transformer | None = None) -> None:
    """Bring the parts of all ranks together in the copies of a head. Each rank calls it.

    Args:
        features: input of the head.
        target: part of this rank, with its weights.
        ranks: connection with the others.
        head: the head, on rank 0.
    """
    size, (of_embedding, of_head) = target.spec.hidden_size, _copied(features, target.spec)
    if of_embedding:
        part_PE, whole_VE = target.embedding_VE, None if head is None else head.embedding_VE
        assert isinstance(part_PE, torch.Tensor), "ranks have no blocks of GGUF files"
        assert not isinstance(whole_VE, BlockEmbedding)
        _gather(part_PE.t().__getitem__, size, None if whole_VE is None else whole_VE.t(), ranks)
    if of_head:
        linear, whole_EV = target.lm_head, None if head is None else head.lm_head.matrix

        def dequantized(rows: slice) -> torch.Tensor:
            """Return rows of a matrix in another format: its products with rows of the identity."""
            places = torch.arange(size, device=target.device)[rows]
            return linear.product(functional.one_hot(places, size).to(target.dtype))

        rows_of = linear.matrix.__getitem__ if linear.spec.scheme is None else dequantized
        _gather(rows_of, size, whole_EV, ranks)
    if target.device.type == "cuda":
        # Steps run on other streams.
        torch.cuda.synchronize(target.device)


def _gather(rows_of: Callable[[slice], torch.Tensor], size: int, whole_EV: torch.Tensor | None, ranks: Ranks) -> None:
    for first in range(0, size, _ROWS):
        rows = slice(first, first + _ROWS)
        ranks.gather(rows_of(rows).contiguous(), None if whole_EV is None else whole_EV[rows])


def _copied(features: FeatureInput, target: ModelSpec) -> tuple[bool, bool]:
    """Return True for the embedding and for the matrix of logits, if there is a copy of it; tied ones are one."""
    tied = target.tie_word_embeddings and target.head.scheme is None
    return not features.owns_embedding and (features.owns_head or not tied), not features.owns_head
