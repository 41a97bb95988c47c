"""Cost of the tape: a replay against the same step run eagerly at the same padded shape, on the same batch.

    python benchmarks/tape_overhead.py
    python benchmarks/tape_overhead.py --output benchmarks/results/tape_overhead.json
    python benchmarks/tape_overhead.py --model smollm2-135m --load-format dummy --decodes 1 2 4 8 --mixed 16 64

Replay and eager take turns, so that both meet the same machine. Batches are random ones of the graph's shape.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bench.result_files import output_file, write_result
from phonograph import LLM
from phonograph.bench.records.record import provenance
from phonograph.graphs.modes import GraphKey, GraphSet

DECODES = [1, 8]
MIXED = [16, 128]


def measure(llm: LLM, key: GraphKey, *, num_batches: int, num_turns: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Medians in microseconds over turns of both on each batch; ratio: median of replay / eager, turn by turn."""
    runner, subject = llm.engine.core.runner, llm.engine.make_subject()
    graph = runner._graphs[key]  # the replay itself, without the checks of the buffers around it
    rng = np.random.default_rng(0)
    replays: list[float] = []
    eagers: list[float] = []
    for _ in range(num_batches):
        subject.prepare(key, rng)
        subject.eager(key)
        subject.replay(key)  # leaves the batch's metadata in place for both
        with torch.inference_mode():
            for turn in range(num_turns + 1):
                start = clock()
                graph.replay()
                middle = clock()
                runner.run_shape(key)
                end = clock()
                if turn:  # the first one warms up
                    replays.append(middle - start)
                    eagers.append(end - middle)
    return {
        "graph": str(key),
        "replay_us": round(statistics.median(replays) * 1e6, 1),
        "eager_us": round(statistics.median(eagers) * 1e6, 1),
        "ratio": round(statistics.median(a / b for a, b in zip(replays, eagers, strict=True)), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--decodes", type=int, nargs="+", default=DECODES, help="tokens of the decode graphs")
    parser.add_argument("--mixed", type=int, nargs="+", default=MIXED, help="tokens of the mixed graphs")
    parser.add_argument("--num-batches", type=int, default=10)
    parser.add_argument("--num-turns", type=int, default=20)
    parser.add_argument(
        "--cpu-time", action="store_true", help="CPU time instead of elapsed time, for a machine that is busy"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=output_file)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    origin = provenance()
    llm = LLM(
        model=arguments.model,
        load_format=arguments.load_format,
        dtype="float32",
        max_num_seqs=max(arguments.decodes),
        max_model_len=512,
        cudagraph_mode="FULL",
        cudagraph_capture_sizes=sorted({*arguments.decodes, *arguments.mixed}),
    )
    wanted = [(GraphSet.DECODE, size) for size in arguments.decodes]
    wanted += [(GraphSet.MIXED, size) for size in arguments.mixed]
    keys = {(key.graphs, key.num_tokens): key for key in llm.plan.captures.largest_first()}
    results = [
        measure(llm, keys[one], num_batches=arguments.num_batches, num_turns=arguments.num_turns, clock=clock)
        for one in wanted
    ]
    for result in results:
        print(
            f"{result['graph']:30s} replay {result['replay_us']:8.1f} us   eager {result['eager_us']:8.1f} us   "
            f"ratio {result['ratio']:.3f}"
        )
    if arguments.output is not None:
        write_result(arguments.output, origin, {"model": arguments.model, "results": results})


if __name__ == "__main__":
    main()
