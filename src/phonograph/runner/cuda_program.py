"""The computation of one step on a GPU, written once: what is captured into every graph, and what runs eagerly.

From head to tail nothing needs the host: the prepare kernel makes the step's inputs out of one uploaded buffer and the
state that lives on the device, and the sampled tokens stay there for the next step.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import fields

import torch

from phonograph.attention.backend import AttentionBackend, AttentionLayer
from phonograph.attention.metadata import AttentionMetadata
from phonograph.graphs.runtime import GraphRuntime
from phonograph.kernels.triton.attention.rope_and_kv_write import rope_and_write_kv
from phonograph.kernels.triton.sampling.bitmask import mask_logits
from phonograph.kernels.triton.sampling.sample import sample
from phonograph.models.fused import FusedDecoder
from phonograph.runner.cuda_inputs import DeviceInputs


class CudaStepProgram:
    """Prepare, attention schedule, decoder layers, logits of the rows that need them, sampling.

    batch_invariant: no kernel is chosen by the number of tokens or requests. The model and the backend must be made so.
    """

    def __init__(
        self,
        *,
        model: FusedDecoder,
        backend: AttentionBackend,
        layers: list[AttentionLayer],
        kv_caches: list[torch.Tensor],
        inputs: DeviceInputs,
        runtime: GraphRuntime,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.metadata: AttentionMetadata | None = None
        self._backend = backend
        self._layers = layers
        self._kv_caches = kv_caches
        self._inputs = inputs
        self._runtime = runtime
        self._batch_invariant = batch_invariant

    def run(
        self, *, num_tokens: int, num_reqs: int, every_row: bool, pieces: bool, all_hidden: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Runs the step that the inputs hold, at a padded shape.

        Args:
            num_tokens, num_reqs: padded tokens T and request slots R.
            every_row: each token is a request's last (uniform decode), so that its row of logits is its own.
            pieces: break the capture at each attention call.
            all_hidden: for logits of more rows than the requests' last.

        Returns:
            hidden before the final norm, [N, E] of the rows with logits where the model leaves out the others
            (`leaves_rows_out`), else [T, E]; logits [N, V], tokens int32 [N], N = min(T, R). A token is -1 where the
            logits had none to choose, and less where the row samples nothing here.
        """
        inputs, metadata = self._inputs, self.metadata
        assert metadata is not None, "the step's attention metadata is built before it runs"
        num_logits = min(num_tokens, num_reqs)
        inputs.prepare(num_reqs=num_reqs, num_tokens=num_tokens)
        self._backend.schedule(metadata)
        attention = functools.partial(self._attention, pieces)
        input_ids_T = inputs.input_ids[:num_tokens]
        if self.model.leaves_rows_out(num_tokens) and not every_row and not all_hidden:
            # Rows of no request of this step are any rows.
            hidden_TE = self.model.forward(input_ids_T, attention, inputs.logits_rows)[:num_logits]
            gathered = False
        else:
            hidden_TE = self.model.forward(input_ids_T, attention)
            # Gathered rows are normed by a kernel of their own.
            gathered = not every_row or self._batch_invariant
        logits_NV = self.model.logits(hidden_TE, inputs.logits_rows[:num_logits] if gathered else None, num_logits)
        tokens_N = inputs.tokens[:num_logits]
        rows = inputs.sampling
        sample(
            logits_NV,
            rows.sample_slots[:num_logits],
            rows.temperature[:num_logits],
            rows.top_k[:num_logits],
            rows.top_p[:num_logits],
            rows.min_p[:num_logits],
            rows.draw_keys[:num_logits],
            inputs.sample_scratch,
            tokens_N,
            inputs.last_token,
            batch_invariant=self._batch_invariant,
        )
        return hidden_TE, logits_NV, tokens_N

    def few_layers(self) -> AbstractContextManager[None]:
        """Inside, `run` launches every kernel of its shape, but only in the first two layers, the last, and one of each
        kind of attention. What it computes is of no use."""
        last = len(self._layers) - 1
        kinds: dict[tuple[object, ...], int] = {}
        for layer in self._layers:
            # A library may read a layer's own tensors once, which is not for captures.
            values = (getattr(layer, field.name) for field in fields(layer) if field.name != "index")
            kind = tuple(id(value) if isinstance(value, torch.Tensor) else value for value in values)
            kinds.setdefault(kind, layer.index)
        return self.model.only_layers(sorted({0, min(1, last), last, *kinds.values()}))

    def sample_masked(self, rows_G: torch.Tensor, bitmask_GW: torch.Tensor) -> None:
        """Masks the logits of these rows of the last run in place, and chooses their tokens; rows below 0 are none."""
        inputs, logits_NV = self._inputs, self.model.workspace.logits_NV
        rows = inputs.sampling
        mask_logits(logits_NV, rows_G, bitmask_GW)
        sample(
            logits_NV,
            rows.slots,
            rows.temperature,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.draw_keys,
            inputs.sample_scratch,
            inputs.tokens,
            inputs.last_token,
            rows_G=rows_G,
            batch_invariant=self._batch_invariant,
        )

    def _attention(self, pieces: bool, index: int, qkv_TF: torch.Tensor, out_TF: torch.Tensor) -> None:
        spec, inputs, layer = self.model.spec, self._inputs, self._layers[index]
        num_tokens = qkv_TF.shape[0]
        rope_and_write_kv(
            qkv_TF,
            inputs.positions[:num_tokens],
            self.model.rotary_PD,
            self._kv_caches[index],
            inputs.slot_mapping[:num_tokens],
            num_query_heads=spec.num_query_heads,
            num_kv_heads=spec.num_kv_heads,
            qk_norm=self.model.decoder.layers[index].qk_norm,
            eps=spec.rms_norm_eps,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            clear_TF=None if self._backend.clears_padding else out_TF,
            batch_invariant=self._batch_invariant,
        )
        # A view of one row by other means forgets the stride between rows, for which kernels are compiled.
        query_THD = qkv_TF.as_strided(
            (num_tokens, spec.num_query_heads, spec.head_size), (qkv_TF.stride(0), spec.head_size, 1)
        )
        out_THD = out_TF.unflatten(-1, (-1, spec.head_size))
        if pieces:
            self._runtime.eager_call(functools.partial(self._attend, index), query_THD, out_THD)
        else:
            self._attend(index, query_THD, out_THD)

    def _attend(self, index: int, query_THD: torch.Tensor, out_THD: torch.Tensor) -> None:
        # Read at call time: between pieces this runs again at each replay, with that step's metadata.
        metadata = self.metadata
        assert metadata is not None
        self._backend.forward(self._layers[index], query_THD, self._kv_caches[index], metadata, out_THD)
