"""Parts of torch's operators, for CPUs and as the reference for others. Norms are computed at once.

They call few operators, because each costs two to four microseconds at the tape's replay.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional

from phonograph.core.token_types import ID_MASK, TYPE_SHIFT
from phonograph.kernels.ranks import Ranks, embed_over_ranks, gather_ranks, joint_norm_over_ranks, sum_ranks
from phonograph.kernels.torch.layers import (
    ACTIVATIONS,
    UNGATED,
    finish_logits,
    layer_norm,
    pool_rows,
    rms_norm,
    rope,
)
from phonograph.models.heads.encoder_ends import InputWeights
from phonograph.models.layer_spec import NO_FACTORS, PLAIN_NORMS, Factors, NormKind, RopeTable
from phonograph.models.layers.experts import Experts
from phonograph.models.layers.kernel_set import MixerPart, Step, Stream
from phonograph.models.layers.layer_embedding import LayerEmbeddingsWeights, LayerEmbeddingWeights
from phonograph.models.layers.linear import Linear
from phonograph.models.layers.part_weights import AttentionWeights, ExpertsWeights, FeatureWeights, FeedForwardWeights
from phonograph.models.layers.rotary import RotaryTables
from phonograph.models.layers.states.state_weights import StateWeights
from phonograph.models.layers.states.torch_states import TorchBeside, TorchStates
from phonograph.models.quantization.block_embedding import BlockEmbedding, Embedding


class Rotary(NamedTuple):
    """Cosines and sines of each token's angles, and the scale of its queries or None, in the model's dtype."""

    cos_T11h: torch.Tensor
    sin_T1h: torch.Tensor
    query_scale_T11: torch.Tensor | None


class TorchKernels:
    """Kernel set of torch's operators, which allocate their results.

    Args:
        rotary: tables of the ropes, in the model's dtype.
        eps: epsilon of the norms.
        factors: of the model.
        norms: arithmetic of its norms.
        max_num_tokens: tokens of the largest step of a model that pools.
        ranks: ranks that have a part of the model each; None for a whole model.
        vocab_size: tokens of the whole vocabulary, with `ranks`.
    """

    def __init__(
        self,
        rotary: RotaryTables,
        eps: float,
        factors: Factors = NO_FACTORS,
        norms: NormKind = PLAIN_NORMS,
        max_num_tokens: int = 0,
        ranks: Ranks | None = None,
        vocab_size: int = 0,
    ) -> None:
        self.tables = rotary
        self.ranks, self.vocab_size = ranks, vocab_size
        self.eps = torch.tensor(eps, dtype=torch.float32, device=rotary.device)
        self.factors, self.norms, self._layer_norm_eps = factors, norms, eps
        self._numbers_T = torch.arange(max_num_tokens, dtype=torch.int32, device=rotary.device)

    def rotary(self, positions_T: torch.Tensor) -> list[Rotary]:
        return [self._rotary(rope, table_PX, positions_T) for rope, table_PX in self.tables.tables.items()]

    @staticmethod
    def _rotary(rope: RopeTable, table_PX: torch.Tensor, positions_T: torch.Tensor) -> Rotary:
        rows = torch.index_select(table_PX, 0, positions_T)
        pairs = len(rope.frequencies)
        cos_Th, sin_Th = rows[:, : 2 * pairs].chunk(2, -1) if rope.query_beta else rows.chunk(2, -1)
        if rope.distance:
            # Pairs between the rotated ones and half a head have an angle of 0.
            others = rope.distance - pairs
            cos_Th, sin_Th = functional.pad(cos_Th, (0, others), value=1.0), functional.pad(sin_Th, (0, others))
        scale_T11 = rows[:, -1, None, None] if rope.query_beta else None
        return Rotary(cos_Th[:, None, None], sin_Th[:, None], scale_T11)

    def embedding(self, embedding_VE: Embedding) -> TorchEmbedding:
        return TorchEmbedding(embedding_VE, self.factors.of_embedding(embedding_VE.dtype), self.ranks)

    def input(self, embedding_VE: Embedding, weights: InputWeights) -> TorchInput:
        return TorchInput(self, embedding_VE, weights)

    def features(self, weights: FeatureWeights) -> TorchFeatures:
        return TorchFeatures(self, weights)

    def attention(self, weights: AttentionWeights) -> TorchAttention:
        return TorchAttention(self, weights)

    def states(self, weights: StateWeights) -> MixerPart:
        return TorchStates(self, weights)

    def beside(self, attention: AttentionWeights, states: StateWeights) -> MixerPart:
        return TorchBeside(self, self.attention(attention), states)

    def feed_forward(self, weights: FeedForwardWeights) -> TorchFeedForward:
        return TorchFeedForward(self, weights)

    def experts(self, weights: ExpertsWeights, load_X: torch.Tensor | None = None) -> TorchExperts:
        return TorchExperts(self, weights, load_X)

    def layer_embedding(self, weights: LayerEmbeddingWeights) -> TorchLayerEmbedding:
        return TorchLayerEmbedding(self, weights)

    def layer_embeddings(self, weights: LayerEmbeddingsWeights) -> TorchLayerEmbeddings:
        return TorchLayerEmbeddings(self, weights)

    def head(self, norm_E: torch.Tensor | None, linear: Linear) -> TorchHead:
        return TorchHead(self, norm_E, linear)

    def leaves_rows_out(self, num_tokens: int, num_kept: int) -> bool:
        """Return False: a graph's padding rows would compute the last layer again for rows that it saves."""
        return False

    def normed(self, hidden_TE: torch.Tensor, norm_E: torch.Tensor | None) -> torch.Tensor:
        """Return the rows, normed if there is a norm."""
        if norm_E is None:
            return hidden_TE
        if self.norms.layer:
            return layer_norm(hidden_TE, norm_E, self._layer_norm_eps)
        return rms_norm(hidden_TE, norm_E, self.eps)

    def pool(
        self, hidden_TE: torch.Tensor, norm_E: torch.Tensor | None, query_start_loc: torch.Tensor | None, pooling: str
    ) -> torch.Tensor:
        """Return the normed rows of all tokens, or a row of each prompt; see `KernelSet.pool`."""
        rows_TE = self.normed(hidden_TE, norm_E)
        if query_start_loc is None or pooling == "all":
            return rows_TE.float()
        return pool_rows(rows_TE, query_start_loc, self._numbers_T[: len(rows_TE)], pooling)

    def keep_pooled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows as they are."""
        return rows

    def summed(self, product_TE: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Return a product, summed over the ranks if each has a part of its inputs."""
        if not linear.spec.partial:
            return product_TE
        assert self.ranks is not None
        return sum_ranks(product_TE, self.ranks)

    def gathered(self, logits_NP: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of the whole vocabulary, on rank 0; the others have their part."""
        return logits_NP if self.ranks is None else gather_ranks(logits_NP, self.vocab_size, self.ranks)

    def add(
        self,
        stream: Stream,
        x: torch.Tensor,
        linear: Linear,
        norm_E: torch.Tensor | None,
        scalar: torch.Tensor | None = None,
    ) -> Stream:
        """Add a product, normed if there is a norm, to the stream, and multiply the sum by the scalar."""
        if self.norms.after_sum:
            linear.add_product(x, stream.hidden_TE)
            stream.hidden_TE = self.normed(stream.hidden_TE, norm_E)
        elif norm_E is None and self.factors.residual == 1 and not linear.spec.partial:
            linear.add_product(x, stream.hidden_TE)
        else:
            added_TE = self.summed(linear.product(x), linear)
            stream.hidden_TE.add_(self.normed(added_TE, norm_E), alpha=self.factors.residual)
        if scalar is not None:
            stream.hidden_TE.mul_(scalar)
        return stream


class TorchEmbedding:
    """Embeddings of tokens, from numbers or from the blocks of a GGUF file. Each rank may have some tokens."""

    def __init__(self, embedding_VE: Embedding, factor: float, ranks: Ranks | None = None) -> None:
        self.then: object = None
        self._embedding_VE = embedding_VE
        self._factor = factor
        self._ranks = ranks

    def __call__(self, input_ids_T: torch.Tensor) -> Stream:
        if self._ranks is None:
            hidden_TE = _embedded(input_ids_T, self._embedding_VE)
        else:
            assert isinstance(self._embedding_VE, torch.Tensor), "ranks have no blocks of GGUF files"
            hidden_TE = embed_over_ranks(input_ids_T, self._embedding_VE, self._ranks)
        return Stream(hidden_TE if self._factor == 1 else hidden_TE.mul_(self._factor))


def _embedded(input_ids_T: torch.Tensor, embedding_VE: Embedding) -> torch.Tensor:
    """Return the embeddings of tokens [T, E], in new memory."""
    if isinstance(embedding_VE, BlockEmbedding):
        return embedding_VE.lookup(input_ids_T)
    return functional.embedding(input_ids_T, embedding_VE)


class TorchInput:
    """Embeddings of tokens, their positions and their types."""

    def __init__(self, kernels: TorchKernels, embedding_VE: Embedding, weights: InputWeights) -> None:
        self.then: object = None
        self._kernels, self._embedding_VE, self._weights = kernels, embedding_VE, weights

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> Stream:
        weights = self._weights
        hidden_TE = _embedded(input_ids_T & ID_MASK if weights.spec.token_types else input_ids_T, self._embedding_VE)
        if weights.token_types_XE is not None:
            hidden_TE.add_(functional.embedding(input_ids_T >> TYPE_SHIFT, weights.token_types_XE))
        if weights.positions_PE is not None:
            hidden_TE.add_(functional.embedding(positions_T, weights.positions_PE[weights.spec.first_position :]))
        return Stream(self._kernels.normed(hidden_TE, weights.norm))


class TorchFeatures:
    """Features of a target beside embeddings of tokens."""

    def __init__(self, kernels: TorchKernels, weights: FeatureWeights) -> None:
        self.then: object = None
        self._kernels, self._weights = kernels, weights

    def join(self, states_TF: torch.Tensor) -> torch.Tensor:
        weights, norms = self._weights, self._weights.state_norms
        if norms:
            parts = states_TF.chunk(len(norms), -1)
            states_TF = torch.cat([self._kernels.normed(*pair) for pair in zip(parts, norms, strict=True)], -1)
        if weights.spec.of_last_state:
            return states_TF
        assert weights.join is not None
        return weights.join.product(states_TF)

    def next_features(self, hidden_TE: torch.Tensor, rows_R: torch.Tensor | None, out_RE: torch.Tensor) -> None:
        hidden_RE = hidden_TE if rows_R is None else hidden_TE.index_select(0, rows_R)
        out_RE.copy_(self._kernels.normed(hidden_RE, self._weights.output_norm))

    def __call__(self, input_ids_T: torch.Tensor, features_TE: torch.Tensor) -> Stream:
        kernels, weights = self._kernels, self._weights
        embedded_TE = _embedded(input_ids_T, weights.embedding_VE)
        if weights.spec.joins_embedding:
            assert weights.join is not None
            return Stream(weights.join.product(torch.cat([embedded_TE, features_TE], -1)))
        normed_TE = kernels.normed(features_TE, weights.feature_norm)
        both_T2E = torch.cat([kernels.normed(embedded_TE, weights.embedding_norm), normed_TE], -1)
        return Stream(normed_TE if weights.spec.normed_stream else features_TE.clone(), normed=both_T2E)


class TorchAttention:
    """Attention of a layer."""

    def __init__(self, kernels: TorchKernels, weights: AttentionWeights) -> None:
        self.then: object = None
        self._kernels, self._weights = kernels, weights
        self._table = kernels.tables.number(weights.spec.rope)

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, spec = self._kernels, self._weights, self._weights.spec
        num_query_heads = spec.num_query_heads
        rows = stream.hidden_TE if stream.normed is None else stream.normed
        stream.normed = None
        qkv_TF = weights.qkv.product(kernels.normed(rows, weights.input_norm))
        qkv_TXD = qkv_TF.unflatten(-1, (-1, spec.head_size))
        num_key_heads, gate_THD = spec.num_key_heads, None
        if spec.gated:
            gate_THD = qkv_TXD[:, 1 : 2 * num_query_heads : 2]
            qkv_TXD = torch.cat([qkv_TXD[:, : 2 * num_query_heads : 2], qkv_TXD[:, 2 * num_query_heads :]], 1)
        qk_TXD = qkv_TXD[:, : num_query_heads + num_key_heads]
        v_TKD = qkv_TXD[:, -num_key_heads:] if num_key_heads else None
        if v_TKD is not None and spec.value_norms:
            v_TKD = rms_norm(v_TKD, None, kernels.eps)
        if weights.head_norms is not None:
            qk_TXD = self._normed(qk_TXD, weights.head_norms)
        rotary: Rotary | None = None if self._table is None else step.rotary[self._table]
        if rotary is not None:
            qk_TXD = rope(qk_TXD, rotary.cos_T11h, rotary.sin_T1h)
        q_THD, k_TKD = qk_TXD[:, :num_query_heads], qk_TXD[:, num_query_heads:] if num_key_heads else None
        if rotary is not None and rotary.query_scale_T11 is not None:
            q_THD = torch.mul(q_THD, rotary.query_scale_T11)
        out_THD = step.attend(q_THD, k_TKD, v_TKD, weights.layer)
        if gate_THD is not None:
            out_THD.mul_(gate_THD.sigmoid())
        attended_TF = out_THD.view(out_THD.shape[0], -1)
        if step.rows_P is not None:
            stream = Stream(stream.hidden_TE.index_select(0, step.rows_P), num_rows=step.num_kept)
            attended_TF = attended_TF.index_select(0, step.rows_P)
        return kernels.add(stream, attended_TF, weights.output, weights.output_norm)

    def _normed(self, qk_TXD: torch.Tensor, weights_XD: torch.Tensor) -> torch.Tensor:
        """Return the normed queries and keys."""
        spec, eps = self._weights.spec, self._kernels.eps
        if not spec.joint_norms:
            return rms_norm(qk_TXD, weights_XD, eps)
        counts = [spec.num_query_heads, spec.num_key_heads]
        pairs = [*zip(qk_TXD.split(counts, 1), weights_XD.split(counts), strict=True)]
        if self._kernels.ranks is not None:
            return joint_norm_over_ranks(pairs, eps, self._kernels.ranks)
        normed = (
            rms_norm(x_TXD.flatten(1), weight_XD.view(-1), eps).unflatten(1, (-1, spec.head_size))
            for x_TXD, weight_XD in pairs
        )
        return torch.cat(list(normed), 1)


class TorchFeedForward:
    """Dense feed-forward of a layer."""

    def __init__(self, kernels: TorchKernels, weights: FeedForwardWeights) -> None:
        self.then: object = None
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream) -> Stream:
        kernels, weights = self._kernels, self._weights
        inner_TI = _activated(weights, kernels.normed(stream.hidden_TE, weights.input_norm))
        return kernels.add(stream, inner_TI, weights.down, weights.output_norm, weights.scalar)


def _activated(weights: FeedForwardWeights, x_TE: torch.Tensor) -> torch.Tensor:
    """Return the input of the last product of a feed-forward."""
    activations = ACTIVATIONS if weights.gated else UNGATED
    return activations[weights.spec.activation](weights.gate_up.product(x_TE))


class TorchExperts:
    """Experts of a layer, and its shared expert."""

    def __init__(self, kernels: TorchKernels, weights: ExpertsWeights, load_X: torch.Tensor | None) -> None:
        self.then: object = None
        self._kernels, self._weights, self._experts = kernels, weights, Experts(weights, load_X)

    def __call__(self, stream: Stream) -> Stream:
        kernels, weights, spec = self._kernels, self._weights, self._weights.spec
        hidden_TE, shared = stream.hidden_TE, weights.shared
        normed_TE = kernels.normed(hidden_TE, weights.input_norm)
        own_TE = normed_TE if weights.router_norm is None else kernels.normed(hidden_TE, weights.router_norm)
        logits_TX = weights.router.product(own_TE)
        added_TE = kernels.summed(self._experts(normed_TE, logits_TX, stream.num_rows), weights.down)
        added_TE = kernels.normed(added_TE, weights.sum_norm)
        if shared is not None:
            own_TE = normed_TE if shared.input_norm is None else kernels.normed(hidden_TE, shared.input_norm)
            inner_TI = _activated(shared, own_TE)
            shared_TE = kernels.normed(kernels.summed(shared.down.product(inner_TI), shared.down), shared.output_norm)
            if spec.shared_gate:
                shared_TE.mul_(logits_TX[:, spec.routing.num_experts :].sigmoid())
            added_TE.add_(shared_TE)
        hidden_TE.add_(kernels.normed(added_TE, weights.output_norm), alpha=kernels.factors.residual)
        if weights.scalar is not None:
            hidden_TE.mul_(weights.scalar)
        return stream


class TorchLayerEmbedding:
    """Embedding of a token in a layer."""

    def __init__(self, kernels: TorchKernels, weights: LayerEmbeddingWeights) -> None:
        self.then: object = None
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights = self._kernels, self._weights
        assert step.embeddings_TX is not None
        size = weights.gate.spec.num_outputs
        embedding_TP = step.embeddings_TX[:, weights.layer * size : (weights.layer + 1) * size]
        if step.rows_P is not None:
            embedding_TP = embedding_TP.index_select(0, step.rows_P)
        gate_TP = functional.gelu(weights.gate.product(stream.hidden_TE), approximate="tanh").mul_(embedding_TP)
        return kernels.add(stream, gate_TP, weights.output, weights.output_norm, weights.scalar)


class TorchLayerEmbeddings:
    """Embeddings of tokens in all layers."""

    def __init__(self, kernels: TorchKernels, weights: LayerEmbeddingsWeights) -> None:
        self._kernels, self._weights = kernels, weights
        self._factors = weights.factors()

    def __call__(self, input_ids_T: torch.Tensor, stream: Stream) -> torch.Tensor:
        weights, factors = self._weights, self._factors
        projected_TX = weights.projection.product(stream.hidden_TE).mul_(factors.projected)
        normed_TLP = rms_norm(projected_TX.unflatten(-1, (-1, weights.spec.size)), weights.norm_P, self._kernels.eps)
        found_TX = functional.embedding(input_ids_T, weights.table_VX).mul_(factors.found)
        return found_TX.add_(normed_TLP.flatten(1)).mul_(factors.both)


class TorchHead:
    """Final norm and logits."""

    def __init__(self, kernels: TorchKernels, norm_E: torch.Tensor | None, linear: Linear) -> None:
        self._kernels, self._norm_E, self._linear = kernels, norm_E, linear

    def __call__(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        hidden_NE = hidden_TE if rows_N is None else hidden_TE.index_select(0, rows_N)
        logits_NP = self._linear.product(self._kernels.normed(hidden_NE, self._norm_E))
        factors = self._kernels.factors
        return self._kernels.gathered(finish_logits(logits_NP, factors.logits, factors.softcap))
