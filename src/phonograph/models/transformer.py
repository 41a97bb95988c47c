"""The decoder of every supported architecture: its weights, and the one forward loop.

Control flow depends on no tensor's contents and is the same in every step, so that CUDA graphs and the tape can capture
it. The kernel set below the loop decides which operations are fused.

Shapes: T tokens, N rows that need logits, P rows that are kept in the last layer, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch

from phonograph.kernels.torch.layers import rms_norm
from phonograph.models.layers.decoder_layer import DecoderLayer
from phonograph.models.layers.kernel_set import Attend, KernelSet
from phonograph.models.layers.linear import Linear, NormedLinear, WeightAllocator
from phonograph.models.quantization.block_embedding import BlockEmbedding, Embedding
from phonograph.models.quantization.gguf_blocks import GgufBlocks
from phonograph.models.quantization.scheme import LinearWeight, QuantizedModule
from phonograph.models.spec import ModelSpec
from phonograph.models.weights.kv_scales import KVScales

Convert = Callable[[LinearWeight, bool], LinearWeight]
"""Conversion of a loaded weight into the form that is multiplied; the second argument is True for the head."""


class Transformer:
    """Weights of a model, allocated without contents, and its forward pass on a kernel set.

    Attributes:
        parameters: the weights in the model's type, in memory layout, all contiguous.
        quantized: the weights in another format.
        kv_scales: scales of an FP8 KV cache.
        kernels: set by `bind`, before the first step.
    """

    kernels: KernelSet

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.kv_scales = KVScales()
        allocate = WeightAllocator(dtype, device)
        self.parameters = allocate.parameters
        self.quantized = allocate.quantized
        self.layers = [DecoderLayer.make(spec, index, allocate) for index in range(spec.num_layers)]
        self.final_norm = allocate.tensor(spec.hidden_size)
        self.lm_head = allocate.linear(spec.hidden_size, spec.vocab_size, bias=False, scheme=spec.lm_head_scheme)
        if spec.tie_word_embeddings and spec.lm_head_scheme is None:
            self.embedding_VE: Embedding = self.lm_head.matrix.t()
        else:
            self.embedding_VE = allocate.tensor(spec.vocab_size, spec.hidden_size)
        self._eps = torch.tensor(spec.rms_norm_eps, dtype=torch.float32, device=device)
        self._indices: Sequence[int] = range(spec.num_layers)
        self._convert: Convert | None = None

    def bind(self, kernels: KernelSet) -> None:
        """Set the kernel set."""
        self.kernels = kernels

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        attend: Attend,
        rows_P: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers. Call it in inference mode.

        Args:
            input_ids_T: token ids.
            positions_T: int64, the position of each token in its sequence.
            attend: attention of this step.
            rows_P: the only rows that the caller reads, int64. The last layer computes only these after its attention.
                For steps for which `kernels.leaves_rows_out` is True.

        Returns:
            The residual stream before the final norm, [T, E], or [P, E] of the rows that are kept.
        """
        kernels = self.kernels
        rotary = kernels.rotary(positions_T)
        stream = kernels.embed(input_ids_T, self.embedding_VE, then=self.layers[0].qkv)
        for layer, following in self._pairs():
            attended_TF = kernels.attention(kernels.project(stream, layer.qkv), layer.heads, rotary, attend)
            if following is None and rows_P is not None:
                stream, attended_TF = kernels.keep_rows(stream, attended_TF, rows_P)
            stream = kernels.add(stream, attended_TF, layer.output, then=layer.gate_up)
            inner = kernels.project_gated(stream, layer.gate_up, then=layer.down)
            stream = kernels.add(stream, inner, layer.down, then=following)
        return stream.hidden_TE

    def logits(self, hidden_TE: torch.Tensor, rows_N: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits [N, V] in the model's dtype, of the rows `rows_N` of `forward`'s result, or of all rows."""
        return self.kernels.logits(hidden_TE, rows_N, self.final_norm, self.lm_head)

    def prompt_logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Return logits [N, V] of any number of rows, with torch's operators, which allocate them."""
        return self.lm_head.product(rms_norm(hidden_NE, self.final_norm, self._eps))

    @contextmanager
    def only_layers(self, indices: Sequence[int]) -> Generator[None]:
        """Restrict `forward` to these layers inside the context, to compile its kernels.

        The first, second and last layer, layers with different attention, and neighbours with different formats of
        weights launch all kernels.
        """
        every, self._indices = self._indices, indices
        try:
            yield
        finally:
            self._indices = every

    def destinations(self) -> dict[str, torch.Tensor]:
        """Return the destination of each tensor of a checkpoint by its name: a view of the fused weights.

        Weights in another format have none; see `quantized_modules`. Views have the shapes of
        `ModelSpec.tensor_shapes`, except the norms of query and key heads, which are [H, D]
        and [K, D] for [D] in the checkpoint.
        """
        assert isinstance(self.embedding_VE, torch.Tensor)
        views = {"model.embed_tokens.weight": self.embedding_VE, "model.norm.weight": self.final_norm}
        if not self.spec.tie_word_embeddings and self.spec.lm_head_scheme is None:
            views["lm_head.weight"] = self.lm_head.matrix.t()
        for layer in self.layers:
            views |= layer.checkpoint_views(self.spec)
        return views

    def quantized_modules(self) -> Iterator[QuantizedModule]:
        """Yield the modules of a checkpoint whose weights are in the format of a scheme.

        The head comes first: a CPU converts it with the most scratch memory, when it holds no other converted weights.
        """
        if not self._makes_head():
            yield from self._quantized_head()
        for layer in self.layers:
            for linear, prefix, parts in layer.matrices(self.spec):
                first, last = 0, list(parts)[-1]
                for part, outputs in parts.items():
                    name = f"{prefix}.{part}"
                    scheme = self.spec.scheme_of(name)
                    if scheme is not None:
                        loaded = self._when_loaded(linear) if part == last else None
                        yield QuantizedModule(name, scheme, linear.weight, first, outputs, loaded)
                    first += outputs

    def finish(self) -> None:
        """Make a head in another format from the embedding that it is tied to, which must be there."""
        if self._makes_head():
            for head in self._quantized_head():
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
        linears = [linear for layer in self.layers for linear, _, _ in layer.matrices(self.spec)]
        for linear in (*linears, self.lm_head):
            linear.weight = convert(linear.weight, linear is self.lm_head)

    def _makes_head(self) -> bool:
        """Return True if a head in another format is made from the embedding; a GGUF file has it in blocks."""
        return self.spec.tie_word_embeddings and not isinstance(self.spec.lm_head_scheme, GgufBlocks)

    def _quantized_head(self) -> Iterator[QuantizedModule]:
        if self.spec.lm_head_scheme is not None:
            scheme, loaded = self.spec.lm_head_scheme, self._when_loaded(self.lm_head)
            yield QuantizedModule("lm_head", scheme, self.lm_head.weight, 0, self.spec.vocab_size, loaded)

    def _when_loaded(self, linear: Linear) -> Callable[[], None] | None:
        """Return a function that converts a loaded weight, or None if weights stay as they are."""
        convert = self._convert
        if convert is None:
            return None

        def loaded() -> None:
            linear.weight = convert(linear.weight, linear is self.lm_head)

        return loaded

    def _pairs(self) -> Iterator[tuple[DecoderLayer, NormedLinear | None]]:
        """Yield each layer with the product that reads the stream after it, None after the last layer."""
        # Of a part of the layers, the stream is made for the next one of the part, whose format may be another.
        for index, following in zip_longest(self._indices, self._indices[1:]):
            yield self.layers[index], None if following is None else self.layers[following].qkv
