"""Operators beyond their numbers: hostile memory, frozen calls, buckets, padding, saturation."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from phonograph.attention.backend import AttentionLayer
from phonograph.graphs.tape.tape import TapeRuntime
from phonograph.kernels.torch.attention import paged as reference
from phonograph.kernels.torch.attention.schedule import new_handle, states, view_cache
from phonograph.testing.oracle import dense_attention

SIZE, KV_HEADS, HEADS, HEAD_SIZE = 8, 2, 4, 16
SCALE = 0.3
NO_SLOTS = torch.empty(0, dtype=torch.int64)


class Paged:
    """A paged batch made by hand, memory without a request poisoned."""

    def __init__(
        self,
        query_lens: list[int],
        seq_lens: list[int],
        *,
        beyond: int = 2**30,
        seed: int = 0,
        empty: int = 0,
        padding: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // SIZE) for length in seq_lens]
        order = (1 + torch.randperm(sum(counts), generator=generator)).tolist()
        self.cache = torch.full((2, 2 + sum(counts), SIZE, KV_HEADS, HEAD_SIZE), torch.nan)
        self.table = torch.full((len(seq_lens) + empty, max(counts) + 2), beyond, dtype=torch.int32)
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        for row, (count, length) in enumerate(zip(counts, seq_lens, strict=True)):
            blocks = [order.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(blocks)
            contents = torch.randn(2, length, KV_HEADS, HEAD_SIZE, generator=generator)
            for position in range(length):
                self.cache[:, blocks[position // SIZE], position % SIZE] = contents[:, position]
            self.keys.append(contents[0].double().numpy())
            self.values.append(contents[1].double().numpy())
        total = sum(query_lens)
        self.query = torch.full((total + padding, HEADS, HEAD_SIZE), torch.nan)
        self.query[:total] = torch.randn(total, HEADS, HEAD_SIZE, generator=generator)
        self.handle = new_handle(self, torch.device("cpu"))
        self.starts = torch.tensor([0, *np.cumsum(query_lens + [0] * empty)], dtype=torch.int32)
        self.lens = torch.tensor(seq_lens + [0] * empty, dtype=torch.int32)

    def attend(self, *, causal: bool = True, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full_like(self.query, torch.nan)
        lse = torch.full((HEADS, len(self.query)), torch.nan)
        self.call(out, lse, causal=causal, sinks=sinks)
        return out, lse

    def call(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        causal: bool = True,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
    ) -> None:
        reference.schedule(self.starts, self.lens, self.table, NO_SLOTS, self.handle, SIZE)
        reference.attention(
            self.query,
            self.cache,
            self.table,
            self.handle,
            out,
            lse,
            None,
            sinks,
            k_scale,
            None,
            SCALE,
            -1,
            -1,
            0.0,
            causal,
        )

    def expected(self, *, causal: bool = True, sinks: torch.Tensor | None = None) -> tuple[np.ndarray, np.ndarray]:
        layer = AttentionLayer(index=0, scale=SCALE, sinks=sinks)
        outs, lses = [], []
        for row, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            query = self.query[self.starts[row] : self.starts[row + 1]].double().numpy()
            out, lse = dense_attention(query, keys, values, layer, causal=causal)
            outs.append(out)
            lses.append(lse)
        return np.concatenate(outs), np.concatenate(lses, axis=1)


def assert_right(batch: Paged, **settings: object) -> None:
    out, lse = batch.attend(**settings)  # type: ignore[arg-type]
    expected, expected_lse = batch.expected(**settings)  # type: ignore[arg-type]
    actual = len(expected)
    np.testing.assert_allclose(out[:actual], expected, atol=3e-6)
    np.testing.assert_allclose(lse[:, :actual], expected_lse, atol=3e-6)
    assert not out[actual:].any()
    assert (lse[:, actual:] == -torch.inf).all()


@pytest.mark.parametrize("beyond", [-1, 0, 2**30])
def test_block_table_entries_beyond_a_sequence_are_never_followed(beyond: int) -> None:
    assert_right(Paged([1, 1, 1, 6], [3, 30, 17, 22], beyond=beyond, empty=2, padding=3))


@pytest.mark.parametrize("beyond", [-1, 0, 2**30])
def test_decodes_that_end_beside_the_end_of_a_block_of_a_half_precision_cache(beyond: int) -> None:
    """Blocks of such a cache are gathered before they are read; those without a visible key are not."""
    batch = Paged([1] * 5, [SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 5 * SIZE - 1], beyond=beyond)
    batch.cache = batch.cache.bfloat16()
    for contents in (batch.keys, batch.values):
        contents[:] = [torch.from_numpy(one).bfloat16().double().numpy() for one in contents]
    assert_right(batch)


def test_lengths_that_fall_into_several_buckets() -> None:
    lens = [700, 3, 650, 9, 8, 1, 90, 80, 2, 1000]
    assert len(decode_module()._buckets(lens, 64)) > 1
    assert_right(Paged([1] * 10, lens))


def decode_module() -> object:
    """Return the module, which the package's function of the same name hides."""
    return sys.modules["phonograph.kernels.torch.attention.decode"]


@pytest.mark.parametrize("num_heads", [1, 8, 64])
def test_buckets_hold_every_sequence_once_and_bound_the_padding(num_heads: int) -> None:
    module = decode_module()
    lens = np.random.default_rng(5).integers(1, 3000, 200).tolist()
    groups = module._buckets(lens, num_heads)
    assert sorted(index for group in groups for index in group) == list(range(200))
    for group in groups:
        padded, real = len(group) * max(lens[index] for index in group), sum(lens[index] for index in group)
        assert padded * num_heads <= 1.5 * real * num_heads + 4096
        assert len(group) == 1 or padded * num_heads <= 4 * 2**20


def test_a_sequence_longer_than_a_bucket_may_be_goes_alone() -> None:
    assert decode_module()._buckets([10, 2**21, 2**21, 10], 4) == [[1], [2], [0, 3]]


def test_more_queries_than_keys() -> None:
    """As cross attention has them; where causal, the first queries stand before the first key."""
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    for settings in ({}, {"sinks": sinks}, {"causal": False}):
        assert_right(Paged([1, 9, 20], [5, 4, 20], padding=2), **settings)


def test_an_empty_sequence_with_queries_and_an_empty_slot_between() -> None:
    batch = Paged([1, 2], [9, 11], empty=1)
    batch.starts = torch.tensor([0, 1, 3, 3], dtype=torch.int32)
    batch.lens[1] = 0
    out, lse = batch.attend(sinks=torch.arange(4.0))
    assert not out[1:].any()
    assert lse[:, 1:].tolist() == [[float(head)] * 2 for head in range(4)]
    assert not out[0].isnan().any()

    batch = Paged([1, 1, 1], [9, 11, 3])
    batch.lens[1] = 0
    out, lse = batch.attend()
    assert not out[1].any() and out[::2].isfinite().all() and lse[:, 1].tolist() == [-float("inf")] * HEADS

    batch = Paged([1, 1, 4], [9, 11, 12])
    expected, _ = batch.expected()
    batch.starts = torch.tensor([0, 1, 1, 5], dtype=torch.int32)
    batch.query = batch.query[[0, 2, 3, 4, 5]]
    out, _ = batch.attend()
    np.testing.assert_allclose(out, expected[[0, 2, 3, 4, 5]], atol=3e-6)


@pytest.mark.parametrize("graph", [False, True])
def test_the_same_call_follows_new_contents(graph: bool) -> None:
    """The very same tensors with other contents: other blocks, and another mix of decodes and prefills."""
    batches = [
        Paged([1, 1, 1, 5], [20, 3, 9, 5], padding=3),
        Paged([1, 1, 1, 5], [20, 3, 9, 5], padding=3, seed=1),
        Paged([1, 7], [31, 12], seed=2, empty=2, padding=3),
        Paged([6, 2], [6, 30], seed=3, empty=2, padding=3),
    ]
    query, starts, lens = (
        torch.zeros_like(tensor) for tensor in (batches[0].query, batches[0].starts, batches[0].lens)
    )
    table = torch.zeros(4, 8, dtype=torch.int32)
    cache = torch.full((2, 16, SIZE, KV_HEADS, HEAD_SIZE), torch.nan)
    out, lse = torch.empty_like(query), torch.empty(HEADS, len(query))
    handle = new_handle(batches[0], torch.device("cpu"))

    def load(batch: Paged) -> None:
        for tensor, contents in ((query, batch.query), (starts, batch.starts), (lens, batch.lens)):
            tensor.fill_(torch.nan if tensor is query else 0)[: len(contents)] = contents
        table[:, : batch.table.shape[1]] = batch.table
        cache.fill_(torch.nan)[:, : batch.cache.shape[1]] = batch.cache

    def call() -> tuple[torch.Tensor, ...]:
        reference.schedule(starts, lens, table, NO_SLOTS, handle, SIZE)
        reference.attention(query, cache, table, handle, out, lse, None, None, None, None, SCALE, -1, -1, 0.0, True)
        return (out, lse)

    load(batches[0])
    replay = TapeRuntime().capture(call).replay if graph else call
    for batch in (*batches, batches[0]):
        load(batch)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        replay()
        expected, expected_lse = batch.expected()
        np.testing.assert_allclose(out[: len(expected)], expected, atol=3e-6)
        np.testing.assert_allclose(lse[:, : len(expected)], expected_lse, atol=3e-6)
        assert not out[len(expected) :].any()
        assert (lse[:, len(expected) :] == -torch.inf).all()


def test_a_sequence_does_not_feel_its_neighbours() -> None:
    batch = Paged([1, 1, 1, 8], [40, 500, 7, 19])
    out, _ = batch.attend()
    for row in range(4):
        alone = Paged([1], [1])
        alone.query = batch.query[batch.starts[row] : batch.starts[row + 1]]
        alone.starts = torch.tensor([0, len(alone.query)], dtype=torch.int32)
        alone.cache, alone.table, alone.lens = batch.cache, batch.table[row : row + 1], batch.lens[row : row + 1]
        torch.testing.assert_close(
            alone.attend()[0], out[batch.starts[row] : batch.starts[row + 1]], rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("k_scale", [None, torch.tensor([0.5, 2.0])])
@pytest.mark.parametrize("query_lens", [[1, 1, 6], [1] * 8])
def test_query_and_output_may_be_strided(query_lens: list[int], k_scale: torch.Tensor | None) -> None:
    """As slices of a joint projection are."""
    batch = Paged(query_lens, [9, 12, 14, *[10] * 5][: len(query_lens)])
    wide = torch.full((8, HEADS + 4, HEAD_SIZE), torch.nan)
    wide[:, 1 : HEADS + 1] = batch.query
    out, lse = torch.full_like(wide, torch.nan), torch.empty(HEADS, 8)
    batch.query = wide[:, 1 : HEADS + 1]
    batch.call(out[:, 2 : HEADS + 2], lse, k_scale=k_scale)
    if k_scale is not None:
        batch.keys = [keys * k_scale.view(-1, 1).numpy() for keys in batch.keys]
    np.testing.assert_allclose(out[:, 2 : HEADS + 2], batch.expected()[0], atol=3e-6)
    assert out[:, :2].isnan().all()
    assert out[:, HEADS + 2 :].isnan().all()


def test_one_token_may_have_any_stride() -> None:
    """As transposed heads of a single token have."""
    batch = Paged([1], [9])
    batch.query = batch.query.as_strided((1, HEADS, HEAD_SIZE), (HEAD_SIZE, HEAD_SIZE, 1))
    np.testing.assert_allclose(batch.attend()[0], batch.expected()[0], atol=3e-6)


def write(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, *scales: torch.Tensor | None
) -> None:
    """Run a step without attention, for its KV writes."""
    nothing = torch.zeros(1, dtype=torch.int32)
    handle = new_handle(key, torch.device("cpu"))
    reference.schedule(nothing, nothing[:0], nothing[:0].view(0, 0), slots, handle, SIZE)
    reference.kv_write(key, value, cache, handle, *scales)


@pytest.mark.parametrize("plane", [0, 1])
def test_a_cache_of_the_models_type_may_have_one_scale(plane: int) -> None:
    cache = torch.zeros(2, 4, SIZE, KV_HEADS, HEAD_SIZE)
    rows = torch.randn(2, 3, KV_HEADS, HEAD_SIZE)
    scales: list[torch.Tensor | None] = [None, None]
    scales[plane] = torch.tensor([0.5, 4.0])
    write(rows[0], rows[1], cache, torch.tensor([2 * SIZE + 5, -1, 3]), *scales)
    rows[plane] /= torch.tensor([[0.5], [4.0]])
    assert torch.equal(cache[:, 2, 5], rows[:, 0]) and torch.equal(cache[:, 0, 3], rows[:, 2])
    assert cache.count_nonzero() == 2 * rows[0, :2].numel()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("permuted", [False, True])
def test_fp8_write_divides_by_the_scale_and_saturates(dtype: torch.dtype, permuted: bool) -> None:
    shape = (2, 4, KV_HEADS, SIZE, HEAD_SIZE) if permuted else (2, 4, SIZE, KV_HEADS, HEAD_SIZE)
    cache = torch.zeros(shape).to(dtype)
    if permuted:
        cache = cache.transpose(2, 3)
    key = torch.full((3, KV_HEADS, HEAD_SIZE), 2.0)
    value = torch.full((3, KV_HEADS, HEAD_SIZE), -1e9)
    key[1] = torch.nan
    slots = torch.tensor([2 * SIZE + 5, -1, 3])
    write(key, value, cache, slots, torch.tensor([0.5, 4.0]), torch.tensor([1.0, 1e8]))
    stored = cache.float()
    largest = torch.finfo(dtype).max
    for block, offset in ((2, 5), (0, 3)):
        assert stored[0, block, offset].unique(dim=1).flatten().tolist() == [4.0, 0.5]
        assert stored[1, block, offset].unique(dim=1).flatten().tolist() == [-largest, -10.0]
        stored[:, block, offset] = 0
    assert not stored.any()


def test_write_takes_a_mapping_shorter_than_the_keys() -> None:
    cache = torch.full((2, 4, SIZE, KV_HEADS, HEAD_SIZE), -1.0)
    key = torch.randn(5, KV_HEADS, HEAD_SIZE)
    write(key, 2 * key, cache, torch.tensor([9, -1, 8]), None, None)
    torch.testing.assert_close(cache[:, 1, :2], torch.stack([key[[2, 0]], 2 * key[[2, 0]]]))
    cache[:, 1, :2] = -1
    assert (cache == -1).all()
    write(key, key, cache, torch.full((5,), -1), None, None)
    assert (cache == -1).all()
    write(key, 2 * key, cache, torch.tensor([9, 8]), None, None)
    torch.testing.assert_close(cache[:, 1, :2], torch.stack([key[[1, 0]], 2 * key[[1, 0]]]))


def test_no_two_handles_have_one_address_while_their_owners_live() -> None:
    owners = [type("Owner", (), {})() for _ in range(20)]
    # The caller drops each handle at once; without an owner its memory would be free for the next.
    addresses = {new_handle(owner, torch.device("cpu")).data_ptr() for owner in owners}
    assert len(addresses) == len(owners)
    assert all(address in states for address in addresses)
    del owners
    assert not any(address in states for address in addresses)


@pytest.mark.parametrize(
    ("block", "token", "head", "number", "viewed"),
    [
        (256, 32, 16, 1, True),
        (400, 48, 16, 1, True),
        (512, 64, 32, 1, True),
        (257, 32, 16, 1, False),
        (400, 33, 16, 1, False),
        (400, 48, 17, 1, False),
        (800, 96, 48, 2, False),
    ],
)
def test_a_cache_is_viewed_as_rows_if_its_strides_are_whole_rows(
    block: int, token: int, head: int, number: int, viewed: bool
) -> None:
    """The views end with the last row of the cache, where its memory may end too."""
    shape, strides = (2, 3, SIZE, KV_HEADS, HEAD_SIZE), (3 * block + 5, block, token, head, number)
    length = 1 + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    cache = torch.arange(2.0 + length).as_strided(shape, strides, 2)
    views = view_cache(cache)
    assert (views.key_tokens is None) == (views.value_tokens is None) == (not cache.is_contiguous())
    if not viewed:
        assert views.keys_DN is None and views.values_ND is None
        return
    assert views.keys_DN is not None and views.values_ND is not None
    for place in ((0, 0, 0), (0, 0, 1), (1, 2, 0), (2, SIZE - 1, KV_HEADS - 1)):
        row = (place[0] * block + place[1] * token + place[2] * head) // HEAD_SIZE
        assert torch.equal(views.keys_DN[:, row], cache[0][place])
        assert torch.equal(views.values_ND[row], cache[1][place])
    assert views.keys_DN.shape[1] == views.values_ND.shape[0] == row + 1
