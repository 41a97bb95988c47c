"""An arena for cascade attention, whose own state is poisoned too."""

from __future__ import annotations

import torch
from paged import Arena

from phonograph.attention.cascade.backend import CascadeBackend


class CascadeArena(Arena):
    """Poison the state that the cascade keeps from step to step."""

    def poison(self) -> None:
        super().poison()
        backend = self.backend
        assert isinstance(backend, CascadeBackend)
        backend._prefix_out.fill_(torch.nan)
        cut = backend._cut
        for tensor in (cut.prefix_starts[1:], cut.prefix_lens, cut.suffix_lens):
            tensor.fill_(7)
        cut.suffix_table.zero_()  # block 0, which is NaN
