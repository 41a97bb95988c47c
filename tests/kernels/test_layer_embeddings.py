"""Embeddings in layers, their gates, and joint norms of queries and keys, against float64."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.triton.elementwise import layer_embeddings, layers

EPS = 1e-6
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
LIMITS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def apart(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return rows with NaN between them."""
    wide = torch.full((rows, width + 3), torch.nan, dtype=dtype, device=device)
    wide[:, :width] = torch.randn(rows, width).to(device, dtype)
    return wide[:, :width]


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert (found.double() - wanted).norm() <= LIMITS[found.dtype] * wanted.norm()
    between = found.as_strided((len(found), found.stride(0) - found.shape[1]), (found.stride(0), 1), found.shape[1])
    assert between.isnan().all()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 40), (5, 64)])
def test_embeddings_of_all_layers(tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> None:
    projected, table = apart(tokens, 3 * size, dtype, device), apart(7, 3 * size, dtype, device)
    ids, weight = torch.randint(0, 7, (tokens,), device=device), torch.rand(size).to(device) + 0.5
    parts = normed(projected.double().unflatten(1, (3, size)) * 0.25, weight).flatten(1)
    wanted = (parts + 4.0 * table[ids].double()) * 0.5
    layer_embeddings.add_table(projected, ids, table, weight, EPS, (4.0, 0.25, 0.5))
    check(projected, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("picked", [False, True])
def test_gates_of_a_layer(picked: bool, dtype: torch.dtype, device: torch.device) -> None:
    gates, embeddings = apart(3, 40, dtype, device), apart(6, 120, dtype, device)
    rows = torch.tensor([5, 0, 5], device=device) if picked else torch.arange(3, device=device)
    wanted = torch.nn.functional.gelu(gates.double(), approximate="tanh") * embeddings[rows, 80:].double()
    layer_embeddings.gate_embedding(gates, embeddings, 2, rows if picked else None)
    check(gates, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 5)])
def test_joint_norms(heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device) -> None:
    """Values stay as they are."""
    size = 24
    queries, keys = heads * size, kv_heads * size
    qkv = apart(5, queries + 2 * keys, dtype, device)
    weights = (torch.rand(heads + kv_heads, size) + 0.5).to(device, dtype)
    wanted = qkv.double()
    wanted[:, :queries] = normed(wanted[:, :queries], weights[:heads].flatten())
    wanted[:, queries : queries + keys] = normed(wanted[:, queries : queries + keys], weights[heads:].flatten())
    values = qkv[:, queries + keys :].clone()
    layers.norm_queries_and_keys(qkv, weights, heads, EPS)
    check(qkv, wanted)
    assert torch.equal(qkv[:, queries + keys :], values)
