"""Parts of Triton kernels: few, fused launches over static memory.

Nothing is allocated. Every intermediate is a slice of one workspace for the largest step, so that all graphs share it
and its size is known in advance. A step of one token is limited by reading the weights once: its norms, activation and
residual additions are inside the matrix products.

A batch-invariant kernel set has neither that path nor products chosen by the number of rows. Every step runs the same
kernels, each of which computes a row independently of its position.

Shapes are those of `workspace`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.fp8_activations import Rows
from phonograph.kernels.triton.attention.rope_and_kv_write import rope_and_write_kv
from phonograph.kernels.triton.elementwise import layers
from phonograph.kernels.triton.gemm.bound_product import BoundProduct
from phonograph.kernels.triton.gemm.product import DeferredNorm, NextNorm, Norm
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.kernels.triton.gemm.run_product import GemmScratch
from phonograph.models.layer_spec import NO_FACTORS, Activation, Factors
from phonograph.models.layers.finish_logits import finish_logits
from phonograph.models.layers.kernel_set import Step, Stream
from phonograph.models.layers.linear import Linear
from phonograph.models.layers.part_weights import AttentionWeights, ExpertsWeights, FeedForwardWeights
from phonograph.models.layers.rotary import RotaryTables
from phonograph.models.layers.triton_experts import ExpertKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.quantization.block_embedding import Embedding

_FEW_TOKENS = 128
_ACTIVATIONS = {"silu": layers.silu_and_mul, "gelu_tanh": layers.gelu_tanh_and_mul}


class NormedInput(NamedTuple):
    """Beginning of a part: the norm of the stream, or None, and the product that reads the normed rows.

    Without a product, the part reads rows in the model's type, normed before.
    """

    norm_E: torch.Tensor | None
    product: BoundProduct | None

    def norms_inside(self, num_rows: int) -> bool:
        """Return True if the product norms its rows itself."""
        return self.product is not None and self.product.plan(num_rows).norms_inside


class TritonKernels:
    """Kernel set of Triton kernels, on a CUDA device.

    Args:
        workspace: intermediates of the largest step.
        rotary: tables of the ropes, float32.
        eps: epsilon of the norms.
        device: GPU that products are planned for.
        factors: of the model.
        batch_invariant: make each token's result independent, bit by bit, of other tokens; 16-bit weights only.
    """

    def __init__(
        self,
        workspace: Workspace,
        rotary: RotaryTables,
        eps: float,
        *,
        device: GemmDevice,
        factors: Factors = NO_FACTORS,
        batch_invariant: bool = False,
    ) -> None:
        self.workspace, self.tables, self.eps, self.factors = workspace, rotary, eps, factors
        self.batch_invariant = batch_invariant
        self._device = device
        self._scratch = GemmScratch.make(rotary.device)._replace(
            dequantized=workspace.dequantized, scaled=workspace.scaled_scratch()
        )

    def rotary(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the positions: the kernel reads the tables itself."""
        return positions_T

    def embedding(self, embedding_VE: Embedding) -> TritonEmbedding:
        assert isinstance(embedding_VE, torch.Tensor)
        return TritonEmbedding(self, embedding_VE)

    def attention(self, weights: AttentionWeights) -> TritonAttention:
        return TritonAttention(self, weights)

    def feed_forward(self, weights: FeedForwardWeights) -> TritonFeedForward:
        return TritonFeedForward(self, weights)

    def experts(self, weights: ExpertsWeights, load_X: torch.Tensor | None = None) -> TritonExperts:
        return TritonExperts(self, weights, load_X)

    def head(self, norm_E: torch.Tensor, linear: Linear) -> TritonHead:
        return TritonHead(self, norm_E, self.bind(linear))

    def leaves_rows_out(self, num_tokens: int) -> bool:
        """Return True if the last layer computes only the rows that need logits.

        It then always computes as many rows as there can be, so that all such steps run the same kernels. This only
        pays if these are at most half the tokens, and if there are enough tokens that products are not limited by
        reading the weights.
        """
        most_logits = self.workspace.logits_NV.shape[0]
        return not self.batch_invariant and num_tokens > _FEW_TOKENS and num_tokens >= 2 * most_logits

    def bind(self, linear: Linear, activation: Activation = "silu") -> BoundProduct:
        """Return the products of a matrix; `activation` is for gates."""
        dtype = str(self.workspace.hidden_TE.dtype).removeprefix("torch.")
        return BoundProduct(
            linear.weight.operand,
            linear.bias_O,
            linear.spec.shape,
            linear.spec.weight_format(dtype),
            device=self._device,
            scratch=self._scratch,
            activation=activation,
            batch_invariant=self.batch_invariant,
        )

    def input_memory(self, product: BoundProduct | None, rows_TI: torch.Tensor) -> Rows:
        """Return the memory of a product's input: room for FP8 if it takes that, or `rows_TI`."""
        if product is None or not product.plan(len(rows_TI)).fp8_rows:
            return rows_TI
        assert self._scratch.scaled is not None
        return self._scratch.scaled.rows(*rows_TI.shape)

    def normed_memory(self, stream: Stream) -> torch.Tensor:
        """Return the memory of the stream's normed rows in 16 or 32 bits."""
        return self.workspace.normed_TE[: len(stream.hidden_TE)]

    def fused_norm(self, stream: Stream, begin: NormedInput | None) -> tuple[torch.Tensor, float, torch.Tensor] | None:
        """Return weights, epsilon and memory of the next part's norm, if a kernel can compute it with a sum."""
        if begin is None or begin.norm_E is None or begin.norms_inside(len(stream.hidden_TE)):
            return None
        memory = self.input_memory(begin.product, self.normed_memory(stream))
        if not isinstance(memory, torch.Tensor):
            return None
        return begin.norm_E, self.eps, memory

    def begin(
        self,
        stream: Stream,
        begin: NormedInput | None,
        added_TE: torch.Tensor | None = None,
        added_norm_E: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> Stream:
        """Add rows to the stream, if there are any, and norm it for the part that reads it next.

        The rows are normed first if they have a norm, and multiplied by the factor.
        """
        hidden_TE = stream.hidden_TE
        stream.norm, stream.normed = None, hidden_TE
        if begin is None or begin.norm_E is None or begin.norms_inside(len(hidden_TE)):
            if added_TE is not None and added_norm_E is None and factor == 1:
                hidden_TE.add_(added_TE)
            elif added_TE is not None:
                layers.add_and_norm(added_TE, hidden_TE, None, self.eps, None, x_weight_E=added_norm_E, factor=factor)
            return stream
        stream.normed = self.input_memory(begin.product, self.normed_memory(stream))
        if added_TE is None:
            layers.rms_norm(hidden_TE, begin.norm_E, self.eps, stream.normed)
        else:
            layers.add_and_norm(
                added_TE,
                hidden_TE,
                begin.norm_E,
                self.eps,
                stream.normed,
                x_weight_E=added_norm_E,
                factor=factor,
            )
        return stream

    def project(self, stream: Stream, begin: NormedInput, out_TN: torch.Tensor) -> None:
        """Compute a part's first product, of the normed stream."""
        norm = stream.norm
        assert begin.product is not None
        if begin.norm_E is not None and begin.norms_inside(len(out_TN)):
            norm = Norm(begin.norm_E, self.eps)
        begin.product.store(stream.normed, out_TN, norm)

    def add(
        self, stream: Stream, x: Rows, product: BoundProduct, norm_E: torch.Tensor | None, then: NormedInput | None
    ) -> Stream:
        """Add a part's last product, normed if it has a norm, to the stream, and norm it for the part that follows."""
        hidden_TE = stream.hidden_TE
        if norm_E is not None or self.factors.residual != 1:
            added_TE = self.normed_memory(stream)
            product.store(x, added_TE)
            return self.begin(stream, then, added_TE, norm_E, self.factors.residual)
        deferred = None if stream.is_part else self._deferred_norm(len(hidden_TE), product, then)
        if deferred is None:
            return self.begin(stream, then, product.add(x, hidden_TE))
        assert then is not None and then.norm_E is not None
        stream.normed, stream.norm = self.normed_memory(stream), deferred
        product.add(x, hidden_TE, NextNorm(then.norm_E, stream.normed, deferred))
        return stream

    def _deferred_norm(self, num_rows: int, product: BoundProduct, then: NormedInput | None) -> DeferredNorm | None:
        """Return the memory of a norm that `product` begins and the next part's first product ends, or None."""
        if then is None or then.norm_E is None or then.product is None:
            return None
        if not then.product.plan(num_rows).defers_norms:
            return None
        return product.deferred_norm(num_rows, self.eps)


class TritonEmbedding:
    """Embeddings of tokens."""

    def __init__(self, kernels: TritonKernels, embedding_VE: torch.Tensor) -> None:
        self.then: TritonAttention | None = None
        self._kernels, self._embedding_VE = kernels, embedding_VE

    def __call__(self, input_ids_T: torch.Tensor) -> Stream:
        kernels, then = self._kernels, self.then
        assert then is not None
        hidden_TE = kernels.workspace.hidden_TE[: input_ids_T.shape[0]]
        stream, norm_E = Stream(hidden_TE), then.begin.norm_E
        factor = kernels.factors.of_embedding(hidden_TE.dtype)
        if factor != 1 or norm_E is None:
            layers.gather_rows(self._embedding_VE, input_ids_T, hidden_TE)
            if factor != 1:
                hidden_TE.mul_(factor)
            return kernels.begin(stream, then.begin)
        normed = kernels.input_memory(then.begin.product, kernels.normed_memory(stream))
        layers.embed_and_norm(input_ids_T, self._embedding_VE, norm_E, kernels.eps, hidden_TE, normed)
        stream.normed = hidden_TE if then.begin.norms_inside(len(hidden_TE)) else normed
        return stream


class TritonAttention:
    """Attention of a layer."""

    def __init__(self, kernels: TritonKernels, weights: AttentionWeights) -> None:
        self.then: TritonFeedForward | TritonExperts | None = None
        self.begin = NormedInput(weights.input_norm, kernels.bind(weights.qkv))
        self._output = kernels.bind(weights.output)
        self._kernels, self._weights = kernels, weights
        rope = weights.spec.rope
        self._table_PX = None if rope is None else kernels.tables.tables[rope]

    def __call__(self, stream: Stream, step: Step) -> Stream:
        kernels = self._kernels
        qkv_TF = kernels.workspace.qkv_TF[: len(stream.hidden_TE)]
        kernels.project(stream, self.begin, qkv_TF)
        attended_TF = self._attend(qkv_TF, step)
        if step.rows_P is not None:
            stream, attended_TF = self._keep_rows(stream, attended_TF, step.rows_P, step.num_kept)
        then = None if self.then is None else self.then.begin
        return kernels.add(stream, attended_TF, self._output, self._weights.output_norm, then)

    def _attend(self, qkv_TF: torch.Tensor, step: Step) -> torch.Tensor:
        """Norm and rotate query and key heads, and attend. Returns [T, H * D]."""
        kernels, weights, spec, num_tokens = self._kernels, self._weights, self._weights.spec, len(qkv_TF)
        out_TF = kernels.workspace.attention_TF[:num_tokens]
        target = step.attend.kv_target(weights.layer, num_tokens)
        head_norms = weights.head_norms
        if spec.joint_norms and head_norms is not None:
            layers.norm_queries_and_keys(qkv_TF, head_norms, spec.num_query_heads, kernels.eps)
            head_norms = None
        rope_and_write_kv(
            qkv_TF,
            step.rotary,
            self._table_PX,
            target.kv_cache,
            target.slot_mapping,
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            qk_norm=head_norms,
            eps=kernels.eps,
            k_scale=target.k_scale,
            v_scale=target.v_scale,
            clear_TF=None if target.clears_padding else out_TF,
            batch_invariant=kernels.batch_invariant,
        )
        # Other views of one row lose the stride between rows, for which kernels are compiled.
        q_THD = qkv_TF.as_strided(
            (num_tokens, spec.num_query_heads, spec.head_size), (qkv_TF.stride(0), spec.head_size, 1)
        )
        step.attend.read(q_THD, weights.layer, out_TF.unflatten(-1, (-1, spec.head_size)))
        return out_TF

    def _keep_rows(
        self, stream: Stream, attended_TF: torch.Tensor, rows_P: torch.Tensor, num_kept: torch.Tensor | None
    ) -> tuple[Stream, torch.Tensor]:
        """Return these rows of the stream and of attention's output, in memory that was the projection's and norm's."""
        space, count = self._kernels.workspace, rows_P.shape[0]
        attended_PF = space.qkv_TF[:count, : attended_TF.shape[1]]
        hidden_PE = space.normed_TE[count : 2 * count]
        layers.gather_rows(attended_TF, rows_P, attended_PF)
        layers.gather_rows(stream.hidden_TE, rows_P, hidden_PE)
        return Stream(hidden_PE, is_part=True, num_rows=num_kept), attended_PF


class TritonFeedForward:
    """Dense feed-forward of a layer."""

    def __init__(self, kernels: TritonKernels, weights: FeedForwardWeights) -> None:
        self.then: TritonAttention | None = None
        self.begin = NormedInput(weights.input_norm, kernels.bind(weights.gate_up, weights.spec.activation))
        self._down = kernels.bind(weights.down)
        self._kernels, self._weights = kernels, weights

    def __call__(self, stream: Stream) -> Stream:
        kernels, num_rows = self._kernels, len(stream.hidden_TE)
        width = self._weights.spec.down.num_inputs
        # Layers may differ in width; the activation replaces the gates.
        gate_up_T2I = kernels.workspace.shared[: num_rows * 2 * width].view(num_rows, 2 * width)
        inner_TI = gate_up_T2I[:, :width]
        inner: Rows = inner_TI
        assert self.begin.product is not None
        if self.begin.product.plan(num_rows).gates_apart:
            kernels.project(stream, self.begin, gate_up_T2I)
            inner = kernels.input_memory(self._down, inner_TI)
            _ACTIVATIONS[self._weights.spec.activation](gate_up_T2I, inner)
        else:
            kernels.project(stream, self.begin, inner_TI)
        then = None if self.then is None else self.then.begin
        return kernels.add(stream, inner, self._down, self._weights.output_norm, then)


class TritonExperts:
    """Experts of a layer, and its shared expert."""

    def __init__(self, kernels: TritonKernels, weights: ExpertsWeights, load_X: torch.Tensor | None) -> None:
        self.then: TritonAttention | None = None
        self.begin = NormedInput(weights.input_norm, None)
        self._kernels, self._weights = kernels, weights
        shared = (
            None
            if weights.shared is None
            else (kernels.bind(weights.shared.gate_up), kernels.bind(weights.shared.down))
        )
        self._experts = ExpertKernels(weights, kernels.workspace, shared, load_X)

    def __call__(self, stream: Stream) -> Stream:
        kernels, weights, hidden_TE = self._kernels, self._weights, stream.hidden_TE
        then = None if self.then is None else self.then.begin
        self._experts.run(stream.normed, stream.num_rows)
        if weights.output_norm is not None:
            added_TE = kernels.normed_memory(stream)
            self._experts.add(added_TE, stream.num_rows, added=False)
            layers.rms_norm(added_TE, weights.output_norm, kernels.eps, added_TE)
            if kernels.factors.residual != 1:
                added_TE.mul_(kernels.factors.residual)
            return kernels.begin(stream, then, added_TE)
        normed = kernels.fused_norm(stream, then)
        self._experts.add(hidden_TE, stream.num_rows, factor=kernels.factors.residual, norm=normed)
        if normed is None:
            return kernels.begin(stream, then)
        stream.norm, stream.normed = None, normed[2]
        return stream


class TritonHead:
    """Final norm and logits."""

    def __init__(self, kernels: TritonKernels, norm_E: torch.Tensor, product: BoundProduct) -> None:
        self._kernels, self._norm_E, self._product = kernels, norm_E, product

    def __call__(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None) -> torch.Tensor:
        kernels, num_logits = self._kernels, (hidden_TE if rows_N is None else rows_N).shape[0]
        rows_NE, logits_NV = kernels.workspace.rows_NE[:num_logits], kernels.workspace.logits_NV[:num_logits]
        if rows_N is None:
            layers.rms_norm(hidden_TE, self._norm_E, kernels.eps, rows_NE)
        else:
            layers.gather_and_norm(hidden_TE, rows_N, self._norm_E, kernels.eps, rows_NE)
        self._product.store(rows_NE, logits_NV)
        return finish_logits(logits_NV, kernels.factors)
