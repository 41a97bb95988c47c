"""Random block tables through the plan of shared prefixes, and some of them through attention, against definitions.

    python tests/kernels/random_tables.py --tables 10000 --attended 500 --output tables.json

A table has sequences that copy leading blocks of earlier ones, with blocks that are permuted, equal in the middle only,
or written by a later sequence, and empty slots between them. Half have a window, with blocks that were freed before it.
Each plan is compared with runs that plain Python finds.
Attention over other random batches (runs of one to all sequences, shared lengths of 0, a page, a page more or less, and
all but one token; two levels, drafts, windows, FP8, several shapes of heads) is compared with its definition in
float64. On a CPU the kernels run in Triton's interpreter. The exit code is 1 at the first difference, whose seed is
printed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from decode_problem import Case, Problem
from prefix_tables import check_plan, draw_tables, shares
from quick_interpreter import make_quick
from test_shared_prefixes import plan_for

from bench.result_files import output_file

# Query heads, KV heads, head size and tokens of a block.
_HEADS = ((28, 4, 128, 64), (40, 8, 64, 16), (8, 1, 256, 32), (8, 8, 96, 48), (32, 8, 128, 64))
_SMALL_HEADS = ((7, 1, 32, 16), (4, 4, 32, 32), (8, 2, 64, 16), (3, 1, 96, 48))
_PLANS = ((8, 4, 60), (2, 7, 60), (8, 1, 60), (4, 4, 8))


def draw_case(rng: random.Random, *, small: bool) -> Case:
    """Draw a batch for attention. Small ones are for the interpreter, in which BF16 products are wrong."""
    heads, kv_heads, head_size, size = rng.choice(_SMALL_HEADS if small else _HEADS)
    longest = 900 if small else 6000
    drafts = rng.random() < 0.3
    count = rng.randint(2, 10 if small else 60)
    # All share one length, or two groups share more of theirs, or each sequence draws.
    form = rng.choice(["all", "levels", "drawn"])
    batch: list[tuple[int, int]] = []
    shared: list[tuple[int, int]] = []
    for index in range(count):
        query_len = rng.randint(1, 16) if drafts and rng.random() < 0.5 else 1
        if rng.random() < 0.05:
            batch.append((0, 0))
            shared.append((0, 0))
            continue
        source = index - 1 if rng.random() < 0.7 else rng.randrange(index) if index else 0
        context = max(batch[source][1] - batch[source][0], 0) if index else 0
        most = context // size * size
        wanted = rng.choice([0, size, 256 - size, 256, 256 + size, most, most, most // 2, rng.randint(0, most)])
        if form != "drawn" and index:
            source = count // 2 if form == "levels" and index > count // 2 else 0
            context = max(batch[source][1] - batch[source][0], 0)
            most = context // size * size
            wanted = most // 2 if form == "levels" and index == count // 2 else most
        keys = max(0, min(wanted, most)) // size * size
        own = rng.choice([0, 1, size - 1, rng.randint(0, longest // 4)])
        batch.append((query_len, (keys or (longest if index == 0 else rng.randint(0, longest))) + own + query_len))
        shared.append((source, keys))
    most = max(keys for _, keys in batch)
    left = rng.choice(
        [-1, rng.choice([256, most // 2, most - 300, most - 2 * size, most, rng.randint(256, 256 + most)])]
    )
    return Case(
        batch=tuple(batch),
        window=(left, -1),
        shared=tuple(shared),
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        block_size=size,
        dtype=rng.choice([torch.float32, torch.float16] if small else [torch.float16, torch.bfloat16]),
        kv_dtype=rng.choice([None, None, torch.float8_e4m3fn]),
        hnd=rng.random() < 0.3,
        max_query_len=1 if not drafts and rng.random() < 0.5 else 16,
        softcap=rng.choice([0.0, 0.0, 2.5]),
        sinks=rng.random() < 0.2,
        num_sms=rng.choice([1, 1, 3] if small else [2, 16, 64]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=int, default=10000, help="plans that are compared")
    parser.add_argument("--attended", type=int, default=500, help="batches that are attended")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end each part after this time")
    parser.add_argument("--output", type=output_file, help="JSON file")
    arguments = parser.parse_args()
    make_quick()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu, interpreted",
        "plans": _plans(arguments, device),
        "attention": _attention(arguments, device),
    }
    print(json.dumps(results, indent=1))
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(results[part]["failed"] is not None for part in ("plans", "attention")))


def _plans(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    plans = [plan_for(device, kv_heads=kv_heads, group=group, tokens=tokens) for kv_heads, group, tokens in _PLANS]
    done = sharing = 0
    began = time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.tables):
        if time.monotonic() - began > arguments.seconds:
            break
        rng = random.Random(f"plan {seed}")
        plan, longest, slots = rng.choice(plans), rng.choice([1, 16, 16]), rng.choice([0, 2])
        try:
            sharing += check_plan(draw_tables(rng), plan, device, max_query_len=longest, slots=slots)
        except AssertionError as error:
            print(f"plan {seed}: {error}", file=sys.stderr)
            return {"tables": done, "share": sharing, "failed": seed}
        done += 1
    return {"tables": done, "share": sharing, "failed": None, "seconds": round(time.monotonic() - began, 1)}


def _attention(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    done = sharing = windowed = 0
    began = time.monotonic()
    for seed in range(arguments.first, arguments.first + arguments.attended):
        if time.monotonic() - began > arguments.seconds:
            break
        case = draw_case(random.Random(f"attention {seed}"), small=device.type == "cpu")
        problem = Problem(case, device)
        plan = problem.plan()
        try:
            problem.check(plan)
        except AssertionError as error:
            print(f"attention {seed}, {case}: {error}", file=sys.stderr)
            return {"batches": done, "share": sharing, "failed": seed}
        done, sharing = done + 1, sharing + shares(plan)
        windowed += shares(plan) and case.window[0] >= 0
    seconds = round(time.monotonic() - began, 1)
    return {"batches": done, "share": sharing, "share in windows": windowed, "failed": None, "seconds": seconds}


if __name__ == "__main__":
    sys.exit(main())
