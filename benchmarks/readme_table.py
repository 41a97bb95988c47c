"""README's table of speed beside vLLM, made from the records in `benchmarks/results`.

    python benchmarks/readme_table.py            # print the table
    python benchmarks/readme_table.py --write    # write it between the markers in README.md

A row names one record, and both sides of its ratio are read from that record: figures of different runs come from
different hosts and GPUs, which differ by more than the ratios do. A test compares README.md with this table.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "README.md"
BEGIN = "<!-- table of benchmarks/readme_table.py -->"
END = "<!-- end of the table -->"
DEFAULTS = "FLASH_ATTN/FULL_AND_PIECEWISE"
"""vLLM on FlashAttention 3 with the graph mode that it chooses itself."""
HIGHER_IS_BETTER = ("throughput", "output_throughput")
HEADINGS = "", "Phonograph", "vLLM", "times as good", "record"


class RecordError(Exception):
    """A record that cannot give a ratio."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table.

    record: file in `benchmarks/results`, without its suffix
    cases:  (suite, case) of `vs_vllm.py`, or (figure, "WORKLOAD CASE") of `serve_vs_vllm.py`
    peer:   vLLM's backend, graph mode and capture limit; `serve_vs_vllm.py` has one peer
    """

    label: str
    record: str
    cases: tuple[tuple[str, str], ...]
    peer: str = DEFAULTS


def _cases(suite: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((suite, name) for name in names)


LLAMA, MIXED = "vs_vllm_llama_alone_2", "vs_vllm_llama_mixed"
ROWS = (
    Row("ms between tokens: 1, 8, 32 of 1K", LLAMA, _cases("decode", "1x1024", "8x1024", "32x1024")),
    Row("128 of 1K, 256 of 512", LLAMA, _cases("decode", "128x1024", "256x512")),
    Row("1, 8 of 32K", LLAMA, _cases("decode", "1x32768", "8x32768")),
    Row("ms, prompt of 500, 2000, 8000", LLAMA, _cases("latency", "500", "2000", "8000")),
    Row("tokens/s offline", LLAMA, _cases("throughput", "256")),
    Row("tokens/s offline, Qwen3-0.6B", "vs_vllm_qwen_alone", _cases("throughput", "256")),
    Row("tokens/s of the server", "serve_vs_vllm", _cases("output_throughput", "sweep 128")),
    Row("its median TTFT, ms", "serve_vs_vllm", _cases("median_ttft_ms", "sweep 128")),
    Row("s, decode at 32K beside prompts", MIXED, _cases("mixed", "32768")),
    Row("the same, vLLM captured to 16", MIXED, _cases("mixed", "32768"), "FLASH_ATTN/FULL/16"),
    Row("s to ready: first, second start", "vs_vllm_llama", _cases("startup", "first", "second")),
)


def figures(record: dict[str, Any], case: tuple[str, str], peer: str) -> tuple[float, float]:
    """Ours and the peer's of one case, both of this record.

    Raises:
        RecordError: the record lacks either side, or its sides ran on different GPUs.
    """
    if record.get("same_gpu") is not True:
        raise RecordError(f"same_gpu={record.get('same_gpu')!r}: both sides of a ratio must have run on one GPU")
    for row in record["comparison"]:
        if (row.get("suite"), row.get("case")) == case and row.get("system") in ("ours", None) and peer in row["peers"]:
            return row["ours"], row["peers"][peer]
        if (row.get("figure"), f"{row.get('workload')} {row.get('case')}") == case:
            return row["ours"], row["other"]
    raise RecordError(f"no case {case} with both ours and {peer}")


def ratio(suite: str, ours: float, peers: float) -> float:
    """Returns how many times as good ours is: above 1 is better than the peer."""
    return ours / peers if suite in HIGHER_IS_BETTER else peers / ours


def line(row: Row, results: Path = RESULTS) -> str:
    """Returns a row as Markdown."""
    name = f"{row.record}.json"
    record = json.loads((results / name).read_text())
    try:
        pairs = [figures(record, case, row.peer) for case in row.cases]
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None
    ratios = [ratio(suite, *pair) for (suite, _), pair in zip(row.cases, pairs, strict=True)]
    ours, peers = (", ".join(map(_shown, side)) for side in zip(*pairs, strict=True))
    return _cells(row.label, ours, peers, ", ".join(f"{value:.2f}" for value in ratios), f"`{row.record}`")


def table(rows: Sequence[Row] = ROWS, results: Path = RESULTS) -> str:
    """Returns the whole table as Markdown."""
    return "\n".join([_cells(*HEADINGS), "|" + "---|" * len(HEADINGS), *(line(row, results) for row in rows)])


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the table in README.md")
    made = table()
    if parser.parse_args().write:
        text = README.read_text()
        before, _, rest = text.partition(f"{BEGIN}\n")
        README.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")
    print(made)


if __name__ == "__main__":
    main()
