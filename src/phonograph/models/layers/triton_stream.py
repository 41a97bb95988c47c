"""Products of Triton kernels and norms of the stream, from which the parts of a decoder are made.

Nothing is allocated. Every intermediate is a slice of one workspace for the largest step, so that all graphs share it
and its size is known in advance. A step of one token is limited by reading the weights once: its norms, activation and
residual additions are inside the matrix products.

Shapes are those of `workspace`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from phonograph.kernels.fp8_activations import Rows
from phonograph.kernels.ranks import Ranks, gather_ranks
from phonograph.kernels.triton.elementwise import encoder_rows, layers
from phonograph.kernels.triton.gemm.bound_product import BoundProduct
from phonograph.kernels.triton.gemm.product import DeferredNorm, NextNorm, Norm
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.kernels.triton.gemm.run_product import GemmScratch
from phonograph.models.layer_spec import NO_FACTORS, Activation, Factors
from phonograph.models.layers.kernel_set import Stream
from phonograph.models.layers.linear import Linear
from phonograph.models.layers.rotary import RotaryTables
from phonograph.models.layers.workspace import Workspace


class NormedInput(NamedTuple):
    """Beginning of a part: the norm of the stream, or None, and the product that reads the normed rows.

    Without a product, the part reads rows in the model's type, normed before, but for a single row if `norms_one_row`.
    """

    norm_E: torch.Tensor | None
    product: BoundProduct | None
    norms_one_row: bool = False

    def norms_inside(self, num_rows: int) -> bool:
        """Return True if the product norms its rows itself. None has layer norms."""
        if self.norm_E is not None and self.norm_E.ndim == 2:
            return False
        if self.product is None:
            return self.norms_one_row and num_rows == 1
        return self.product.plan(num_rows).norms_inside


class StreamKernels:
    """Kernels between the parts: products, and norms of the stream.

    Args:
        workspace: intermediates of the largest step.
        rotary: tables of the ropes, float32.
        eps: epsilon of the norms.
        device: GPU that products are planned for.
        factors: of the model.
        batch_invariant: make each token's result independent, bit by bit, of other tokens; 16-bit weights only.
        ranks: ranks that have a part of the model each; None for a whole model.
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
        ranks: Ranks | None = None,
    ) -> None:
        self.workspace, self.tables, self.eps, self.factors = workspace, rotary, eps, factors
        self.batch_invariant, self.ranks = batch_invariant, ranks
        self._device = device
        self._scratch = GemmScratch.make(rotary.device)._replace(
            dequantized=workspace.dequantized, scaled=workspace.scaled_scratch()
        )

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
            summed=linear.spec.partial,
        )

    def gathered(self, logits_NP: torch.Tensor, out_NV: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits of the whole vocabulary on rank 0, in `out_NV` or in new memory; on others their part."""
        if self.ranks is None:
            return logits_NP
        if out_NV is None:
            return gather_ranks(logits_NP, self.workspace.logits_NV.shape[1], self.ranks)
        self.ranks.gather(logits_NP, out_NV if self.ranks.rank == 0 else None)
        return out_NV if self.ranks.rank == 0 else logits_NP

    def sum_ranks(self, x_TE: torch.Tensor, *, partial: bool) -> None:
        """Replace rows by their sum over the ranks, if each has a part of it."""
        if partial:
            assert self.ranks is not None
            self.ranks.sum(x_TE)

    def pool(
        self, hidden_TE: torch.Tensor, norm_E: torch.Tensor | None, query_start_loc: torch.Tensor | None, pooling: str
    ) -> torch.Tensor:
        """Return the normed rows of all tokens, or a row of each prompt; see `KernelSet.pool`."""
        num_tokens, width = hidden_TE.shape
        if query_start_loc is not None and pooling in ("first", "last"):
            ends = query_start_loc[:-1] if pooling == "first" else query_start_loc[1:] - 1
            out_RE = hidden_TE.new_empty(len(ends), width)
            self.take_rows(hidden_TE, ends.clamp(0, num_tokens - 1), norm_E, out_RE)
            return out_RE.float()
        rows_TE = hidden_TE
        if norm_E is not None:
            rows_TE = self.workspace.normed_TE[:num_tokens]
            self.take_rows(hidden_TE, None, norm_E, rows_TE)
        if query_start_loc is None or pooling == "all":
            return rows_TE.float()
        out_RE = torch.empty(len(query_start_loc) - 1, width, dtype=torch.float32, device=hidden_TE.device)
        encoder_rows.mean_rows(rows_TE, query_start_loc, out_RE)
        return out_RE

    def keep_pooled(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of the rows in the workspace."""
        return self.workspace.pooled[: len(rows)].copy_(rows)

    def input_memory(self, product: BoundProduct | None, rows_TI: torch.Tensor) -> Rows:
        """Return the memory of a product's input: room for FP8 if it takes that, or `rows_TI`."""
        if product is None or not product.plan(len(rows_TI)).fp8_rows:
            return rows_TI
        assert self._scratch.scaled is not None
        return self._scratch.scaled.rows(*rows_TI.shape)

    def normed_memory(self, stream: Stream) -> torch.Tensor:
        """Return the memory of the stream's normed rows in 16 or 32 bits."""
        return self.workspace.normed_TE[: len(stream.hidden_TE)]

    def take_rows(
        self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None, norm_E: torch.Tensor | None, out_NE: torch.Tensor
    ) -> None:
        """Write rows of the stream, or all of them, normed if there is a norm."""
        if norm_E is not None and norm_E.ndim == 2:
            encoder_rows.layer_norm(hidden_TE, norm_E, self.eps, out_NE, rows_N=rows_N)
        elif norm_E is not None and rows_N is not None:
            layers.gather_and_norm(hidden_TE, rows_N, norm_E, self.eps, out_NE)
        elif norm_E is not None:
            layers.rms_norm(hidden_TE, norm_E, self.eps, out_NE)
        elif rows_N is not None:
            layers.gather_rows(hidden_TE, rows_N, out_NE)
        else:
            out_NE.copy_(hidden_TE)

    def keep_rows(
        self, stream: Stream, mixed_TX: torch.Tensor, rows_P: torch.Tensor, num_kept: torch.Tensor | None
    ) -> tuple[Stream, torch.Tensor]:
        """Return these rows of the stream and of a mixer's output, in memory of its projection and of the norm."""
        count, width = rows_P.shape[0], mixed_TX.shape[1]
        mixed_PX = self.workspace.shared[: count * width].view(count, width)
        hidden_PE = self.workspace.normed_TE[count : 2 * count]
        layers.gather_rows(mixed_TX, rows_P, mixed_PX)
        layers.gather_rows(stream.hidden_TE, rows_P, hidden_PE)
        return Stream(hidden_PE, is_part=True, num_rows=num_kept), mixed_PX

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
        scalar: torch.Tensor | None = None,
    ) -> Stream:
        """Add rows to the stream, if there are any, and norm it for the part that reads it next.

        The rows are normed first if they have a norm, and multiplied by the factor; the sum is multiplied by the
        scalar.
        """
        hidden_TE = stream.hidden_TE
        stream.norm, stream.normed = None, hidden_TE
        if begin is not None and begin.norm_E is not None and begin.norm_E.ndim == 2:
            stream.normed, kept_TE = self.normed_memory(stream), None if added_TE is None else hidden_TE
            encoder_rows.layer_norm(
                hidden_TE, begin.norm_E, self.eps, stream.normed, added_TE=added_TE, kept_TE=kept_TE
            )
            return stream
        if begin is None or begin.norm_E is None or begin.norms_inside(len(hidden_TE)):
            if added_TE is not None and added_norm_E is None and factor == 1 and scalar is None:
                hidden_TE.add_(added_TE)
            elif added_TE is not None:
                layers.add_and_norm(
                    added_TE,
                    hidden_TE,
                    None,
                    self.eps,
                    None,
                    x_weight_E=added_norm_E,
                    factor=factor,
                    scalar=scalar,
                )
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
                scalar=scalar,
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
        self,
        stream: Stream,
        x: Rows,
        product: BoundProduct,
        norm_E: torch.Tensor | None,
        then: NormedInput | None,
        scalar: torch.Tensor | None = None,
    ) -> Stream:
        """Add a part's last product, normed if it has a norm, to the stream, and norm it for the part that follows.

        The sum is multiplied by the scalar, if there is one. A layer norm is that of the sum (`NormKind.after_sum`).
        """
        hidden_TE = stream.hidden_TE
        if norm_E is not None and norm_E.ndim == 2:
            added_TE = self.normed_memory(stream)
            product.store(x, added_TE)
            encoder_rows.layer_norm(hidden_TE, norm_E, self.eps, hidden_TE, added_TE=added_TE)
            return self.begin(stream, then)
        if product.summed or norm_E is not None or self.factors.residual != 1 or scalar is not None:
            added_TE = self.normed_memory(stream)
            product.store(x, added_TE)
            if product.summed and norm_E is None and scalar is None and self._add_sum(stream, added_TE, then):
                return stream
            self.sum_ranks(added_TE, partial=product.summed)
            return self.begin(stream, then, added_TE, norm_E, self.factors.residual, scalar)
        deferred = None if stream.is_part else self._deferred_norm(len(hidden_TE), product, then)
        if deferred is None:
            return self.begin(stream, then, product.add(x, hidden_TE))
        assert then is not None and then.norm_E is not None
        stream.normed, stream.norm = self.normed_memory(stream), deferred
        product.add(x, hidden_TE, NextNorm(then.norm_E, stream.normed, deferred))
        return stream

    def _add_sum(self, stream: Stream, part_TE: torch.Tensor, then: NormedInput | None) -> bool:
        """Add the sum of the ranks' parts to the stream, and norm it for the next part, by one kernel.

        Returns:
            False if nothing was done.
        """
        assert self.ranks is not None
        weight_E, normed = None, None
        if then is not None and then.norm_E is not None and not then.norms_inside(len(part_TE)):
            weight_E, normed = then.norm_E, self.input_memory(then.product, self.normed_memory(stream))
        hidden_TE = stream.hidden_TE
        if not self.ranks.add_and_norm(part_TE, hidden_TE, weight_E, self.eps, normed, self.factors.residual):
            return False
        stream.norm, stream.normed = None, hidden_TE if normed is None else normed
        return True

    def _deferred_norm(self, num_rows: int, product: BoundProduct, then: NormedInput | None) -> DeferredNorm | None:
        """Return the memory of a norm that `product` begins and the next part's first product ends, or None."""
        if then is None or then.norm_E is None or then.norm_E.ndim == 2 or then.product is None:
            return None
        if not then.product.plan(num_rows).defers_norms:
            return None
        return product.deferred_norm(num_rows, self.eps)
