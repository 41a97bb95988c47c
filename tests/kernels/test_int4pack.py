"""Products of weights packed in 4 bits, and what they rely on in torch's private operators."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.torch import int4pack
from phonograph.kernels.torch.grouped import Grouped, dequantize

aten = torch.ops.aten


def weights(bits: int, group: int, inputs: int, outputs: int, *, zeros: bool, offsets: bool) -> Grouped:
    groups = -(-inputs // group)
    words = torch.randint(-(2**31), 2**31, (outputs, -(-groups * group * bits // 32)), dtype=torch.int32)
    return Grouped(
        words,
        torch.rand(outputs, groups) + 0.1,
        torch.randint(0, 1 << bits, (outputs, groups), dtype=torch.uint8) if zeros else None,
        bits,
        group,
        offsets_OG=torch.randn(outputs, groups) if offsets else None,
    )


def exact(weight: Grouped, inputs: int) -> torch.Tensor:
    offsets_OG = None if weight.offsets_OG is None else weight.offsets_OG.double()
    return dequantize(weight._replace(scales_OG=weight.scales_OG.double(), offsets_OG=offsets_OG))[:, :inputs]


@pytest.mark.parametrize("tile_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(
    ("bits", "group", "inputs", "outputs"),
    [
        *((4, 32, 576, 100), (4, 64, 64, 64), (4, 128, 300, 37), (4, 512, 1024, 130), (4, 96, 288, 17)),
        *((8, 16, 256, 70), (8, 32, 100, 64), (8, 128, 256, 5), (8, 256, 512, 200), (8, 48, 144, 65)),
        (8, 32, 4096, 400),
    ],
)
def test_products(
    bits: int, group: int, inputs: int, outputs: int, zeros: bool, offsets: bool, tile_dtype: torch.dtype
) -> None:
    """Against float64, by the operator and by tiles; the last group and the last block may not be whole."""
    weight = weights(bits, group, inputs, outputs, zeros=zeros, offsets=offsets)
    packed = int4pack.pack(weight, 4, tile_dtype)
    assert packed.nbytes == int4pack.packed_bytes(outputs, inputs, bits, group)
    matrix_OI = exact(weight, inputs)
    unpacked_IO = int4pack.unpack(packed)[:inputs]
    assert (unpacked_IO.t() - matrix_OI).norm() <= 3e-3 * matrix_OI.norm()
    for rows in (1, 3, 4, 5, 40):
        x, hidden = torch.randn(rows, inputs), torch.randn(rows, outputs)
        wanted = x.double() @ matrix_OI.t()
        got = int4pack.product(x, packed)
        assert got.dtype == torch.float32 and (got - wanted).norm() <= 1e-2 * wanted.norm()
        assert int4pack.product(x.bfloat16(), packed).dtype == torch.bfloat16
        wanted += hidden
        int4pack.add_product(x, packed, hidden)
        assert (hidden - wanted).norm() <= 1e-2 * wanted.norm()


@pytest.mark.parametrize(("bits", "group"), [(4, 16), (4, 24), (8, 8), (8, 24), (4, 33)])
def test_groups_without_a_packed_form(bits: int, group: int) -> None:
    assert int4pack.column_group(bits, group) is None


def test_the_operator_sums_what_the_file_means() -> None:
    """The values are exact: with weights and inputs that bfloat16 holds, the only rounding is the result's."""
    values = torch.randint(0, 16, (64, 128), dtype=torch.int32)
    packed = aten._convert_weight_to_int4pack_for_cpu(values, 2)
    assert packed.shape == (64, 64) and packed.dtype == torch.uint8
    scales = torch.tensor([0.5, -3.0]).bfloat16().expand(4, 64, 2).contiguous()
    x = torch.randint(-3, 4, (3, 128)).bfloat16()
    got = aten._weight_int4pack_mm_for_cpu(x, packed, 32, scales)
    wanted = x.double() @ ((values - 8) * 0.5 - 3.0).double().t()
    assert torch.equal(got, wanted.bfloat16())


def test_the_layout_is_one_of_two() -> None:
    """Tiles of weights are unpacked by it. Blocks of outputs are packed alone, which packing in slices relies on."""
    assert int4pack.missing() is None
    values = torch.randint(0, 16, (192, 64), dtype=torch.int32)
    whole = aten._convert_weight_to_int4pack_for_cpu(values, 2).view(-1)
    parts = [aten._convert_weight_to_int4pack_for_cpu(part.contiguous(), 2).view(-1) for part in values.split(64)]
    assert torch.equal(whole, torch.cat(parts))


def test_a_torch_without_the_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4pack, "_aten", object())
    int4pack.missing.cache_clear()
    assert "has no operator _convert_weight_to_int4pack_for_cpu" in str(int4pack.missing())
    monkeypatch.undo()
    int4pack.missing.cache_clear()
    monkeypatch.setattr(int4pack, "_layout_block", lambda: 0)
    assert "unknown layout" in str(int4pack.missing())
    int4pack.missing.cache_clear()


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_averaged_products_are_nearer(rows: int) -> None:
    """Two roundings of one result differ, and their average is nearer."""
    weight = weights(8, 32, 1024, 640, zeros=False, offsets=False)
    x = torch.randn(rows, 1024)
    wanted = x.double() @ exact(weight, 1024).t()
    plain, averaged = (int4pack.pack(weight, 8, torch.float32, averaged=value) for value in (False, True))
    # What remains is the rounding of the scales, which both have.
    rounded = x.double() @ int4pack.unpack(plain).double()
    error, less = ((int4pack.product(x, one) - rounded).norm() / wanted.norm() for one in (plain, averaged))
    assert less <= (0.85 if rows < 3 else 1.0) * error
    hidden = torch.zeros(rows, 640)
    int4pack.add_product(x, averaged, hidden)
    assert torch.equal(hidden, int4pack.product(x, averaged))


@pytest.mark.parametrize("inputs", [8192, 8224, 12_288])
def test_tiles_of_very_wide_products_have_one_block(inputs: int) -> None:
    """More inputs than a tile has room for, with one block of outputs."""
    assert int4pack.TILE // inputs // int4pack.BLOCK * int4pack.BLOCK <= int4pack.BLOCK
    weight = weights(4, 32, inputs, 70, zeros=False, offsets=False)
    x = torch.randn(5, inputs)
    wanted = x.double() @ exact(weight, inputs).t()
    assert (int4pack.product(x, int4pack.pack(weight, 4, torch.float32)) - wanted).norm() <= 1e-2 * wanted.norm()
