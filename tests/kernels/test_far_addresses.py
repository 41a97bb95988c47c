"""Addresses beyond 2^31 elements: each kernel on rows that lie so far apart, against the same rows close together.

On the CPU the tensors take address space and no memory. On a GPU they take up to 23 GiB, one test at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import gluon_on_threads
import numpy as np
import pytest
import torch
from far_memory import BORDER, far_tensor, gpu_turn, last_programs, spread
from fp4_weights import random_file, weight_for_gpu
from kernel_entries import kernel_entries

from phonograph.kernels.attention_scratch import PREFILL_ROWS
from phonograph.kernels.fp8_activations import Fp8Rows
from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.kernels.triton.attention import prefill as attention_prefill
from phonograph.kernels.triton.attention import rope_and_kv_write as rope_kv
from phonograph.kernels.triton.attention.decode import decode_attention
from phonograph.kernels.triton.attention.decode_plan import make_decode_plan, plan_decode
from phonograph.kernels.triton.attention.page_indices import page_indices
from phonograph.kernels.triton.attention.prefill import merge_prefill, prefill_attention
from phonograph.kernels.triton.attention.prefill_plan import make_prefill_plan
from phonograph.kernels.triton.attention.quantize_query import quantize_queries
from phonograph.kernels.triton.attention.shared_runs import compare_tables
from phonograph.kernels.triton.elementwise import layer_embeddings, layers
from phonograph.kernels.triton.elementwise.fp8_rows import quantize_rows
from phonograph.kernels.triton.elementwise.gate_heads import gate_heads
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import ExpertConfig, ExpertTile, FewRowsTile, RowTile
from phonograph.kernels.triton.experts.expert_products import down_products, gate_up_products
from phonograph.kernels.triton.experts.expert_results import add_results
from phonograph.kernels.triton.experts.join_results import join_results
from phonograph.kernels.triton.experts.route import route
from phonograph.kernels.triton.experts.route_row import route_row
from phonograph.kernels.triton.experts.row_products import add_down_row, gate_up_row
from phonograph.kernels.triton.gemm import gemm_grouped_small_m, gemm_small_m, gemm_tiled, gemv
from phonograph.kernels.triton.gemm.dequantize import dequantize_into
from phonograph.kernels.triton.gemm.product import ADD, SILU, DeferredNorm, NextNorm, Norm, Product
from phonograph.kernels.triton.gemm.product_plan import (
    GemmGroupedSmallMConfig,
    GemmRingConfig,
    GemmRingSmallMConfig,
    GemmSmallMConfig,
    GemmTiledConfig,
    GemvConfig,
    GemvIntegerConfig,
)
from phonograph.kernels.triton.sampling.bitmask import mask_logits
from phonograph.kernels.triton.sampling.sample import make_sample_scratch, sample
from phonograph.kernels.triton.state.causal_conv import short_conv
from phonograph.kernels.triton.state.gated_delta import gated_delta
from phonograph.kernels.triton.state.mamba2 import mamba2
from phonograph.kernels.triton.step.accept_drafts import accept
from phonograph.kernels.triton.step.draft_rows import DraftRows, first_pass, listed_pass, next_pass
from phonograph.kernels.triton.step.prepare import apply_appends, prepare
from phonograph.kernels.triton.step.prompt_lookup import propose_ngrams
from phonograph.kernels.triton.step.step_layout import START_WORDS, SlotState, StepLayout

Place = Callable[..., torch.Tensor]
"""Copies a tensor: as it is, or with its rows far apart."""
Walk = Callable[[Place, torch.device], list[torch.Tensor]]
ROWS, WIDTH = 3, 1024
TOKENS = BORDER // WIDTH + 2
"""Rows of WIDTH elements, of which the last two lie beyond the border."""
EPS = 1e-5


class Places:
    """Counts the tensors of a walk, and spreads those whose numbers are in `far`."""

    def __init__(self, far: Sequence[int] = ()) -> None:
        self.count = 0
        self._far = far

    def __call__(self, tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
        self.count += 1
        return spread(tensor, dim) if self.count - 1 in self._far else tensor.clone()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter is off where there is a GPU")
    if request.param == "cpu":
        yield torch.device("cpu")
        return
    with gpu_turn():
        yield torch.device("cuda")


def randn(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(shape).to(device, torch.float16)


def walk_gemv(place: Place, device: torch.device) -> list[torch.Tensor]:
    weight, x, norm = place(randn(16, 64, device=device)), randn(1, 64, device=device), randn(64, device=device)
    out, gated = torch.zeros(2, 1, 16, dtype=x.dtype, device=device)
    config = GemvConfig(4, 64, 1)
    gemv.launch(Product(x, weight, None, out), config)
    gemv.launch(Product(x, weight, None, gated[:, :8], SILU, Norm(norm, EPS)), config)
    return [out, gated]


def operands(place: Place, device: torch.device) -> tuple[list[torch.Tensor], NextNorm]:
    """x, weights, out, and a norm behind: the inputs of 3 rows, 64 inputs and 64 outputs."""
    tensors = [place(randn(*shape, device=device)) for shape in ((ROWS, 64), (128, 64), (ROWS, 64))]
    norm = NextNorm(
        randn(64, device=device),
        place(torch.zeros(ROWS, 64, dtype=torch.float16, device=device)),
        DeferredNorm(torch.zeros(8, 16, device=device), EPS),
    )
    return tensors, norm


def walk_few_rows(place: Place, device: torch.device) -> list[torch.Tensor]:
    (x, weight, out), norm = operands(place, device)
    norm = norm._replace(squares=DeferredNorm(torch.zeros(8, 8, device=device), EPS))
    config = GemmSmallMConfig(8, 8, 64, 1, 1, 2, 1)
    gated = place(torch.zeros_like(out, memory_format=torch.contiguous_format))
    gemm_small_m.launch(Product(x, weight, None, gated, SILU), config)
    gemm_small_m.launch(Product(x, weight[:64], None, out, ADD, next_norm=norm), config)
    return [out, norm.normed_MN, gated]


def walk_in_groups(
    place: Place, device: torch.device, group: int, launch: Callable[[Product], None], *, interleaved: bool
) -> list[torch.Tensor]:
    """Multiply by weights of 4 bits in three groups."""
    x, out, gated = (place(randn(ROWS, width, device=device)) for width in (3 * group, 64, 64))
    packed = place(torch.randint(-(2**31), 2**31, (128, 3 * group // 8)).to(device, torch.int32))
    scales = place(randn(3, 128, device=device)).t()
    weight = Grouped(packed, scales, None, 4, group, interleaved=interleaved)
    launch(Product(x, weight, None, gated, SILU))
    launch(Product(x, weight.rows(0, 64), None, out, ADD))
    return [out, gated]


def walk_grouped_rows(place: Place, device: torch.device) -> list[torch.Tensor]:
    config = GemmGroupedSmallMConfig(8, 16, 2, 1, 1, 2)
    launch = functools.partial(gemm_grouped_small_m.launch, config=config)
    return walk_in_groups(place, device, 32, launch, interleaved=False)


def walk_row_tiles(place: Place, device: torch.device) -> list[torch.Tensor]:
    (x, weight, out), norm = operands(place, device)
    config = GemmTiledConfig(16, 64, 64, 1, 4, 2, 0)
    gated = place(torch.zeros_like(out, memory_format=torch.contiguous_format))
    gemm_tiled.launch(Product(x, weight, None, gated, SILU), config, None)
    gemm_tiled.launch(Product(x, weight[:64], None, out, ADD, next_norm=norm), config, None)
    # Rows that begin at no multiple of 16 bytes are read by pointers.
    odd = place(torch.zeros_like(out, memory_format=torch.contiguous_format))
    gemm_tiled.launch(Product(x[:, :60], weight[:64, 1:61], None, odd), config, None)
    return [out, norm.normed_MN, gated, odd]


def walk_ring(place: Place, device: torch.device) -> list[torch.Tensor]:
    from phonograph.kernels.triton.gemm.hopper import gemm_ring

    (x, weight, out), norm = operands(place, device)
    config = GemmRingConfig(16, 64, 64, 1, 2)
    gated = place(torch.zeros_like(out, memory_format=torch.contiguous_format))
    gemm_ring.launch(Product(x, weight, None, gated, SILU), config, None)
    gemm_ring.launch(Product(x, weight[:64], None, out, ADD, next_norm=norm), config, None)
    return [out, norm.normed_MN, gated]


def walk_few_rows_ring(place: Place, device: torch.device) -> list[torch.Tensor]:
    from phonograph.kernels.triton.gemm.hopper import gemm_ring_small_m

    launch = functools.partial(gemm_ring_small_m.launch, config=GemmRingSmallMConfig(8, 16, 1, 1, 1, 1, 1), parts=None)
    return walk_in_groups(place, device, 128, launch, interleaved=True)


def walk_integer_row(place: Place, device: torch.device) -> list[torch.Tensor]:
    from phonograph.kernels.triton.gemm.hopper import gemv_integer

    def launch(product: Product) -> None:
        one = product._replace(x=product.x[:1], out_MN=product.out_MN[:1])
        gemv_integer.launch(one, GemvIntegerConfig(16, 1, 1, 1, 1, 1), None)

    return walk_in_groups(place, device, 128, launch, interleaved=True)


def walk_sampling(place: Place, device: torch.device) -> list[torch.Tensor]:
    logits = place(randn(ROWS, 3000, device=device))
    mask = torch.full((1, 94), -2, dtype=torch.int32, device=device)
    mask_logits(logits, torch.tensor([ROWS - 1], dtype=torch.int32, device=device), mask)
    tokens, last_token = torch.zeros(2, ROWS, dtype=torch.int32, device=device)
    parameters = torch.ones(ROWS, device=device)
    sample(
        logits,
        torch.arange(ROWS, dtype=torch.int32, device=device),
        parameters,
        torch.tensor([0, 5, 40], dtype=torch.int32, device=device),
        parameters,
        parameters * 0,
        torch.arange(ROWS, device=device),
        make_sample_scratch(ROWS, 3000, device),
        tokens,
        last_token,
        last_token,
        last_token,
    )
    return [tokens, logits]


def walk_gathers(place: Place, device: torch.device) -> list[torch.Tensor]:
    out, ordered = (place(torch.zeros(ROWS, 70, dtype=torch.float16, device=device)) for _ in range(2))
    picked, source = torch.tensor([2, 0, 2], device=device), place(randn(ROWS, 70, device=device))
    layers.gather_rows(source, picked, out)
    of_ids = place(torch.empty_like(out))
    layers.gather_rows(source, picked.int(), of_ids)
    layers.gather_columns(source, torch.arange(70, device=device).flip(0), ordered)
    return [out, of_ids, ordered]


def walk_block_tables(place: Place, device: torch.device) -> list[torch.Tensor]:
    """Page numbers, the keys that sequences share, and blocks entered ahead of a step."""
    lens = torch.tensor([30, 0, 64], dtype=torch.int32, device=device)
    table = place(torch.randint(0, 99, (ROWS, 8), dtype=torch.int32).to(device))
    apply_appends(torch.tensor([[2], [3], [77]], dtype=torch.int32, device=device), table)
    pages = torch.zeros(ROWS * 8, dtype=torch.int32, device=device)
    page_indices(table, lens, pages, page_size=16)
    table[2, 0] = table[1, 0]
    shared = torch.full((ROWS,), -1, dtype=torch.int32, device=device)
    starts = torch.arange(ROWS + 1, dtype=torch.int32, device=device)
    compare_tables(shared, starts, lens + 40, (table,), block_size=16, max_query_len=1, max_tokens=ROWS)
    return [table, pages, shared]


def walk_prepare(place: Place, device: torch.device) -> list[torch.Tensor]:
    layout = StepLayout(ROWS, 8, 8)
    staging = np.zeros(layout.num_words, np.int32)
    views = layout.host_views(staging)
    views.header[:3] = ROWS, ROWS, ROWS - 2
    views.slots[:] = 2, 0, 1
    views.query_starts[:] = views.append_starts[0] = np.arange(ROWS + 1)
    views.token_starts[:] = views.start_at[:] = -1
    # Prefills of one token, which is kept.
    views.token_starts[1:], views.context_lens[1:], views.tokens[:2] = [0, 1], [47, 20], [5, 6]
    views.append_at[:] = 1, 2, 3
    views.appends[:ROWS] = 50, 51, 52
    tables = [place(torch.randint(0, 99, (ROWS, 8), dtype=torch.int32).to(device)) for _ in range(2)]
    ints = {name: torch.zeros(8, dtype=torch.int32, device=device) for name in ("input_ids_T", "query_start_loc")}
    longs = ("positions_T", "logits_rows_L")
    outputs = ints | {name: torch.zeros(8, dtype=torch.int64, device=device) for name in longs}
    outputs["slot_mappings_GT"] = torch.zeros(1, 8, dtype=torch.int64, device=device)
    seq_lens = torch.zeros(8, dtype=torch.int32, device=device)
    history = place(torch.zeros(ROWS, 64, dtype=torch.int32, device=device))
    last_token, num_computed = torch.tensor([[7, 8, 9], [30, 47, 20]], dtype=torch.int32, device=device)
    prepare(
        torch.from_numpy(staging).to(device),
        layout,
        SlotState(
            last_token,
            num_computed,
            torch.zeros(ROWS, START_WORDS, dtype=torch.int32, device=device),
            torch.zeros(ROWS, 0, dtype=torch.int32, device=device),
            tables[0][None],
        ),
        block_tables_GRN=tables[1][None],
        block_sizes=(16,),
        num_reqs_padded=ROWS,
        num_tokens_padded=ROWS,
        seq_lens_R=seq_lens,
        slots_R=torch.zeros_like(seq_lens),
        history_RM=history,
        **outputs,
    )
    return [*tables, *outputs.values(), seq_lens, history]


def walk_drafts(place: Place, device: torch.device) -> list[torch.Tensor]:
    """Acceptance and prompt lookup over histories far apart."""
    layout = StepLayout(ROWS, 3 * ROWS, 8, max_num_logits=3 * ROWS)
    staging = np.zeros(layout.num_words, np.int32)
    views = layout.host_views(staging)
    views.header[:4] = ROWS, 3 * ROWS, ROWS, 3 * ROWS
    views.slots[:] = 2, 0, 1
    views.query_starts[:] = np.arange(0, 3 * ROWS + 1, 3)
    first = layout.fields["lengths"][1].start
    staging[first : first + 3 * ROWS] = np.tile([20, 21, 22], ROWS)
    state = SlotState.make(num_groups=1, max_num_seqs=ROWS, max_blocks=1, device=device, most_drafts=2)
    history = place(torch.arange(32, dtype=torch.int32).remainder(5).repeat(ROWS, 1).to(device))
    ids = torch.arange(19, 19 + 3 * ROWS, dtype=torch.int32, device=device).remainder(5)
    tokens, counts = (ids + 1).remainder(5), torch.zeros(ROWS, dtype=torch.int32, device=device)
    common = torch.from_numpy(staging).to(device), layout, state
    shape = {"num_reqs_padded": ROWS, "tokens_L": tokens, "history_RM": history}
    accept(*common, input_ids_T=ids, counts_R=counts, **shape)
    propose_ngrams(*common, shortest=2, longest=4, **shape)
    rows = DraftRows.make(max_num_seqs=ROWS, max_num_tokens=3 * ROWS, device=device)
    table = place(torch.arange(8 * ROWS, dtype=torch.int32).view(ROWS, 8).to(device))
    of_passes = {"block_size": 4, "num_reqs_padded": ROWS, "block_table_RN": table}
    lens = torch.full((ROWS,), 22, dtype=torch.int32, device=device)
    state.parameters[:, 7] = 30
    first_pass(
        *common, rows, num_tokens_padded=3 * ROWS, tokens_L=tokens, input_ids_T=ids, seq_lens_R=lens, **of_passes
    )
    first = rows.slot_mapping.clone()
    next_pass(state, rows, index=0, **of_passes)
    later = rows.slot_mapping.clone()
    listed = torch.tensor([2, 0, -1], dtype=torch.int32, device=device)
    listed_table = place(torch.zeros(ROWS, 8, dtype=torch.int32, device=device))
    listed_pass(
        *common,
        rows,
        block_size=4,
        listed_G=listed,
        seq_lens_R=lens,
        block_table_RN=table,
        listed_table_GN=listed_table,
    )
    states = state.drafts, state.num_computed, state.last_token
    return [history, counts, *states, first, later, rows.slot_mapping, listed_table]


def walk_kv_writes(place: Place, device: torch.device) -> list[torch.Tensor]:
    """Rotation and writes of tokens far apart to blocks far apart, values further than keys."""
    qkv = place(randn(ROWS, 8 * 32, device=device))
    cache = place(torch.zeros(2, ROWS, 16, 2, 32, dtype=torch.float8_e5m2, device=device), dim=1)
    slots = torch.tensor([3, 40, 17], device=device)
    arguments = {
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "qk_norm": None,
        "eps": EPS,
        "k_scale": None,
        "v_scale": None,
    }
    rotary = torch.randn(9, 32).to(device)
    rope_kv.rope_and_write_kv(qkv, torch.tensor([1, 8, 3], device=device), rotary, cache, slots, **arguments)
    key, value = (place(randn(ROWS, 2, 32, device=device)) for _ in range(2))
    rope_kv.write_kv(key, value, cache, slots + 5, None, None)
    layers.norm_queries_and_keys(qkv, randn(6, 32, device=device), 4, EPS)
    return [qkv, cache.view(torch.uint8)]


def walk_layer_embeddings(place: Place, device: torch.device) -> list[torch.Tensor]:
    projected, table, gates = (place(randn(ROWS, 32, device=device)) for _ in range(3))
    ids = torch.tensor([2, 0, 1], device=device)
    layer_embeddings.add_table(projected, ids, table, randn(16, device=device), EPS, (4.0, 0.25, 0.5))
    layer_embeddings.gate_embedding(gates[:, :32], projected, 0, ids)
    return [projected, gates]


KV_KERNELS = (
    "rope_and_kv_write._rope_kernel",
    "rope_and_kv_write._write_kernel",
    "layers._joint_norm_kernel",
)


def walk_experts(place: Place, device: torch.device) -> list[torch.Tensor]:
    routing, width, inner = Routing(3, 2), 32, 16
    lists = ExpertLists.over(
        torch.zeros(ExpertLists.num_words(ROWS, routing), device=device),
        ROWS,
        routing,
        ExpertLists.counters(ROWS, device),
    )
    x, hidden = (place(randn(ROWS, width, device=device)) for _ in range(2))
    route(x, place(randn(3, width, device=device)), routing, lists, block=16)
    config = ExpertConfig(16, ExpertTile(16, 16, 1, 1), ExpertTile(16, 16, 1, 1))
    inner_rows, results = (place(randn(2 * ROWS, size, device=device)) for size in (inner, width))
    gate_up, down = place(randn(6 * inner, width, device=device)), place(randn(3 * width, inner, device=device))
    gate_up_products(x, gate_up, lists, routing, config, inner_rows)
    down_products(inner_rows, down, lists, routing, config, results)
    add_results(results, hidden, 2)
    return [inner_rows, results, hidden, lists.experts_Tk, lists.weights_Tk]


def walk_few_rows_of_experts(place: Place, device: torch.device) -> list[torch.Tensor]:
    """Words of FP4 lie one after another; exponents of outputs may lie apart."""
    routing, size, dtype = Routing(3, 2), 64, torch.float16
    words = torch.zeros(ExpertLists.num_words(ROWS, routing), device=device)
    lists = ExpertLists.over(words, ROWS, routing, ExpertLists.counters(ROWS, device))
    x = place(randn(ROWS, size, device=device).to(dtype))
    route(x, place(randn(3, size, device=device).to(dtype)), routing, lists, block=8)
    config = ExpertConfig(8, FewRowsTile(16, 1, 1, 1), FewRowsTile(16, 1, 1, 1))
    inner_rows, results = (place(randn(2 * ROWS, size, device=device).to(dtype)) for _ in range(2))
    gate_up, down = (weight_for_gpu(random_file(3, outputs, size), device) for outputs in (2 * size, size))
    gate_up, down = (weight._replace(scales_OG=place(weight.scales_OG)) for weight in (gate_up, down))
    gate_up_products(x, gate_up, lists, routing, config, inner_rows)
    down_products(inner_rows, down, lists, routing, config, results)
    tile, row = FewRowsTile(8, 1, 1, 1), results[:1].clone()
    inner_row = torch.zeros(2, size, dtype=dtype, device=device)
    gate_up_row(x[:1], gate_up, lists, tile, inner_row)
    add_down_row(inner_row, down, lists, tile, row)
    return [inner_rows, results, inner_row, row]


def walk_row_of_experts(place: Place, device: torch.device) -> list[torch.Tensor]:
    routing, width, inner, tile = Routing(3, 2), 32, 16, RowTile(4, 16, 1, 1)
    words = torch.zeros(ExpertLists.num_words(1, routing), device=device)
    lists = ExpertLists.over(words, 1, routing, ExpertLists.counters(1, device))
    hidden, normed, inner_rows = (
        randn(rows, size, device=device) for rows, size in ((1, width), (1, width), (2, inner))
    )
    norm = randn(width, device=device), EPS, normed
    gate_up, down = place(randn(6 * inner, width, device=device)), place(randn(3 * width, inner, device=device))
    route_row(hidden, place(randn(3, width, device=device)), routing, lists, tile, norm=norm)
    gate_up_row(normed, gate_up, lists, tile, inner_rows)
    add_down_row(inner_rows, down, lists, tile, hidden)
    return [inner_rows, hidden, lists.experts_Tk, lists.weights_Tk]


def walk_states(place: Place, device: torch.device) -> list[torch.Tensor]:
    """Projections and gates of mixers with a state, and gates of attention's heads; slots are in `test_far_states`."""
    net = DeltaSizes(1, 2, 16, 32, by_head=True)
    projected = place(randn(20, net.channels + 64, device=device))
    gates, checkpoints = place(randn(20, 4, device=device)), place(torch.full((3, 2), -1).to(device, torch.int32))
    taps, decay, bias, norm = (randn(*shape, device=device).float() for shape in ((net.channels, 3), (2,), (2,), (32,)))
    starts, lens, slots = (torch.tensor(one).to(device, torch.int32) for one in ([0, 18, 20], [30, 2], [1, 0]))
    history, out = randn(2, 2, net.channels, device=device), randn(20, 64, device=device)
    state, scratch = randn(2, 2, 16, 32, device=device).float(), randn(20, sum(net.scratch_widths), device=device)
    rows = starts, lens, slots, checkpoints
    gated_delta(projected, gates, taps, decay, bias, norm, *rows, history, state, out, net, EPS, scratch)
    gates_and_inputs, inputs, mixed = (
        place(randn(20, 96, device=device)),
        *(randn(*shape, 32, device=device) for shape in ((2, 2), (20,))),
    )
    short_conv(gates_and_inputs, taps[:32].contiguous(), None, *rows, inputs, mixed)
    mamba = MambaSizes(2, 32, 1, 16)
    per_head, norm = (randn(2, device=device).float() for _ in range(3)), randn(64, device=device).float()
    # More tokens than a segment has.
    starts, lens = (torch.tensor(one).to(device, torch.int32) for one in ([0, 518, 520], [530, 2]))
    scanned, kept = randn(520, 64, device=device), randn(2, 2, 32, 16, device=device).float()
    weights = taps[: mamba.channels].contiguous(), None, *per_head, norm
    scratch, columns = randn(520, sum(mamba.scratch_widths), device=device), mamba.inner + mamba.channels + 2
    pools, rows = (randn(2, 2, mamba.channels, device=device), kept), (starts, lens, slots, checkpoints)
    mamba2(place(randn(520, columns, device=device)), *weights, *rows, *pools, scanned, mamba, EPS, scratch)
    heads = place(randn(ROWS, 32, device=device))
    gate_heads(heads, place(randn(ROWS, 96, device=device)), 16)
    return [out, history, state, heads, inputs, mixed, scanned, *pools]


WALKS: dict[str, tuple[Walk, tuple[str, ...]]] = {
    "gemv": (walk_gemv, ("gemv._gemv_kernel",)),
    "few rows": (walk_few_rows, ("gemm_small_m._gemm_small_m_kernel",)),
    "few rows, in groups": (walk_grouped_rows, ("gemm_grouped_small_m._gemm_grouped_small_m_kernel",)),
    "row tiles": (walk_row_tiles, ("gemm_tiled._gemm_tiled_kernel",)),
    "ring": (walk_ring, ("gemm_ring._gemm_ring_kernel",)),
    "few rows, ring": (walk_few_rows_ring, ("gemm_ring_small_m._gemm_ring_small_m_kernel",)),
    "one row, integers": (walk_integer_row, ("gemv_integer._gemv_integer_kernel",)),
    "experts": (
        walk_experts,
        ("route._route_kernel", "expert_products._expert_kernel", "expert_results._add_kernel"),
    ),
    "experts of one row": (
        walk_row_of_experts,
        ("route_row._route_row_kernel", "row_products._gate_up_row_kernel", "row_products._down_row_kernel"),
    ),
    "experts with few rows": (
        walk_few_rows_of_experts,
        (
            "expert_few_rows.expert_few_rows_kernel",
            "row_products_fp4._gate_up_fp4_row_kernel",
            "row_products_fp4._down_fp4_row_kernel",
        ),
    ),
    "sampling": (
        walk_sampling,
        ("scan.scan_kernel", "filter.filter_kernel", "bitmask._mask_kernel"),
    ),
    "gathers": (walk_gathers, ("layers._gather_kernel", "layers._gather_columns_kernel")),
    "block tables": (
        walk_block_tables,
        ("page_indices._indices_kernel", "shared_runs._compare_kernel", "prepare._append_kernel"),
    ),
    "prepare": (walk_prepare, ("prepare._prepare_kernel",)),
    "drafts": (
        walk_drafts,
        (
            *("accept_drafts._accept_kernel", "prompt_lookup._ngram_kernel"),
            *("draft_rows._first_rows_kernel", "draft_rows._next_row_kernel", "draft_rows._listed_rows_kernel"),
        ),
    ),
    "KV writes": (walk_kv_writes, KV_KERNELS),
    "states": (
        walk_states,
        (
            *("causal_conv._conv_kernel", "gate_heads._gate_heads_kernel", "mamba2._gated_norm_kernel"),
            *("delta_chunk.delta_chunk_kernel", "delta_norm.delta_norm_kernel"),
            *("mamba_step.mamba_step_kernel", "mamba_chunk.mamba_chunk_kernel"),
            *("mamba_segments.mamba_segment_kernel", "mamba_segments.mamba_pass_kernel"),
        ),
    ),
    "embeddings in layers": (
        walk_layer_embeddings,
        ("layer_embeddings._add_table_kernel", "layer_embeddings._gate_kernel"),
    ),
}
"""By name: how rows far apart are compared with rows close together, and the kernels that do."""
IN_GLUON = {
    "ring": ("gemm.hopper.gemm_ring", "_gemm_ring_kernel"),
    "few rows, ring": ("gemm.hopper.gemm_ring_small_m", "_gemm_ring_small_m_kernel"),
    "one row, integers": ("gemm.hopper.gemv_integer", "_gemv_integer_kernel"),
}
"""Module and kernel of the walks that need a Hopper GPU, or run on threads."""
OTHER_TESTS = {
    "decode._attention_kernel",
    "prefill._attention_kernel",
    "prefill._merge_kernel",
    "prefill_hopper._prefill_kernel",
    "layers._norm_kernel",
    "join_results._join_kernel",
    "layers._activation_kernel",
    "fp8_rows._quantize_rows_kernel",
    "quantize_query._quantize_kernel",
    "sum_rows._sum_rows_kernel",
    *("share_rows._share_rows_kernel", "merge_heads._merge_heads_kernel"),
    "dequantize._dequantize_kernel",
    *(f"encoder_rows.{name}" for name in ("_layer_norm_kernel", "_embed_kernel", "_activate_kernel", "_mean_kernel")),
    *(
        "delta_step.delta_step_kernel",
        "delta_step.delta_decode_kernel",
        "delta_scan.delta_scan_kernel",
        "causal_conv._history_kernel",
    ),
}
WITHOUT_ROWS = {
    "decode_plan._plan_kernel",
    "prefill_plan._plan_kernel",
    "split_batch._split_kernel",
    "route._list_kernel",
    "list_experts._chosen_kernel",
    "count_pairs._count_kernel",
    *("pinned_words._copy_kernel", "pinned_words._send_kernel"),
}
"""Kernels whose tensors have one dimension, or rows of a few words that a step's tiles number."""


def test_every_kernel_is_here() -> None:
    walked = {kernel for _, kernels in WALKS.values() for kernel in kernels}
    assert walked | OTHER_TESTS | WITHOUT_ROWS == kernel_entries()


@pytest.mark.parametrize("name", WALKS)
def test_rows_far_apart(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    walk, _ = WALKS[name]
    if name in IN_GLUON:
        on_threads(*IN_GLUON[name], device, monkeypatch)
    places = Places()
    torch.manual_seed(1)
    expected = walk(places, device)
    # A GPU has memory for one tensor at a time.
    turns = [range(places.count)] if device.type == "cpu" else [[index] for index in range(places.count)]
    for turn in turns:
        torch.manual_seed(1)
        for close, far in zip(expected, walk(Places(turn), device), strict=True):
            assert close.any() and torch.equal(close, far)


def on_threads(module: str, kernel: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a Gluon kernel run on threads where there is no Hopper GPU."""
    found = pytest.importorskip(f"phonograph.kernels.triton.{module}")
    if device.type == "cpu":
        monkeypatch.setattr(found, kernel, gluon_on_threads.launcher(found, kernel))
    elif not attention_prefill.gluon_usable():
        pytest.skip("needs a Hopper GPU")


def test_rows_of_one_large_tensor(device: torch.device) -> None:
    """Kernels whose rows follow one another: the last row of a step, and rows of a table of embeddings."""
    torch.manual_seed(1)
    rows, weight = randn(2, WIDTH, device=device), randn(WIDTH, device=device)
    expected = torch.zeros_like(rows)
    layers.rms_norm(rows, weight, EPS, expected)
    table, out = (far_tensor(TOKENS, WIDTH, dtype=rows.dtype, device=device) for _ in range(2))
    table[[0, -1]] = rows
    with last_programs(2):
        layers.rms_norm(table, weight, EPS, out)
    assert torch.equal(out[-1], expected[1])

    got, kept = torch.zeros_like(rows), torch.zeros_like(rows)
    picked = torch.tensor([0, TOKENS - 1], device=device)
    layers.gather_and_norm(table, picked, weight, EPS, got)
    assert torch.equal(got, expected)
    layers.embed_and_norm(picked.int(), table, weight, EPS, kept, got.zero_())
    assert torch.equal(got, expected) and torch.equal(kept, rows)

    with last_programs(2):
        layers.silu_and_mul(table, out[:, : WIDTH // 2])
    layers.silu_and_mul(rows, expected[:, : WIDTH // 2])
    assert torch.equal(out[-1, : WIDTH // 2], expected[1, : WIDTH // 2])

    # A row that is added to itself.
    with last_programs(2):
        layers.add_and_norm(table, table, weight, EPS, out)
    layers.add_and_norm(rows, kept, weight, EPS, expected)
    assert torch.equal(out[-1], expected[1]) and torch.equal(table[-1], kept[1])

    norms = weight, weight, weight
    with last_programs(2):
        join_results(table, table, out, norms, EPS, norm=(weight, table))
    join_results(kept, kept, expected, norms, EPS, norm=(weight, kept))
    assert torch.equal(out[-1], expected[1]) and torch.equal(table[-1], kept[1])


def test_rows_in_fp8_of_one_large_tensor(device: torch.device) -> None:
    torch.manual_seed(1)
    rows = randn(2, WIDTH, device=device)
    expected = torch.zeros(2, WIDTH, dtype=torch.float8_e4m3fn, device=device)
    expected_scales, scales = torch.zeros(2, 1, device=device), torch.zeros(TOKENS, 1, device=device)
    quantize_rows(rows, Fp8Rows(expected, expected_scales))
    table = far_tensor(TOKENS, WIDTH, dtype=rows.dtype, device=device)
    out = far_tensor(TOKENS, WIDTH, dtype=torch.float8_e4m3fn, device=device)
    table[-2:] = rows
    with last_programs(2):
        quantize_rows(table, Fp8Rows(out, scales))
    assert expected.float().any() and torch.equal(out[-2:].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales[-2:], expected_scales)


def test_queries_of_one_large_step(device: torch.device) -> None:
    """Queries in FP8, and the zeros of rows that attention leaves alone."""
    heads, size = 8, WIDTH // 8
    torch.manual_seed(1)
    fused = far_tensor(TOKENS, heads + 2, size, dtype=torch.float16, device=device)
    fused[-1] = randn(heads + 2, size, device=device)
    out = far_tensor(TOKENS, heads, size, dtype=torch.float8_e5m2, device=device)
    with last_programs(2):
        quantize_queries(fused[:, :heads], None, out)
    expected = torch.zeros(1, heads, size, dtype=torch.float8_e5m2, device=device)
    quantize_queries(fused[-1:, :heads], None, expected)
    assert expected.float().any() and torch.equal(out[-1:].view(torch.uint8), expected.view(torch.uint8))

    clear = far_tensor(TOKENS, WIDTH, dtype=torch.float16, device=device)
    clear[-1] = 1.0
    with last_programs(2):
        rope_kv.rope_and_write_kv(
            fused.flatten(1),
            torch.zeros(TOKENS, dtype=torch.int64, device=device),
            torch.randn(1, size).to(device),
            torch.zeros(2, 1, 16, 1, size, dtype=torch.float16, device=device),
            torch.full((TOKENS,), -1, dtype=torch.int64, device=device),
            num_query_heads=heads,
            num_kv_heads=1,
            qk_norm=None,
            eps=EPS,
            k_scale=None,
            v_scale=None,
            clear_TF=clear,
        )
    assert not clear[-1].any()


def test_outputs_of_one_large_matrix(device: torch.device) -> None:
    """The last outputs of a matrix in FP8, whose bytes and numbers both lie beyond the border."""
    torch.manual_seed(1)
    rows = randn(2, WIDTH, device=device).to(torch.float8_e4m3fn)
    packed = far_tensor(TOKENS, WIDTH, dtype=torch.float8_e4m3fn, device=device)
    packed[-2:].view(torch.uint8).copy_(rows.view(torch.uint8))
    scales = torch.full((TOKENS, 1), 0.5, dtype=torch.float16, device=device)
    out = far_tensor(TOKENS, WIDTH, dtype=torch.float16, device=device)
    with last_programs(1):
        dequantize_into(Grouped(packed, scales, None, 8, WIDTH), out)
    assert torch.equal(out[-2:], rows.to(torch.float16) * 0.5)


FEATURES = {"window": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "sinks": None, "k_scale": None, "v_scale": None}


def attend(query_THD: torch.Tensor, keys_2LKD: torch.Tensor, first_position: int, scale: float) -> torch.Tensor:
    """Causal attention in float32 of queries whose first sees `first_position` + 1 keys."""
    group = query_THD.shape[1] // keys_2LKD.shape[2]
    keys_HLD, values_HLD = keys_2LKD.float().repeat_interleave(group, 2).transpose(1, 2)
    logits = torch.einsum("thd,hld->htl", query_THD.float(), keys_HLD) * scale
    key = torch.arange(keys_HLD.shape[1], device=logits.device)
    position = first_position + torch.arange(len(query_THD), device=logits.device)[:, None]
    weights = logits.masked_fill(key > position, -torch.inf).softmax(-1)
    return (weights @ values_HLD).transpose(0, 1)


@pytest.mark.parametrize("far", ["rows", "blocks"])
def test_decodes_at_the_end_of_a_large_step(far: str, device: torch.device) -> None:
    """Sequences whose rows lie beyond the border with rows of no request behind them, or whose blocks lie far apart."""
    heads, kv_heads, size, first = 8, 2, WIDTH // 8, TOKENS - 5 if far == "rows" else 0
    num_tokens = first + 7
    torch.manual_seed(1)
    fused = far_tensor(num_tokens, heads + 2 * kv_heads, size, dtype=torch.float16, device=device)
    out = far_tensor(num_tokens, heads, size, dtype=torch.float16, device=device)
    fused[first:] = randn(num_tokens - first, heads + 2 * kv_heads, size, device=device)
    out[first:] = torch.nan
    cache = randn(2, 3, 16, kv_heads, size, device=device)
    cache = spread(cache, dim=1) if far == "blocks" else cache
    starts = torch.tensor([first, first + 1, first + 2], dtype=torch.int32, device=device)
    lens = torch.tensor([20, 9], dtype=torch.int32, device=device)
    table = torch.tensor([[2, 1], [0, 0]], dtype=torch.int32, device=device)
    plan = make_decode_plan(
        num_query_heads=heads, num_kv_heads=kv_heads, head_size=size, max_num_seqs=2, num_sms=1, device=device
    )
    plan_decode(plan, starts, lens, max_query_len=16, window=(-1, -1))
    query = fused[:, :heads]
    decode_attention(
        plan, query, cache, table, starts, lens, out, None,
        scale=size**-0.5, causal=True, max_query_len=16, **FEATURES
    )  # fmt: skip
    for row, (blocks, length) in enumerate((([2, 1], 20), ([0], 9))):
        keys = cache[:, blocks].flatten(1, 2)[:, :length]
        expected = attend(query[first + row : first + row + 1], keys, length - 1, size**-0.5)
        torch.testing.assert_close(out[first + row : first + row + 1].float(), expected, rtol=5e-3, atol=5e-3)
    assert not out[first + 2 :].any()


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("kernel", ["pointers", "far blocks", "copy engine", "hopper"])
def test_the_end_of_a_long_prompt(
    kernel: str, cut: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of a million tokens with all keys of its last tile in one piece, or in two that are merged.

    The work list is written by hand, as the plan of such a step would take minutes in the interpreter.
    """
    if kernel == "hopper":
        on_threads("attention.prefill_hopper", "_prefill_kernel", device, monkeypatch)
        monkeypatch.setattr(attention_prefill, "gluon_usable", lambda: True)
    elif device.type == "cuda":
        monkeypatch.setattr(attention_prefill, "_HOPPER_TOKENS", 1 << 30)
    heads, size, num_tokens = 16, 128, 264 if kernel == "far blocks" else BORDER // (16 * 128) + 8
    block_size = 16 if kernel in ("pointers", "far blocks") else 64
    torch.manual_seed(1)
    fused = far_tensor(num_tokens, heads + 2, size, dtype=torch.float16, device=device)
    out = far_tensor(num_tokens, heads, size, dtype=torch.float16, device=device)
    lse = torch.empty(heads, num_tokens, device=device)
    tile = num_tokens * heads // PREFILL_ROWS - 1
    tokens = slice(num_tokens - PREFILL_ROWS // heads, num_tokens)
    fused[tokens] = randn(8, heads + 2, size, device=device)
    out[tokens] = torch.nan
    start = (num_tokens - 1) // 128 * 128 - 128
    keys = randn(2, num_tokens - start, 1, size, device=device)
    num_blocks = -(-keys.shape[1] // block_size)
    cache = torch.zeros(2, num_blocks * block_size, 1, size, dtype=torch.float16, device=device)
    cache[:, : keys.shape[1]] = keys
    cache = cache.unflatten(1, (num_blocks, block_size))
    table = torch.zeros(1, start // block_size + num_blocks, dtype=torch.int32, device=device)
    table[0, start // block_size :] = torch.arange(num_blocks, dtype=torch.int32, device=device)
    plan = make_prefill_plan(
        num_query_heads=heads, num_kv_heads=1, head_size=size, max_num_seqs=1, max_num_tokens=512, num_sms=1,
        device=device,
    )  # fmt: skip
    middle = start + 128
    pieces = [(start, middle, 0), (middle, num_tokens, 1)] if cut else [(start, num_tokens, -1)]
    for index, (first, last, slot) in enumerate(pieces):
        entry = [0, tile, first, last, slot, 0, num_tokens, num_tokens]
        plan.entries[index] = torch.tensor(entry, dtype=torch.int32, device=device)
    plan.header[0], plan.header[1] = len(pieces), int(cut)
    plan.merges[0, :4] = torch.tensor([0, tile, 0, 2], dtype=torch.int32, device=device)
    prefill_attention(
        plan,
        fused[:, :heads],
        spread(cache, dim=1) if kernel == "far blocks" else cache,
        table,
        out,
        lse,
        scale=size**-0.5,
        causal=True,
        **FEATURES,
    )
    merge_prefill(plan, torch.tensor([0, num_tokens], dtype=torch.int32, device=device), out, lse, None)
    expected = attend(fused[tokens, :heads], keys, keys.shape[1] - 8, size**-0.5)
    torch.testing.assert_close(out[tokens].float(), expected, rtol=5e-3, atol=5e-3)
