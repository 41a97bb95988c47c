"""Sums and notes of an engine on several ranks."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.kernels.triton.ranks.choose_sum import SumChoice, choose_sums
from phonograph.models.spec import ModelSpec
from phonograph.models.weights.tensor_parallel import SETTING
from phonograph.models.weights.tensor_shapes import DTYPE_BYTES


def plan_sums(
    config: EngineConfig, model: ModelSpec, dtype: str, limits: Limits, device: DeviceSpec
) -> tuple[SumChoice, ...]:
    """Return the kernels that sum over ranks, by rows; none for one rank."""
    size = config.tensor_parallel_size
    if size == 1:
        return ()
    return choose_sums(
        model.hidden_size,
        DTYPE_BYTES[dtype],
        size,
        most_rows=limits.max_num_batched_tokens,
        on_cpu=device.kind == "cpu",
        batch_invariant=config.batch_invariant,
    )


def rank_notes(
    config: EngineConfig, whole: ModelSpec, model: ModelSpec, dtype: str, sums: Sequence[SumChoice]
) -> list[str]:
    """Return notes on the parts of the ranks; none for one rank.

    Args:
        config: number of ranks.
        whole: the model.
        model: the part of a rank.
        dtype: type of the model.
        sums: kernels that sum over the ranks.
    """
    size = config.tensor_parallel_size
    if size == 1:
        return []
    all_heads, heads = (next(iter(one.attentions.values())) for one in (whole, model))
    notes = [
        f"{SETTING} {size}: a rank has {heads.num_query_heads} of {all_heads.num_query_heads} query heads, "
        f"{heads.num_kv_heads} of {all_heads.num_kv_heads} KV heads and {model.head.num_outputs} of {whole.vocab_size} "
        "tokens of the vocabulary",
        *(f"sums over ranks of {one.rows} rows by {one.kernel}: {one.reason}" for one in sums),
    ]
    dense = {
        one.name
        for layer, cut in zip(whole.layers, model.layers, strict=True)
        for one, own in zip(layer.matrices, cut.matrices, strict=True)
        if one.scheme is not None and own.scheme is None
    }
    if dense:
        notes.append(
            f"{' and '.join(sorted(dense))} in {dtype} on each rank: the inputs have an order over all groups, which "
            "cannot be cut"
        )
    if all_heads.num_kv_heads < size:
        times = size // all_heads.num_kv_heads
        notes.append(f"there are fewer KV heads than ranks: each is on {times} ranks, whose KV caches repeat it")
    return notes
