"""Each function of a kernel set: ours in Triton beside torch, on random inputs of odd sizes, over poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from phonograph.kernels.fp8_activations import Fp8Rows
from phonograph.models.layers.kernel_set import KernelSet, KVTarget, Stream
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.layers.rotary import rotary_table
from phonograph.models.layers.torch_kernels import TorchKernels
from phonograph.models.layers.triton_kernels import TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.quantization.awq import Awq
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.scheme import Quantization, Scheme
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer

ROWS = (1, 2, 21)
MAX_TOKENS, MAX_LOGITS, POSITIONS = 21, 9, 50
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative errors. Both sides round their results once, and the torch set what lies between two of its operators."""
# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]


class WritesCache:
    """Attention whose output is the query, beside a cache that is written by slot."""

    def __init__(self, cache: torch.Tensor, slots_T: torch.Tensor) -> None:
        self._cache = cache
        self._slots_T = slots_T

    def __call__(self, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        block, offset = self._slots_T // self._cache.shape[2], self._slots_T % self._cache.shape[2]
        self._cache[0, block, offset], self._cache[1, block, offset] = k_TKD, v_TKD
        return q_THD.contiguous()

    def kv_target(self, layer: int, num_tokens: int) -> KVTarget:
        return KVTarget(self._cache, self._slots_T[:num_tokens], None, None, clears_padding=True)

    def read(self, q_THD: torch.Tensor, layer: int, out_THD: torch.Tensor) -> None:
        out_THD.copy_(q_THD)


class Pair:
    """A model of random weights with both kernel sets."""

    def __init__(self, model: Transformer, num_tokens: int = MAX_TOKENS, capability: tuple[int, int] = (0, 0)) -> None:
        spec, dtype, device = model.spec, model.dtype, model.device
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
        self.workspace = Workspace.make(spec, num_tokens, MAX_LOGITS, dtype, device, capability=capability)
        self.torch = TorchKernels(rotary_table(spec, POSITIONS, dtype, device), spec.rms_norm_eps)
        self.triton = TritonKernels(
            self.workspace, rotary_table(spec, POSITIONS, torch.float32, device), spec.rms_norm_eps
        )

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape).to(self.model.device, self.model.dtype)

    def poison(self) -> None:
        for memory in self.workspace.tensors():
            memory.fill_(torch.nan)

    def streams(self, rows: int) -> Iterator[tuple[KernelSet, Stream]]:
        """Streams of both sets that begin with the same embeddings, which the first layer's projection reads."""
        self.poison()
        ids = torch.randint(self.model.spec.vocab_size, (rows,), dtype=torch.int32).to(self.model.device)
        for kernels in (self.torch, self.triton):
            yield kernels, kernels.embed(ids, self.model.embedding_VE, then=self.model.layers[0].qkv)

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
PAIRS = [(family, dtype, "dense") for family in ("qwen3", "llama_bias") for dtype in DTYPES]
PAIRS += [("llama_bias", DTYPES[-1], scheme) for scheme in SCHEMES if scheme != "dense"]


@pytest.fixture(params=PAIRS, ids=lambda pair: " ".join(map(str, pair)))
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    family, dtype, scheme_name = request.param
    lay_as_on_a_gpu(monkeypatch)
    with torch.inference_mode():
        yield Pair(make_model(tmp_path, family, dtype, SCHEMES[scheme_name]))


def lay_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightAllocator, "matrix", lambda self, size_in, size_out: self.tensor(size_out, size_in).t())


def make_model(
    folder: Path, family: str, dtype: torch.dtype, scheme: Scheme | None, hidden: int = 136, inner: int = 104
) -> Transformer:
    make_checkpoint(family, folder)
    sizes = {"num_query_heads": 6, "num_kv_heads": 2, "vocab_size": 203}
    quantization = None if scheme is None else Quantization("", scheme)
    spec = replace(
        read_model_spec(folder), hidden_size=hidden, intermediate_size=inner, quantization=quantization, **sizes
    )
    return Transformer(spec, dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@pytest.mark.parametrize("rows", ROWS)
def test_embedding_and_projections_of_normed_rows(pair: Pair, rows: int) -> None:
    layer = pair.model.layers[0]
    (torch_set, wanted), (triton_set, got) = pair.streams(rows)
    assert torch.equal(wanted.hidden_TE, got.hidden_TE)
    pair.check(torch_set.project(wanted, layer.qkv), triton_set.project(got, layer.qkv))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_adding_to_the_stream_and_the_gated_projection_behind_it(pair: Pair, rows: int, last: bool) -> None:
    layer = pair.model.layers[0]
    results = []
    attended = pair.random(rows, layer.output.weight.shape[0])
    for kernels, begun in pair.streams(rows):
        stream = kernels.add(begun, attended, layer.output, then=layer.gate_up)
        inner = kernels.project_gated(stream, layer.gate_up, then=layer.down)
        results.append((stream.hidden_TE.clone(), inner.clone()))
        following = None if last else pair.model.layers[1].qkv
        stream = kernels.add(stream, inner, layer.down, then=following)
        results[-1] += (stream.hidden_TE, *(() if following is None else (kernels.project(stream, following),)))
    for wanted, got in zip(*results, strict=True):
        pair.check(wanted, got)


@torch.inference_mode()
def test_fp8_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 17 rows on, with FP8 weights; no matrix is written out. The torch set has activations in 16 bits."""
    lay_as_on_a_gpu(monkeypatch)
    rows, scheme = 40, Fp8(origin="FP8", scales="channel")
    model = make_model(tmp_path, "llama_bias", DTYPES[-1], scheme, hidden=128, inner=96)
    pair = Pair(model, rows, capability=(9, 0))
    assert not pair.workspace.dequantized.numel()
    layer, following = model.layers
    results = []
    for kernels, begun in pair.streams(rows):
        attended = kernels.project(begun, layer.qkv)[:, : layer.output.weight.shape[0]].clone()
        stream = kernels.add(begun, attended, layer.output, then=layer.gate_up)
        inner = kernels.project_gated(stream, layer.gate_up, then=layer.down)
        gated = inner.values_MK.float() * inner.scales_M1 if isinstance(inner, Fp8Rows) else inner.clone()
        assert isinstance(inner, Fp8Rows) == (kernels is pair.triton)
        stream = kernels.add(stream, inner, layer.down, then=following.qkv)
        results.append([attended, gated, stream.hidden_TE.clone(), kernels.project(stream, following.qkv).clone()])
        results[-1].append(kernels.add(stream, attended, layer.output, then=None).hidden_TE)
    for wanted, got in zip(*results, strict=True):
        error = (got.double() - wanted.double()).norm() / wanted.double().norm()
        # The interpreter drops the carry where rounding to FP8 fills the mantissa.
        assert error <= (0.1 if model.device.type == "cuda" else 0.3)
    assert pair.workspace.fp8_rows.float().isfinite().any()


@pytest.mark.parametrize("rows", ROWS)
def test_attention_norms_and_rotates_and_writes_the_cache(pair: Pair, rows: int) -> None:
    layer, spec = pair.model.layers[0], pair.model.spec
    device = pair.model.device
    positions = torch.randint(POSITIONS, (rows,)).to(device)
    slots = torch.randperm(96)[:rows].to(device)
    results = []
    for kernels, stream in pair.streams(rows):
        cache = torch.full((2, 6, 16, spec.num_kv_heads, spec.head_size), 7.0).to(device, pair.model.dtype)
        attend = WritesCache(cache, slots)
        qkv = kernels.project(stream, layer.qkv)
        results.append((kernels.attention(qkv, layer.heads, kernels.rotary(positions), attend), cache))
    for wanted, got in zip(*results, strict=True):
        pair.check(wanted, got)


@pytest.mark.parametrize("rows", [13, 21])
def test_rows_that_are_kept(pair: Pair, rows: int) -> None:
    layer = pair.model.layers[-1]
    chosen = torch.randperm(rows)[: MAX_LOGITS // 2].to(pair.model.device)
    attended = pair.random(rows, layer.output.weight.shape[0])
    results = []
    for kernels, begun in pair.streams(rows):
        stream, part = kernels.keep_rows(begun, attended, chosen)
        stream = kernels.add(stream, part, layer.output, then=layer.gate_up)
        inner = kernels.project_gated(stream, layer.gate_up, then=layer.down)
        stream = kernels.add(stream, inner, layer.down, then=None)
        results.append(stream.hidden_TE)
    pair.check(*results)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_logits(pair: Pair, rows: int, gathered: bool) -> None:
    model = pair.model
    pair.poison()
    hidden = pair.random(20 if gathered else rows, model.spec.hidden_size)
    chosen = torch.randint(20, (rows,)).to(model.device) if gathered else None
    wanted, got = (
        kernels.logits(hidden, chosen, model.final_norm, model.lm_head) for kernels in (pair.torch, pair.triton)
    )
    pair.check(wanted, got)
