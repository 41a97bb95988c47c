"""Speed beside vLLM from the records in `benchmarks/results`: README's chart and the table of docs/performance.md.

    python benchmarks/speed_beside_vllm.py            # print the table
    python benchmarks/speed_beside_vllm.py --write    # write it between the page's markers, and draw the chart

A row names one record, and both sides of its ratio are read from that record: figures of different runs come from
different hosts and GPUs, which differ by more than the ratios do. A test compares page and chart with the records.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from checks.bench_plots import ratio_chart, save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "performance.md"
CHART = ROOT / "docs" / "plots" / "speed.svg"
BEGIN = "<!-- table of benchmarks/speed_beside_vllm.py -->"
END = "<!-- end of the table -->"
DEFAULTS = "FLASH_ATTN/FULL_AND_PIECEWISE"
"""vLLM on FlashAttention 3 with the graph mode that it chooses itself."""
HIGHER_IS_BETTER = ("throughput", "output_throughput")
HEADINGS = "", "Phonograph", "vLLM", "times as good", "record"


class RecordError(Exception):
    """A record that cannot give a ratio."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table, with a bar of the chart for each case.

    Attributes:
        record: file in `benchmarks/results`, without its suffix.
        cases: (suite, case) of `vs_vllm.py`, or (figure, "WORKLOAD CASE") of `serve_vs_vllm.py`.
        bars: the cases' names in the chart, which has twelve at most; "" for a case without a bar.
        unit: unit of the figures in the chart.
        peer: vLLM's backend, graph mode and capture limit; `serve_vs_vllm.py` has one peer.
    """

    label: str
    record: str
    cases: tuple[tuple[str, str], ...]
    bars: tuple[str, ...] = ()
    unit: str = "ms"
    peer: str = DEFAULTS


def _cases(suite: str, *names: str) -> tuple[tuple[str, str], ...]:
    return tuple((suite, name) for name in names)


LLAMA, MIXED = "vs_vllm_llama_alone_2", "vs_vllm_llama_mixed"
ROWS = (
    Row(
        "ms between tokens: 1, 8, 32 of 1K",
        LLAMA,
        _cases("decode", "1x1024", "8x1024", "32x1024"),
        ("between tokens, 1x1K", "", "between tokens, 32x1K"),
    ),
    Row(
        "128 of 1K, 256 of 512",
        LLAMA,
        _cases("decode", "128x1024", "256x512"),
        ("", "between tokens, 256x512"),
    ),
    Row(
        "1, 8 of 32K",
        LLAMA,
        _cases("decode", "1x32768", "8x32768"),
        ("", "between tokens, 8x32K"),
    ),
    Row(
        "ms, prompt of 500, 2000, 8000",
        LLAMA,
        _cases("latency", "500", "2000", "8000"),
        ("prompt of 500", "", "prompt of 8000"),
    ),
    Row("tokens/s offline", LLAMA, _cases("throughput", "256"), ("offline throughput",), "tokens/s"),
    Row(
        "tokens/s offline, Qwen3-0.6B",
        "vs_vllm_qwen_alone",
        _cases("throughput", "256"),
        ("",),
        "tokens/s",
    ),
    Row(
        "tokens/s of the server",
        "serve_vs_vllm",
        _cases("output_throughput", "sweep 128"),
        ("server throughput",),
        "tokens/s",
    ),
    Row("its median TTFT, ms", "serve_vs_vllm", _cases("median_ttft_ms", "sweep 128"), ("server, median TTFT",)),
    Row("s, decode at 32K beside prompts", MIXED, _cases("mixed", "32768"), ("decode at 32K beside prompts",), "s"),
    Row(
        "the same, vLLM captured to 16",
        MIXED,
        _cases("mixed", "32768"),
        ("the same, vLLM captured to 16",),
        "s",
        "FLASH_ATTN/FULL/16",
    ),
    Row(
        "s to ready: first, second start",
        "vs_vllm_llama",
        _cases("startup", "first", "second"),
        ("", "second start"),
        "s",
    ),
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
    """Return how many times as good ours is: above 1 is better than the peer."""
    return ours / peers if suite in HIGHER_IS_BETTER else peers / ours


def measured(row: Row, results: Path = RESULTS) -> tuple[list[tuple[float, float]], list[float]]:
    """Return the figures of both sides and the ratio of each case.

    Raises:
        RecordError: the record has no ratio of a case.
    """
    name = f"{row.record}.json"
    record = json.loads((results / name).read_text())
    try:
        pairs = [figures(record, case, row.peer) for case in row.cases]
    except RecordError as error:
        raise RecordError(f"{name}: {error}") from None
    return pairs, [ratio(suite, *pair) for (suite, _), pair in zip(row.cases, pairs, strict=True)]


def line(row: Row, results: Path = RESULTS) -> str:
    """Return a row as Markdown."""
    pairs, ratios = measured(row, results)
    ours, peers = (", ".join(map(_shown, side)) for side in zip(*pairs, strict=True))
    return _cells(row.label, ours, peers, ", ".join(f"{value:.2f}" for value in ratios), f"`{row.record}`")


def table(rows: Sequence[Row] = ROWS, results: Path = RESULTS) -> str:
    """Return the whole table as Markdown."""
    return "\n".join([_cells(*HEADINGS), "|" + "---|" * len(HEADINGS), *(line(row, results) for row in rows)])


def chart(rows: Sequence[Row] = ROWS, results: Path = RESULTS) -> Axes:
    """Return the bar chart: how many times as good as vLLM, with both sides' figures."""
    bars: list[tuple[str, float, str]] = []
    for row in rows:
        pairs, ratios = measured(row, results)
        for name, value, (ours, peers) in zip(row.bars, ratios, pairs, strict=True):
            if name:
                bars.append((name, value, f"{value:.2f} ({_shown(ours)} : {_shown(peers)} {row.unit})"))
    title = "Times as good as vLLM, Llama-3.1-8B on one H200"
    return ratio_chart(title, "times as good (Phonograph : vLLM)", "as good", bars)


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:#.3g}".rstrip(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into the page, and the chart")
    made = table()
    if parser.parse_args().write:
        before, _, rest = PAGE.read_text().partition(f"{BEGIN}\n")
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")
        save(chart(), CHART)
    print(made)


if __name__ == "__main__":
    main()
