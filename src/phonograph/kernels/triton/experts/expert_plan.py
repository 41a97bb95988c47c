"""Tiles of the experts' products by the number of tokens, and the weight formats that they take.

`benchmarks/sweep_experts.py` measures them on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from phonograph.kernels.routing import Routing
from phonograph.kernels.triton.gemm.choose import one_row
from phonograph.kernels.triton.gemm.product_plan import WeightFormat, rows_class


class ExpertTile(NamedTuple):
    """Tile of a product, and its launch.

    Attributes:
        block_n: outputs.
        block_k: inputs of a step; a divisor of a group's.
        num_warps: warps of a program.
        num_stages: steps in flight.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class FewRowsTile(NamedTuple):
    """Tile of a product by `expert_few_rows`.

    Attributes:
        block_n: outputs, a multiple of 16; of one row (`row_products_fp4`) a multiple of 8, for `down` 8.
        units: of a step, a multiple of the warps.
        ahead: steps whose words are in registers.
        num_warps: warps of a program.
    """

    block_n: int
    units: int
    ahead: int
    num_warps: int


class ExpertConfig(NamedTuple):
    """Launch of a layer's experts for a class of tokens.

    Attributes:
        block: most pairs of an item.
        gate_up: tile of the first product; it has as many outputs of gates as of ups.
        down: tile of the second.
        tail: rows of the product of items with at most that many pairs, less than `block`; 0 for `block`.
    """

    block: int
    gate_up: ExpertTile | FewRowsTile
    down: ExpertTile | FewRowsTile
    tail: int = 0


_CONFIGS = (
    (4, ExpertConfig(16, ExpertTile(32, 128, 2, 4), ExpertTile(64, 128, 4, 3))),
    (8, ExpertConfig(16, ExpertTile(64, 128, 4, 3), ExpertTile(128, 128, 4, 3))),
    (24, ExpertConfig(32, ExpertTile(64, 128, 4, 5), ExpertTile(128, 64, 4, 5))),
    (48, ExpertConfig(64, ExpertTile(64, 64, 4, 4), ExpertTile(128, 64, 4, 4))),
    (None, ExpertConfig(128, ExpertTile(128, 64, 8, 4), ExpertTile(128, 64, 4, 3), tail=64)),
)
"""Configurations by the largest mean number of an expert's pairs, if all experts have as many."""
_FP4_CONFIGS = (
    (0.25, ExpertConfig(8, FewRowsTile(32, 4, 1, 4), FewRowsTile(16, 4, 2, 2))),
    (4, ExpertConfig(8, FewRowsTile(16, 4, 1, 4), FewRowsTile(32, 4, 1, 4))),
    (8, ExpertConfig(16, FewRowsTile(16, 2, 1, 2), FewRowsTile(32, 2, 1, 2))),
    (48, ExpertConfig(32, ExpertTile(64, 128, 4, 3), ExpertTile(64, 128, 4, 4))),
    (256, ExpertConfig(128, ExpertTile(64, 128, 4, 3), ExpertTile(128, 128, 8, 4), tail=32)),
    (None, ExpertConfig(256, ExpertTile(64, 128, 8, 3), ExpertTile(128, 128, 8, 3), tail=64)),
)
"""The same for FP4. A warp makes operands of 16 outputs in registers; an `ExpertTile` of fewer than 64 outputs would
pass through shared memory."""


def expert_config(num_tokens: int, routing: Routing, *, fp4: bool = False) -> ExpertConfig:
    """Return the launch of a layer's experts for T tokens, which is one for each `rows_class`."""
    mean = rows_class(num_tokens) * routing.top_k / routing.num_experts
    return next(config for most, config in (_FP4_CONFIGS if fp4 else _CONFIGS) if most is None or mean <= most)


def why_not(weights: WeightFormat) -> str | None:
    """Return the reason why the kernels cannot multiply weights of a format, or None."""
    if not weights.bits:
        return None
    if weights.dtype == "float32":
        return "a GPU multiplies quantized experts in bfloat16 and float16 only; choose one of these as dtype"
    # Products over 16 inputs and 16 rows gave wrong sums on an H200; the interpreter's are right.
    if weights.group % 32:
        return f"groups of {weights.group} inputs are not a multiple of 32, which a GPU's kernels of experts need"
    return None


class RowTile(NamedTuple):
    """Tile of a product of one row, and its launch.

    Attributes:
        block_n: outputs.
        block_k: inputs of a step, a power of two.
        ahead: steps whose weights are in registers; of `down` before the kernel waits for its inputs.
        num_warps: warps of a program.
    """

    block_n: int
    block_k: int
    ahead: int
    num_warps: int


class RowConfig(NamedTuple):
    """Launch of a layer's experts for one row: tiles of the router's product, of gates and ups, and of `down`."""

    route: RowTile
    gate_up: RowTile | FewRowsTile
    down: RowTile | FewRowsTile


_FP4_ROW = FewRowsTile(8, 1, 4, 1), FewRowsTile(8, 4, 2, 4)
"""Tiles of gates and ups and of `down` for one row of FP4."""


def row_config(hidden_size: int, intermediate_size: int, *, fp4: bool = False) -> RowConfig:
    """Return the launch of experts of such sizes, with the tiles of `choose` for one row of dense weights.

    Gates and ups of 2048 inputs are an exception: 14.4 us of Qwen3-30B-A3B on an H200 in place of 18.6, as more
    programs of one warp share a multiprocessor. Four steps of `down` come in while gates and ups are computed. With 512
    inputs eight come in, each with half of the outputs, and a step of Qwen3.6-35B-A3B takes 2.10 ms in place of 2.20.
    """
    tiles: list[RowTile] = []
    for num_inputs in (hidden_size, intermediate_size):
        config = one_row(num_inputs, gated=False)
        tiles.append(RowTile(config.block_n, config.block_k, 1, config.num_warps))
    route, down = tiles
    if fp4:
        return RowConfig(route, *_FP4_ROW)
    down = RowTile(2, 512, 8, 1) if intermediate_size == 512 else down._replace(ahead=4)
    return RowConfig(route, RowTile(4, 512, 4, 1) if hidden_size == 2048 else route, down)
