"""Parts of Triton kernels: few, fused launches over static memory (`triton_stream`).

A batch-invariant kernel set has neither that path nor products chosen by the number of rows. Every step runs the same
kernels, each of which computes a row independently of its position.

Shapes are those of `workspace`.
"""

from __future__ import annotations

import torch

from phonograph.kernels.fp8_activations import Rows
from phonograph.kernels.ranks import joint_norm_over_ranks
from phonograph.kernels.torch.layers import finish_logits
from phonograph.kernels.triton.attention.rope_and_kv_write import rope_and_write_kv
from phonograph.kernels.triton.elementwise import encoder_rows, layers
from phonograph.kernels.triton.elementwise.gate_heads import gate_heads
from phonograph.kernels.triton.elementwise.layer_embeddings import add_table, gate_embedding
from phonograph.kernels.triton.experts.row_products import takes_row
from phonograph.kernels.triton.gemm.bound_product import BoundProduct
from phonograph.models.heads.encoder_ends import InputWeights
from phonograph.models.layers.kernel_set import MixerPart, Step, Stream
from phonograph.models.layers.layer_embedding import LayerEmbeddingsWeights, LayerEmbeddingWeights
from phonograph.models.layers.linear import Linear
from phonograph.models.layers.part_weights import AttentionWeights, ExpertsWeights, FeatureWeights, FeedForwardWeights
from phonograph.models.layers.states.state_weights import StateWeights
from phonograph.models.layers.states.triton_states import TritonBeside, TritonStates
from phonograph.models.layers.triton_experts import ExpertKernels
from phonograph.models.layers.triton_stream import NormedInput, StreamKernels
from phonograph.models.layers.workspace import mixer_widths
from phonograph.models.quantization.block_embedding import Embedding

_FEW_TOKENS = 128


class TritonEmbedding:
    """Embeddings of tokens."""

    def __init__(self, kernels: StreamKernels, embedding_VE: torch.Tensor) -> None:
        self.then: TritonAttention | None = None
        self._kernels, self._embedding_VE = kernels, embedding_VE

    def __call__(self, input_ids_T: torch.Tensor) -> Stream:
        kernels, then = self._kernels, self.then
        assert then is not None
        hidden_TE = kernels.workspace.hidden_TE[: input_ids_T.shape[0]]
        stream, norm_E = Stream(hidden_TE), then.begin.norm_E
        factor = kernels.factors.of_embedding(hidden_TE.dtype)
        if kernels.ranks is not None or factor != 1 or norm_E is None:
            if kernels.ranks is None:
                layers.gather_rows(self._embedding_VE, input_ids_T, hidden_TE)
            else:
                first = kernels.ranks.rank * len(self._embedding_VE)
                layers.gather_part(self._embedding_VE, input_ids_T, first, hidden_TE)
                kernels.ranks.sum(hidden_TE)
            if factor != 1:
                hidden_TE.mul_(factor)
            return kernels.begin(stream, then.begin)
        normed = kernels.input_memory(then.begin.product, kernels.normed_memory(stream))
        layers.embed_and_norm(input_ids_T, self._embedding_VE, norm_E, kernels.eps, hidden_TE, normed)
        stream.normed = hidden_TE if then.begin.norms_inside(len(hidden_TE)) else normed
        return stream


class TritonInput:
    """Embeddings of tokens, their positions and their types."""

    def __init__(self, kernels: StreamKernels, embedding_VE: torch.Tensor, weights: InputWeights) -> None:
        self.then: TritonAttention | None = None
        self._kernels, self._embedding_VE, self._weights = kernels, embedding_VE, weights
        table = weights.positions_PE
        self._positions_PE = None if table is None else table[weights.spec.first_position :]

    def __call__(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> Stream:
        kernels, weights, then = self._kernels, self._weights, self.then
        assert then is not None
        hidden_TE = kernels.workspace.hidden_TE[: len(input_ids_T)]
        tables = self._embedding_VE, self._positions_PE, weights.token_types_XE
        encoder_rows.embed(input_ids_T, positions_T, *tables, weights.norm, kernels.eps, hidden_TE)
        return kernels.begin(Stream(hidden_TE), then.begin)


class TritonFeatures:
    """Features of a target beside embeddings of tokens. Its memory is beside the workspace."""

    def __init__(self, kernels: StreamKernels, weights: FeatureWeights) -> None:
        self.then: TritonAttention | None = None
        self._kernels, self._weights = kernels, weights
        self._join = None if weights.join is None else kernels.bind(weights.join)
        # [norm(embedding), norm(feature)] by rows, and one half of it at a time.
        self._both_T2E = torch.empty_like(kernels.workspace.hidden_TE).repeat(1, 2)
        self._half_TE = torch.empty_like(kernels.workspace.hidden_TE)
        self._features_TE = torch.empty_like(kernels.workspace.hidden_TE)
        sizes, half_TE = [size for _, size in weights.spec.state_norms], self._half_TE
        if len(sizes) > 1:
            # One normed state of several, and the rows of each one where the states of a token are rows.
            self._state_TS = half_TE.new_empty(len(half_TE), sizes[0])
            rows = torch.arange(len(half_TE) * len(sizes), device=half_TE.device)
            self._rows_of_states = rows.view(-1, len(sizes)).t().contiguous()

    def join(self, states_TF: torch.Tensor) -> torch.Tensor:
        kernels, norms, count = self._kernels, self._weights.state_norms, len(states_TF)
        if len(norms) == 1:
            layers.rms_norm(states_TF, norms[0], kernels.eps, states_TF)
        elif norms:
            states_XS, state_TS, parts = states_TF.view(-1, len(norms[0])), self._state_TS[:count], len(norms)
            for rows_T, norm_S, part_TS in zip(self._rows_of_states, norms, states_TF.chunk(parts, 1), strict=True):
                layers.gather_and_norm(states_XS, rows_T[:count], norm_S, kernels.eps, state_TS)
                part_TS.copy_(state_TS)
        if self._weights.spec.of_last_state:
            return states_TF
        assert self._join is not None
        features_TE = self._features_TE[:count]
        self._join.store(states_TF, features_TE)
        return features_TE

    def next_features(self, hidden_TE: torch.Tensor, rows_R: torch.Tensor | None, out_RE: torch.Tensor) -> None:
        self._kernels.take_rows(hidden_TE, rows_R, self._weights.output_norm, out_RE)

    def __call__(self, input_ids_T: torch.Tensor, features_TE: torch.Tensor) -> Stream:
        kernels, weights, count = self._kernels, self._weights, len(input_ids_T)
        hidden_TE, half_TE = kernels.workspace.hidden_TE[:count], self._half_TE[:count]
        both_T2E, size, embedding_VE = self._both_T2E[:count], hidden_TE.shape[1], weights.embedding_VE
        assert isinstance(embedding_VE, torch.Tensor)
        if weights.spec.joins_embedding:
            assert self._join is not None
            layers.gather_rows(embedding_VE, input_ids_T, both_T2E[:, :size])
            both_T2E[:, size:].copy_(features_TE)
            self._join.store(both_T2E, hidden_TE)
            return Stream(hidden_TE, normed=hidden_TE)
        layers.embed_and_norm(input_ids_T, embedding_VE, weights.embedding_norm, kernels.eps, hidden_TE, half_TE)
        both_T2E[:, :size].copy_(half_TE)
        layers.rms_norm(features_TE, weights.feature_norm, kernels.eps, half_TE)
        both_T2E[:, size:].copy_(half_TE)
        hidden_TE.copy_(half_TE if weights.spec.normed_stream else features_TE)
        return Stream(hidden_TE, normed=both_T2E)


class TritonAttention:
    """Attention of a layer."""

    def __init__(self, kernels: StreamKernels, weights: AttentionWeights) -> None:
        self.then: TritonFeedForward | TritonExperts | None = None
        self.begin = NormedInput(weights.input_norm, kernels.bind(weights.qkv))
        self._widths = mixer_widths(weights.spec)
        self._projected = weights.qkv.spec.num_outputs
        self._output = kernels.bind(weights.output)
        self._kernels, self._weights = kernels, weights
        rope = weights.spec.rope
        self._table_PX = None if rope is None else kernels.tables.tables[rope]

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels = self._kernels
        qkv_TF, attended_TF = kernels.workspace.attention_memory(len(stream.hidden_TE), self._widths)
        kernels.project(stream, self.begin, qkv_TF[:, : self._projected])
        self._attend(qkv_TF, attended_TF, step)
        if self._weights.spec.gated:
            gate_heads(attended_TF, qkv_TF, self._weights.spec.head_size)
        if step.rows_P is not None:
            stream, attended_TF = kernels.keep_rows(stream, attended_TF, step.rows_P, step.num_kept)
        then = None if self.then is None else self.then.begin
        return kernels.add(stream, attended_TF, self._output, self._weights.output_norm, then)

    def _attend(self, qkv_TF: torch.Tensor, out_TF: torch.Tensor, step: Step) -> None:
        """Norm and rotate query and key heads, and attend into [T, H * D]."""
        kernels, weights, spec, num_tokens = self._kernels, self._weights, self._weights.spec, len(qkv_TF)
        target = step.attend.kv_target(weights.layer, num_tokens)
        head_norms = weights.head_norms
        if spec.joint_norms and head_norms is not None and kernels.ranks is not None:
            counts = spec.num_query_heads, spec.num_key_heads
            heads_TXD = qkv_TF[:, : sum(counts) * spec.head_size].unflatten(1, (-1, spec.head_size))
            pairs = [*zip(heads_TXD.split(counts, 1), head_norms.split(counts), strict=True)]
            heads_TXD.copy_(joint_norm_over_ranks(pairs, kernels.eps, kernels.ranks))
            head_norms = None
        elif spec.joint_norms and head_norms is not None:
            layers.norm_queries_and_keys(qkv_TF, head_norms, spec.num_query_heads, kernels.eps)
            head_norms = None
        rope_and_write_kv(
            qkv_TF,
            step.rotary,
            self._table_PX,
            target.kv_cache,
            target.slot_mapping,
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_key_heads,
            qk_norm=head_norms,
            eps=kernels.eps,
            value_norms=spec.value_norms,
            keys_are_values=spec.keys_are_values,
            gated=spec.gated,
            pairs_in_halves=spec.rope is not None and spec.rope.distance > 0,
            k_scale=target.k_scale,
            v_scale=target.v_scale,
            clear_TF=None if target.clears_padding else out_TF,
            batch_invariant=kernels.batch_invariant,
        )
        # Other views of one row lose the stride between rows, for which kernels are compiled.
        q_THD = qkv_TF.as_strided(
            (num_tokens, spec.num_query_heads, spec.head_size),
            (qkv_TF.stride(0), spec.head_size, 1),
            qkv_TF.storage_offset() + (self._projected if spec.gated else 0),
        )
        step.attend.read(q_THD, weights.layer, out_TF.unflatten(-1, (-1, spec.head_size)))


class TritonFeedForward:
    """Dense feed-forward of a layer."""

    def __init__(self, kernels: StreamKernels, weights: FeedForwardWeights) -> None:
        self.then: TritonAttention | TritonLayerEmbedding | None = None
        self.begin = NormedInput(weights.input_norm, kernels.bind(weights.gate_up, weights.spec.activation))
        self._down = kernels.bind(weights.down)
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream) -> Stream:
        kernels, num_rows = self._kernels, len(stream.hidden_TE)
        width, weights = self._weights.spec.down.num_inputs, self._weights
        then = None if self.then is None else self.then.begin
        if not weights.gate_up.spec.gated:
            x_TX = kernels.workspace.shared[: num_rows * weights.gate_up.spec.num_outputs].view(num_rows, -1)
            kernels.project(stream, self.begin, x_TX)
            inner_TI = x_TX[:, :width]
            encoder_rows.activate(x_TX, inner_TI, weights.spec.activation)
            return kernels.add(stream, inner_TI, self._down, weights.output_norm, then, weights.scalar)
        # Layers may differ in width; the activation replaces the gates.
        gate_up_T2I = kernels.workspace.shared[: num_rows * 2 * width].view(num_rows, 2 * width)
        inner_TI = gate_up_T2I[:, :width]
        inner: Rows = inner_TI
        assert self.begin.product is not None
        if self.begin.product.plan(num_rows).gates_apart:
            kernels.project(stream, self.begin, gate_up_T2I)
            inner = kernels.input_memory(self._down, inner_TI)
            layers.ACTIVATIONS[self._weights.spec.activation](gate_up_T2I, inner)
        else:
            kernels.project(stream, self.begin, inner_TI)
        return kernels.add(stream, inner, self._down, weights.output_norm, then, weights.scalar)


class TritonExperts:
    """Experts of a layer, and its shared expert."""

    def __init__(self, kernels: StreamKernels, weights: ExpertsWeights, load_X: torch.Tensor | None) -> None:
        self.then: TritonAttention | TritonLayerEmbedding | None = None
        self.begin = NormedInput(weights.input_norm, None, norms_one_row=weights.router_norm is None)
        self._kernels, self._weights = kernels, weights
        apart = weights.shared if weights.joint is None else None
        shared = apart and (kernels.bind(apart.gate_up, apart.spec.activation), kernels.bind(apart.down))
        self._experts = ExpertKernels(weights, kernels.workspace, shared, kernels.eps, load_X, kernels.ranks)
        alone = (apart, weights.sum_norm, weights.output_norm, weights.scalar) == (None,) * 4
        self._partial = weights.down.spec.partial
        num_pairs = weights.spec.gpu_routing.num_pairs
        plain = weights.gate_up.spec.gated and takes_row(weights.down.weight.operand, num_pairs)
        self._adds_row = alone and not self._partial and plain

    def __call__(self, stream: Stream) -> Stream:
        kernels, weights, hidden_TE = self._kernels, self._weights, stream.hidden_TE
        then = None if self.then is None else self.then.begin
        norm = None
        if self.begin.norm_E is not None and self.begin.norms_inside(len(hidden_TE)):
            norm = self.begin.norm_E, kernels.eps, kernels.normed_memory(stream)
            if self._adds_row:
                self._experts.add_row(hidden_TE, norm, stream.num_rows, kernels.factors.residual)
                return kernels.begin(stream, then)
        self._experts.run(hidden_TE, stream.normed, stream.num_rows, norm)
        joins = weights.sum_norm is not None
        if not joins and (self._partial or weights.output_norm is not None or weights.scalar is not None):
            added_TE = kernels.normed_memory(stream)
            self._experts.add(added_TE, stream.num_rows, added=False)
            kernels.sum_ranks(added_TE, partial=self._partial)
            return kernels.begin(stream, then, added_TE, weights.output_norm, kernels.factors.residual, weights.scalar)
        normed = kernels.fused_norm(stream, then)
        if joins:
            sums_TE = kernels.normed_memory(stream)
            self._experts.join(hidden_TE, sums_TE, stream.num_rows, factor=kernels.factors.residual, norm=normed)
        else:
            self._experts.add(hidden_TE, stream.num_rows, factor=kernels.factors.residual, norm=normed)
        if normed is None:
            return kernels.begin(stream, then)
        stream.norm, stream.normed = None, normed[2]
        return stream


class TritonLayerEmbedding:
    """Embedding of a token in a layer."""

    def __init__(self, kernels: StreamKernels, weights: LayerEmbeddingWeights) -> None:
        self.then: TritonAttention | None = None
        self.begin = NormedInput(None, kernels.bind(weights.gate))
        self._output = kernels.bind(weights.output)
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels, weights, num_rows = self._kernels, self._weights, len(stream.hidden_TE)
        assert step.embeddings_TX is not None
        size = weights.gate.spec.num_outputs
        gate_TP = kernels.workspace.shared[: num_rows * size].view(num_rows, size)
        kernels.project(stream, self.begin, gate_TP)
        gate_embedding(gate_TP, step.embeddings_TX, weights.layer, step.rows_P)
        then = None if self.then is None else self.then.begin
        return kernels.add(stream, gate_TP, self._output, weights.output_norm, then, weights.scalar)


class TritonLayerEmbeddings:
    """Embeddings of tokens in all layers."""

    def __init__(self, kernels: StreamKernels, weights: LayerEmbeddingsWeights) -> None:
        self._kernels, self._weights, self._factors = kernels, weights, weights.factors()
        self._projection = kernels.bind(weights.projection)

    def __call__(self, input_ids_T: torch.Tensor, stream: Stream) -> torch.Tensor:
        kernels, weights = self._kernels, self._weights
        embeddings_TX = kernels.workspace.embeddings_TX[: len(input_ids_T)]
        self._projection.store(stream.hidden_TE, embeddings_TX)
        add_table(embeddings_TX, input_ids_T, weights.table_VX, weights.norm_P, kernels.eps, self._factors)
        return embeddings_TX


class TritonHead:
    """Final norm and logits."""

    def __init__(self, kernels: StreamKernels, norm_E: torch.Tensor | None, product: BoundProduct) -> None:
        self._kernels, self._norm_E, self._product = kernels, norm_E, product

    def __call__(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        kernels, num_logits = self._kernels, (hidden_TE if rows_N is None else rows_N).shape[0]
        rows_NE, logits_NP = kernels.workspace.rows_NE[:num_logits], kernels.workspace.parts_NP[:num_logits]
        kernels.take_rows(hidden_TE, rows_N, self._norm_E, rows_NE)
        self._product.store(rows_NE, logits_NP)
        finish_logits(logits_NP, kernels.factors.logits, kernels.factors.softcap)
        return kernels.gathered(logits_NP, kernels.workspace.logits_NV[:num_logits])


class TritonKernels(StreamKernels):
    """Kernel set of Triton kernels, on a CUDA device. Its arguments are those of `StreamKernels`."""

    def rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the positions: the kernel reads the tables itself."""
        return positions_T

    def embedding(self, embedding_VE: Embedding) -> TritonEmbedding:
        assert isinstance(embedding_VE, torch.Tensor)
        return TritonEmbedding(self, embedding_VE)

    def input(self, embedding_VE: Embedding, weights: InputWeights) -> TritonInput:
        assert isinstance(embedding_VE, torch.Tensor)
        return TritonInput(self, embedding_VE, weights)

    def features(self, weights: FeatureWeights) -> TritonFeatures:
        return TritonFeatures(self, weights)

    def attention(self, weights: AttentionWeights) -> TritonAttention:
        return TritonAttention(self, weights)

    def states(self, weights: StateWeights) -> MixerPart:
        return TritonStates(self, weights)

    def beside(self, attention: AttentionWeights, states: StateWeights) -> MixerPart:
        return TritonBeside(self, self.attention(attention), states)

    def feed_forward(self, weights: FeedForwardWeights) -> TritonFeedForward:
        return TritonFeedForward(self, weights)

    def experts(self, weights: ExpertsWeights, load_X: torch.Tensor | None = None) -> TritonExperts:
        return TritonExperts(self, weights, load_X)

    def layer_embedding(self, weights: LayerEmbeddingWeights) -> TritonLayerEmbedding:
        return TritonLayerEmbedding(self, weights)

    def layer_embeddings(self, weights: LayerEmbeddingsWeights) -> TritonLayerEmbeddings:
        return TritonLayerEmbeddings(self, weights)

    def head(self, norm_E: torch.Tensor | None, linear: Linear) -> TritonHead:
        return TritonHead(self, norm_E, self.bind(linear))

    def leaves_rows_out(self, num_tokens: int, num_kept: int) -> bool:
        """Return True if the last layer computes only the rows that need logits.

        It then always computes as many rows as there can be, so that all such steps run the same kernels. This only
        pays if these are at most half the tokens, and if there are enough tokens that products are not limited by
        reading the weights.
        """
        return not self.batch_invariant and num_tokens > _FEW_TOKENS and num_tokens >= 2 * num_kept
