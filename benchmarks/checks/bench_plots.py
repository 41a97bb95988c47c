"""Charts of results as SVG: lines over a logarithmic axis, groups of bars and stacked bars with a floor, rooflines. The
standard library is enough for these, and the text of an SVG shows in a diff what changed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#7b5ea7", "#6b7280")
WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 260, 48, 64
_BOTTOM_Y, _RIGHT_X = HEIGHT - BOTTOM, WIDTH - RIGHT
_LABEL_WIDTH, _LINE = 90, 13


def line_chart(title: str, x_label: str, y_label: str, series: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Points joined by lines, both axes logarithmic. All values must be above 0."""
    points = [point for line in series.values() for point in line]
    x_ticks = sorted({x for x, _ in points})
    low_y, high_y = min(y for _, y in points) / 1.2, max(y for _, y in points) * 1.2
    y_ticks = _decimal_ticks(low_y, high_y)

    def place_x(value: float) -> float:
        return _scaled(value, x_ticks[0] / 1.1, x_ticks[-1] * 1.1, LEFT, _RIGHT_X)

    def place_y(value: float) -> float:
        return _scaled(value, low_y, high_y, _BOTTOM_Y, TOP)

    parts = [_y_axis(y_label, [(place_y(tick), f"{tick:g}") for tick in y_ticks])]
    parts += [_text(place_x(tick), _BOTTOM_Y + 18, f"{tick:g}", "middle") for tick in x_ticks]
    parts.append(_text((LEFT + _RIGHT_X) / 2, HEIGHT - 14, x_label, "middle"))
    for color, line in zip(_colors(len(series)), series.values(), strict=True):
        placed = [(place_x(x), place_y(y)) for x, y in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in placed]
    return _document(title, parts, list(series))


def bar_chart(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    floors: Sequence[float | None] | None = None,
    cap: float = math.inf,
    line: str = "floor",
) -> str:
    """A group of bars for each name, one bar a series; None leaves a gap. A floor is a black line across its group, and
    `line` what the legend calls it.

    Bars above `cap` are cut there and have their value written on them, so that one outlier does not flatten the rest.
    """
    values = [value for one in series.values() for value in one if value is not None]
    high = min(cap, max([*values, *(floor for floor in floors or () if floor is not None)])) * 1.05
    slot = (_RIGHT_X - LEFT) / len(groups)
    bar = slot * 0.8 / len(series)
    place_y, axis = _linear_axis(y_label, high)
    parts = [axis]
    for place, group in enumerate(groups):
        left = LEFT + place * slot + slot * 0.1
        parts.append(_label_of_group(left + slot * 0.4, group, slanted=len(groups) > 8))
        for number, (color, one) in enumerate(zip(_colors(len(series)), series.values(), strict=True)):
            value = one[place]
            if value is None:
                continue
            x, y = left + number * bar, place_y(min(value, cap))
            name = f"<title>{escape(group)}: {value:g}</title>"
            size = f'x="{x:.1f}" y="{y:.1f}" width="{bar * 0.92:.1f}" height="{_BOTTOM_Y - y:.1f}"'
            parts.append(f'<rect {size} fill="{color}">{name}</rect>')
            if value > cap:
                turned = f'transform="translate({x + bar * 0.7:.1f} {y - 3:.1f}) rotate(-90)"'
                parts.append(f'<text {turned} font-size="8">{value:.3g}</text>')
        floor = floors[place] if floors else None
        if floor is not None:
            parts.append(_floor_line(left - 2, left + slot * 0.8 + 2, place_y(floor)))
    return _document(title, parts, list(series), line=None if floors is None else line)


def stacked_chart(
    title: str,
    y_label: str,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    floors: Sequence[float | None] | None = None,
) -> str:
    """A bar for each name, its parts upon one another with their share of it on them; floors as in `bar_chart`."""
    totals = [sum(one[place] for one in series.values()) for place in range(len(groups))]
    high = max([*totals, *(floor for floor in floors or () if floor is not None)]) * 1.05
    slot = (_RIGHT_X - LEFT) / len(groups)
    place_y, axis = _linear_axis(y_label, high)
    parts = [axis]
    for place, (group, total) in enumerate(zip(groups, totals, strict=True)):
        left, below = LEFT + place * slot + slot * 0.2, 0.0
        parts.append(_text(left + slot * 0.3, _BOTTOM_Y + 18, group, "middle"))
        for color, (name, one) in zip(_colors(len(series)), series.items(), strict=True):
            value = one[place]
            top, bottom = place_y(below + value), place_y(below)
            size = f'x="{left:.1f}" y="{top:.1f}" width="{slot * 0.6:.1f}" height="{bottom - top:.1f}"'
            told = f"<title>{escape(group)}, {escape(name)}: {value:g}</title>"
            parts.append(f'<rect {size} fill="{color}">{told}</rect>')
            if bottom - top > 14:
                middle = (top + bottom) / 2 + 4
                share = f'fill="#ffffff" text-anchor="middle">{100 * value / total:.0f}%</text>'
                parts.append(f'<text x="{left + slot * 0.3:.1f}" y="{middle:.1f}" {share}')
            below += value
        parts.append(_text(left + slot * 0.3, place_y(total) - 5, f"{total:g}", "middle"))
        floor = floors[place] if floors else None
        if floor is not None:
            parts.append(_floor_line(left - 8, left + slot * 0.6 + 8, place_y(floor)))
    return _document(title, parts, list(series), line=None if floors is None else "floor")


def roofline_chart(
    title: str, bandwidth: float, flops: float, series: Mapping[str, Sequence[tuple[float, float, str]]]
) -> str:
    """Operations a second over operations a byte, under what a chip allows: its memory's slope, then its products' top.

    Args:
        bandwidth, flops: bytes and operations a second at most
        series: by name points (operations a byte, operations a second, label); all above 0
    """
    points = [point for one in series.values() for point in one]
    ridge = flops / bandwidth
    low_x, high_x = min([x for x, _, _ in points] + [ridge]) / 2, max([x for x, _, _ in points] + [ridge]) * 2
    low_y, high_y = min(y for _, y, _ in points) / 2e12, flops * 1.5 / 1e12

    def place_x(value: float) -> float:
        return _scaled(value, low_x, high_x, LEFT, _RIGHT_X)

    def place_y(value: float) -> float:
        return _scaled(value, low_y, high_y, _BOTTOM_Y, TOP)

    parts = [_y_axis("TFLOP/s", [(place_y(tick), f"{tick:g}") for tick in _decimal_ticks(low_y, high_y)])]
    parts += [
        _text(place_x(tick), _BOTTOM_Y + 18, f"{tick:g}", "middle")
        for tick in _decimal_ticks(low_x, high_x)
        if f"{tick:e}".startswith(("1.", "5."))
    ]
    parts.append(_text((LEFT + _RIGHT_X) / 2, HEIGHT - 14, "operations a byte", "middle"))
    # The slope begins where it enters the picture.
    start = max(low_x, low_y * 1e12 / bandwidth)
    roof = [(start, start * bandwidth / 1e12), (ridge, flops / 1e12), (high_x, flops / 1e12)]
    path = " ".join(f"{place_x(x):.1f},{place_y(y):.1f}" for x, y in roof)
    parts.append(f'<polyline points="{path}" fill="none" stroke="#111827" stroke-width="2"/>')
    labels: list[tuple[float, float]] = []
    for color, (name, one) in zip(_colors(len(series)), series.items(), strict=True):
        for x, y, label in sorted(one, key=lambda point: -point[1]):
            share = y / min(flops, x * bandwidth)
            told = f"{name}, {label}: {y / 1e12:.3g} TFLOP/s, {100 * share:.0f}% of the roof"
            at_x, at_y = place_x(x), place_y(y / 1e12)
            parts.append(
                f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="4" fill="{color}"><title>{escape(told)}</title></circle>'
            )
            # Points at one place have their labels below each other.
            near = [below for side, below in labels if abs(side - at_x) < _LABEL_WIDTH and below <= at_y + 12 + _LINE]
            labels.append((at_x, max([at_y + 12, *(below + _LINE for below in near)])))
            parts.append(_text(at_x + 7, labels[-1][1], f"{label} {100 * share:.0f}%", "start"))
    return _document(title, parts, list(series))


def _document(title: str, parts: Sequence[str], names: Sequence[str], *, line: str | None = None) -> str:
    """line: what the black lines are, where there are some."""
    legend: list[str] = []
    for number, (color, name) in enumerate(zip(_colors(len(names)), names, strict=True)):
        y = TOP + 8 + number * 20
        legend.append(f'<rect x="{_RIGHT_X + 14}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        legend.append(_text(_RIGHT_X + 30, y, name, "start"))
    if line is not None:
        y = TOP + 8 + len(names) * 20
        ends = f'x1="{_RIGHT_X + 12}" x2="{_RIGHT_X + 26}" y1="{y - 4}" y2="{y - 4}"'
        legend += [f'<line {ends} stroke="#111827" stroke-width="2"/>', _text(_RIGHT_X + 30, y, line, "start")]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#111827">'
    )
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    heading = f'<text x="{LEFT}" y="26" font-size="16" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, background, heading, *parts, *legend, "</svg>", ""])


def _linear_axis(label: str, high: float) -> tuple[Callable[[float], float], str]:
    """Where a value from 0 to `high` lies, and the axis with some six ticks."""

    def place_y(value: float) -> float:
        return _BOTTOM_Y - value / high * (_BOTTOM_Y - TOP)

    step = _round_step(high / 6)
    ticks = [index * step for index in range(int(high / step) + 1)]
    return place_y, _y_axis(label, [(place_y(tick), f"{tick:g}") for tick in ticks])


def _floor_line(start: float, end: float, y: float) -> str:
    ends = f'x1="{start:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
    return f'<line {ends} stroke="#111827" stroke-width="2"/>'


def _y_axis(label: str, ticks: Sequence[tuple[float, str]]) -> str:
    lines = [
        f'<line x1="{LEFT}" x2="{_RIGHT_X}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e7eb"/>\n'
        + _text(LEFT - 8, y + 4, text, "end")
        for y, text in ticks
    ]
    middle = (TOP + _BOTTOM_Y) / 2
    turned = f'<text transform="translate(18 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(label)}</text>'
    return "\n".join([*lines, turned])


def _label_of_group(x: float, text: str, *, slanted: bool) -> str:
    if not slanted:
        return _text(x, _BOTTOM_Y + 18, text, "middle")
    turned = f'transform="translate({x:.1f} {_BOTTOM_Y + 12}) rotate(-28)"'
    return f'<text {turned} text-anchor="end" font-size="9">{escape(text)}</text>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _colors(count: int) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(count)]


def _scaled(value: float, low: float, high: float, start: float, end: float) -> float:
    return start + (math.log(value) - math.log(low)) / (math.log(high) - math.log(low)) * (end - start)


def _decimal_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 of every power of ten between two values; all three are few enough for six powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [tick for tick in ticks if low <= tick <= high]


def _round_step(step: float) -> float:
    """1, 2 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= step)
