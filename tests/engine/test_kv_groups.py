"""KV groups of models with layers of several kinds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.core.device import known_device
from phonograph.core.kv_group import KVGroup
from phonograph.engine.groups.kv_groups import KVGroups, layers_per_group, make_kv_groups
from phonograph.engine.groups.select_backends import weakest_support
from phonograph.errors import ConfigError, UnsupportedModelError
from phonograph.graphs.modes import GraphSupport, Support

SPEC = AttentionSpec(
    num_query_heads=16,
    num_kv_heads=8,
    head_size=256,
    dtype="bfloat16",
    kv_cache_dtype="bfloat16",
    block_size=64,
)
WINDOW = replace(SPEC, windows=((1023, 0),))


def grouped(*layers: AttentionSpec, max_model_len: int = 32768, block_size: int | None = None) -> KVGroups:
    return make_kv_groups(layers, max_model_len=max_model_len, block_size=block_size)


def test_gemma_3_12b_has_five_sliding_groups_and_a_full_one() -> None:
    kv = grouped(*([WINDOW] * 5 + [SPEC]) * 8)
    assert [group.window for group in kv.groups] == [1024] * 5 + [None]
    assert all(len(group.layers) == 8 and group.block_size == 64 for group in kv.groups)
    assert kv.groups[0].layers == (0, 1, 2, 3, 4, 6, 7, 8) and kv.groups[5].layers == tuple(range(5, 48, 6))
    assert sorted(layer for group in kv.groups for layer in group.layers) == list(range(48))
    assert (kv.layers_per_page, kv.waste, kv.notes) == (8, 0, [])
    assert kv.page_bytes == 8 * 64 * 2 * 8 * 256 * 2
    assert kv.members == {WINDOW: [0, 1, 2, 3, 4], SPEC: [5]}
    assert kv.group_of_layer[:7] == [0, 0, 0, 0, 0, 5, 0]


def test_alternating_layers_are_two_groups() -> None:
    kv = grouped(*[replace(WINDOW, windows=((127, 0),)), SPEC] * 12)
    assert [(group.window, len(group.layers)) for group in kv.groups] == [(128, 12), (None, 12)]


@pytest.mark.parametrize(
    ("layers", "window"),
    [([SPEC] * 3, None), ([WINDOW] * 3, 1024), ([replace(SPEC, windows=((32767, 0),)), SPEC], None)],
)
def test_layers_of_one_kind_are_one_group(layers: list[AttentionSpec], window: int | None) -> None:
    """A window as long as the context hides no key; the backend still gets it."""
    kv = grouped(*layers)
    assert kv.groups == (KVGroup(layers=tuple(range(len(layers))), block_size=64, window=window),)
    assert set(kv.specs[0].windows) == {layer.windows[0] for layer in layers}
    shorter = grouped(*layers, max_model_len=32769)
    assert len(shorter.groups) == len({layer.windows for layer in layers})


def test_blocks_of_wider_tokens_have_fewer_of_them() -> None:
    wide = replace(SPEC, head_size=512)
    kv = grouped(WINDOW, WINDOW, wide, wide)
    assert kv.block_sizes == (128, 64) == tuple(spec.block_size for spec in kv.specs)
    pages = {group.block_size * spec.kv_token_bytes for group, spec in zip(kv.groups, kv.specs, strict=True)}
    assert {kv.layers_per_page * size for size in pages} == {kv.page_bytes}
    # Heads of 256 and 320: both sizes are multiples of 16.
    odd = replace(SPEC, head_size=320)
    assert grouped(SPEC, odd).block_sizes == (80, 64)
    with pytest.raises(ConfigError, match=r"block_size=16: makes no pages of equal bytes .* multiples of 64 work"):
        grouped(SPEC, odd, block_size=16)
    assert grouped(SPEC, odd, block_size=128).block_sizes == (160, 128)
    with pytest.raises(UnsupportedModelError, match="more than 1024 tokens"):
        grouped(SPEC, replace(SPEC, head_size=254))


@pytest.mark.parametrize(
    ("counts", "size"),
    [((40, 8), 8), ((12, 12), 12), ((52, 10), 13), ((22, 4), 4), ((29, 5), 5), ((7,), 7), ((2, 1), 1)],
)
def test_group_sizes_waste_least(counts: tuple[int, ...], size: int) -> None:
    assert layers_per_group(counts) == size


def test_two_kinds_always_divide() -> None:
    for first in range(1, 100):
        for second in range(1, 100):
            size = layers_per_group((first, second))
            groups = -(-first // size) + -(-second // size)
            assert groups <= 10 and 1 - (first + second) / (groups * size) <= 0.2


def test_padding_is_a_note_and_too_much_of_it_is_refused() -> None:
    kv = grouped(*([WINDOW] * 5 + [SPEC]) * 4, WINDOW, WINDOW)
    assert kv.notes == ["7 KV groups of 4 layers: 2 of 28 places are padding, 7.1% of the KV cache"]
    assert len(kv.groups[kv.group_of_layer[25]].layers) == 2
    with pytest.raises(
        UnsupportedModelError, match=r"10 kinds of attention, of 1, .* 45% of the KV cache .* 20% works"
    ):
        layers_per_group([1] * 9 + [2])


@pytest.mark.parametrize("windowed_first", [False, True])
def test_the_weakest_group_decides_on_graphs_and_is_named(windowed_first: bool) -> None:
    layers = [WINDOW, SPEC] if windowed_first else [SPEC, WINDOW]
    kv = grouped(*layers)
    strong = Support(GraphSupport.ALWAYS, "lengths are read on the device")
    weak = Support(GraphSupport.UNIFORM_BATCH, "it plans on the host")

    def selected(windowed: Support, full: Support) -> Any:
        supports = {WINDOW: windowed, SPEC: full}
        return {
            spec: SimpleNamespace(capabilities=SimpleNamespace(graph_support=lambda spec, device: supports[spec]))
            for spec in kv.members
        }

    device = known_device("h200")
    found = weakest_support(kv, selected(strong, weak), device)
    name = f"KV group {int(windowed_first)} (1 layer, full attention)"
    assert found == Support(GraphSupport.UNIFORM_BATCH, f"{name}: it plans on the host")
    assert weakest_support(kv, selected(weak, weak), device) == weak


def test_layers_that_read_the_pages_of_others() -> None:
    """They take no place in a page, and are in the group of the layer that they read."""
    wide = replace(SPEC, head_size=512)
    layers, sources = [WINDOW, WINDOW, wide, WINDOW, wide], [None, None, None, 1, 2]
    kv = make_kv_groups(layers, max_model_len=32768, sources=sources)
    assert [(group.layers, group.readers) for group in kv.groups] == [((0,), ()), ((1,), (3,)), ((2,), (4,))]
    assert kv.group_of_layer == [0, 1, 2, 1, 2] and kv.block_sizes == (128, 128, 64)
    assert kv.page_bytes == 64 * wide.kv_token_bytes and not kv.notes
    # A window as long as the context hides no key.
    one = make_kv_groups([WINDOW, WINDOW], max_model_len=512, sources=[None, 0])
    assert one.groups == (KVGroup(layers=(0,), block_size=64, readers=(1,)),)


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ([None, 2, None], "layer 1 reads the keys and values of layer 2, which is not before it"),
        ([None, 1, None], "layer 1 .* of layer 1, which is not before it"),
        ([None, 0, 1], "layer 2 .* of layer 1, which has none of its own"),
        ([None, None, 0], "layer 2 .* of layer 0, which has attention of another kind; an earlier layer .* works"),
    ],
)
def test_sources_that_cannot_be_read(sources: list[int | None], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        make_kv_groups([WINDOW, WINDOW, SPEC], max_model_len=32768, sources=sources)
