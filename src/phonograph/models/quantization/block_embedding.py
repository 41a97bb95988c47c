"""Embedding that stays in the blocks of a GGUF file, which a CPU looks up in the file's mapping.

Shapes: T tokens, V vocabulary, B bytes of a row, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from phonograph.models.quantization.gguf_blocks import BLOCK_TYPES

_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define("embed_blocks(Tensor ids, Tensor rows, str kind, Tensor(a!) out) -> ()")


def _embed_blocks(ids_T: torch.Tensor, rows_VB: torch.Tensor, kind: str, out_TE: torch.Tensor) -> None:
    out_TE.copy_(BLOCK_TYPES[kind].dequantize(rows_VB.index_select(0, ids_T)))


_library.impl("embed_blocks", _embed_blocks, "CPU")


@dataclass(frozen=True, slots=True)
class BlockEmbedding:
    """Rows of blocks.

    Attributes:
        rows_VB: uint8, mapped from the file.
        kind: type of the blocks, by its name in `BLOCK_TYPES`.
        dtype: type of the numbers.
    """

    rows_VB: torch.Tensor
    kind: str
    dtype: torch.dtype

    def lookup(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, [T, E]."""
        block = BLOCK_TYPES[self.kind]
        width = self.rows_VB.shape[1] // block.nbytes * block.inputs
        out_TE = torch.empty(len(ids_T), width, dtype=self.dtype)
        torch.ops.phonograph.embed_blocks.default(ids_T, self.rows_VB, self.kind, out_TE)
        return out_TE


Embedding = torch.Tensor | BlockEmbedding
"""Numbers [V, E], or their blocks."""
