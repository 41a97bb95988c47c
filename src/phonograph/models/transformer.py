"""The decoder of every supported architecture: its weights, and the one forward loop.

Control flow depends on no tensor's contents and is the same in every step, so that CUDA graphs and the tape can capture
it. The kernel set below the loop decides which operations are fused.

Shapes: T tokens, N rows that need logits, P rows that are kept in the last layer, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple

import torch

from phonograph.kernels.torch.layers import finish_logits, layer_norm, rms_norm
from phonograph.models.heads.encoder_ends import InputWeights, StageWeights
from phonograph.models.heads.text_encoder import make_encoder
from phonograph.models.layers.kernel_set import (
    Attend,
    FeedForwardPart,
    KernelSet,
    LayerEmbeddingPart,
    MixerPart,
    Step,
    StepStates,
)
from phonograph.models.layers.layer_embedding import LayerEmbeddingsWeights
from phonograph.models.layers.linear import Linear, WeightAllocator, norm_views
from phonograph.models.layers.part_weights import AttentionWeights, ExpertsWeights, FeatureWeights, LayerWeights
from phonograph.models.modules.step_model import StepModel
from phonograph.models.quantization.block_embedding import BlockEmbedding, Embedding
from phonograph.models.quantization.gguf_blocks import GgufBlocks
from phonograph.models.quantization.scheme import LinearWeight, QuantizedModule
from phonograph.models.spec import LAYERS, ModelSpec
from phonograph.models.weights.kv_scales import KVScales

Convert = Callable[[LinearWeight, bool], LinearWeight]
"""Conversion of a loaded weight into the form that is multiplied; the second argument is True for the head."""


def _feed_forward(kernels: KernelSet, layer: LayerWeights, load_X: torch.Tensor | None) -> FeedForwardPart | None:
    weights = layer.feed_forward
    if weights is None:
        return None
    return kernels.experts(weights, load_X) if isinstance(weights, ExpertsWeights) else kernels.feed_forward(weights)


def _mixer(kernels: KernelSet, layer: LayerWeights) -> MixerPart | None:
    weights = layer.mixer
    if weights is None:
        return None
    if isinstance(weights, AttentionWeights) and layer.beside is not None:
        beside = replace(layer.beside, input_norm=weights.input_norm)
        return kernels.beside(replace(weights, input_norm=None), beside)
    return kernels.attention(weights) if isinstance(weights, AttentionWeights) else kernels.states(weights)


class BoundLayer(NamedTuple):
    """Parts of a layer, and memory [T, E] in which its output is kept, each of them or None."""

    mixer: MixerPart | None
    feed_forward: FeedForwardPart | None
    embedding: LayerEmbeddingPart | None
    tap_TE: torch.Tensor | None
    cross: MixerPart | None


class Transformer(StepModel):
    """Weights of a model, allocated without contents, and its forward pass on a kernel set.

    Attributes:
        parameters: the weights that are not quantized, in memory layout, all contiguous. Norms may be in float32.
        quantized: the weights in another format.
        kv_scales: scales of an FP8 KV cache.
        weights: weights of each layer.
        gathered: copies of parts of a target that all ranks have, in a draft head (`heads/shared_weights.py`).
        expert_load: int64 [X], by the index of a layer: pairs of a token and an expert that were computed since the
            start. Empty unless `count_expert_load` was called.
        kernels: set by `bind`, before the first step.
        layers: parts of each layer, likewise.
    """

    kernels: KernelSet
    layers: list[BoundLayer]

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        make_empty: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.kv_scales = KVScales()
        norm_dtype = torch.float32 if spec.norms.wide else dtype
        layer_norms = spec.norms.bias if spec.norms.layer else None
        allocate = WeightAllocator(dtype, device, norm_dtype, make_empty, layer_norms)
        self.parameters = allocate.parameters
        self.gathered: list[torch.Tensor] = []
        self.quantized = allocate.quantized
        self.weights = [
            LayerWeights.make(layer, index, spec.hidden_size, allocate, spec.num_layers)
            for index, layer in enumerate(spec.layers)
        ]
        self.encoder = None
        if spec.encoder is not None:
            layers = [
                LayerWeights.make(layer, index, spec.hidden_size, allocate)
                for index, layer in enumerate(spec.encoder.layers)
            ]
            self.encoder = make_encoder(spec.encoder, layers, allocate, spec.rms_norm_eps)
        self.layer_embeddings = (
            None
            if spec.layer_embeddings is None
            else LayerEmbeddingsWeights.make(spec.layer_embeddings, spec.num_layers, spec.hidden_size, allocate)
        )
        self.final_norm = allocate.norm(spec.hidden_size) if spec.has_final_norm else None
        self.lm_head = allocate.linear(spec.head if spec.owns_head else spec.head.without_outputs())
        self.features = (
            None
            if spec.features is None
            else FeatureWeights.make(
                spec.features, spec.hidden_size, allocate, self.lm_head if spec.tie_word_embeddings else None
            )
        )
        if self.features is not None:
            self.features.output_norm = self.final_norm if self.features.spec.normed_output else None
            self.embedding_VE: Embedding = self.features.embedding_VE
        elif spec.tie_word_embeddings and spec.head.scheme is None:
            self.embedding_VE = self.lm_head.matrix.t()
        else:
            self.embedding_VE = allocate.tensor(spec.head.num_outputs, spec.hidden_size)
        self.input = None if spec.input is None else InputWeights.make(spec.input, spec.hidden_size, allocate)
        self.stages = [StageWeights.make(stage, allocate) for stage in (spec.pooler.stages if spec.pooler else ())]
        self._eps = torch.tensor(spec.rms_norm_eps, dtype=torch.float32, device=device)
        self.expert_load: dict[int, torch.Tensor] = {}
        self._running: Sequence[BoundLayer] = ()
        self._convert: Convert | None = None

    def count_expert_load(self) -> None:
        """Count the pairs of each expert in each step. Call it before `bind`."""
        self.expert_load = {
            index: torch.zeros(layer.feed_forward.spec.routing.num_experts, dtype=torch.int64, device=self.device)
            for index, layer in enumerate(self.weights)
            if isinstance(layer.feed_forward, ExpertsWeights)
        }

    def bind(
        self,
        kernels: KernelSet,
        taps: Mapping[int, torch.Tensor] = MappingProxyType({}),
        of_encoder: KernelSet | None = None,
    ) -> None:
        """Build the parts by a kernel set.

        Args:
            kernels: the kernel set.
            taps: memory [T, E] by the index of a layer, in which each step keeps the stream after it (for draft heads);
                -1 for the stream before the first.
            of_encoder: kernel set of an encoder; None for the same.
        """
        self.kernels = kernels
        self._first_tap_TE = taps.get(-1)
        self.embedding = None if self.features or self.input else kernels.embedding(self.embedding_VE)
        self.input_part = None if self.input is None else kernels.input(self.embedding_VE, self.input)
        self.feature_part = None if self.features is None else kernels.features(self.features)
        self._layer_embeddings = (
            None if self.layer_embeddings is None else kernels.layer_embeddings(self.layer_embeddings)
        )
        self.layers = [
            BoundLayer(
                _mixer(kernels, layer),
                _feed_forward(kernels, layer, self.expert_load.get(index)),
                None if layer.embedding is None else kernels.layer_embedding(layer.embedding),
                taps.get(index),
                None if layer.cross is None else kernels.attention(layer.cross),
            )
            for index, layer in enumerate(self.weights)
        ]
        self.of_encoder = own = of_encoder or kernels
        if self.encoder is not None:
            begin = None if self.encoder.input is None else own.input(self.embedding_VE, self.encoder.input)
            self.encoder.bind(((_mixer(own, one), _feed_forward(own, one, None)) for one in self.encoder.layers), begin)
        self._head = None if self.spec.pooler else kernels.head(self.final_norm, self.lm_head)
        self._link(self.layers)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        rows_P: torch.Tensor | None = None,
        num_rows: torch.Tensor | None = None,
        num_kept: torch.Tensor | None = None,
        features_TE: torch.Tensor | None = None,
        states: StepStates | None = None,
    ) -> torch.Tensor:
        """Return the residual stream before the final norm, [T, E] or [P, E]; see `StepModel.forward`.

        The last layer computes only the rows `rows_P` after its attention. Padding has no experts.
        """
        step, last = Step(self.kernels.rotary(positions_T), attend, states=states), self._running[-1]
        if self.feature_part is not None:
            assert features_TE is not None
            stream = self.feature_part(input_ids_T, features_TE)
        elif self.input_part is not None:
            stream = self.input_part(input_ids_T, positions_T)
        else:
            assert self.embedding is not None
            stream = self.embedding(input_ids_T)
        stream.num_rows = num_rows
        if self._first_tap_TE is not None:
            self._first_tap_TE[: len(stream.hidden_TE)].copy_(stream.hidden_TE)
        if self._layer_embeddings is not None:
            step = step._replace(embeddings_TX=self._layer_embeddings(input_ids_T, stream))
        for layer in self._running:
            whole = step
            if layer is last:
                step = step._replace(rows_P=rows_P, num_kept=num_kept)
            if layer.mixer is not None:
                stream = layer.mixer(stream, step if layer.cross is None else whole)
            if layer.cross is not None:
                stream = layer.cross(stream, step)
            if layer.feed_forward is not None:
                stream = layer.feed_forward(stream)
            if layer.embedding is not None:
                stream = layer.embedding(stream, step)
            if layer.tap_TE is not None:
                layer.tap_TE[: len(stream.hidden_TE)].copy_(stream.hidden_TE)
        return stream.hidden_TE

    def attention_weights(self, index: int) -> AttentionWeights:
        """Return the weights of an attention by its index in `ModelSpec.attentions`."""
        layer = self.weights[index % len(self.weights)]
        weights = layer.mixer if index < len(self.weights) else layer.cross
        assert isinstance(weights, AttentionWeights)
        return weights

    def prompt_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        if self.final_norm is None:
            normed_NE = hidden_NE
        elif self.spec.norms.layer:
            normed_NE = layer_norm(hidden_NE, self.final_norm, self.spec.rms_norm_eps)
        else:
            normed_NE = rms_norm(hidden_NE, self.final_norm, self._eps)
        logits_NP = self.lm_head.product(normed_NE)
        factors = self.spec.factors
        return self.kernels.gathered(finish_logits(logits_NP, factors.logits, factors.softcap))

    def logits(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None = None) -> torch.Tensor:
        assert self._head is not None, "a model with a pooler has no logits"
        return self._head(hidden_TE, rows_N)

    def pooled(self, hidden_TE: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        assert self.spec.pooler is not None
        rows = self.kernels.pool(hidden_TE, self.final_norm, query_start_loc, self.spec.pooler.pooling)
        for stage in self.stages:
            rows = stage(rows, self.spec.rms_norm_eps)
        return self.kernels.keep_pooled(rows)

    def token_rows(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        return self.kernels.pool(hidden_TE, self.final_norm, None, "all")

    def leaves_rows_out(self, num_tokens: int, num_kept: int) -> bool:
        return self.kernels.leaves_rows_out(num_tokens, num_kept)

    def sinks(self, layer: int) -> torch.Tensor | None:
        return self.attention_weights(layer).sinks

    @contextmanager
    def only_layers(self, indices: Sequence[int]) -> Generator[None]:
        """Restrict `forward` to these layers inside the context, to compile its kernels.

        Layers of each kind, and neighbours of each pair of kinds, launch all kernels.
        """
        self._link([self.layers[index] for index in indices])
        try:
            yield
        finally:
            self._link(self.layers)

    def _link(self, layers: Sequence[BoundLayer]) -> None:
        """Run these layers, and tell each part which one reads its stream."""
        self._running = layers
        beginning = self.embedding or self.feature_part or self.input_part
        parts = [beginning]
        for layer in layers:
            parts += [layer.mixer, layer.cross, layer.feed_forward, layer.embedding]
        present = [part for part in parts if part is not None]
        for part, following in zip_longest(present, present[1:]):
            part.then = following

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name: a view of the fused weights.

        Weights in another format have none; see `quantized_modules`. Views have the shapes of
        `ModelSpec.tensor_shapes`, except the norms of each query and key head, which are
        [H, D] and [K, D] for [D] in the checkpoint, and stacked experts, whose outputs have two dimensions.
        """
        assert isinstance(self.embedding_VE, torch.Tensor)
        views = {} if self.final_norm is None else norm_views("model.norm", self.final_norm)
        if self.input is not None:
            views |= {f"model.{name}": view for name, view in self.input.checkpoint_views().items()}
        if self.encoder is not None:
            views |= self.encoder.checkpoint_views()
        for stage in self.stages:
            views |= stage.checkpoint_views()
        if self.features is None:
            views["model.embed_tokens.weight"] = self.embedding_VE
        else:
            views |= {f"model.{name}": view for name, view in self.features.checkpoint_views().items()}
        if not self.spec.tie_word_embeddings and self.spec.owns_head:
            views |= self.lm_head.checkpoint_views()
        if self.layer_embeddings is not None:
            views |= {f"model.{name}": view for name, view in self.layer_embeddings.checkpoint_views().items()}
        for index, layer in enumerate(self.weights):
            views |= {f"{LAYERS}.{index}.{name}": view for name, view in layer.checkpoint_views().items()}
        return views

    def quantized_modules(self) -> Iterator[QuantizedModule]:
        """Yield the modules of a checkpoint whose weights are in the format of a scheme.

        The head comes first: a CPU converts it with the most scratch memory, when it holds no other converted weights.
        """
        if not self._makes_head():
            yield from self._quantized_parts(self.lm_head, "")
        for index, layer in enumerate(self.weights):
            for linear in layer.linears:
                yield from self._quantized_parts(linear, f"{LAYERS}.{index}.")

    def _quantized_parts(self, linear: Linear, prefix: str) -> Iterator[QuantizedModule]:
        first = 0
        for name, part in linear.spec.projections():
            if part.scheme is not None:
                is_last = first + part.num_outputs == linear.spec.num_outputs
                loaded = self.when_loaded(linear) if is_last else None
                yield QuantizedModule(
                    prefix + name, part.scheme, linear.weight, first, part.num_outputs, loaded, linear.spec.fused
                )
            first += part.num_outputs

    def finish(self) -> None:
        """Make a head in another format from the embedding that it is tied to, which must be there."""
        if self._makes_head():
            for head in self._quantized_parts(self.lm_head, ""):
                assert isinstance(self.embedding_VE, torch.Tensor)
                head.load({"weight": self.embedding_VE})

    def keep_embedding_blocks(self, blocks: BlockEmbedding) -> None:
        """Look the embedding up in the file's blocks, in place of numbers."""
        dense, self.embedding_VE = self.embedding_VE, blocks
        self.parameters = [parameter for parameter in self.parameters if parameter is not dense]

    def convert_quantized(self, convert: Convert) -> None:
        """Replace weights in another format, one after another: those that are loaded after this, each when it is."""
        # The list would keep the memory of converted weights.
        self.quantized.clear()
        self._convert = convert

    def convert_drawn(self, convert: Convert) -> None:
        """Replace the weights in another format, one after another."""
        self.quantized.clear()
        for linear in (*(linear for layer in self.weights for linear in layer.linears), self.lm_head):
            linear.weight = convert(linear.weight, linear is self.lm_head)

    def _makes_head(self) -> bool:
        """Return True if a head in another format is made from the embedding; a GGUF file has it in blocks."""
        return self.spec.tie_word_embeddings and not isinstance(self.spec.head.scheme, GgufBlocks)

    def when_loaded(self, linear: Linear) -> Callable[[], None] | None:
        """Return a function that converts a loaded weight, or None if weights stay as they are."""
        convert = self._convert
        if convert is None:
            return None

        def loaded() -> None:
            linear.weight = convert(linear.weight, linear is self.lm_head)

        return loaded
