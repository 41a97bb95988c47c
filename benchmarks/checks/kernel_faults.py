"""Faults to plant in the kernels that only a GPU runs as they are: small mistakes that a test should notice.

Each replaces a text that occurs once in its file. `checks.gpu_mutants` plants them one at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

KERNELS = "src/phonograph/kernels/triton"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A planted fault.

    name: the kernel, then what is wrong
    file: below `KERNELS`
    old, new: the text that occurs once, and what replaces it
    narrow: arguments of pytest for tests of a few seconds that should fail
    broad: the same for whole files, run if those pass
    """

    name: str
    file: str
    old: str
    new: str
    narrow: tuple[str, ...]
    broad: tuple[str, ...]

    def plant(self, root: Path) -> None:
        """Write the fault into a copy of the repository.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        path = root / KERNELS / self.file
        source = path.read_text()
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"{self.name}: the text to replace occurs {count} times in {self.file}, not once")
        path.write_text(source.replace(self.old, self.new))


RING, RING_FEW = "gemm/hopper/gemm_ring.py", "gemm/hopper/gemm_ring_small_m.py"
PARTS, ROW = "gemm/hopper/gemm_ring_parts.py", "gemm/hopper/gemv_integer.py"
PREFILL, HOPPER = "attention/prefill.py", "attention/prefill_hopper.py"
DECODE, FILTER = "attention/decode.py", "sampling/filter.py"

_TESTS = "tests/kernels"
_RING = f"{_TESTS}/test_ring.py"
_GROUPED_RING = f"{_TESTS}/test_grouped_ring.py"
_ROW = f"{_TESTS}/test_integer_row.py"
_DENSE = f"{_TESTS}/test_triton_products.py"
_GROUPED = f"{_TESTS}/test_grouped_products.py"
_CHAIN = f"{_TESTS}/test_grouped_chain.py"
_HOPPER = f"{_TESTS}/test_attention_prefill_hopper.py"
_PREFILL = f"{_TESTS}/test_attention_prefill.py"
_DECODE = f"{_TESTS}/test_attention_decode.py"
_LAYERS, _SAMPLING = f"{_TESTS}/test_triton_layers.py", f"{_TESTS}/test_triton_sampling.py"
_MATRIX = "tests/attention/test_triton_gpu_matrix.py"
_ENGINE = ("tests/engine/test_gpu_engine.py", "tests/engine/test_quantized_engine.py", "-m", "gpu")
_SET = "tests/models/test_kernel_sets.py"
_RINGS = (_RING, _GROUPED_RING, _ROW)

_PRODUCTS: tuple[Fault, ...] = (
    Fault(
        name="ring: the last products of a lag are not waited for",
        file=RING,
        old="        sums, ups = _wait_for_products(0, sums, ups, PAIR)\n",
        new="        sums, ups = _wait_for_products(LAG, sums, ups, PAIR)\n",
        narrow=(_RING, "-k", "test_on_the_gpu and dtype0 and (config7 or config8)"),
        broad=(_RING, _DENSE, "-m", "gpu", "-k", "random or 64 or 100 or chain"),
    ),
    Fault(
        name="ring: scales of FP8 rows without the tile's first row",
        file=RING,
        old="gl.load(row_scales_ptr + m, mask=m < M",
        new="gl.load(row_scales_ptr + m - first_row, mask=m < M",
        narrow=(_GROUPED_RING, "-k", "test_fp8_on_the_gpu and case4 and dtype0"),
        broad=(f"{_TESTS}/test_scaled_products.py", _GROUPED_RING),
    ),
    Fault(
        name="ring of few rows: groups count from the first of all, not of the split",
        file=RING_FEW,
        old="step * BLOCK_K // GROUP - first_group\n",
        new="step * BLOCK_K // GROUP\n",
        narrow=(_GROUPED_RING, "-k", "test_on_the_gpu and dtype0 and (case6 or case7 or case10)"),
        broad=(_GROUPED_RING, _GROUPED, *_ENGINE),
    ),
    Fault(
        name="ring of few rows: no wait for the kernel before",
        file=RING_FEW,
        old="    if PDL:\n        wait_for_kernel_before()\n",
        new="",
        narrow=(_CHAIN, "-k", "few-ring"),
        broad=(_CHAIN, _GROUPED_RING, *_ENGINE),
    ),
    Fault(
        name="ring parts: a program arrives before all of its warps have stored",
        file=PARTS,
        old="    gl.thread_barrier()\n    return gl.atomic_add(",
        new="    return gl.atomic_add(",
        narrow=(_RING, _ROW, "-k", "same_result or (test_on_the_gpu and dtype0 and (config1 or size2))"),
        broad=(*_RINGS, "-m", "gpu"),
    ),
    Fault(
        name="ring parts: room for one group less",
        file=PARTS,
        old="most = most * block_k // group + 2\n",
        new="most = most * block_k // group + 1\n",
        narrow=(_ROW, "-k", "test_on_the_gpu and dtype0 and (size2 or size5)"),
        broad=(*_RINGS, _GROUPED, *_ENGINE),
    ),
    Fault(
        name="ring: no factor of the norm before for the ups",
        file=RING,
        old="        if MODE >= 2:\n            up *= factor\n",
        new="",
        narrow=(_RING, "-k", "test_on_the_gpu and dtype0 and (config4 or config6)"),
        broad=(*_RINGS, _DENSE, *_ENGINE),
    ),
    Fault(
        name="ring parts: squares of tiles beyond the last",
        file=PARTS,
        old="mask=tile < SQUARE_TILES, other=0.0)",
        new="mask=tile < TILES, other=0.0)",
        narrow=(_RING, "-k", "test_on_the_gpu and dtype0 and (config4 or config6)"),
        broad=(*_RINGS, *_ENGINE),
    ),
    Fault(
        name="ring parts: the last row in memory is not described",
        file=PARTS,
        old="(elements - num_inputs) // stride + 1\n",
        new="(elements - num_inputs) // stride\n",
        narrow=(_RING, "-k", "test_on_the_gpu and config1 and dtype0"),
        broad=(*_RINGS, _DENSE),
    ),
    Fault(
        name="integer row: outputs beyond the last are stored",
        file=ROW,
        old="MODE).to(KIND), mask=mask)",
        new="MODE).to(KIND))",
        narrow=(_ROW, "-k", "test_on_the_gpu and dtype0 and size0"),
        broad=(_ROW, _GROUPED, *_ENGINE),
    ),
    Fault(
        name="integer row: no wait for the kernel before",
        file=ROW,
        old="    if PDL:\n        wait_for_kernel_before()\n",
        new="",
        narrow=(_CHAIN, "-k", "integer-row"),
        broad=(_CHAIN, _ROW, *_ENGINE),
    ),
    Fault(
        name="integer operands: a low byte of 128 is not carried",
        file="gemm/hopper/integer_operands.py",
        old="add.s32 b, $3, 128;",
        new="add.s32 b, $3, 127;",
        narrow=(_ROW, "-k", "test_numbers_on_the_gpu"),
        broad=(_ROW, *_ENGINE),
    ),
    Fault(
        name="few rows: no wait for the kernel before",
        file="gemm/gemm_small_m.py",
        old="    if PDL:\n        tl_cuda.gdc_wait()\n",
        new="",
        narrow=(f"{_DENSE}::test_a_chain_replayed_with_other_contents[8]",),
        broad=(_DENSE, *_ENGINE),
    ),
    Fault(
        name="few rows: squares of tiles beyond the last",
        file="gemm/gemm_epilogue.py",
        old="m[None, :], tile < TILES, other=0.0)",
        new="m[None, :], tile < 2 * TILES, other=0.0)",
        narrow=(_DENSE, "-k", "(test_few_rows and config0 and dtype1 and True) or deferred_from"),
        broad=(_DENSE, "-k", "deferred or few_rows"),
    ),
    Fault(
        name="tiles: the last program but one adds the parts as well",
        file="gemm/gemm_tiled.py",
        old="        if arrived < SPLITS - 1:\n",
        new="        if arrived < SPLITS - 2:\n",
        narrow=(_DENSE, "-k", "test_tiles_of_rows and (200 or 263)"),
        broad=(_DENSE, _GROUPED, "-k", "tiles_of_rows or same_result or deferred"),
    ),
    Fault(
        name="tiles: no mask for columns of a last step of 16, 32 or 48",
        file="gemm/gemm_tiled.py",
        old="x_mask = (m < M)[:, None] if K % BLOCK_K == 0 else",
        new="x_mask = (m < M)[:, None] if K % 16 == 0 else",
        narrow=(_DENSE, "-k", "tiles_of_wider"),
        broad=(_DENSE, _GROUPED, "-k", "tiles_of_rows or config0 or fp8_with_odd_sizes or entry_whose"),
    ),
    Fault(
        name="grouped few rows: no wait for the kernel before",
        file="gemm/gemm_grouped_small_m.py",
        old="    if PDL:\n        tl_cuda.gdc_wait()\n",
        new="",
        narrow=(_CHAIN, "-k", "grouped-rows"),
        broad=(_CHAIN, _GROUPED, *_ENGINE),
    ),
    Fault(
        name="grouped few rows: the last word of a row that is not full",
        file="gemm/gemm_grouped_small_m.py",
        old="if BITS == 4 else (K + 3) // 4\n",
        new="if BITS == 4 else K // 4\n",
        narrow=(_GROUPED, "-k", "test_products and 203 and config1 and dtype1"),
        broad=(_GROUPED, "-k", "test_products or random"),
    ),
    Fault(
        name="one row: weights of a column beyond the last",
        file="gemm/gemv.py",
        old="(columns < K - BLOCK_K)",
        new="(columns <= K - BLOCK_K)",
        narrow=(_DENSE, "-k", "larger_matrix or (every_epilogue and 2500 and dtype1 and True)"),
        broad=(_DENSE, _SET, "-k", "one_row or embedding_and_projections"),
    ),
    Fault(
        name="written out: all values of a word have one group",
        file="gemm/dequantize.py",
        old="(word[:, None] * COUNT if GROUP % COUNT == 0 else column)",
        new="(word[:, None] * COUNT)",
        narrow=(f"{_TESTS}/test_dequantize.py",),
        broad=(_GROUPED, _SET, "tests/models/test_quantized_weights.py"),
    ),
)

_OTHERS: tuple[Fault, ...] = (
    Fault(
        name="prefill: a tile with one key that its first row does not see has no mask",
        file=PREFILL,
        old="edge = tl.minimum(stop, first + RIGHT + 1)",
        new="edge = tl.minimum(stop, first + RIGHT + 2)",
        narrow=(_PREFILL, "-k", "borders or (output_and_lse and (plain or window))"),
        broad=(_PREFILL, "-m", "gpu", "-k", "many_tokens or (128 and plain)"),
    ),
    Fault(
        name="prefill for Hopper: a tile with one key that its first row does not see has no mask",
        file=HOPPER,
        old="edge = gl.minimum(stop, first + shape.RIGHT + 1)",
        new="edge = gl.minimum(stop, first + shape.RIGHT + 2)",
        narrow=(_HOPPER, "-k", "borders_on_the_device or (test_on_the_device and float16 and plain)"),
        broad=(_HOPPER, "-m", "gpu"),
    ),
    Fault(
        name="prefill for Hopper: a tile with one key that has left the window has no mask",
        file=HOPPER,
        old="        plain = last - shape.LEFT\n",
        new="        plain = last - shape.LEFT - 1\n",
        narrow=(_HOPPER, "-k", "borders_on_the_device or (test_on_the_device and float16 and window)"),
        broad=(_HOPPER, "-m", "gpu"),
    ),
    Fault(
        name="prefill for Hopper: loads do not wait for the kernel before",
        file=HOPPER,
        old="    if shape.PDL:\n        wait_for_kernel_before()\n    num_items = gl.load(header) * shape.KV_HEADS\n",
        new="    num_items = gl.load(header) * shape.KV_HEADS\n",
        narrow=(_HOPPER, "-k", "kernel_before"),
        broad=(_HOPPER, "tests/engine/test_gpu_engine.py", "-m", "gpu"),
    ),
    Fault(
        name="decode: a program counts its result before all of its threads have stored it",
        file=DECODE,
        old="        tl.debug_barrier()\n        arrived = tl.atomic_add(tensors.counters + unit.first, 1)\n",
        new="        arrived = tl.atomic_add(tensors.counters + unit.first, 1)\n",
        narrow=(_DECODE, "-k", "(test_models and 32-8-128) or order_of_arrival"),
        broad=(_DECODE, _MATRIX, "-m", "gpu", "-k", "decode or D128"),
    ),
    Fault(
        name="decode: the first partial result is always its program's first",
        file=DECODE,
        old="rows = tl.where(part == 0, first_rows, rows)",
        new="rows = tl.where(part < 0, first_rows, rows)",
        narrow=(_DECODE, "-k", "order_of_arrival or few_units or one_plan"),
        broad=(_DECODE,),
    ),
    Fault(
        name="decode plan: a window one tile too long in a shared run",
        file="attention/decode_plan.py",
        old="tl.cdiv(tl.maximum(-least_R, 0), shape.BLOCK_N) * shape.BLOCK_N",
        new="tl.maximum(-least_R, 0) // shape.BLOCK_N * shape.BLOCK_N",
        narrow=(f"{_TESTS}/test_shared_prefixes.py", "-k", "chains or wrong_windows"),
        broad=(f"{_TESTS}/test_shared_prefixes.py",),
    ),
    Fault(
        name="rope: values have the scale of keys",
        file="attention/rope_and_kv_write.py",
        old="store_scaled(pointer, first, v_scale_ptr, value_head",
        new="store_scaled(pointer, first, k_scale_ptr, value_head",
        narrow=(_LAYERS, "-k", "scale or 32_bits"),
        broad=(_LAYERS, _SET, "tests/engine/test_fp8_cache.py"),
    ),
    Fault(
        name="filter: min-p by the bound of the candidates, which lies a little lower",
        file=FILTER,
        old="kept = (order >= low) & (scaled >= row.log_min_p)",
        new="kept = order >= low",
        narrow=(_SAMPLING, "-k", "min_p or test_filters"),
        broad=(_SAMPLING, "tests/engine/test_gpu_engine.py"),
    ),
    Fault(
        name="filter: one candidate more than there is room for",
        file=FILTER,
        old="        if count <= CANDIDATES:\n",
        new="        if count <= CANDIDATES + 1:\n",
        narrow=(_SAMPLING, "-k", "candidates or no_level"),
        broad=(_SAMPLING, "tests/engine/test_gpu_engine.py"),
    ),
    Fault(
        name="edit: a row does not see the draft that is its own token",
        file="sampling/edit.py",
        old="place = tl.load(edit.logits_rows + edit.row) - back\n",
        new="place = tl.load(edit.logits_rows + edit.row) - back - 1\n",
        narrow=(f"{_TESTS}/test_logit_edits.py",),
        broad=("tests/speculation/test_gpu_speculation.py",),
    ),
    Fault(
        name="prepare: blocks of long tables are not entered",
        file="step/prepare.py",
        old="            tl.store(table_row + column, block_ids, mask=is_new)\n",
        new="",
        narrow=(f"{_TESTS}/test_prepare.py",),
        broad=("tests/engine/test_gpu_path.py", "tests/engine/test_gpu_engine.py"),
    ),
)

_EXPERT_TESTS = (
    f"{_TESTS}/test_expert_kernels.py",
    f"{_TESTS}/test_expert_sizes.py",
    "tests/models/test_expert_sets.py",
)
_EXPERTS: tuple[Fault, ...] = (
    Fault(
        name="experts: padding rows route",
        file="experts/route.py",
        old="(valid[:, None] & chosen)",
        new="chosen",
        narrow=_EXPERT_TESTS[:1],
        broad=_EXPERT_TESTS,
    ),
    Fault(
        name="experts: padding rows have pairs where few pairs are compared",
        file="experts/list_few_pairs.py",
        old="has = (row < num_rows)[:, None] & (column < K)[None, :]",
        new="has = (row >= 0)[:, None] & (column < K)[None, :]",
        narrow=_EXPERT_TESTS[:1],
        broad=_EXPERT_TESTS,
    ),
    Fault(
        name="experts: a part of the router's product is read before all have arrived",
        file="experts/route.py",
        old="        if arrived < PARTS - 1:\n            return\n",
        new="",
        narrow=_EXPERT_TESTS[1:2],
        broad=_EXPERT_TESTS,
    ),
    Fault(
        name="experts: two tiles sort their pairs to one place",
        file="experts/route.py",
        old="        earlier += tl.where((tile < own)[:, None], counts, 0)\n",
        new="",
        narrow=(*_EXPERT_TESTS[1:2], "-k", "2048"),
        broad=_EXPERT_TESTS,
    ),
    Fault(
        name="experts: the second block of an expert has the rows of the first",
        file="experts/route.py",
        old="tl.store(ptrs + 1, first + block * BLOCK, has)",
        new="tl.store(ptrs + 1, first, has)",
        narrow=(*_EXPERT_TESTS[1:2], "-k", "2048"),
        broad=_EXPERT_TESTS,
    ),
    Fault(
        name="experts: sums of FP4 lack their factor",
        file="experts/expert_tile.py",
        old="        sums *= FACTOR\n",
        new="        pass\n",
        narrow=(f"{_TESTS}/test_expert_fp4.py",),
        broad=(f"{_TESTS}/test_expert_fp4.py", *_EXPERT_TESTS),
    ),
    Fault(
        name="experts: a scale of FP4 is that of the next group",
        file="experts/expert_tile.py",
        old="(exponents >> 8) & 255, KIND), power_of_two((exponents >> 24) & 255, KIND)",
        new="(exponents >> 24) & 255, KIND), power_of_two((exponents >> 8) & 255, KIND)",
        narrow=(f"{_TESTS}/test_expert_fp4.py",),
        broad=(f"{_TESTS}/test_expert_fp4.py", *_EXPERT_TESTS),
    ),
    Fault(
        name="experts: ups have the biases of gates",
        file="experts/expert_results.py",
        old="tl.load(bias_ptr + bias_row + N + n, valid_n, other=0.0)",
        new="tl.load(bias_ptr + bias_row + n, valid_n, other=0.0)",
        narrow=(*_EXPERT_TESTS[:1], "-k", "products"),
        broad=_EXPERT_TESTS,
    ),
    Fault(
        name="experts: limits of the activation hide gates that are not a number",
        file="gemm/gemm_epilogue.py",
        old="gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)",
        new="gate = tl.minimum(gate, LIMIT)",
        narrow=(*_EXPERT_TESTS[:1], "-k", "number"),
        broad=_EXPERT_TESTS,
    ),
)

FAULTS: tuple[Fault, ...] = _PRODUCTS + _OTHERS + _EXPERTS
