"""Batch invariance of what is around attention: a row's bits are the same alone and among any others.

In Triton's interpreter on small sizes; on a GPU also on those of real models. Attention has tests of its own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_sets import OwnQueries
from product_problem import gemm_device, linear, linear_add, linear_add_norm, linear_gated

from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.triton.attention import rope_and_kv_write as rope_kv
from phonograph.kernels.triton.gemm.choose import BATCH_INVARIANT
from phonograph.kernels.triton.gemm.run_product import GemmScratch
from phonograph.kernels.triton.sampling import sample as sampling
from phonograph.models.layer_spec import LayerSizes, decoder_layer
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.triton_parts import TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.sampling.sampler import Sampler

EPS = 1e-5
HALF = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
REAL = [(6144, 4096), (4096, 14336), (28672, 4096), (1001, 4096), (300, 2501), (151936, 1024)]
"""Outputs and inputs."""
MOST = 150
"""Rows."""


class Products:
    """Weights, and rows that are the same whatever their number."""

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        self.weight, self.pairs = (random(rows, inputs) / inputs**0.5 for rows in (outputs, 2 * outputs))
        self.bias, self.x, self.residual = random(outputs), random(MOST, inputs), random(MOST, outputs)
        self.scratch = GemmScratch.make(device)

    def run(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return the results of each kind of product for these rows in this order."""
        x, residual = self.x[rows], self.residual[rows]
        fixed = {"scratch": self.scratch, "config": BATCH_INVARIANT}
        out, silu, normed = (torch.full_like(residual, torch.nan) for _ in range(3))
        added, hidden = residual.clone(), residual.clone()
        linear(x, self.weight, self.bias, out, **fixed)
        linear_add(x, self.weight, None, added, **fixed)
        assert linear_gated(x, self.pairs, None, silu, **fixed)
        assert not linear_add_norm(x, self.weight, None, hidden, self.bias, EPS, normed, defer=False, **fixed)
        return [out, added, silu, hidden, normed]

    def check(self, sizes: list[int]) -> None:
        every = self.run(torch.arange(MOST))
        wanted = self.x.double() @ self.weight.double().t()
        assert float((every[1].double() - self.residual.double() - wanted).norm()) < 2e-2 * float(wanted.norm())
        assert all(bool(tensor.isfinite().all()) for tensor in every)
        generator = torch.Generator().manual_seed(2)
        for size in sizes:
            # At other places of a tile than among all rows.
            rows = torch.randperm(MOST, generator=generator)[:size]
            some = self.run(rows)
            assert all(torch.equal(a[rows], b) for a, b in zip(every, some, strict=True)), f"{size} of {MOST} rows"


@pytest.mark.usefixtures("every_row_alike")
def test_small_products(device: torch.device) -> None:
    Products(200, 70, torch.float16, device).check([1, 3, 66])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), REAL)
def test_products_of_real_sizes(outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> None:
    Products(inputs, outputs, dtype, device).check([1, 2, 5, 16, 17, 63, 64, 65, 128])


@pytest.mark.gpu
def test_chosen_products_differ(device: torch.device) -> None:
    """Ordinary products depend on the batch; otherwise the tests above could not fail."""
    generator = torch.Generator().manual_seed(2)
    x, weight = (torch.randn(n, 4096, generator=generator).to(device, torch.bfloat16) for n in (200, 4096))
    outs = [torch.empty(rows, 4096, dtype=torch.bfloat16, device=device) for rows in (1, 8, 200)]
    for out in outs:
        linear(x[: len(out)], weight, None, out, scratch=GemmScratch.make(device))
    assert not all(torch.equal(out[0], outs[0][0]) for out in outs)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 4, 64), (4, 2, 128), (3, 1, 40)])
def test_norms_of_heads(heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(size)
    qkv = torch.randn(20, (heads + 2 * kv_heads) * size, generator=generator).to(device, dtype)
    weight = torch.rand(heads + kv_heads, size, generator=generator).to(device, dtype)
    angles = torch.rand(50, size // 2, generator=generator) * 6
    rotary = torch.cat((angles.cos(), angles.sin()), -1).to(device)

    def run(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        made, cache = qkv[:rows].clone(), torch.zeros(2, 3, 16, kv_heads, size, dtype=dtype, device=device)
        numbers = torch.arange(rows, device=device)
        rope_kv.rope_and_write_kv(
            made,
            numbers,
            rotary,
            cache,
            numbers,
            num_query_heads=heads,
            num_kv_heads=kv_heads,
            qk_norm=weight,
            eps=EPS,
            k_scale=None,
            v_scale=None,
            batch_invariant=True,
        )
        return made, cache[:, 0, 0]

    query, cached = run(1)
    for rows in (2, 20):
        other_query, other_cached = run(rows)
        assert torch.equal(query, other_query[:1]) and torch.equal(cached, other_cached)


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_sums_of_the_sampler(batch_invariant: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are cut into fewer parts where there are many; what top-p and top-k go by must not show it."""
    monkeypatch.setattr(sampling, "_SCAN_PROGRAMS", 4)
    monkeypatch.setattr(sampling, "_FILTER_PROGRAMS", 4)
    vocab, params = 4500, SamplingParams(temperature=0.7, top_p=0.8, seed=3)
    logits = torch.randn(3, vocab, generator=torch.Generator().manual_seed(4)).to(device)

    def run(rows: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        sampler = Sampler(max_num_seqs=6, vocab_size=vocab, device=torch.device("cpu"), seed=1)
        for slot in range(rows):
            sampler.load(slot, params, [], [], [], 0)
        drawn = sampler.kernel_parameters(np.arange(rows))
        scratch = sampling.make_sample_scratch(3, vocab, device)
        scratch.part_sums.zero_()
        tokens, last = (torch.zeros(6, dtype=torch.int32, device=device) for _ in range(2))
        sampling.sample(
            logits[:rows],
            torch.arange(rows, dtype=torch.int32, device=device),
            *(
                torch.from_numpy(each).to(device, dtype)
                for each, dtype in zip(drawn[: len(_DRAWN)], _DRAWN, strict=True)
            ),
            scratch,
            tokens,
            last,
            last,
            torch.zeros(rows, dtype=torch.int32, device=device),
            batch_invariant=batch_invariant,
        )
        return tokens[:1].tolist(), scratch.row_low[0].clone(), scratch.part_sums[:2].clone()

    (token, low, sums), (other_token, other_low, other_sums) = run(1), run(3)
    assert token == other_token
    assert (bool(low == other_low) and torch.equal(sums, other_sums)) == batch_invariant


_DRAWN = torch.float32, torch.int32, torch.float32, torch.float32, torch.int64


def test_the_hosts_sampler_takes_rows_one_by_one(device: torch.device) -> None:
    vocab, rows = 1500, 6
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5)).to(device)
    logits[2, 7] = torch.nan
    kinds = [{}, {"logprobs": 3}, {"top_p": 0.9}, {"top_k": 4}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 2.0}}]

    def made(batch_invariant: bool) -> Sampler:
        sampler = Sampler(max_num_seqs=rows, vocab_size=vocab, device=device, seed=1, batch_invariant=batch_invariant)
        for slot, kind in enumerate(kinds):
            sampler.load(slot, SamplingParams(temperature=0.9, seed=slot, **kind), [1, 2], [], [], 0)
        return sampler

    slots, lens = list(range(rows)), [0] * rows
    sampler = made(True)
    seen: list[int] = []
    edit = sampler._edit
    sampler._edit = lambda logits_NV, *rest: (seen.append(len(logits_NV)), edit(logits_NV, *rest))[1]
    got, wanted = sampler.sample(logits, slots, lens), made(False).sample(logits, slots, lens)
    assert seen == [1] * rows
    assert got.token_ids == wanted.token_ids and got.token_ids[2] == -1 and min(got.token_ids[:2]) >= 0
    assert got.logprobs.keys() == wanted.logprobs.keys() == {1}


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_a_whole_decoder(batch_invariant: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention that looks at its own row only. In float16, as the interpreter multiplies bfloat16 wrongly."""
    demo = read_model_spec("demo")
    heads = demo.layers[0].attention
    layer = decoder_layer(LayerSizes(128, 96, heads.num_query_heads, heads.num_kv_heads, heads.head_size))
    head = LayerMatrix("lm_head", "", (MatrixPart("lm_head", 300),), 128)
    spec = replace(demo, vocab_size=300, hidden_size=128, layers=(layer,), head=head)
    with torch.inference_mode():
        monkeypatch.setattr(WeightAllocator, "by_outputs", True)
        model = Transformer(spec, torch.float16, device)
        generator = torch.Generator().manual_seed(6)
        for parameter in model.parameters:
            scale = 1.0 if parameter.dim() == 1 else 0.1
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
        gpu = gemm_device()
        workspace = Workspace.make(spec, 20, 20, torch.float16, device, gemm_device=gpu)
        table = rotary_tables(spec, 32, torch.float32, device)
        model.bind(TritonKernels(workspace, table, spec.rms_norm_eps, device=gpu, batch_invariant=batch_invariant))

        def run(ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
            tokens = torch.tensor(ids, dtype=torch.int32, device=device)
            rows = torch.arange(len(ids), device=device)
            hidden = model.forward(tokens, rows, OwnQueries(model))
            logits = model.logits(hidden, rows)
            assert bool(hidden.isfinite().all() & logits.isfinite().all())
            return hidden[0].clone(), logits[0].clone()

        alone = run([5])
        same = [all(torch.equal(a, b) for a, b in zip(alone, run([5, *range(rows)]), strict=True)) for rows in (1, 18)]
    assert all(same) == batch_invariant
