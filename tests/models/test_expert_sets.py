"""Models with experts on both kernel sets: padding, poisoned memory, rows that are kept, and all weight formats."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from checkpoints import EXPERT_FAMILIES, make_checkpoint
from kernel_sets import OwnQueries
from product_problem import gemm_device

from phonograph.kernels.triton.experts.count_pairs import count_pairs
from phonograph.models.layers import triton_experts
from phonograph.models.layers.kernel_set import KernelSet
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.layers.part_weights import ExpertsWeights
from phonograph.models.layers.rotary import rotary_tables
from phonograph.models.layers.torch_parts import TorchKernels
from phonograph.models.layers.triton_parts import TritonExperts, TritonKernels
from phonograph.models.layers.workspace import Workspace
from phonograph.models.quantization import mxfp4
from phonograph.models.quantization.awq import Awq
from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme
from phonograph.models.quantization.scheme import Quantization, Scheme
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer

MAX_TOKENS, REAL, KEPT = 21, 17, 4
FLOAT16 = torch.bfloat16 if torch.cuda.is_available() else torch.float16
# A rounding may choose another expert of two whose logits are close, so that few numbers of some rows differ much.
LIMITS = {torch.float32: 3e-5, FLOAT16: 2e-2}
SCHEMES: dict[str, Scheme] = {
    "int4": Gptq(bits=4, group_size=32, version=1),
    "int4 with zeros": Awq(bits=4, group_size=32, zeros=True),
    "fp8 blocks": Fp8(origin="FP8", scales="block", block=(16, 32)),
    "fp8 channels": Fp8(origin="FP8", scales="channel"),
    "int8": Gptq(bits=8, group_size=32, zeros=True, version=2),
    "mxfp4": Mxfp4Scheme(),
}
CASES = [(family, torch.float32, None) for family in EXPERT_FAMILIES]
# One family for each way to route and each kind of expert.
CASES += [(family, FLOAT16, None) for family in ("qwen2_moe", "glm4_moe", "gpt_oss", "gemma4_moe")]
CASES += [("qwen2_moe", FLOAT16, scheme) for scheme in SCHEMES]
# Shared experts of the experts' size and format are one of them on a GPU. With MXFP4 they are in 16 bits.
ALIKE = " alike"
CASES += [(family + ALIKE, torch.float32, None) for family in ("qwen2_moe", "granitemoeshared", "granite4_moe")]
CASES += [("qwen2_moe" + ALIKE, FLOAT16, scheme) for scheme in (None, *SCHEMES)]


class Sets:
    """A model of random weights that runs on either kernel set."""

    def __init__(self, folder: Path, family: str, dtype: torch.dtype, scheme: Scheme | None) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        inner = 64 if isinstance(scheme, Mxfp4Scheme) else 32
        sizes = {"moe_intermediate_size": inner, "intermediate_size": inner}
        if family.endswith(ALIKE):
            family = family.removesuffix(ALIKE)
            sizes |= {"shared_expert_intermediate_size": inner, "shared_intermediate_size": inner}
        alike = (family == "glm4_moe" or len(sizes) > 2) and not isinstance(scheme, Mxfp4Scheme)
        own = {name: size for name, size in sizes.items() if EXPERT_FAMILIES[family][2].get(name)}
        make_checkpoint(family, folder, seed=2, **own)
        only = ("mlp.experts",) if isinstance(scheme, Mxfp4Scheme) else ()
        quantization = None if scheme is None else Quantization("", scheme, only=only)
        spec = read_model_spec(folder).with_quantization(quantization)
        self.model = model = Transformer(spec, dtype, device)
        experts = [one.feed_forward for one in model.weights if isinstance(one.feed_forward, ExpertsWeights)]
        assert all((one.joint is not None) == alike for one in experts)
        generator = torch.Generator().manual_seed(5)
        for weight in model.parameters:
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn / weight.shape[1] ** 0.5 if weight.dim() == 2 else drawn * 0.2 + 1)
        for weight in model.quantized:
            weight.draw(weight.shape[0] ** -0.5, torch.Generator(device).manual_seed(1))
        tables = [rotary_tables(spec, 8, its, device) for its in (dtype, torch.float32)]
        self.workspace = Workspace.make(spec, MAX_TOKENS, 9, dtype, device, gemm_device=gemm_device())
        self.sets: tuple[KernelSet, ...] = (
            TorchKernels(tables[0], spec.rms_norm_eps, spec.factors),
            TritonKernels(self.workspace, tables[1], spec.rms_norm_eps, device=gemm_device(), factors=spec.factors),
        )

    def run(self, kernels: KernelSet, ids: torch.Tensor, real: int, kept: torch.Tensor | None = None) -> torch.Tensor:
        for memory in self.workspace.tensors():
            memory.fill_(torch.nan)
        model = self.model
        model.bind(kernels)
        positions = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        num_rows, num_kept = (torch.tensor([n], dtype=torch.int32, device=ids.device) for n in (real, KEPT))
        hidden = model.forward(ids, positions, OwnQueries(model), kept, num_rows, num_kept).clone()
        part = model.layers[-1].feed_forward
        if isinstance(part, TritonExperts):
            # Padding has no experts.
            experts = part._experts._lists.experts_Tk[: len(hidden)]
            routed = torch.arange(len(hidden), device=ids.device) < (real if kept is None else KEPT)
            assert torch.equal((experts >= 0).all(1), routed) and torch.equal((experts >= 0).any(1), routed)
        return hidden


@pytest.fixture(params=CASES, ids=lambda case: " ".join(map(str, case)))
def sets(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sets:
    family, dtype, scheme = request.param
    monkeypatch.setattr(mxfp4, "_in_order_of_gpu", lambda _: True)
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    with torch.inference_mode():
        return Sets(tmp_path, family, dtype, None if scheme is None else SCHEMES[scheme])


@torch.inference_mode()
def test_layers_in_turn(sets: Sets) -> None:
    device, spec = sets.model.device, sets.model.spec
    for rows, real in ((1, 1), (MAX_TOKENS, REAL)):
        ids = (torch.arange(rows, dtype=torch.int32, device=device) * 37 + 5) % spec.vocab_size
        wanted, found = (sets.run(kernels, ids, real)[:real].double() for kernels in sets.sets)
        assert (found - wanted).norm() <= LIMITS[sets.model.dtype] * wanted.norm()


@torch.inference_mode()
def test_rows_that_are_kept(sets: Sets) -> None:
    device, spec = sets.model.device, sets.model.spec
    ids = (torch.arange(MAX_TOKENS, dtype=torch.int32, device=device) * 37 + 5) % spec.vocab_size
    kept = torch.tensor([3, 0, 16, 7, 20, 20], device=device)
    wanted, found = (sets.run(kernels, ids, REAL, kept)[:KEPT].double() for kernels in sets.sets)
    assert (found - wanted).norm() <= LIMITS[sets.model.dtype] * wanted.norm()


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen2_moe" + ALIKE])
@torch.inference_mode()
def test_both_sets_count_alike(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding count nothing. Without counters no kernel counts."""
    monkeypatch.setattr(WeightAllocator, "by_outputs", True)
    sets = Sets(tmp_path, family, torch.float32, None)
    launched: list[int] = []

    def seen(experts_Tk: torch.Tensor, load_X: torch.Tensor, **settings: bool) -> None:
        launched.append(len(experts_Tk))
        count_pairs(experts_Tk, load_X, **settings)

    monkeypatch.setattr(triton_experts, "count_pairs", seen)
    ids = torch.arange(MAX_TOKENS, dtype=torch.int32, device=sets.model.device) * 3
    kept = torch.tensor([3, 0, 16, 7, 20, 20], device=sets.model.device)
    loads: list[list[int]] = []
    for counts, rows in itertools.product((False, True), (None, kept)):
        for kernels in sets.sets:
            if counts:
                sets.model.count_expert_load()
            sets.run(kernels, ids, REAL, rows)
            loads += [load_X.tolist() for load_X in sets.model.expert_load.values()]
    assert launched == [MAX_TOKENS, len(kept)]
    assert loads[0] == loads[1] and sum(loads[0]) == 3 * REAL
    assert loads[2] == loads[3] and sum(loads[2]) == 3 * KEPT
