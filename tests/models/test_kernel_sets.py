"""Each part of a kernel set: ours in Triton next to torch, on random inputs of odd sizes, over poisoned memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
import torch
from checkpoints import make_checkpoint
from product_problem import gemm_device
from resized import resized

from phonograph.kernels.fp8_activations import Fp8Rows
from phonograph.models.layers.kernel_set import (
    EmbeddingPart,
    HeadPart,
    KernelSet,
    KVTarget,
    LayerEmbeddingsPart,
    Step,
    Stream,
)
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.layers.triton_parts import NormedInput, TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.quantization.awq import Awq
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.scheme import Quantization, Scheme
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import BoundLayer, Transformer

ROWS = (1, 2, 21)
MAX_TOKENS, MAX_LOGITS, POSITIONS = 21, 9, 50
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative errors. Both sides round their results once, and the torch set what lies between two of its operators."""
# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


class WritesCache:
    """Attention whose output is the query, beside a cache of each layer that is written by slot."""

    def __init__(self, caches: list[torch.Tensor], slots_T: torch.Tensor) -> None:
        self._caches = caches
        self._slots_T = slots_T

    def __call__(
        self, q_THD: torch.Tensor, k_TKD: torch.Tensor | None, v_TKD: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        cache = self._caches[layer]
        block, offset = self._slots_T // cache.shape[2], self._slots_T % cache.shape[2]
        if k_TKD is not None:
            cache[0, block, offset], cache[1, block, offset] = k_TKD, v_TKD
        return q_THD.contiguous()

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        return KVTarget(self._caches[layer], self._slots_T[:num_tokens], None, None, clears_padding=True)

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        out_THD.copy_(q_THD)


class Bound(NamedTuple):
    """A model's parts on a kernel set."""

    kernels: KernelSet
    embedding: EmbeddingPart
    layer_embeddings: LayerEmbeddingsPart | None
    layers: list[BoundLayer]
    head: HeadPart


class Pair:
    """A model of random weights with both kernel sets."""

    def __init__(self, model: Transformer, num_tokens: int = MAX_TOKENS, *, fp8_rows: bool = False) -> None:
        spec, dtype, device = model.spec, model.dtype, model.device
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(0)
        for weight in model.parameters:
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn / weight.shape[1] ** 0.5 if weight.dim() == 2 else drawn * 0.2 + 1)
        for weight in model.quantized:
            weight.draw(weight.shape[0] ** -0.5, torch.Generator(device).manual_seed(1))
            if weight.values.order_I is not None:
                weight.values.order_I.copy_(torch.randperm(weight.inputs))
            if weight.values.zeros_OG is not None:
                weight.values.zeros_OG.random_(1, 1 << weight.values.bits)
        self.model = model
        gpu = gemm_device()._replace(capability=(9, 0) if fp8_rows else (8, 0))
        self.workspace = Workspace.make(spec, num_tokens, MAX_LOGITS, dtype, device, gemm_device=gpu)
        table = rotary_tables(spec, POSITIONS, torch.float32, device)
        own_table = rotary_tables(spec, POSITIONS, dtype, device)
        self.torch = self._bound(TorchKernels(own_table, spec.rms_norm_eps, spec.factors))
        self.triton = self._bound(
            TritonKernels(self.workspace, table, spec.rms_norm_eps, device=gpu, factors=spec.factors)
        )

    def _bound(self, kernels: KernelSet) -> Bound:
        model = self.model
        model.bind(kernels)
        return Bound(kernels, model.embedding, model._layer_embeddings, model.layers, model._head)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).to(self.model.device, self.model.dtype)

    def poison(self) -> None:
        for memory in self.workspace.tensors():
            memory.fill_(torch.nan)

    def streams(self, rows: int) -> Iterator[tuple[Bound, Stream, Step, torch.Tensor]]:
        """Yield both sets with streams of the same embeddings, the inputs of a step, and the caches that it writes."""
        self.poison()
        spec, device = self.model.spec, self.model.device
        self.ids = torch.randint(spec.vocab_size, (rows,), dtype=torch.int32).to(device)
        self.positions, slots = torch.randint(POSITIONS, (rows,)).to(device), torch.randperm(96)[:rows].to(device)
        for bound in (self.torch, self.triton):
            shapes = [(2, 6, 16, one.attention.num_kv_heads, one.attention.head_size) for one in spec.layers]
            memory = torch.full((sum(map(math.prod, shapes)),), 7.0).to(device, self.model.dtype)
            parts = memory.split([math.prod(shape) for shape in shapes])
            caches = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
            stream = bound.embedding(self.ids)
            embeddings = None if bound.layer_embeddings is None else bound.layer_embeddings(self.ids, stream)
            step = Step(bound.kernels.rotary(self.positions), WritesCache(caches, slots), embeddings_TX=embeddings)
            yield bound, stream, step, memory

    def check(self, wanted: torch.Tensor, got: torch.Tensor) -> None:
        assert wanted.shape == got.shape and wanted.dtype == got.dtype
        wanted, got = wanted.double(), got.double()
        error = ((got - wanted).norm() / wanted.norm()).item()
        assert error <= LIMITS[self.model.dtype], error


SCHEMES: dict[str, Scheme | None] = {
    "dense": None,
    "int4": Gptq(bits=4, group_size=40, version=1),
    "int4 with zeros": Awq(bits=4, group_size=-1, zeros=True),
    "fp8 blocks": Fp8(origin="FP8", scales="block", block=(16, 48)),
    "int8 reordered": Gptq(bits=8, group_size=32, zeros=True, ordered=True, version=2),
}


# Formats differ in products only, which the family with all biases has in every kind.
DENSE = [(family, dtype, "dense") for family in ("qwen3", "llama_bias") for dtype in DTYPES]
PAIRS = [*DENSE, *(("llama_bias", DTYPES[-1], scheme) for scheme in SCHEMES if scheme != "dense")]


def name_of(pair: tuple[str, torch.dtype, str]) -> str:
    return " ".join(map(str, pair))


@pytest.fixture(params=PAIRS, ids=name_of)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    family, dtype, scheme_name = request.param
    lay_as_on_a_gpu(monkeypatch)
    with torch.inference_mode():
        yield Pair(make_model(tmp_path, family, dtype, SCHEMES[scheme_name]))


def lay_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)


def make_model(
    folder: Path, family: str, dtype: torch.dtype, scheme: Scheme | None, hidden: int = 136, inner: int = 104
) -> Transformer:
    make_checkpoint(family, folder)
    spec = resized(
        read_model_spec(folder),
        hidden_size=hidden,
        intermediate_size=inner,
        num_query_heads=6,
        num_kv_heads=2,
        vocab_size=203,
    )
    spec = spec.with_quantization(None if scheme is None else Quantization("", scheme))
    return Transformer(spec, dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.parametrize("rows", ROWS)
def test_layers_in_turn(pair: Pair, rows: int) -> None:
    """Each part begins with the norm that the part before left to it, and the last one has no part after it.

    Attention writes the cache. What the first one adds to the stream is compared alone.
    """
    begun, results = [], []
    for bound, stream, step, cache in pair.streams(rows):
        begun.append(stream.hidden_TE.clone())
        found = []
        for layer in bound.layers:
            found.append(layer.mixer(stream, step).hidden_TE.clone())
            found.append(layer.feed_forward(stream).hidden_TE.clone())
        assert len(found) == 2 * pair.model.spec.num_layers
        results.append([found[0] - begun[-1], cache, *found])
    assert torch.equal(*begun)
    for wanted, got in zip(*results, strict=True):
        pair.check(wanted, got)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "family",
    [
        *("phi3", "granite", "smollm3", "olmo3", "ministral3", "gemma", "gemma2", "gemma3"),
        *("gemma4", "gemma4_values", "gemma4_shared"),
    ],
)
def test_parts_of_other_families(family: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial ropes and none, factors, norms after a layer and over all heads, in float32, GELU, caps of logits; heads
    by layer, norms of values, values that are keys, and factors of the stream."""
    lay_as_on_a_gpu(monkeypatch)
    make_checkpoint(family, tmp_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = Pair(Transformer(read_model_spec(tmp_path), DTYPES[-1], device))
    results = []
    for bound, stream, step, cache in pair.streams(rows):
        for layer in bound.layers:
            layer.feed_forward(layer.mixer(stream, step))
            if layer.embedding is not None:
                layer.embedding(stream, step)
        results.append((stream.hidden_TE.clone(), cache, bound.head(stream.hidden_TE, None)))
    for wanted, got in zip(*results, strict=True):
        pair.check(wanted, got)


@torch.inference_mode()
def test_rows_that_are_kept_have_their_own_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_as_on_a_gpu(monkeypatch)
    make_checkpoint("gemma4_shared", tmp_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pair = Pair(Transformer(read_model_spec(tmp_path), DTYPES[0], device))
    rows, chosen = 13, torch.tensor([12, 3, 7], device=device)
    found = []
    for kept in (None, chosen):
        torch.manual_seed(5)
        for bound, begun, step, _ in pair.streams(rows):
            stream = begun
            for layer in bound.layers:
                own = step._replace(rows_P=kept if layer is bound.layers[-1] else None)
                stream = layer.feed_forward(layer.mixer(stream, own))
                assert layer.embedding is not None
                stream = layer.embedding(stream, own)
            found.append(stream.hidden_TE.clone() if kept is not None else stream.hidden_TE[chosen].clone())
    for other in found[1:]:
        pair.check(found[0], other)


@torch.inference_mode()
def test_fp8_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 17 rows on, with FP8 weights; no matrix is written out. The torch set has activations in 16 bits."""
    lay_as_on_a_gpu(monkeypatch)
    rows, scheme = 40, Fp8(origin="FP8", scales="channel")
    model = make_model(tmp_path, "llama_bias", DTYPES[-1], scheme, hidden=128, inner=96)
    pair = Pair(model, rows, fp8_rows=True)
    assert not pair.workspace.dequantized.numel()
    results = []
    for bound, stream, step, _ in pair.streams(rows):
        found = [stream.hidden_TE.clone()]
        for layer in bound.layers:
            found.append(layer.mixer(stream, step).hidden_TE.clone())
            assert isinstance(stream.normed, Fp8Rows) == (bound is pair.triton)
            found.append(layer.feed_forward(stream).hidden_TE.clone())
        results.append([after - before for before, after in pairwise(found)])
    for wanted, got in zip(*results, strict=True):
        error = (got.double() - wanted.double()).norm() / wanted.double().norm()
        # The interpreter drops the carry where rounding to FP8 fills the mantissa.
        assert error <= (0.1 if model.device.type == "cuda" else 0.3)
    assert pair.workspace.fp8_rows.float().isfinite().any()


@pytest.mark.parametrize("rows", [13, 21])
def test_rows_that_are_kept(pair: Pair, rows: int) -> None:
    chosen = torch.randperm(rows)[: MAX_LOGITS // 2].to(pair.model.device)
    results = []
    for bound, stream, step, _ in pair.streams(rows):
        *before, last = bound.layers
        for layer in before:
            layer.feed_forward(layer.mixer(stream, step))
        kept = last.mixer(stream, step._replace(rows_P=chosen))
        results.append(last.feed_forward(kept).hidden_TE)
    assert len(results[0]) == len(chosen)
    pair.check(*results)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("pair", DENSE, ids=name_of, indirect=True)
def test_logits(pair: Pair, rows: int, gathered: bool) -> None:
    model = pair.model
    pair.poison()
    hidden = pair.random(20 if gathered else rows, model.spec.hidden_size)
    chosen = torch.randint(20, (rows,)).to(model.device) if gathered else None
    wanted, got = (bound.head(hidden, chosen) for bound in (pair.torch, pair.triton))
    pair.check(wanted, got)


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("ends", [None, False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_norm_is_deferred_if_the_products_before_and_after_it_can(
    has_norm: bool, ends: bool | None, begins: bool
) -> None:
    """`ends` is None for a part without a product."""
    memory, kernels, product, then = object(), *(MagicMock() for _ in range(3))
    product.deferred_norm.return_value = memory if begins else None
    then.plan.return_value.defers_norms = ends
    begin = NormedInput(torch.ones(1) if has_norm else None, None if ends is None else then)
    found = TritonKernels._deferred_norm(kernels, 5, product, begin)
    assert found is (memory if has_norm and ends and begins else None)
    assert TritonKernels._deferred_norm(kernels, 5, product, None) is None
    assert {call.args for call in then.plan.call_args_list} <= {(5,)}


def test_outputs_of_layers_are_kept(pair: Pair) -> None:
    """A tap has the stream after its layer, in memory of its own."""
    model, rows = pair.model, 5
    for bound, stream, step, _ in pair.streams(rows):
        first = bound.layers[0]
        wanted = first.feed_forward(first.mixer(stream, step)).hidden_TE.clone()
        memory = torch.full((rows + 2, model.spec.hidden_size), torch.nan).to(model.device, model.dtype)
        model.bind(bound.kernels, {0: memory})
        hidden = model.forward(pair.ids, pair.positions, step.attend)
        assert memory[rows:].isnan().all() and not torch.equal(memory[:rows], hidden)
        pair.check(wanted, memory[:rows])
