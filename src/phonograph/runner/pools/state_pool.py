"""Device memory of the states of layers that have them: one row for each slot of the runner.

A running request owns its slot, so that there is neither a table nor an allocator. Checkpoints of the prefix cache are
rows behind those of the slots. A sequence starts from zeros inside
the kernel, whatever its slot has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from phonograph.errors import MemoryLimitError
from phonograph.models.layers.states.state_mixer import StateMixer


def allocate_state_pool(
    mixers: Mapping[int, StateMixer],
    *,
    num_slots: int,
    dtype: torch.dtype,
    device: torch.device,
    make_empty: Callable[..., torch.Tensor] = torch.empty,
) -> dict[int, tuple[torch.Tensor, ...]]:
    """Allocate the states [slots, ...] of each layer, without contents, in the order of `StateMixer.states`.

    Args:
        mixers: mixers with a state, by the index of the layer.
        num_slots: slots of the runner, and checkpoints.
        dtype: the model's type.
        device: place of the pool.
        make_empty: allocates the tensors; called as `torch.empty`.

    Raises:
        MemoryLimitError: the device has too little memory.
    """
    try:
        return {
            layer: tuple(
                make_empty((num_slots, *state.shape), dtype=torch.float32 if state.wide else dtype, device=device)
                for state in mixer.states
            )
            for layer, mixer in mixers.items()
        }
    except RuntimeError as error:  # torch has no more specific error for the CPU
        raise MemoryLimitError(
            f"no memory for {num_slots} states of sequences in {len(mixers)} layers; lower max_num_seqs"
        ) from error
