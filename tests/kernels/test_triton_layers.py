"""The fused layer kernels against the functions of torch that the CPU runs, and against float64."""

from __future__ import annotations

import pytest
import torch

from phonograph.kernels.torch.layers import rms_norm as reference_norm
from phonograph.kernels.torch.layers import rope as reference_rope
from phonograph.kernels.triton.attention import rope_and_kv_write as rope_kv
from phonograph.kernels.triton.elementwise import layer_embeddings, layers
from phonograph.kernels.triton.elementwise.gate_heads import gate_heads

DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
EPS = 1e-5


def relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def limit(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


def poison(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 200, 896])
@pytest.mark.parametrize("rows", [1, 5])
def test_norms(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(rows * width)
    embedding = torch.randn(11, width, device=device).to(dtype)
    weight, eps = torch.rand(width, device=device).to(dtype), torch.tensor(EPS, device=device)
    ids = torch.randint(0, 11, (rows,), dtype=torch.int32, device=device)
    hidden, normed = (poison(rows, width, dtype=dtype, device=device) for _ in range(2))
    layers.embed_and_norm(ids, embedding, weight, EPS, hidden, normed)
    assert torch.equal(hidden, embedding[ids.long()])
    assert relative(normed, reference_norm(hidden, weight, eps)) < limit(dtype)

    out = poison(rows, width, dtype=dtype, device=device)
    layers.rms_norm(hidden, weight, EPS, out)
    assert torch.equal(out, normed)
    picked = torch.tensor([rows - 1, 0, 0], device=device)
    out = poison(3, width, dtype=dtype, device=device)
    layers.gather_and_norm(hidden, picked, weight, EPS, out)
    assert torch.equal(out, normed[picked])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 70), (4, 1024), (3, 2500)])
def test_gathered_rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows apart from one another, as views of wider ones are; what lies between is left alone."""
    source = torch.randn(6, width + 5, device=device).to(dtype)[:, 3:-2]
    picked = torch.arange(rows, device=device) * 5 % 6
    memory = poison(rows + 2, width + 9, dtype=dtype, device=device)
    layers.gather_rows(source, picked, memory[1:-1, 4:-5])
    assert torch.equal(memory[1:-1, 4:-5], source[picked])
    # A part of a table, from row 1 to 3.
    layers.gather_part(source[1:4], picked, 1, memory[1:-1, 4:-5])
    known = (picked > 0) & (picked < 4)
    assert torch.equal(memory[1:-1, 4:-5], torch.where(known[:, None], source[picked], 0.0))
    memory[1:-1, 4:-5] = float("nan")
    assert bool(memory.isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 70), (3, 2500)])
def test_gathered_columns(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    source = torch.randn(rows, width + 5, device=device).to(dtype)[:, 3:-2]
    order = torch.randperm(width, device=device)
    memory = poison(rows + 2, width, dtype=dtype, device=device)
    layers.gather_columns(source, order, memory[1:-1])
    assert torch.equal(memory[1:-1], source[:, order])
    assert bool(memory[[0, -1]].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 100), (3, 2500), (9, 64)])
def test_activation(rows: int, width: int, gelu: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(width)
    gate_up = (4 * torch.randn(rows, 2 * width, device=device)).to(dtype)
    out = poison(rows, width, dtype=dtype, device=device)
    activate = layers.gelu_tanh_and_mul if gelu else layers.silu_and_mul
    activate(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    wanted = torch.nn.functional.gelu(gate, approximate="tanh") if gelu else torch.nn.functional.silu(gate)
    assert relative(out, wanted * up) < limit(dtype)
    activate(gate_up, gate_up[:, :width])
    assert torch.equal(gate_up[:, :width], out) and torch.equal(gate_up[:, width:].double(), up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), [(1, 4, 2, 64), (5, 3, 1, 40), (17, 4, 4, 128)])
def test_rope_and_kv_write(
    tokens: int, heads: int, kv_heads: int, size: int, norm: bool, hnd: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(tokens + size)
    block_size, num_blocks, positions_in_table = 16, 4, 50
    width = (heads + 2 * kv_heads) * size
    qkv = torch.randn(tokens, width, device=device).to(dtype)
    original = qkv.clone()
    angles = torch.rand(positions_in_table, size // 2, device=device) * 6
    rotary = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, positions_in_table, (tokens,), device=device)
    slots = torch.randperm(num_blocks * block_size, device=device)[:tokens]
    slots[tokens // 2] = -1
    given = slots[:-1] if tokens > 4 else slots  # behind a shorter mapping nothing is written
    shape = (2, num_blocks, kv_heads, block_size, size) if hnd else (2, num_blocks, block_size, kv_heads, size)
    cache = poison(*shape, dtype=dtype, device=device)
    cache = cache.transpose(2, 3) if hnd else cache
    qk_norm = torch.rand(heads + kv_heads, size, device=device).to(dtype) if norm else None
    attention = poison(tokens, heads * size, dtype=dtype, device=device) if hnd else None
    rope_kv.rope_and_write_kv(
        qkv,
        positions,
        rotary,
        cache,
        given,
        clear_TF=attention,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        qk_norm=qk_norm,
        eps=EPS,
        k_scale=None,
        v_scale=None,
    )
    rows = original.float().unflatten(-1, (-1, size))
    qk, value = rows[:, : heads + kv_heads], rows[:, heads + kv_heads :]
    if qk_norm is not None:
        qk = reference_norm(qk, qk_norm.float(), torch.tensor(EPS, device=device))
    cos, sin = rotary[positions].chunk(2, -1)
    rotated = reference_rope(qk, cos[:, None, None], sin[:, None])
    assert relative(qkv[:, : heads * size], rotated[:, :heads].flatten(1)) < limit(dtype)
    assert torch.equal(qkv[:, heads * size :], original[:, heads * size :]), "keys and values stay as they were"
    written = [row for row in range(len(given)) if int(given[row]) >= 0]
    if attention is not None:
        others = [row for row in range(tokens) if row not in written]
        assert others and not attention[others].any() and attention[written].isnan().all()
    blocks, offsets = given[written] // block_size, given[written] % block_size
    if written:
        assert relative(cache[0, blocks, offsets], rotated[written, heads:]) < limit(dtype)
        assert torch.equal(cache[1, blocks, offsets], value[written].to(dtype))
    assert int(cache.isfinite().sum()) == 2 * len(written) * kv_heads * size, "nothing else was written"

    again = poison(*shape, dtype=dtype, device=device)
    again = again.transpose(2, 3) if hnd else again
    key = rotated[:, heads:].to(dtype)
    strided_value = original.unflatten(-1, (-1, size))[:, heads + kv_heads :]
    rope_kv.write_kv(key, strided_value, again, given, None, None)
    assert torch.equal(again[0, blocks, offsets], key[written])
    assert torch.equal(again[1, blocks, offsets], value[written].to(dtype))
    assert int(again.isfinite().sum()) == 2 * len(written) * kv_heads * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("size", "pairs"), [(64, 32), (64, 16), (40, 5), (48, 0)])
def test_rope_of_a_part(size: int, pairs: int, scaled: bool, dtype: torch.dtype, device: torch.device) -> None:
    """The rest of a head is normed, by weights in float32, and not rotated; queries may have a scale by position."""
    torch.manual_seed(size + pairs)
    tokens, heads, kv_heads = 5, 4, 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device).to(dtype)
    original = qkv.double().unflatten(-1, (-1, size))
    angles, scales = torch.rand(9, pairs, device=device) * 6, torch.rand(9, 1, device=device) + 0.5
    table = torch.cat((angles.cos(), angles.sin(), *([scales] if scaled else [])), -1) if pairs else None
    positions = torch.randint(0, 9, (tokens,), device=device)
    norm = torch.rand(heads + kv_heads, size, device=device) + 0.5
    cache = poison(2, 1, 16, kv_heads, size, dtype=dtype, device=device)
    slots = torch.randperm(16, device=device)[:tokens]
    kv_write(qkv, positions, table, cache, slots, norm, None, None)
    qk = original[:, :-kv_heads]
    qk = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    cos, sin = angles[positions][:, None].double().cos(), angles[positions][:, None].double().sin()
    first, second, rest = qk[..., :pairs], qk[..., pairs : 2 * pairs], qk[..., 2 * pairs :]
    wanted = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)
    factor = scales[positions].double()[:, None] if table is not None and scaled else 1.0
    assert relative(qkv[:, : heads * size], (wanted[:, :heads] * factor).flatten(1)) < limit(dtype)
    assert relative(cache[0, 0, slots], wanted[:, heads:]) < limit(dtype)
    assert torch.equal(cache[1, 0, slots].double(), original[:, -kv_heads:])
    assert int(cache.isfinite().sum()) == 2 * tokens * kv_heads * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "size"), [(1, 4, 2, 32), (5, 6, 3, 64), (20, 2, 2, 24)])
def test_heads_with_gates(
    tokens: int, heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Queries between their gates are rotated as without them, into memory behind the values."""
    torch.manual_seed(tokens + size)
    queries, gates = (torch.randn(tokens, heads, size, device=device).to(dtype) for _ in range(2))
    others = torch.randn(tokens, 2 * kv_heads * size, device=device).to(dtype)
    plain = torch.cat([queries.flatten(1), others], 1)
    room = poison(tokens, heads * size, dtype=dtype, device=device)
    gated = torch.cat([torch.stack([queries, gates], 2).flatten(1), others, room], 1)
    angles = torch.rand(9, size // 4, device=device) * 6
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.randint(0, 9, (tokens,), device=device)
    norm, slots = torch.rand(heads + kv_heads, size, device=device) + 0.5, torch.randperm(32, device=device)[:tokens]
    caches = [poison(2, 2, 16, kv_heads, size, dtype=dtype, device=device) for _ in range(2)]
    sizes = {"num_query_heads": heads, "num_kv_heads": kv_heads, "eps": EPS, "k_scale": None, "v_scale": None}
    for rows, cache in zip((plain, gated), caches, strict=True):
        rope_kv.rope_and_write_kv(rows, positions, table, cache, slots, qk_norm=norm, gated=rows is gated, **sizes)
    assert torch.equal(gated[:, -heads * size :], plain[:, : heads * size])
    torch.testing.assert_close(*caches, rtol=0, atol=0, equal_nan=True)
    out = torch.randn(tokens, heads * size, device=device).to(dtype)
    wanted = out.double() * gates.flatten(1).double().sigmoid()
    gate_heads(out, gated, size)
    assert relative(out, wanted) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys_are_values", [False, True])
@pytest.mark.parametrize("value_norms", [False, True])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "size", "pairs"),
    [(1, 4, 2, 512, 64), (3, 6, 2, 40, 5), (17, 5, 1, 64, 32), (5, 8, 8, 24, 0)],
)
def test_pairs_in_halves_and_values(
    tokens: int,
    heads: int,
    kv_heads: int,
    size: int,
    pairs: int,
    value_norms: bool,
    keys_are_values: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The first pairs of a head rotate, half a head apart. Values are normed, and may be the keys as given."""
    torch.manual_seed(size + tokens)
    given = heads + kv_heads * (1 if keys_are_values else 2)
    memory = torch.randn(tokens, given * size + 3, device=device).to(dtype)
    qkv, original = memory[:, :-3], memory.clone()
    rows = original[:, :-3].double().unflatten(-1, (-1, size))
    angles, positions = torch.rand(9, pairs, device=device) * 6, torch.randint(0, 9, (tokens,), device=device)
    table = torch.cat((angles.cos(), angles.sin()), -1) if pairs else None
    norm = torch.rand(heads + kv_heads, size, device=device) + 0.5
    cache = poison(2, 2, 16, kv_heads, size, dtype=dtype, device=device)
    slots = torch.randperm(32, device=device)[:tokens]
    rope_kv.rope_and_write_kv(
        qkv,
        positions,
        table,
        cache,
        slots,
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        qk_norm=norm,
        eps=EPS,
        value_norms=value_norms,
        keys_are_values=keys_are_values,
        pairs_in_halves=True,
        k_scale=None,
        v_scale=None,
    )

    def exact_norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()

    values = rows[:, -kv_heads:]
    qk = exact_norm(rows[:, : heads + kv_heads]) * norm.double()
    cos, sin = angles[positions][:, None].double().cos(), angles[positions][:, None].double().sin()
    wanted, half = qk.clone(), size // 2
    wanted[..., :pairs] = qk[..., :pairs] * cos - qk[..., half : half + pairs] * sin
    wanted[..., half : half + pairs] = qk[..., half : half + pairs] * cos + qk[..., :pairs] * sin
    assert relative(qkv[:, : heads * size], wanted[:, :heads].flatten(1)) < limit(dtype)
    assert torch.equal(memory[:, heads * size :], original[:, heads * size :])
    blocks, offsets = slots // 16, slots % 16
    assert relative(cache[0, blocks, offsets], wanted[:, heads:]) < limit(dtype)
    assert relative(cache[1, blocks, offsets], exact_norm(values) if value_norms else values) < limit(dtype)
    assert int(cache.isfinite().sum()) == 2 * tokens * kv_heads * size


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (3, 3, 40), (5, 1, 24)])
def test_norm_of_all_heads(
    heads: int, kv_heads: int, size: int, wide: bool, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(size)
    memory = torch.randn(3, (heads + 2 * kv_heads) * size + 7, device=device).to(dtype)
    qkv, original = memory[:, :-7], memory.clone()
    weights = (torch.rand(heads + kv_heads, size, device=device) + 0.5).to(torch.float32 if wide else dtype)
    layers.norm_queries_and_keys(qkv, weights, heads, EPS)
    first, last = heads * size, (heads + kv_heads) * size
    for part, weight in ((slice(0, first), weights[:heads]), (slice(first, last), weights[heads:])):
        x = original[:, part].double()
        wanted = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double().flatten()
        assert relative(memory[:, part], wanted) < limit(dtype)
    assert torch.equal(memory[:, last:], original[:, last:]), "values stay as they were"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.3])
@pytest.mark.parametrize("normed_first", [False, True])
@pytest.mark.parametrize("normed_after", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("width", [64, 200])
def test_a_norm_before_an_addition(
    width: int,
    scaled: bool,
    normed_after: bool,
    normed_first: bool,
    factor: float,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """The rows that are added may lie where the result goes."""
    x, hidden = (torch.randn(5, width, device=device).to(dtype) for _ in range(2))
    weights = [torch.rand(width, device=device) + 0.5 for _ in range(2)]

    def exact_norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()

    added = exact_norm(x.double(), weights[0]) if normed_first else x.double()
    scalar = (torch.rand(1, device=device) + 0.5).to(dtype) if scaled else None
    wanted = (hidden.double() + factor * added) * (1.0 if scalar is None else scalar.double())
    layers.add_and_norm(
        x,
        hidden,
        weights[1] if normed_after else None,
        EPS,
        x if normed_after else None,
        x_weight_E=weights[0] if normed_first else None,
        factor=factor,
        scalar=scalar,
    )
    assert relative(hidden, wanted) < limit(dtype)
    if normed_after:
        assert relative(x, exact_norm(wanted, weights[1])) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "num_layers"), [(12, 3), (256, 2), (40, 1)])
def test_embeddings_in_layers(size: int, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(size)
    tokens, width, factors = 5, size * num_layers, (size**0.5, 0.125, 2**-0.5)
    projected, table = (torch.randn(rows, width, device=device).to(dtype) for rows in (tokens, 9))
    ids, norm = torch.randint(9, (tokens,), dtype=torch.int32, device=device), torch.rand(size, device=device) + 0.5
    rows = projected.double().unflatten(-1, (-1, size)) * factors[1]
    normed = rows / (rows.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    wanted = (normed.flatten(1) + factors[0] * table[ids].double()) * factors[2]
    layer_embeddings.add_table(projected, ids, table, norm, EPS, factors)
    assert relative(projected, wanted) < limit(dtype)
    for chosen in (None, torch.tensor([4, 0], device=device)):
        gates = torch.randn(tokens if chosen is None else 2, size, device=device).to(dtype)
        embedding = projected[:, -size:] if chosen is None else projected[chosen, -size:]
        wanted = torch.nn.functional.gelu(gates.double(), approximate="tanh") * embedding.double()
        layer_embeddings.gate_embedding(gates, projected, num_layers - 1, chosen)
        assert relative(gates, wanted) < limit(dtype)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_weights_in_float32(dtype: torch.dtype, device: torch.device) -> None:
    """They are multiplied before the result is rounded, as in the functions of torch."""
    x = torch.randn(5, 200, device=device).to(dtype)
    weight, out = torch.rand(200, device=device) + 0.5, poison(5, 200, dtype=dtype, device=device)
    layers.rms_norm(x, weight, EPS, out)
    exact = reference_norm(x.float(), weight, torch.tensor(EPS, device=device)).to(dtype)
    assert float((out != exact).float().mean()) < 0.01
    reference = reference_norm(x, weight, torch.tensor(EPS, device=device))
    assert reference.dtype == dtype and float((reference != exact).float().mean()) < 0.01


def kv_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor | None,
    cache: torch.Tensor,
    slots: torch.Tensor,
    norm: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """With the key and value heads that the cache has; all other heads are queries."""
    kv_heads, size = cache.shape[3], cache.shape[4]
    rope_kv.rope_and_write_kv(
        qkv,
        positions,
        rotary,
        cache,
        slots,
        num_query_heads=qkv.shape[1] // size - 2 * kv_heads,
        num_kv_heads=kv_heads,
        qk_norm=norm,
        eps=EPS,
        k_scale=k_scale,
        v_scale=v_scale,
    )


def expected_heads(
    qkv: torch.Tensor, positions: torch.Tensor, rotary: torch.Tensor, norm: torch.Tensor | None, kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotated query and key heads, and values, in float64."""
    size = rotary.shape[1]
    rows = qkv.double().unflatten(-1, (-1, size))
    qk, value = rows[:, :-kv_heads], rows[:, -kv_heads:]
    if norm is not None:
        qk = qk / (qk.square().mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
    cos, sin = rotary[positions][:, None].double().chunk(2, -1)
    first, second = qk.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1), value


@pytest.mark.parametrize("tokens", [3, 20])
def test_keys_and_values_have_scales_of_their_own(tokens: int, device: torch.device) -> None:
    """A scale of each KV head, in a cache that does not round."""
    heads, kv_heads, size = 4, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device)
    rotary = torch.rand(50, size, device=device)
    positions = torch.randint(0, 50, (tokens,), device=device)
    rotated, value = expected_heads(qkv, positions, rotary, None, kv_heads)
    k_scale, v_scale = torch.rand(2, kv_heads, device=device) + 0.5
    cache = poison(2, 4, 16, kv_heads, size, dtype=torch.float32, device=device)
    slots = torch.randperm(64, device=device)[:tokens]
    kv_write(qkv, positions, rotary, cache, slots, None, k_scale, v_scale)
    keys, values = cache.flatten(1, 2)[:, slots]
    assert relative(keys * k_scale[:, None], rotated[:, heads:]) < 1e-5
    assert relative(values * v_scale[:, None], value) < 1e-5


MODELS = [(4096, 32, 8, 128, 14336, False), (1024, 16, 8, 128, 3072, True), (3584, 28, 4, 128, 18944, False)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 2, 15, 17, 257, 2048])
@pytest.mark.parametrize(("hidden_size", "heads", "kv_heads", "size", "inner", "norm"), MODELS)
def test_sizes_of_models(
    hidden_size: int,
    heads: int,
    kv_heads: int,
    size: int,
    inner: int,
    norm: bool,
    tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    hidden = torch.randn(tokens, hidden_size, device=device).to(dtype)
    weight = torch.rand(hidden_size, device=device).to(dtype)
    normed = poison(tokens, hidden_size, dtype=dtype, device=device)
    layers.rms_norm(hidden, weight, EPS, normed)
    wide = hidden.double()
    assert relative(normed, wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()) < limit(dtype)

    gate_up = torch.randn(tokens, 2 * inner, device=device).to(dtype)
    out = poison(tokens, inner, dtype=dtype, device=device)
    layers.silu_and_mul(gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    assert relative(out, torch.nn.functional.silu(gate) * up) < limit(dtype)

    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=device).to(dtype)
    angles = torch.rand(4096, size // 2, device=device) * 6
    rotary = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.randint(0, 4096, (tokens,), device=device)
    weights = torch.rand(heads + kv_heads, size, device=device).to(dtype) if norm else None
    rotated, value = expected_heads(qkv, positions, rotary, weights, kv_heads)
    cache = poison(2, 200, 16, kv_heads, size, dtype=dtype, device=device)
    slots = torch.randperm(3200, device=device)[:tokens]
    kv_write(qkv, positions, rotary, cache, slots, weights, None, None)
    assert relative(qkv.unflatten(-1, (-1, size))[:, :heads], rotated[:, :heads]) < limit(dtype)
    assert relative(cache[0].flatten(0, 1)[slots], rotated[:, heads:]) < limit(dtype)
    assert torch.equal(cache[1].flatten(0, 1)[slots].double(), value)
    assert int(cache.isfinite().sum()) == 2 * tokens * kv_heads * size


@pytest.mark.gpu
def test_graph_follows_contents_in_a_cache_beyond_32_bits(device: torch.device) -> None:
    tokens, heads, kv_heads, size, num_blocks = 5, 4, 2, 128, 300_000
    cache = torch.zeros(2, num_blocks, 16, kv_heads, size, dtype=torch.float8_e4m3fn, device=device)
    assert cache.numel() > 2**31
    qkv = torch.zeros(tokens, (heads + 2 * kv_heads) * size, dtype=torch.bfloat16, device=device)
    rotary = torch.rand(64, size, device=device)
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    slots = torch.full((tokens,), -1, device=device)
    scales = torch.tensor([[0.5, 0.01], [0.2, 0.3]], device=device)
    kv_write(qkv, positions, rotary, cache, slots, None, *scales)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kv_write(qkv, positions, rotary, cache, slots, None, *scales)
    qkv.copy_(3 * torch.randn_like(qkv))
    positions.random_(0, 64)
    slots.copy_(num_blocks * 16 - 1 - torch.randperm(64, device=device)[:tokens])
    slots[2] = -1
    rotated, value = expected_heads(qkv, positions, rotary, None, kv_heads)
    graph.replay()
    assert relative(qkv.unflatten(-1, (-1, size))[:, :heads], rotated[:, :heads]) < 1e-2
    kept = slots[slots >= 0]
    for part, (wanted, scale) in enumerate(zip((rotated[:, heads:], value), scales, strict=True)):
        got = cache[part, kept // 16, kept % 16].float() * scale[:, None]
        assert relative(got, (wanted[slots >= 0] / scale[:, None]).clamp(-448, 448) * scale[:, None]) < 0.04
    assert int(cache[:, -5:].view(torch.uint8).count_nonzero()) <= 2 * (tokens - 1) * kv_heads * size
    assert not bool(cache[:, :-5].view(torch.uint8).any())


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_writes_are_scaled_and_saturated(kv_dtype: torch.dtype, device: torch.device) -> None:
    key, value = (100 * torch.randn(7, 3, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
    k_scale, v_scale = (torch.rand(3, device=device) + 0.05 for _ in range(2))
    cache = torch.zeros(2, 2, 16, 3, 64, device=device, dtype=kv_dtype)
    slots = torch.arange(3, 10, device=device)
    rope_kv.write_kv(key, value, cache, slots, k_scale, v_scale)
    largest = torch.finfo(kv_dtype).max
    for part, (source, scale) in enumerate(((key, k_scale), (value, v_scale))):
        wanted = (source.float() / scale[:, None]).clamp(-largest, largest).to(kv_dtype)
        assert torch.equal(cache[part, 0, 3:10].float(), wanted.float())
