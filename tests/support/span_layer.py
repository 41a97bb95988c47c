"""Random weights and rows of all products between two attention launches, and what they should come to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from phonograph.kernels.triton.linear import LinearScratch, linear, make_scratch
from phonograph.kernels.triton.span import SpanWeights, run_span
from phonograph.kernels.triton.span_plan import SpanConfig, SpanSizes, StreamConfig

EPS = 1e-6


class Layer:
    """A layer's weights and rows, the rows inside larger poisoned tensors, so that stray writes show."""

    def __init__(
        self, rows: int, sizes: SpanSizes, dtype: torch.dtype, device: torch.device, *, bias: bool, seed: int = 0
    ) -> None:
        attended, hidden, intermediate, qkv = sizes
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(device)

        def product(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor | None]:
            return random(outputs, inputs) / inputs**0.5, random(outputs) if bias else None

        def poisoned(width: int) -> torch.Tensor:
            return torch.full((rows + 2, width + 16), float("nan"), dtype=dtype, device=device)

        self.dtype = dtype
        self.weights = SpanWeights(
            *product(hidden, attended),
            random(hidden) * 0.1 + 1,
            *product(2 * intermediate, hidden),
            *product(hidden, intermediate),
            random(hidden) * 0.1 + 1,
            *product(qkv, hidden),
        )
        self.attended, self.residual = random(rows, attended), random(rows, hidden)
        self._around = {"hidden": poisoned(hidden), "inner": poisoned(intermediate), "qkv": poisoned(qkv)}
        self.normed = torch.full_like(self.residual, float("nan"))
        self.hidden, self.inner, self.qkv = (one[1:-1, 8:-8] for one in self._around.values())
        self.hidden.copy_(self.residual)

    def run(
        self,
        config: SpanConfig | StreamConfig,
        scratch: LinearScratch,
        num_programs: int | None = None,
        *,
        last: bool = False,
    ) -> None:
        weights = self.weights
        if last:
            weights = weights._replace(next_norm_E=None, qkv_FE=None, qkv_bias_F=None)
        rows = self.attended, self.hidden, self.normed, self.inner, self.qkv
        run_span(weights, *rows, EPS, scratch=scratch, config=config, num_programs=num_programs)

    def reference(self) -> dict[str, torch.Tensor]:
        weights = [one.double() if one is not None else None for one in self.weights]
        output, output_bias, mlp_norm, gate_up, gate_up_bias, down, down_bias, next_norm, qkv, qkv_bias = weights
        assert output is not None and gate_up is not None and down is not None and qkv is not None
        width = (self.residual.shape[1],)
        hidden = self.residual.double() + functional.linear(self.attended.double(), output, output_bias)
        normed = functional.rms_norm(hidden, width, mlp_norm, EPS)
        gate, up = functional.linear(normed, gate_up, gate_up_bias).chunk(2, -1)
        inner = functional.silu(gate) * up
        hidden = hidden + functional.linear(inner, down, down_bias)
        normed = functional.rms_norm(hidden, width, next_norm, EPS)
        return {"inner": inner, "hidden": hidden, "qkv": functional.linear(normed, qkv, qkv_bias)}

    def check(self, *, last: bool = False) -> None:
        limit = 1e-2 if self.dtype is torch.bfloat16 else 2e-3
        for name, wanted in self.reference().items():
            got = getattr(self, name).double()
            if name == "qkv" and last:
                assert got.isnan().all()
                continue
            assert (got - wanted).norm() <= limit * wanted.norm(), name
            assert torch.allclose(got, wanted, rtol=0.05, atol=6 * limit), name
            outside = self._around[name].clone()
            outside[1:-1, 8:-8] = float("nan")
            assert outside.isnan().all(), name


def poisoned_scratch(device: torch.device) -> LinearScratch:
    scratch = make_scratch(device)
    scratch.squares.fill_(float("nan"))
    scratch.partials.fill_(float("nan"))
    return scratch


def check_launches_in_a_row(
    sizes: SpanSizes,
    config: SpanConfig | StreamConfig,
    rows: int,
    device: torch.device,
    *,
    num_layers: int,
    launches: int,
) -> None:
    """In a graph each begins before the one before has ended, and must do what it does alone. A product stands in for
    attention between them; after a pause nothing overlaps."""
    scratch = poisoned_scratch(device)
    layers = [Layer(rows, sizes, torch.bfloat16, device, bias=False, seed=seed) for seed in range(num_layers)]
    layer, weights = layers[0], [one.weights for one in layers]
    generator = torch.Generator().manual_seed(9)
    mix = torch.randn(sizes.attended, sizes.qkv, generator=generator) / sizes.qkv**0.5
    mix = mix.to(torch.bfloat16).to(device)
    start = layer.attended.clone()

    def chain(pause: bool) -> None:
        for index in range(launches):
            layer.weights = weights[index % num_layers]
            layer.run(config, scratch)
            if pause:
                torch.cuda.synchronize()
            linear(layer.qkv, mix, None, layer.attended, scratch=scratch)
            if pause:
                torch.cuda.synchronize()

    def again(run: Callable[[], None]) -> list[torch.Tensor]:
        layer.attended.copy_(start)
        layer.hidden.copy_(layer.residual)
        for one in (layer.normed, layer.inner, layer.qkv, scratch.squares):
            one.fill_(float("nan"))
        run()
        assert not scratch.barrier.any()
        return [layer.hidden.clone(), layer.inner.clone(), layer.qkv.clone()]

    wanted = again(lambda: chain(pause=True))
    assert all(one.isfinite().all() for one in wanted)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(pause=False)
    for _ in range(5):
        assert all(torch.equal(*pair) for pair in zip(again(graph.replay), wanted, strict=True))
