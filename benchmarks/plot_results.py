"""Draws the charts of docs/plots from result files.

    python benchmarks/plot_results.py --versus benchmarks/results/vs_vllm.json --attention attention.jsonl ...

--versus is what `vs_vllm.py` wrote: latency over input length, and decode beside its floor. --attention takes files of
`python -m bench attention --output`, and files of the same rows by others: kernel time over its floor. Of several
times for a case of one provider the best is drawn. --steps takes a file of `python -m bench step --output`: the parts
of a step, and products and attention under the roofline of an H200. --serving is what `serve_vs_vllm.py` wrote: how
many times as good our server is, by workload. --products is what `products_beside_vllm.py` wrote: time over rows.
--sums is what `sum_over_ranks.py` wrote: time of a sum over rows.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from bench.floor import H200
from bench.result_files import read_records
from bench.step_trace import PARTS
from checks.bench_plots import bar_chart, line_chart, panel_chart, roofline_chart, save, stacked_chart

PLOTS = Path("docs/plots")
CAP = 4.0
"""Times the floor at which a bar is cut."""
SERVED = {
    "output_throughput": "output tokens a second",
    "median_ttft_ms": "TTFT, median",
    "median_itl_ms": "ITL, median",
}
MOST_BARS = 12
"""Bars of a chart; more cannot be read."""
DECODES = ("1x1024", "8x1024", "32x1024", "128x1024", "256x512", "8x32768")
KERNELS = ("decode_1x1k", "decode_8x1k", "decode_1x32k", "decode_128x1k", "prefill_1x8k", "mixed_64dec4k_1x2k")
"""Cases to draw where a record has more than fit."""
PROVIDERS = {"triton": "Phonograph", "flash_attn 3": "FlashAttention 3", "flash_attn 2": "FlashAttention 2"}


def of_ours(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the comparison without backends of ours that were requested by name."""
    return [row for row in result["comparison"] if row.get("system", "ours") == "ours"]


def peer_name(peer: str, peers: Sequence[str]) -> str:
    """Return the name of vLLM's backend and graph mode in a chart, which has them only to tell several apart."""
    return "vLLM" if len(peers) == 1 else f"vLLM, {peer}"


def fitting(cases: Sequence[str], chosen: Sequence[str], systems: int) -> list[str]:
    """Return the cases whose bars fit a chart: all, or the chosen ones, or the first."""
    most = MOST_BARS // systems
    return list(cases) if len(cases) <= most else [one for one in cases if one in chosen][:most] or list(cases[:most])


def latency_chart(result: dict[str, Any]) -> Axes | None:
    """Milliseconds of one request over its input length, ours and the peers'."""
    rows = [row for row in of_ours(result) if row["suite"] == "latency"]
    peers = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        named = {peer_name(peer, peers): value for peer, value in row["peers"].items()}
        for system, value in {"Phonograph": row["ours"], **named}.items():
            lines.setdefault(system, []).append((float(row["case"]), value))
    title = f"Latency of one request with 4 output tokens, {result['model']}"
    return line_chart(title, "input tokens", "ms", lines) if lines else None


def decode_chart(result: dict[str, Any]) -> Axes | None:
    """Milliseconds between tokens, as multiples of the floor so that small and large batches share an axis."""
    floors = {row["case"]: row["floor_ms"] for row in result["rows"] if "floor_ms" in row}
    rows = [row for row in of_ours(result) if row["suite"] == "decode" and row["case"] in floors]
    if not rows:
        return None
    systems = list(dict.fromkeys(peer for row in rows for peer in row["peers"]))
    cases = fitting([row["case"] for row in rows], DECODES, 1 + len(systems))
    rows = [row for row in rows if row["case"] in cases]

    def over_floor(values: Sequence[float | None]) -> list[float | None]:
        return [
            None if value is None else round(value / floors[row["case"]], 3)
            for row, value in zip(rows, values, strict=True)
        ]

    bars = {"Phonograph": over_floor([row["ours"] for row in rows])}
    bars |= {peer_name(system, systems): over_floor([row["peers"].get(system) for row in rows]) for system in systems}
    title = f"Time between tokens over its floor, {result['model']}"
    return bar_chart(title, "x floor", [row["case"] for row in rows], bars, [1.0] * len(rows), cap=CAP)


def attention_chart(records: Sequence[dict[str, Any]]) -> Axes | None:
    """Kernel time over its floor, one bar a provider; the floors are those that our own rows name."""
    rows = [row for record in records for row in record.get("rows", [record]) if "us" in row]
    floors = {row["case"]: row["floor_us"] for row in rows if "floor_us" in row}
    best: dict[str, dict[str, float]] = {}
    for row in rows:
        of_provider = best.setdefault(row["provider"], {})
        of_provider[row["case"]] = min(row["us"], of_provider.get(row["case"], row["us"]))
    cases = fitting(list(floors), KERNELS, max(1, len(best)))
    bars = {
        PROVIDERS.get(provider, provider): [
            round(times[case] / floors[case], 3) if case in times else None for case in cases
        ]
        for provider, times in best.items()
    }
    return (
        bar_chart("Attention kernels over their floor", "x floor", cases, bars, [1.0] * len(cases), cap=CAP)
        if cases
        else None
    )


def steps_charts(record: dict[str, Any]) -> dict[str, Axes]:
    """Return the parts of a decode step in ms, and the bandwidth of its products and attention."""
    rows = [row for row in record["rows"] if row["suite"] == "step"]
    cases = [row["case"] for row in rows]
    parts = {name: [round(row[f"{name}_us"] / 1000, 3) for row in rows] for name in PARTS}
    floors = [row["floor_us"] / 1000 if "floor_us" in row else None for row in rows]
    name = Path(record["model"]).name
    reached: dict[str, list[tuple[float, float, str]]] = {}
    for part in ("products", "attention"):
        for row in rows:
            work = row["work"][part]
            speed = work["operations"] / (row[f"{part}_us"] * 1e-6)
            reached.setdefault(part, []).append((work["operations"] / work["bytes"], speed, row["case"]))
    return {
        "steps": stacked_chart(f"A decode step, {name}: sequences x context", "ms", cases, parts, floors),
        "roofline": roofline_chart(
            f"Products and attention of a decode step, {name}", H200.bandwidth, H200.flops, reached
        ),
    }


def serving_chart(result: dict[str, Any]) -> Axes | None:
    """Chart of the ratios of our server to the other one by workload, in figures that users see."""
    ratios = {
        (f"{row['workload']} {row['case']}".strip(), row["figure"]): row["ratio"]
        for row in result["comparison"]
        if row["figure"] in SERVED and row["workload"].startswith(("table", "sweep"))
    }
    workloads = list(dict.fromkeys(workload for workload, _ in ratios))
    workloads = fitting(workloads, [*workloads[:1], *workloads[2:]], len(SERVED))
    bars = {name: [ratios.get((workload, figure)) for workload in workloads] for figure, name in SERVED.items()}
    title = f"Phonograph's server beside vLLM's, {Path(result['model']).name}"
    return (
        bar_chart(title, "times as good", workloads, bars, [1.0] * len(workloads), CAP, "as good") if ratios else None
    )


def products_chart(record: dict[str, Any]) -> Axes | None:
    """Time of quantized products over rows, a panel for each: as multiples of the floor if it is known, or in us."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    rows = [row for row in record["rows"] if row["us"]]
    known = all("floor_us" in row for row in rows)
    for row in rows:
        heading = f"{row['model'].partition(',')[0]}, {row['product']} {row['outputs']}x{row['inputs']}"
        for name, us in row["us"].items():
            value = us / row["floor_us"] if known else us
            panels.setdefault(heading, {}).setdefault(name, []).append((row["rows"], value))
    title = "Quantized products beside vLLM's operators"
    y_label, line = ("x memory floor", "floor") if known else ("us", None)
    return panel_chart(title, "rows", y_label, panels, 4, line) if panels else None


def sums_chart(record: dict[str, Any]) -> Axes:
    """Microseconds of a sum over ranks in a graph, over its rows."""
    names = {"nccl_us": "NCCL", "peer_us": "peer memory", "peer_norm_us": "with residual and norm"}
    series = {name: [(row["rows"], row[key]) for row in record["sums"]] for key, name in names.items()}
    return line_chart(f"Sum of rows of {record['width']} over {record['ranks']} GPUs", "rows", "us", series)


def main(tokens: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versus", type=Path)
    parser.add_argument("--attention", type=Path, nargs="+", default=[])
    parser.add_argument("--steps", type=Path)
    parser.add_argument("--serving", type=Path)
    parser.add_argument("--products", type=Path)
    parser.add_argument("--sums", type=Path)
    parser.add_argument("--folder", type=Path, default=PLOTS)
    arguments = parser.parse_args(tokens)
    charts: dict[str, Axes | None] = {}
    if arguments.versus is not None:
        result = json.loads(arguments.versus.read_text(encoding="utf-8"))
        charts |= {"latency": latency_chart(result), "decode": decode_chart(result)}
    if arguments.attention:
        charts["attention"] = attention_chart(read_records(arguments.attention))
    if arguments.steps is not None:
        *_, record = read_records([arguments.steps])
        charts |= steps_charts(record)
    if arguments.serving is not None:
        charts["serving"] = serving_chart(json.loads(arguments.serving.read_text(encoding="utf-8")))
    if arguments.products is not None:
        charts["products"] = products_chart(json.loads(arguments.products.read_text(encoding="utf-8")))
    if arguments.sums is not None:
        charts["sums"] = sums_chart(json.loads(arguments.sums.read_text(encoding="utf-8")))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name, chart in charts.items():
        if chart is None:
            print(f"{name}: no rows for it")
            continue
        path = arguments.folder / f"{name}.svg"
        save(chart, path)
        print(path)


if __name__ == "__main__":
    main()
