"""Sizes of FlashInfer's workspaces, worked out by hand for Llama-3.1-8B on Hopper."""

from __future__ import annotations

from dataclasses import replace

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.flashinfer.workspace_sizes import EAGER_INTEGERS, Sizes
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet

SPEC = AttentionSpec(
    num_query_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=64
)
LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8190)
FA3 = Sizes(spec=SPEC, limits=LIMITS, routine="fa3", num_sms=132)
FA2 = replace(FA3, routine="fa2")


def test_integers() -> None:
    """33 tiles fill the device twice; a tile has three words and a flag, a token and a slot a word each."""
    assert FA3.decode_integers(256) == 13 * (64 + 256) + 4 * 512 + 4096
    assert FA3.decode_integers(2) == 13 * 33 + 4 * 4 + 4096
    assert FA2.prefill_integers(300, 13) == 13 * (75 + 13) + 4 * 313 + 4096
    assert FA2.prefill_integers(16, 2) == 13 * 33 + 4 * 18 + 4096
    assert FA3.prefill_integers(300, 13) == 4 * (7 * 16 * 32 + 132) + 4096
    # From 4098 tiles on, all heads share one list.
    assert FA3.prefill_integers(128, 4096) == 4 * (7 * 4097 * 32 + 132) + 4096
    assert FA3.prefill_integers(129, 4096) == 4 * (7 * 4098 + 132) + 4096


def test_partial_results() -> None:
    """Decodes of all slots; in FA2 also prefills that fill the device, with speculation those of all slots."""
    assert FA3.floats() == FA2.floats() == 32 * 320 * 16 * 129 * 4 + 4096
    few = replace(LIMITS, max_num_seqs=2)
    assert replace(FA3, limits=few).floats() == 32 * 33 * 16 * 129 * 4 + 4096
    assert replace(FA2, limits=few).floats() == 32 * 33 * 128 * 129 * 4 + 4096
    guessing = replace(SPEC, speculative_tokens=2)
    assert replace(FA3, spec=guessing).floats() == FA3.floats()
    assert replace(FA2, spec=guessing).floats() == 32 * (24 + 257) * 128 * 129 * 4 + 4096
    wide = replace(SPEC, head_size=256)
    assert replace(FA2, spec=wide, limits=few).floats() == 32 * 33 * 64 * 257 * 4 + 4096
    # More query heads for each KV head than the narrowest tiles have rows.
    for kv_heads, tile, rows in ((2, 16, 256 + 256), (1, 64, 128 + 256)):
        sizes = replace(FA3, spec=replace(SPEC, num_kv_heads=kv_heads))
        assert sizes.floats() == 32 * max(264 // kv_heads, rows) * tile * 129 * 4 + 4096


def test_all_wrappers() -> None:
    """One of each number of slots for decodes, those of mixed graphs included, and one of each other shape."""
    keys = [
        GraphKey(GraphSet.DECODE, 8, 8, 1),
        GraphKey(GraphSet.DECODE, 24, 8, 3),
        GraphKey(GraphSet.MIXED, 5, 8),
        GraphKey(GraphSet.MIXED, 300, 12),
        GraphKey(GraphSet.PIECEWISE, 64, 16),
    ]
    eager = FA3.floats() + 2 * EAGER_INTEGERS + 4 * 256 * 128 + 4 * (5 * 256 + 6)
    assert FA3.total([]) == FA3.total(keys[-1:]) == eager
    prefills = sum(FA3.prefill_integers(tokens, slots) for tokens, slots in ((24, 9), (5, 9), (300, 13)))
    assert FA3.total(keys) == eager + prefills + sum(map(FA3.decode_integers, (8, 5, 12)))
    guessing = replace(FA3, spec=replace(SPEC, speculative_tokens=2))
    assert guessing.total(keys) == eager + prefills + FA3.decode_integers(8)
