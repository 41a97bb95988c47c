"""Compiles all kernels outside `gemm` for Hopper, up to Triton's first stage, and prints their names as JSON.

The interpreter accepts names whose type changes in a branch or a loop, and the compiler does not. A program of its own,
since the interpreter is chosen when Triton is imported.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import decode_problem
import prefill_problem
import torch
import triton
from far_gpu import FarGpu
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction

import phonograph.kernels.triton
from bench.kernel_parts import KERNEL_PARTS
from phonograph.kernels.fp8_activations import Fp8Rows
from phonograph.kernels.routing import Routing
from phonograph.kernels.torch.grouped import Grouped
from phonograph.kernels.torch.state.gated_delta import DeltaSizes
from phonograph.kernels.torch.state.mamba2 import MambaSizes
from phonograph.kernels.triton.attention import page_indices, prefill, quantize_query, split_batch
from phonograph.kernels.triton.attention import rope_and_kv_write as rope
from phonograph.kernels.triton.elementwise import encoder_rows, fp8_rows, layer_embeddings, layers
from phonograph.kernels.triton.elementwise.gate_heads import gate_heads
from phonograph.kernels.triton.experts.count_pairs import count_pairs
from phonograph.kernels.triton.experts.expert_lists import ExpertLists
from phonograph.kernels.triton.experts.expert_plan import FewRowsTile, expert_config, row_config
from phonograph.kernels.triton.experts.expert_products import down_products, fitted, gate_up_products
from phonograph.kernels.triton.experts.expert_results import add_results
from phonograph.kernels.triton.experts.join_results import join_results
from phonograph.kernels.triton.experts.list_experts import list_experts
from phonograph.kernels.triton.experts.route import route
from phonograph.kernels.triton.experts.route_row import route_row
from phonograph.kernels.triton.experts.row_products import add_down_row, gate_up_row, takes_row
from phonograph.kernels.triton.gemm.product import CLAMPED_SWIGLU, GELU, SILU
from phonograph.kernels.triton.ranks.merge_heads import merge_heads
from phonograph.kernels.triton.ranks.peer_buffers import PARTS, PeerBuffers
from phonograph.kernels.triton.ranks.share_rows import share_rows
from phonograph.kernels.triton.ranks.sum_rows import sum_rows
from phonograph.kernels.triton.sampling import bitmask, sample
from phonograph.kernels.triton.state.causal_conv import short_conv
from phonograph.kernels.triton.state.gated_delta import gated_delta
from phonograph.kernels.triton.state.mamba2 import mamba2
from phonograph.kernels.triton.step import accept_drafts, draft_rows, pinned_words, prepare, prompt_lookup
from phonograph.kernels.triton.step.step_layout import SlotState, StepLayout

CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
ROOMS = ("attention", "sampling", "state", "step", "elementwise", "experts", "ranks")


class Accepted(Exception):
    """Ends a compilation after the first stage."""


def accept(*_: Any) -> None:
    raise Accepted


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=BF16)


def launch_attention() -> None:
    for changes in ({}, {"kv_dtype": FP8, "softcap": 9.0, "window": (64, -1), "alibi": True, "sinks": True}):
        short = decode_problem.Case(batch=((1, 30), (16, 90)), head_size=64, dtype=BF16, num_sms=132, **changes)
        problem = decode_problem.Problem(short, CPU)
        problem.run(problem.plan())
        long = prefill_problem.Case(dtype=BF16, **changes)
        batch, plan = prefill_problem.Batch(long, CPU), prefill_problem.make_plan(long, CPU)
        batch.plan(plan)
        batch.attend(plan)
    prefill._HOPPER_TOKENS, prefill.gluon_usable = 0, lambda: True
    long = prefill_problem.Case(head_size=128, block_size=64, dtype=BF16, window=(100, -1), sinks=True)
    prefill_problem.Batch(long, CPU).attend(prefill_problem.make_plan(long, CPU))
    shared = decode_problem.Case(batch=((1, 700),) * 4, shared=((0, 640),) * 4, head_size=64, dtype=BF16, sinks=True)
    problem = decode_problem.Problem(shared, CPU)
    problem.run(problem.plan())
    split_batch.split_batch(split_batch.SplitBatch.make(8, CPU), ints(9), ints(8), decode_query_len=1)
    page_indices.page_indices(ints(8, 32), ints(8), ints(300), page_size=16)
    quantize_query.quantize_queries(halves(8, 4, 64), torch.zeros(2), halves(8, 4, 64).to(FP8))
    qkv, cache = halves(8, 8 * 64), halves(2, 4, 16, 2, 64).to(FP8)
    scales = {"k_scale": torch.zeros(2), "v_scale": torch.zeros(2)}
    heads = {"num_query_heads": 4, "num_kv_heads": 2, "qk_norm": halves(6, 64), "eps": 1e-6}
    rope.rope_and_write_kv(qkv, longs(8), torch.zeros(32, 64), cache, longs(8), **heads, **scales)
    for width in (33, 32):
        heads["qk_norm"] = torch.zeros(6, 64)
        rope.rope_and_write_kv(qkv, longs(8), torch.zeros(32, width), cache, longs(8), **heads, **scales)
    rope.rope_and_write_kv(qkv, longs(8), None, cache, longs(8), **heads, **scales)
    heads_and_room = halves(8, 16 * 64)
    rope.rope_and_write_kv(
        heads_and_room, longs(8), torch.zeros(32, 32), cache, longs(8), gated=True, **heads, **scales
    )
    gate_heads(halves(8, 4 * 64), heads_and_room, 64)
    values = {"value_norms": True, "keys_are_values": True, "pairs_in_halves": True}
    rope.rope_and_write_kv(qkv, longs(8), torch.zeros(32, 16), cache, longs(8), **heads, **scales, **values)
    layers.norm_queries_and_keys(qkv, torch.zeros(6, 64), 4, 1e-6)
    rope.write_kv(halves(8, 2, 64), halves(8, 2, 64), cache, longs(8), **scales)


def launch_others() -> None:
    scratch = sample.make_sample_scratch(8, 32000, CPU)
    numbers = (torch.zeros(8), ints(8), torch.zeros(8), torch.zeros(8), longs(8))
    sample.sample(halves(8, 32000), ints(8), *numbers, scratch, *(ints(8) for _ in range(4)))
    bitmask.mask_logits(halves(4, 1000), ints(4), ints(4, 32))
    for sizes in ((16,), (16, 16), (16, 32, 16)):
        groups = len(sizes)
        for drafts in (0, 3):
            logits = 8 * (1 + drafts)
            layout = StepLayout(8, 64, 16, num_groups=groups, max_num_logits=logits)
            state = SlotState.make(num_groups=groups, max_num_seqs=8, max_blocks=32, device=CPU, most_drafts=drafts)
            step = ints(layout.num_words), layout, state
            crossed = groups == 3
            prepare.prepare(
                *step, block_sizes=sizes, num_reqs_padded=8, num_tokens_padded=64, input_ids_T=ints(64),
                positions_T=longs(64), slot_mappings_GT=longs(groups, 64), query_start_loc=ints(9), seq_lens_R=ints(8),
                slots_R=ints(8), block_tables_GRN=ints(groups, 8, 32), logits_rows_L=longs(logits),
                encoder_lens=(0, 1500, 0) if crossed else (), encoder_lens_R=ints(8) if crossed else None,
                slot_encoder_lens_R=ints(8) if crossed and drafts else None,
            )  # fmt: skip
    rows = draft_rows.DraftRows.make(max_num_seqs=8, max_num_tokens=64, device=CPU)
    of_passes = {"block_size": 16, "num_reqs_padded": 8, "block_table_RN": ints(8, 32)}
    draft_rows.first_pass(
        *step, rows, num_tokens_padded=64, tokens_L=ints(32), input_ids_T=ints(64), seq_lens_R=ints(8), **of_passes
    )
    draft_rows.first_pass(
        *step, rows, num_tokens_padded=64, tokens_L=ints(32), input_ids_T=ints(64), seq_lens_R=ints(8),
        history_RM=ints(8, 100), **of_passes,
    )  # fmt: skip
    for shifts in (False, True):
        draft_rows.next_pass(state, rows, index=1, shifts=shifts, **of_passes)
        draft_rows.listed_pass(
            *step, rows, block_size=16, listed_G=ints(4), seq_lens_R=ints(8), block_table_RN=ints(8, 32),
            listed_table_GN=ints(4, 32), shifts=shifts,
        )  # fmt: skip
    behind = {"num_reqs_padded": 8, "tokens_L": ints(32), "history_RM": ints(8, 100)}
    for shares in (None, torch.zeros(3)):
        accept_drafts.accept(*step, input_ids_T=ints(64), counts_R=ints(8), synthetic_K=shares, **behind)
    prompt_lookup.propose_ngrams(*step, shortest=2, longest=5, **behind)
    prepare.apply_appends(ints(3, 5), ints(8, 32))
    pinned_words.copy_words(ints(64), ints(64), 64)
    pinned_words.send_words(ints(64), ints(64), ints(3, 68), more=ints(3))
    rounded = Fp8Rows(halves(8, 512).to(FP8), torch.zeros(8, 1))
    layers.embed_and_norm(ints(8), halves(99, 512), halves(512), 1e-6, halves(8, 512), halves(8, 512))
    table = halves(100, 3 * 40)
    layer_embeddings.add_table(halves(8, 3 * 40), ints(8), table, torch.zeros(40), 1e-6, (4.0, 0.25, 0.5))
    for rows in (None, longs(8)):
        layer_embeddings.gate_embedding(halves(8, 40), halves(9, 3 * 40), 2, rows)
    layers.add_and_norm(halves(8, 512), halves(8, 512), halves(512), 1e-6, rounded)
    layers.add_and_norm(halves(8, 512), halves(8, 512), torch.zeros(512), 1e-6, rounded)
    fused = {"x_weight_E": torch.zeros(512), "factor": 0.5}
    layers.add_and_norm(halves(8, 512), halves(8, 512), torch.zeros(512), 1e-6, rounded, **fused)
    layers.add_and_norm(halves(8, 512), halves(8, 512), None, 1e-6, None, **fused)
    layers.add_and_norm(halves(8, 512), halves(8, 512), None, 1e-6, None, **fused, scalar=halves(1))
    layers.silu_and_mul(halves(8, 1024), rounded)
    layers.gelu_tanh_and_mul(halves(8, 1024), rounded)
    layers.gather_rows(halves(8, 512), longs(4), halves(4, 512))
    layers.gather_part(halves(8, 512), ints(4), 8, halves(4, 512))
    layers.gather_columns(halves(8, 512), longs(512), halves(8, 512))
    fp8_rows.quantize_rows(halves(8, 512), rounded)
    rows, weight = halves(8, 512), halves(2, 512)
    encoder_rows.layer_norm(rows, weight, 1e-6, rows)
    encoder_rows.layer_norm(rows, weight, 1e-6, halves(4, 512), rows_N=longs(4), added_TE=rows, kept_TE=rows)
    encoder_rows.embed(ints(8), longs(8), halves(99, 512), None, None, None, 1e-6, rows)
    encoder_rows.embed(ints(8), longs(8), halves(99, 512), halves(64, 512), weight, weight, 1e-6, rows)
    for activation in ("silu", "gelu_tanh", "gelu", "relu", "relu2"):
        encoder_rows.activate(halves(8, 1024), rows, activation)
    encoder_rows.mean_rows(rows, ints(3), torch.zeros(2, 512))


def launch_sums() -> None:
    for num_ranks in (2, 4):
        buffers = PeerBuffers(halves(PARTS, num_ranks, 8, 512), longs(num_ranks), ints(8), ints(1), 1)
        rows, weight, rounded = halves(8, 512), halves(512), Fp8Rows(halves(8, 512).to(FP8), torch.zeros(8, 1))
        sum_rows(rows, buffers)
        sum_rows(rows, buffers, halves(8, 512), factor=0.5)
        for normed in (rows, rounded):
            sum_rows(rows, buffers, halves(8, 512), weight_E=weight, eps=1e-6, normed=normed)
        share_rows(rows, buffers, halves(8, num_ranks, 512))
        lses = buffers._replace(own=torch.zeros(PARTS, num_ranks, 8, 4))
        found, lse, out = (
            halves(8, 4 * num_ranks, 128),
            torch.zeros(4 * num_ranks, 9)[:, :8],
            halves(8, 4, 130)[..., :128],
        )
        for own in (None, (halves(8, 4, 128), torch.zeros(4, 8))):
            merge_heads(found, lse, buffers, lses, out, None if own is None else torch.zeros(4, 8), own)


def launch_experts() -> None:
    routings = (
        Routing(128, 8),
        Routing(24, 4, sigmoid=True, num_groups=4, top_groups=2),
        Routing(256, 8, shared=True),
    )
    for routing, tokens in itertools.product(routings, (1, 200, 700)):
        width, inner, pairs, num_experts = 256, 128, tokens * routing.num_pairs, routing.num_matrices
        words = torch.zeros(ExpertLists.num_words(tokens, routing))
        lists = ExpertLists.over(words, tokens, routing, ExpertLists.counters(tokens, CPU))
        x, real = halves(tokens, width), ints(1)
        config = expert_config(tokens, routing)
        bias, outputs = torch.zeros(num_experts) if routing.sigmoid else None, routing.num_experts + 1
        of_route = {"choice_bias_X": bias, "router_bias_O": halves(outputs), "num_rows": real}
        route(x, halves(outputs, width), routing, lists, block=config.block, **of_route)
        count_pairs(lists.experts_Tk, longs(routing.num_experts), shared=routing.shared)
        if not routing.shared:
            chosen = longs(tokens, routing.top_k), halves(tokens, routing.top_k)
            list_experts(*chosen, routing, lists, block=config.block)
        gate_up, down = halves(num_experts * 2 * inner, width), halves(num_experts * width, inner)
        if tokens == 1:
            tiles, norm, row = row_config(width, inner), (halves(width), 1e-6, halves(1, width)), halves(pairs, inner)
            route_row(x, halves(outputs, width), routing, lists, tiles.route, norm=norm, **of_route)
            gate_up_row(x, gate_up, lists, tiles.gate_up, row, halves(num_experts * 2 * inner), mode=CLAMPED_SWIGLU)
            add_down_row(row, down, lists, tiles.down, x, halves(num_experts * width), factor=0.5)
        factors, scale = routing._replace(logit_factor=0.1), torch.zeros(num_experts)
        route(x, halves(outputs - 1, width), factors, lists, block=config.block, expert_scale_X=scale)
        for mode in (SILU, GELU, CLAMPED_SWIGLU):
            biases = halves(num_experts * 2 * inner)
            gate_up_products(x, gate_up, lists, routing, config, halves(pairs, inner), biases, mode=mode)
        biases = halves(num_experts * width)
        down_products(halves(pairs, inner), down, lists, routing, config, halves(pairs, width), biases)
        grouped = Grouped(ints(num_experts * width, inner // 8), halves(num_experts * width, 1), None, 4, inner)
        for weight in (grouped, grouped._replace(packed_OW=halves(num_experts * width, inner).to(FP8), bits=8)):
            down_products(halves(pairs, inner), weight, lists, routing, config, halves(pairs, width))
        fp4 = Grouped(
            ints(num_experts * width, inner // 8), ints(num_experts * width, 1), None, 4, 32, interleaved=True
        )
        whole = fitted(config, fp4, fp4)
        down_products(halves(pairs, inner), fp4, lists, routing, whole, halves(pairs, width))
        few = config._replace(down=FewRowsTile(16, 4, 1, 4))
        down_products(halves(pairs, inner), fp4, lists, routing, few, halves(pairs, width))
        if tokens == 1 and takes_row(fp4, pairs):
            words, exponents = ints(num_experts * 2 * inner, width // 8), ints(num_experts * 2 * inner, 2)
            gates = fp4._replace(packed_OW=words, scales_OG=exponents)
            tiles, row = row_config(width, inner, fp4=True), halves(pairs, inner)
            gate_up_row(x, gates, lists, tiles.gate_up, row, halves(num_experts * 2 * inner), mode=CLAMPED_SWIGLU)
            add_down_row(row, fp4, lists, tiles.down, x, halves(num_experts * width), factor=0.5)
        shared = x, lists.shared_T
        for weights in (halves(width), torch.zeros(width)):
            norm = weights, 1e-6, x
            add_results(halves(pairs, width), x, routing.num_pairs, num_rows=real, shared=shared, norm=norm)
            norms, scalar = (weights, weights, weights), halves(1)
            results = halves(tokens * routing.num_pairs, width)
            join_results(results, x, x, norms, 1e-6, scalar=scalar, num_rows=real, norm=(weights, x))


def launch_states() -> None:
    for net in (DeltaSizes(16, 32, 128, 128, by_head=False), DeltaSizes(1, 3, 10, 20, by_head=True)):
        heads, values = net.value_heads, net.value_heads * net.value_size
        weights = torch.zeros(net.channels, 4), torch.zeros(heads), torch.zeros(heads), torch.zeros(net.value_size)
        rows = ints(9), ints(8), ints(8), ints(3, 8)
        pool = halves(9, 3, net.channels), torch.zeros(9, heads, net.key_size, net.value_size)
        inputs = halves(64, net.channels + values + 2 * heads).split([net.channels + values, 2 * heads], 1)
        scratch = halves(64, sum(net.scratch_widths))
        for single in (False, True):
            gated_delta(
                *inputs, *weights, *rows, *pool, halves(64, values), net, 1e-6, scratch, single=single, early=True
            )
    for sizes in (MambaSizes(128, 80, 8, 128, norm_groups=8), MambaSizes(3, 20, 1, 10, norm_groups=0)):
        heads, channels = (torch.zeros(sizes.heads) for _ in range(3)), sizes.channels
        norm = torch.zeros(sizes.inner) if sizes.norm_groups else None
        weights = torch.zeros(channels, 4), torch.zeros(channels), *heads, norm
        pool = halves(9, 3, channels), torch.zeros(9, sizes.heads, sizes.head_size, sizes.key_size)
        widths = sizes.inner + channels + sizes.heads, sizes.inner, sum(sizes.scratch_widths)
        projected, out, scratch = (halves(600, width) for width in widths)
        for single in (False, True):
            mamba2(projected, *weights, *rows, *pool, out, sizes, 1e-6, scratch, single=single)
    for bias, single in ((None, False), (torch.zeros(2048), True)):
        args = halves(64, 6144), torch.zeros(2048, 3), bias, *rows, halves(9, 2, 2048), halves(64, 2048)
        short_conv(*args, single=single)


def kernels_of_rooms() -> list[str]:
    """Return the names of all kernels in ROOMS."""
    found: set[str] = set()
    for room in ROOMS:
        folder = phonograph.kernels.triton.__path__[0] + f"/{room}"
        for info in pkgutil.iter_modules([folder], f"phonograph.kernels.triton.{room}."):
            module = importlib.import_module(info.name)
            found |= {name for name, value in vars(module).items() if isinstance(value, JITFunction)}
    return sorted(found & set(KERNEL_PARTS))


def main() -> None:
    triton.runtime.driver.set_active(FarGpu(90))
    CUDABackend.make_ttgir = CUDABackend.gluon_to_ttgir = accept
    run = JITFunction.run
    accepted: set[str] = set()

    def compile_first_stage(self: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        try:
            run(self, *args, grid=grid, warmup=True, **keywords)
        except Accepted:
            accepted.add(self.__name__)

    JITFunction.run = compile_first_stage
    launch_attention()
    launch_others()
    launch_experts()
    launch_states()
    launch_sums()
    print(json.dumps({"accepted": sorted(accepted), "all": kernels_of_rooms()}))


if __name__ == "__main__":
    main()
