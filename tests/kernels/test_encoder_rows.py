"""Kernels between an encoder's products, next to torch: odd widths, several rows, overlaid memory, empty slots."""

from __future__ import annotations

import pytest
import torch

from phonograph.core.token_types import TypedTokens
from phonograph.kernels.torch import layers

encoder_rows = pytest.importorskip("phonograph.kernels.triton.elementwise.encoder_rows")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WIDTHS = (48, 384, 1000)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype is torch.float32 else 4e-3
    # A mean far from 0 shows sums of squares that are not centred.
    stream, added, weight = (
        random(5, width, dtype=dtype) + 3,
        random(5, width, dtype=dtype),
        random(2, width, dtype=dtype),
    )
    wanted = layers.layer_norm(stream + added, weight, 1e-5)
    normed, kept = added.clone(), stream.clone()
    encoder_rows.layer_norm(kept, weight, 1e-5, normed, added_TE=normed, kept_TE=kept)
    assert torch.equal(kept, stream + added)
    assert (normed - wanted).abs().max() < limit
    encoder_rows.layer_norm(stream, weight, 1e-5, stream, added_TE=added)
    assert (stream - wanted).abs().max() < limit
    rows = torch.tensor([4, 0, 4], device=DEVICE)
    gathered = torch.full((3, width), torch.nan, dtype=dtype, device=DEVICE)
    encoder_rows.layer_norm(kept, weight, 1e-5, gathered, rows_N=rows)
    assert (gathered - wanted[rows]).abs().max() < limit


@pytest.mark.parametrize("parts", ["words", "types", "positions", "norm", "all"])
def test_embed(parts: str) -> None:
    words, positions, types, weight = random(20, 48), random(9, 48), random(2, 48), random(2, 48)
    ids, kinds, places = [3, 19, 0, 3], [0, 1, 1, 0], torch.tensor([0, 5, 8, 1], device=DEVICE)
    has = {name: parts in (name, "all") for name in ("types", "positions", "norm")}
    tokens = TypedTokens.of(ids, kinds) if has["types"] else ids
    wanted = words[ids] + has["types"] * types[kinds] + has["positions"] * positions[places]
    wanted = layers.layer_norm(wanted, weight, 1e-12) if has["norm"] else wanted
    out = torch.full((4, 48), torch.nan, device=DEVICE)
    encoder_rows.embed(
        torch.tensor(tokens, dtype=torch.int32, device=DEVICE),
        places,
        words,
        positions if has["positions"] else None,
        types if has["types"] else None,
        weight if has["norm"] else None,
        1e-12,
        out,
    )
    assert (out - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu", "relu", "relu2"])
@pytest.mark.parametrize("width", [40, 1500])
def test_activations(name: str, width: int) -> None:
    plain = random(3, width) * 3
    wanted = layers.UNGATED[name](plain)
    encoder_rows.activate(plain, plain, name)
    assert (plain - wanted).abs().max() < 1e-5
    both = random(3, 2 * width) * 3
    wanted = layers.UNGATED[name](both[:, :width]) * both[:, width:]
    encoder_rows.activate(both, both[:, :width], name)
    assert (both[:, :width] - wanted).abs().max() < 1e-5


@pytest.mark.parametrize("width", WIDTHS)
def test_means_and_rows_of_prompts(width: int) -> None:
    rows, starts = random(40, width), torch.tensor([0, 1, 20, 20, 37, 37], dtype=torch.int32, device=DEVICE)
    rows[37:] = torch.nan  # padding
    numbers = torch.arange(40, dtype=torch.int32, device=DEVICE)
    out = torch.full((5, width), torch.nan, device=DEVICE)
    encoder_rows.mean_rows(rows, starts, out)
    pooled = {name: layers.pool_rows(rows, starts, numbers, name) for name in ("mean", "first", "last")}
    for number, (start, end) in enumerate([(0, 1), (1, 20), (20, 20), (20, 37)]):
        mean = rows[start:end].mean(0) if end > start else torch.zeros(width, device=DEVICE)
        assert (out[number] - mean).abs().max() < 1e-5
        assert (pooled["mean"][number] - mean).abs().max() < 1e-5
        if end > start:
            assert torch.equal(pooled["first"][number], rows[start])
            assert torch.equal(pooled["last"][number], rows[end - 1])
    assert torch.isfinite(out[4]).all() and torch.isfinite(pooled["mean"]).all()
