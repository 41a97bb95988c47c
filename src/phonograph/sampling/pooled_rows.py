"""Results of requests that generate nothing, from the rows of a step: dimensions, norms and activations.

These differ by request and take microseconds, so the host does them.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from phonograph.core.batch import SlotFailure
from phonograph.core.pooling_params import PoolingParams, RowActivation
from phonograph.sampling.failures import SlotFailures

NOT_FINITE = "the model's rows are not finite"


def finish_rows(rows: np.ndarray, activation: RowActivation) -> np.ndarray:
    """Return float32 [..., F] rows after their activation. The norm of a row of zeros is taken as 1."""
    if activation == "normalize":
        norms = np.linalg.norm(rows, axis=-1, keepdims=True)
        return rows / np.where(norms > 0, norms, 1)
    if activation == "sigmoid":
        return 1 / (1 + np.exp(-rows))
    if activation == "softmax":
        powers = np.exp(rows - rows.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    return rows


def finish_prompts(
    prompts: Mapping[int, np.ndarray],
    params: Mapping[int, PoolingParams],
    activation: RowActivation,
    *,
    activates: bool,
    failures: SlotFailures,
) -> dict[int, np.ndarray]:
    """Return the result of each prompt by slot, in memory of its own.

    Args:
        prompts: float32 [F] by slot, or [T, F] of the prompt's tokens.
        params: parameters by slot.
        activation: that of the model.
        activates: it is applied for requests that do not say.
        failures: receives slots whose rows are not finite.
    """
    alike: dict[tuple[PoolingParams, int], list[int]] = {}
    for slot, rows in prompts.items():
        # Rows of many prompts take one call; those of tokens differ in number.
        alike.setdefault((params[slot], 0 if rows.ndim == 1 else slot + 1), []).append(slot)
    found: dict[int, np.ndarray] = {}
    for (one, _), slots in alike.items():
        wanted = activates if one.use_activation is None else one.use_activation
        rows = np.stack([prompts[slot] for slot in slots])[..., : one.dimensions]
        rows = finish_rows(rows, activation if wanted else "none")
        found.update(zip(slots, rows, strict=True))
        finite = np.isfinite(rows).reshape(len(rows), -1).all(1)
        for at in np.flatnonzero(~finite):
            failures.by_slot.setdefault(slots[at], SlotFailure("pooling", NOT_FINITE))
    return found
