"""Attention of prefills over the paged cache, in large tiles taken from a work list made on the device.

Shapes: T tokens, R sequences, H query heads, K KV heads, D head size, B blocks of S slots; M rows of a tile, which are
(token, query head of one KV head), heads innermost; N keys of a tile.

Algorithm: FlashAttention 2 (Dao, 2023) in persistent programs, with the online softmax of `tile`.
1. The grid is fixed (a few programs a multiprocessor). Each program draws the next piece of `prefill_plan`'s list, so
   one captured graph serves any batch. A piece is a tile of rows and a range of its keys.
2. Only key tiles at an edge of what rows see are masked: three loops, and the middle one has no masks.
3. Keys come through pointers or, where a tile of keys lies in one block, by TMA.
4. Pieces of tiles that are cut along the keys leave normalized partial results, which a second kernel merges in the
   order of their keys.

    keys       start    plain           edge     stop
    first row  . m m m m|x x x x x x x x|m . . .          x: keys in tiles without masks
    last row   . . . . m|x x x x x x x x|m m m m          m: seen keys in masked tiles, .: unseen keys
    pieces     |    program 4    |    program 7   |
"""

# pyright: basic, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from collections import namedtuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from phonograph.kernels.triton.attention.fp8 import at_width_of
from phonograph.kernels.triton.attention.plan_words import load_words
from phonograph.kernels.triton.attention.prefill_plan import (
    COUNTER,
    ENTRY_WORDS,
    MULTIPROCESSORS,
    PrefillPlan,
    cache_matrix,
    read_entry,
    tile_keys,
)
from phonograph.kernels.triton.attention.tile import (
    LOG2_E,
    add_sink,
    in_window,
    merge_parts,
    normalize,
    score,
    softmax_step,
    store_rows,
    token_and_head,
)
from phonograph.kernels.triton.launch.pdl import gluon_usable, pdl_begin, pdl_options, pdl_usable, pdl_wait_first
from phonograph.kernels.triton.launch.shared_memory import shared_memory

_BLOCK_N = 64
_ROOMY = 160 * 1024
"""Least shared memory of a program for the configurations of an H200."""
_MERGE_ROWS = 16
# Padded tokens of a step, which its graph fixes: at most _FEW_TOKENS have few tiles, and from _HOPPER_TOKENS on the
# kernel for Hopper is faster.
_FEW_TOKENS = 2560
_HOPPER_TOKENS = 2000


def prefill_attention(
    plan: PrefillPlan,
    query_THD: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    *,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    causal: bool,
) -> None:
    """Attend the queries of the planned sequences to their keys, and write their rows of the output; one launch.

    `merge_prefill` completes tiles that are cut. Arguments are as in `decode_attention`, but blocks of `kv_cache` may
    have any size, and `causal` and `window` are the plan's.
    """
    num_tokens, _, head_size = query_THD.shape
    _, _, block_size, num_kv_heads, _ = kv_cache.shape
    width = plan.partial_out.shape[-1]
    stride_kv, stride_block, stride_slot, stride_head, _ = kv_cache.stride()
    rows, columns, heads_outside = cache_matrix(kv_cache)
    tma = _fits_tma(kv_cache, width, heads_outside)
    features = softcap != 0.0 or alibi_slopes is not None or k_scale is not None or v_scale is not None
    if (
        num_tokens >= _HOPPER_TOKENS
        and plan.cuts
        and tma
        and not features
        and width in (64, 128)
        and kv_cache.dtype == query_THD.dtype
        and gluon_usable()
    ):
        # Imported here, because other versions of Triton lack parts of Gluon.
        from phonograph.kernels.triton.attention.prefill_hopper import attend_on_hopper

        attend_on_hopper(
            plan,
            query_THD,
            kv_cache,
            block_table,
            out_THD,
            lse_HT,
            (rows, columns, heads_outside),
            scale=scale,
            window=window,
            sinks=sinks,
            causal=causal,
        )
        return
    few = plan.cuts and num_tokens <= _FEW_TOKENS
    block_n, num_warps, num_stages, share = _configuration(width, tma, few=few, roomy=shared_memory() >= _ROOMY)
    cache = kv_cache
    if tma:
        cache = TensorDescriptor(kv_cache, [rows, columns], [columns, 1], [block_n, head_size])
        stride_kv = rows // 2
    right = 0 if causal else window[1]
    programs = plan.num_sms * share
    _attention_kernel[(programs,)](
        query_THD,
        cache,
        block_table,
        out_THD,
        lse_HT,
        alibi_slopes,
        sinks,
        k_scale,
        v_scale,
        plan.header,
        plan.entries,
        plan.partial_out,
        plan.partial_lse,
        query_THD.stride(0),
        stride_kv,
        stride_block,
        stride_slot,
        stride_head,
        block_table.stride(0),
        lse_HT.stride(0) if lse_HT is not None else 0,
        scale,
        softcap,
        PROGRAMS=programs,
        SHARE=share,
        KV_HEADS=num_kv_heads,
        GROUP=plan.group,
        HEAD_SIZE=head_size,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK_M=plan.rows,
        BLOCK_N=block_n,
        LEFT=window[0],
        RIGHT=right,
        SOFTCAP=softcap != 0.0,
        TMA=tma,
        HEADS_OUTSIDE=heads_outside,
        **pdl_options(),
        num_warps=num_warps,
        num_stages=num_stages,
        # A logit must have the same bits in a tile with masks and in one without.
        enable_fp_fusion=plan.cuts,
    )


def prefill_overlaps(num_tokens: int) -> bool:
    """Return True if `prefill_attention` of that many padded tokens lets the next launch run at the same time.

    It then uses only the multiprocessors that its plan names. The kernel for Hopper does not overlap: it lets the next
    launch begin before it has itself waited for its predecessor.
    """
    return pdl_usable() and num_tokens < _HOPPER_TOKENS


def merge_prefill(
    plan: PrefillPlan,
    query_start_loc: torch.Tensor,
    out_THD: torch.Tensor,
    lse_HT: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Merge the partial results of `prefill_attention`, with the same tensors; no launch if the plan has no cuts."""
    if not plan.cuts:
        return
    _merge_kernel[(plan.num_sms,)](
        query_start_loc,
        out_THD,
        lse_HT,
        sinks,
        plan.header,
        plan.merges,
        plan.partial_out,
        plan.partial_lse,
        lse_HT.stride(0) if lse_HT is not None else 0,
        PROGRAMS=plan.num_sms,
        KV_HEADS=plan.num_kv_heads,
        GROUP=plan.group,
        HEAD_SIZE=out_THD.shape[2],
        WIDTH=plan.partial_out.shape[-1],
        BLOCK_M=plan.rows,
        ROWS=_MERGE_ROWS,
        **pdl_options(),
        num_warps=4,
    )


def _configuration(width: int, tma: bool, *, few: bool, roomy: bool) -> tuple[int, int, int, int]:
    """Return keys of a tile, warps, stages, and programs of a multiprocessor, by measurements on an H200.

    Two programs of four warps share a multiprocessor: one's softmax runs during the other's products. Where tiles are
    few, eight warps end each tile earlier. Wide heads fill the registers of eight warps. Without `roomy`, a program
    fits 99 KiB. Heads wider than 256 were not measured: their tiles are the largest that fit.
    """
    if width > 256:
        return (_BLOCK_N // 2, 8, 2, 1) if roomy else (_BLOCK_N // 4, 8, 1, 1)
    if width > 128:
        return (_BLOCK_N, 8, 2, 1) if roomy else (_BLOCK_N // 2, 8, 1, 1)
    if not tma:
        return _BLOCK_N, 4, 3, 2
    return (_BLOCK_N, 8, 3 if roomy else 2, 1) if few else (_BLOCK_N, 4, 2, 2)


def _fits_tma(kv_cache: torch.Tensor, width: int, heads_outside: bool) -> bool:
    """Return True if each key tile lies in one block, and the cache is a matrix of fewer than 2^31 rows.

    A row is a slot [K * D], or a head of a slot [D] if `heads_outside`.
    """
    _, num_blocks, block_size, num_kv_heads, head_size = kv_cache.shape
    stride_kv, stride_block, _, stride_head, _ = kv_cache.stride()
    return (
        block_size % _BLOCK_N == 0
        and (128 % block_size == 0 or block_size % 128 == 0)
        and width == head_size
        and stride_kv == num_blocks * stride_block
        and stride_block == block_size * num_kv_heads * head_size
        and 2 * num_blocks * block_size * (num_kv_heads if heads_outside else 1) < 1 << 31
        and (num_kv_heads == 1 or stride_head == (block_size * head_size if heads_outside else head_size))
    )


# A tile's rows of queries, the keys [low, high) that some row sees, and the cache.
_Tile = namedtuple(
    "_Tile",
    "query_MD cache table kv_head low high position_M slope_M factor softcap "
    "stride_kv stride_block stride_slot stride_head",
)
# Constants of the kernel.
_Shape = namedtuple("_Shape", "HEAD_SIZE WIDTH BLOCK_SIZE BLOCK_N LEFT RIGHT SOFTCAP ALIBI TMA HEADS_OUTSIDE")


@triton.jit
def _attend(sums, span, tile, shape, MASKED: tl.constexpr):
    """Add the keys of a span to the running sums, tile by tile; rows see keys of [low, high) only."""
    acc_MD, sum_M, max_M = sums
    start, stop = span
    HEAD_SIZE: tl.constexpr = shape.HEAD_SIZE
    WIDTH: tl.constexpr = shape.WIDTH
    BLOCK_SIZE: tl.constexpr = shape.BLOCK_SIZE
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    offset_N = tl.arange(0, BLOCK_N)
    dim = tl.arange(0, WIDTH)
    # Block ids are read one tile ahead, so that no tile waits for them before it requests its keys.
    if shape.TMA:
        next_block = tl.load(tile.table + start // BLOCK_SIZE, mask=start < stop, other=0)
    else:
        base = tile.cache + tile.kv_head * tile.stride_head
    # Hoisted matrix descriptors would push other values out of the registers.
    for key in tl.range(start, stop, BLOCK_N, disable_licm=True):
        key_N = key + offset_N
        seen_N = (key_N >= tile.low) & (key_N < tile.high)
        if shape.TMA:
            block = next_block
            ahead = key + BLOCK_N
            next_block = tl.load(tile.table + ahead // BLOCK_SIZE, mask=ahead < stop, other=0)
            if shape.HEADS_OUTSIDE:
                row = (block * (tile.stride_block // tile.stride_head) + tile.kv_head) * BLOCK_SIZE + key % BLOCK_SIZE
                column = 0
            else:
                row = block * BLOCK_SIZE + key % BLOCK_SIZE
                column = tile.kv_head * HEAD_SIZE
            key_ND = tile.cache.load([row, column])
            value_ND = tile.cache.load([row + tile.stride_kv, column])
            if MASKED:
                # Unwritten slots may hold NaN, which a weight of zero does not remove.
                value_ND = tl.where(seen_N[:, None], at_width_of(value_ND, tile.query_MD.dtype), 0.0)
        else:
            if 128 % BLOCK_SIZE == 0 or BLOCK_SIZE % 128 == 0:
                # A tile begins a block or lies in one, so one load of a block id serves all its keys.
                inside = (key + BLOCK_SIZE > tile.low) & (key < tile.high)
                block = tl.load(tile.table + key // BLOCK_SIZE, mask=inside, other=0)
                for index in tl.static_range(1, BLOCK_N // BLOCK_SIZE):
                    first = key + index * BLOCK_SIZE
                    inside = (first + BLOCK_SIZE > tile.low) & (first < tile.high)
                    later = tl.load(tile.table + first // BLOCK_SIZE, mask=inside, other=0)
                    block = tl.where(offset_N >= index * BLOCK_SIZE, later, block)
            else:
                block = tl.load(tile.table + key_N // BLOCK_SIZE, mask=seen_N, other=0)
            slot_N = block.to(tl.int64) * tile.stride_block + (key_N % BLOCK_SIZE) * tile.stride_slot
            pointer_ND = base + slot_N[:, None] + dim[None, :]
            if MASKED:
                mask = seen_N[:, None] & (dim < HEAD_SIZE)[None, :]
                key_ND = tl.load(pointer_ND, mask=mask, other=0.0)
                value_ND = tl.load(pointer_ND + tile.stride_kv, mask=mask, other=0.0)
            elif WIDTH != HEAD_SIZE:
                key_ND = tl.load(pointer_ND, mask=(dim < HEAD_SIZE)[None, :], other=0.0)
                value_ND = tl.load(pointer_ND + tile.stride_kv, mask=(dim < HEAD_SIZE)[None, :], other=0.0)
            else:
                key_ND = tl.load(pointer_ND)
                value_ND = tl.load(pointer_ND + tile.stride_kv)
        key_ND = at_width_of(key_ND, tile.query_MD.dtype)
        value_ND = at_width_of(value_ND, tile.query_MD.dtype)
        logits_MN = tl.dot(tile.query_MD, key_ND.T, input_precision="ieee")
        logits_MN, unit = score(
            logits_MN, tile.factor, tile.softcap, tile.slope_M, key_N, tile.position_M, shape.SOFTCAP, shape.ALIBI
        )  # fmt: skip
        if MASKED:
            seen_MN = in_window(seen_N[None, :], key_N, tile.position_M, shape.LEFT, shape.RIGHT)
            logits_MN = tl.where(seen_MN, logits_MN, float("-inf"))
        weight_MN, decay_M, sum_M, max_M = softmax_step(logits_MN, unit, sum_M, max_M, MASKED)
        acc_MD = acc_MD * decay_M[:, None]
        acc_MD = tl.dot(weight_MN.to(tile.query_MD.dtype), value_ND, acc_MD, input_precision="ieee")
    return acc_MD, sum_M, max_M


@triton.jit(do_not_specialize=["stride_table", "stride_lse"])
def _attention_kernel(
    query_THD,
    cache,
    block_table,
    out_THD,
    lse_HT,
    alibi_slopes,
    sinks,
    k_scale,
    v_scale,
    header,
    entries,
    partial_out,
    partial_lse,
    stride_token,
    stride_kv,
    stride_block,
    stride_slot,
    stride_head,
    stride_table,
    stride_lse,
    scale,
    softcap,
    PROGRAMS: tl.constexpr,
    SHARE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TMA: tl.constexpr,
    HEADS_OUTSIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl_wait_first(PDL)
    ALIBI: tl.constexpr = alibi_slopes is not None
    SHAPE: tl.constexpr = _Shape(
        HEAD_SIZE, WIDTH, BLOCK_SIZE, BLOCK_N, LEFT, RIGHT, SOFTCAP, ALIBI, TMA, HEADS_OUTSIDE
    )  # fmt: skip
    dim = tl.arange(0, WIDTH)
    item = tl.program_id(0)
    programs = tl.minimum(tl.load(header + MULTIPROCESSORS) * SHARE, PROGRAMS)
    num_items = tl.where(item < programs, tl.load(header) * KV_HEADS, 0)
    while item < num_items:
        # Drawn early, used at the end.
        ticket = tl.atomic_add(header + COUNTER, 1, sem="relaxed")
        entry = entries + item // KV_HEADS * ENTRY_WORDS
        kv_head = item % KV_HEADS
        seq, tile, start, stop, slot, query_start, query_len, seq_len = read_entry(entry)
        low, high, first, last = tile_keys(tile, query_len, seq_len, GROUP, BLOCK_M, LEFT, RIGHT)

        row_M = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        token_M, head_M = token_and_head(row_M, kv_head, GROUP)
        valid_M = token_M < query_len
        position_M = seq_len - query_len + token_M
        # 64 bits for the tile's first token, 32 within the tile.
        first_token = tile * BLOCK_M // GROUP
        query = query_THD + (query_start + first_token).to(tl.int64) * stride_token
        pointer_MD = query + ((token_M - first_token) * stride_token + head_M * HEAD_SIZE)[:, None] + dim[None, :]
        mask_MD = valid_M[:, None] & (dim < HEAD_SIZE)[None, :]
        query_MD = tl.load(pointer_MD, mask=mask_MD, other=0.0)
        factor = scale
        if k_scale is not None:
            factor *= tl.load(k_scale + kv_head)
        slope_M = tl.zeros([BLOCK_M], tl.float32)
        if ALIBI:
            slope_M = tl.load(alibi_slopes + head_M) * LOG2_E
        table = block_table + seq.to(tl.int64) * stride_table

        acc_MD = tl.zeros([BLOCK_M, WIDTH], tl.float32)
        sum_M = tl.zeros([BLOCK_M], tl.float32)
        max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
        sums = acc_MD, sum_M, max_M
        operands = _Tile(
            query_MD, cache, table, kv_head, low, high, position_M, slope_M, factor, softcap,
            stride_kv, stride_block, stride_slot, stride_head,
        )  # fmt: skip
        # All rows see the keys from `plain` to `edge`.
        plain = start
        if LEFT >= 0:
            plain = start + tl.cdiv(tl.minimum(tl.maximum(last - LEFT, start), stop) - start, BLOCK_N) * BLOCK_N
            sums = _attend(sums, (start, tl.minimum(plain, stop)), operands, SHAPE, True)
        edge = stop
        if RIGHT >= 0:
            edge = tl.minimum(stop, first + RIGHT + 1)
        edge = plain + tl.maximum(edge - plain, 0) // BLOCK_N * BLOCK_N
        sums = _attend(sums, (plain, edge), operands, SHAPE, False)
        acc_MD, sum_M, max_M = _attend(sums, (edge, stop), operands, SHAPE, True)

        # A volatile load, so that the compiler does not hold the rows' addresses in registers through the loops above.
        first_row = tl.load(entry + 1, volatile=True) * BLOCK_M
        row_M = first_row + tl.arange(0, BLOCK_M)
        first_token = first_row // GROUP
        token_M, head_M = token_and_head(row_M, kv_head, GROUP)
        valid_M = token_M < query_len
        value_factor = 1.0
        if v_scale is not None:
            value_factor = tl.load(v_scale + kv_head)
        if sinks is not None:  # noqa: SIM102 (one is known when compiled, the other is not)
            if slot < 0:
                acc_MD, sum_M, max_M = add_sink(sinks, head_M, acc_MD, sum_M, max_M)
        acc_MD, lse_M = normalize(acc_MD, sum_M, max_M, value_factor)
        if slot < 0:
            store_rows(
                out_THD, lse_HT, stride_lse, acc_MD, lse_M,
                query_start, first_token, token_M, head_M, valid_M, KV_HEADS * GROUP, HEAD_SIZE,
            )  # fmt: skip
        else:
            row_M = (slot * KV_HEADS + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(partial_out + row_M.to(tl.int64)[:, None] * WIDTH + dim[None, :], acc_MD)
            tl.store(partial_lse + row_M, lse_M)
        # Every item draws one ticket. The launch's last ticket resets the counter for the next launch.
        if ticket == num_items - 1:
            tl.store(header + COUNTER, 0)
        item = programs + ticket


@triton.jit(do_not_specialize=["stride_lse"])
def _merge_kernel(
    query_start_loc,
    out_THD,
    lse_HT,
    sinks,
    header,
    merges,
    partial_out,
    partial_lse,
    stride_lse,
    PROGRAMS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merge partial results of cut tiles, ROWS rows at a time: weights exp2(lse), pieces in order of their keys."""
    pdl_begin(PDL)
    STRIPS: tl.constexpr = BLOCK_M // ROWS
    dim = tl.arange(0, WIDTH)
    num_items = tl.load(header + 1) * (KV_HEADS * STRIPS)
    for item in range(tl.program_id(0), num_items, PROGRAMS):
        merge = merges + item // (KV_HEADS * STRIPS) * ENTRY_WORDS
        kv_head = item // STRIPS % KV_HEADS
        strip = item % STRIPS * ROWS + tl.arange(0, ROWS)
        seq, tile, slot, pieces = load_words(merge, 4)
        query_start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - query_start
        row_M = tile * BLOCK_M + strip
        first_token = tile * BLOCK_M // GROUP
        token_M, head_M = token_and_head(row_M, kv_head, GROUP)
        valid_M = token_M < query_len

        max_M = tl.full([ROWS], float("-inf"), tl.float32)
        sum_M = tl.zeros([ROWS], tl.float32)
        acc_MD = tl.zeros([ROWS, WIDTH], tl.float32)
        if sinks is not None:
            max_M = tl.load(sinks + head_M) * LOG2_E
            sum_M += 1.0
        for piece in range(pieces):
            partial_M = ((slot + piece) * KV_HEADS + kv_head).to(tl.int64) * BLOCK_M + strip
            lse_M = tl.load(partial_lse + partial_M)
            part_MD = tl.load(partial_out + partial_M[:, None] * WIDTH + dim[None, :])
            new_max_M = tl.maximum(max_M, lse_M)
            acc_MD, sum_M = merge_parts(acc_MD, sum_M, max_M, new_max_M, (lse_M,), (part_MD,))
            max_M = new_max_M
        acc_MD, lse_M = normalize(acc_MD, sum_M, max_M, 1.0)
        store_rows(
            out_THD, lse_HT, stride_lse, acc_MD, lse_M,
            query_start, first_token, token_M, head_M, valid_M, KV_HEADS * GROUP, HEAD_SIZE,
        )  # fmt: skip
