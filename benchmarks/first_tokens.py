"""Times of first tokens with speculation beside those without, in one process, one request at a time.

    python benchmarks/first_tokens.py MODEL --speculative-config '{"method": "eagle3", ...}' --output FILE

MODEL needs a config.json only: weights are random (--load-format auto reads them). Prompts are random tokens, a new one
each time. Both engines answer each length in turn, so that a change of the machine's speed meets both. With speculation
the host's work before the step, the step and what travels to the host are longer; the table has the medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.result_files import output_file, write_result
from phonograph import LLM, SamplingParams
from phonograph.bench.records.record import provenance

LENGTHS = (16, 64, 128, 260, 500, 1000, 2000, 4000, 8000)
RUNS, TOKENS = 9, 6


def first_token_ms(llm: LLM, rng: random.Random, length: int) -> float:
    """Return the time to the first token of a random prompt, and run the request to its end."""
    prompt = [rng.randrange(5, llm.plan.model.vocab_size - 5) for _ in range(length)]
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    output = llm.session.add(prompt, params)
    while not output.outputs[0].token_ids:
        llm.session.step()
    taken = time.perf_counter() - began
    while llm.session.has_unfinished:
        llm.session.step()
    return taken * 1e3


def measure(engines: dict[str, LLM], length: int) -> dict[str, Any]:
    """Return the medians of both engines for one length, and the ratio of the second to the first."""
    rng = random.Random(length)
    times: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(RUNS + 1):
        for name, llm in engines.items():
            taken = first_token_ms(llm, rng, length)
            if number:
                times[name].append(taken)
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    without, drafting = medians.values()
    return {"tokens": length, "without_ms": without, "with_ms": drafting, "ratio": drafting / without}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="name or folder of the model")
    parser.add_argument("--speculative-config", type=json.loads, required=True, help="as of phonograph serve")
    parser.add_argument("--load-format", default="dummy", choices=("dummy", "auto"))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--num-kv-blocks", type=int, default=2000, help="of each engine")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=output_file, required=True, help="file of the result")
    arguments = parser.parse_args()
    settings = {"load_format": arguments.load_format, "device": arguments.device, "seed": 0}
    settings |= {"max_model_len": max(arguments.lengths) + TOKENS + 1, "num_kv_blocks": arguments.num_kv_blocks}
    engines = {
        name: LLM(arguments.model, **settings, speculative_config=config)
        for name, config in (("without", None), ("with", arguments.speculative_config))
    }
    table = Table("tokens", "without, ms", "with, ms", "ratio")
    rows = [measure(engines, length) for length in arguments.lengths]
    for row in rows:
        table.add_row(str(row["tokens"]), f"{row['without_ms']:.3f}", f"{row['with_ms']:.3f}", f"{row['ratio']:.3f}")
    write_result(arguments.output, provenance(), {"rows": rows})
    Console().print(table)


if __name__ == "__main__":
    main()
