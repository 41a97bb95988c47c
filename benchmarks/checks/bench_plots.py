"""Charts of results as SVG: lines over logarithmic axes, alone or in panels, bars with floors, rooflines."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

matplotlib.rcParams.update(
    {
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        # Text stays text and names stay the same, so that a diff shows what changed.
        "svg.fonttype": "none",
        "svg.hashsalt": "phonograph",
    }
)
FLOOR = "#111827"
INHERITED = 'fill="currentColor" stroke-linejoin="round" stroke-linecap="butt"'
COLOURS = (
    '<style id="standalone">:root { color: #24292f; } '
    "@media (prefers-color-scheme: dark) { :root { color: #d8dee6; } }</style>"
)


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> Axes:
    """Points joined by lines, both axes logarithmic. All values must be above 0."""
    axes = _axes(title, y_label)
    for name, line in series.items():
        xs, ys = zip(*sorted(line), strict=True)
        axes.loglog(xs, ys, marker="o", label=name)
    ticks = sorted({x for line in series.values() for x, _ in line})
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(x_label)
    axes.legend(frameon=False)
    return axes


def panel_chart(
    title: str,
    x_label: str,
    y_label: str,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    columns: int,
    line: str | None = None,
) -> Axes:
    """Draw the lines of each panel on logarithmic axes, of which all panels share the vertical one.

    A series has one color in all panels. With `line`, a black line at 1 has that name in the legend.

    Returns:
        The first panel.
    """
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.2 * columns, 0.8 + 2.6 * rows), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold")
    colors = {
        name: f"C{place}" for place, name in enumerate(dict.fromkeys(n for panel in panels.values() for n in panel))
    }
    found: dict[str, Artist] = {}
    first: Axes | None = None
    for place, (heading, series) in enumerate(panels.items()):
        axes = figure.add_subplot(rows, columns, place + 1, sharey=first)
        first = first or axes
        axes.set_title(heading, loc="left", fontsize=9)
        if line is not None:
            found[line] = axes.axhline(1, color=FLOOR)
        for name, points in series.items():
            xs, ys = zip(*sorted(points), strict=True)
            (found[name],) = axes.loglog(xs, ys, marker="o", markersize=3, color=colors[name])
        ticks = sorted({x for points in series.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.label_outer()
    assert first is not None
    figure.supxlabel(x_label, fontsize=10)
    figure.supylabel(y_label, fontsize=10)
    first.legend(list(found.values()), list(found), fontsize=7, frameon=False)
    return first


def bar_chart(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    floors: Sequence[float | None] | None = None,
    cap: float = math.inf,
    line: str = "floor",
) -> Axes:
    """Draw a group of bars for each name, one bar a series; None leaves a gap.

    A floor is a black line across its group, and `line` its name in the legend. Bars above `cap` are cut there and
    have their value written on them, so that one outlier does not flatten the rest.
    """
    axes = _axes(title, y_label)
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        lefts = [place - 0.4 + (number + 0.5) * width for place in range(len(groups))]
        heights = [math.nan if value is None else min(value, cap) for value in values]
        bars = axes.bar(lefts, heights, width * 0.92, label=name)
        cut = [f"{value:.3g}" if value is not None and value > cap else "" for value in values]
        axes.bar_label(bars, cut, rotation=90, fontsize=7, padding=2)
    axes.margins(y=0.1)
    axes.set_xticks(range(len(groups)), groups)
    if len(groups) > 8:
        axes.tick_params(axis="x", labelrotation=28, labelsize=7)
        for label in axes.get_xticklabels():
            label.set_horizontalalignment("right")
    _draw_floors(axes, floors, line)
    axes.legend(frameon=False)
    return axes


def ratio_chart(title: str, x_label: str, line: str, bars: Sequence[tuple[str, float, str]]) -> Axes:
    """Return horizontal bars from the top down, with a line at 1.

    Args:
        title, x_label: texts of the chart.
        line: name of the line in the legend.
        bars: name, value and label of each bar.
    """
    axes = _axes(title, "", height=0.8 + 0.3 * len(bars))
    drawn = axes.barh([name for name, _, _ in bars], [value for _, value, _ in bars], 0.7, color="#1f77b4")
    axes.bar_label(drawn, [label for _, _, label in bars], padding=4, fontsize=8)
    axes.axvline(1, color=FLOOR, label=line)
    axes.invert_yaxis()
    axes.margins(x=0.4)
    axes.grid(visible=False)
    axes.set_xlabel(x_label)
    axes.legend(loc="upper right", frameon=False)
    return axes


def stacked_chart(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    floors: Sequence[float | None] | None = None,
) -> Axes:
    """Draw a bar for each name, its parts upon one another with their share of it on them; floors as in `bar_chart`."""
    axes = _axes(title, y_label)
    totals = [sum(parts) for parts in zip(*series.values(), strict=True)]
    below = [0.0] * len(groups)
    for name, values in series.items():
        bars = axes.bar(groups, values, 0.6, below, label=name)
        shares = [value / total for value, total in zip(values, totals, strict=True)]
        shown = [
            f"{share:.0%}" if value > 0.04 * max(totals) else "" for share, value in zip(shares, values, strict=True)
        ]
        axes.bar_label(bars, shown, label_type="center", color="white")
        below = [one + value for one, value in zip(below, values, strict=True)]
    for place, total in enumerate(totals):
        axes.annotate(f"{total:g}", (place, total), ha="center", va="bottom")
    _draw_floors(axes, floors, "floor")
    axes.legend(frameon=False)
    return axes


def roofline_chart(
    title: str, bandwidth: float, flops: float, series: Mapping[str, Sequence[tuple[float, float, str]]]
) -> Axes:
    """Operations a second over operations a byte, under what a chip allows: its memory's slope, then its products' top.

    Args:
        bandwidth, flops: bytes and operations a second at most
        series: by name points (operations a byte, operations a second, label); all above 0
    """
    axes = _axes(title, "TFLOP/s")
    ridge = flops / bandwidth
    intensities = [ridge, *(x for points in series.values() for x, _, _ in points)]
    ends = min(intensities) / 2, ridge, max(intensities) * 2
    axes.loglog(ends, [min(flops, x * bandwidth) / 1e12 for x in ends], color=FLOOR)
    for name, points in series.items():
        axes.scatter([x for x, _, _ in points], [y / 1e12 for _, y, _ in points], label=name)
    lowest: dict[float, float] = {}
    for x, y, label in sorted((point for points in series.values() for point in points), key=lambda point: -point[1]):
        # Points at one place have their labels below each other.
        near = next((other for other in lowest if 0.8 < x / other < 1.25), x)
        lowest[near] = min(y, lowest.get(near, math.inf) / 1.3)
        share = y / min(flops, x * bandwidth)
        axes.text(x * 1.1, lowest[near] / 1e12, f"{label} {share:.0%}", fontsize=8, verticalalignment="top")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("operations a byte")
    axes.legend(frameon=False)
    return axes


def _axes(title: str, y_label: str, height: float = 4.5) -> Axes:
    axes = Figure(figsize=(7.5, height), layout="constrained").add_subplot()
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_ylabel(y_label)
    return axes


def _draw_floors(axes: Axes, floors: Sequence[float | None] | None, name: str) -> None:
    found = {place: floor for place, floor in enumerate(floors or ()) if floor is not None}
    if found:
        lefts, rights = [place - 0.45 for place in found], [place + 0.45 for place in found]
        axes.hlines(list(found.values()), lefts, rights, color=FLOOR, label=name)


def save(axes: Axes, path: Path) -> None:
    """Write a chart as SVG, the same text for the same chart.

    It has no background, and black is the colour of the text around it. In a file of its own that follows the system.
    """
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.savefig(path, metadata={"Date": None}, transparent=True)
    text = path.read_text(encoding="utf-8")
    text = re.sub(r" *<defs>\s*<style[^>]*>.*?</style>\s*</defs>\n", "", text, count=1, flags=re.DOTALL)
    text = text.replace("#000000", "currentColor").replace(FLOOR, "currentColor")
    text = re.sub(r"<svg ([^>]*)>", rf"<svg \1 {INHERITED}>\n {COLOURS}", text, count=1)
    path.write_text(text, encoding="utf-8")
