"""The pool of pages: layers of several groups view the same tensors, a page at the same place in all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_specs import TINY

from phonograph.attention.attention_spec import AttentionSpec, KVLayout
from phonograph.core.kv_group import KVGroup
from phonograph.runner.pools.kv_pool import allocate_kv_caches, allocate_kv_pool

CPU = torch.device("cpu")
WIDE = replace(TINY, num_kv_heads=1, head_size=128, block_size=8)


@pytest.mark.parametrize("layout", KVLayout)
@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_groups_share_pages(layout: KVLayout, dtype: str) -> None:
    specs = [replace(spec, layout=layout, kv_cache_dtype=dtype) for spec in (TINY, WIDE, TINY)]
    groups = [
        KVGroup(layers=layers, block_size=spec.block_size, window=window)
        for layers, spec, window in zip([(0, 2), (1, 4), (3,)], specs, [9, None, 9], strict=True)
    ]
    caches = allocate_kv_pool(groups, specs, num_pages=6, device=CPU)
    assert sorted(caches) == [0, 1, 2, 3, 4]
    places = {layer: cache.data_ptr() for layer, cache in caches.items()}
    assert places[0] == places[1] == places[3] != places[2] == places[4]
    for group, spec in zip(groups, specs, strict=True):
        for layer in group.layers:
            assert caches[layer].shape == (2, 6, spec.block_size, spec.num_kv_heads, spec.head_size)
    # A page of one group lies where the others have the same page.
    caches[0].zero_()
    caches[1][:, 4] = 1
    for layer in (0, 3):
        assert caches[layer][:, 4].float().eq(1).all() and not caches[layer][:, [0, 1, 2, 3, 5]].float().any()
    if layout is KVLayout.HND:
        assert caches[1].transpose(2, 3).is_contiguous() and caches[0].transpose(2, 3).is_contiguous()


def strides(cache: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return cache.shape, cache.stride(), cache.dtype


@pytest.mark.parametrize("layout", KVLayout)
def test_one_group_has_a_tensor_for_each_layer(layout: KVLayout) -> None:
    spec: AttentionSpec = replace(TINY, layout=layout)
    group = KVGroup(layers=(0, 1, 2), block_size=spec.block_size)
    caches = allocate_kv_pool([group], [spec], num_pages=3, device=CPU)
    plain = allocate_kv_caches(spec, num_layers=3, num_blocks=3, device=CPU)
    assert len({cache.untyped_storage().data_ptr() for cache in caches.values()}) == 3
    assert [strides(caches[layer]) for layer in range(3)] == [strides(cache) for cache in plain]
