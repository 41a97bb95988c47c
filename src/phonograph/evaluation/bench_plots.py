"""Charts of results as SVG: lines over a logarithmic axis, and groups of bars with a floor. The standard library is
enough for these two, and the text of an SVG shows in a diff what changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

COLORS = ("#1b6ca8", "#d1495b", "#2e8b57", "#edae49", "#7b5ea7", "#6b7280")
WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 260, 48, 64
_BOTTOM_Y, _RIGHT_X = HEIGHT - BOTTOM, WIDTH - RIGHT


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
) -> str:
    """A group of bars for each name, one bar a series; None leaves a gap. A floor is a black line across its group.

    Bars above `cap` are cut there and have their value written on them, so that one outlier does not flatten the rest.
    """
    values = [value for one in series.values() for value in one if value is not None]
    high = min(cap, max([*values, *(floor for floor in floors or () if floor is not None)])) * 1.05
    step = _round_step(high / 6)
    slot = (_RIGHT_X - LEFT) / len(groups)
    bar = slot * 0.8 / len(series)

    def place_y(value: float) -> float:
        return _BOTTOM_Y - value / high * (_BOTTOM_Y - TOP)

    ticks = [index * step for index in range(int(high / step) + 1)]
    parts = [_y_axis(y_label, [(place_y(tick), f"{tick:g}") for tick in ticks])]
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
            y = place_y(floor)
            ends = f'x1="{left - 2:.1f}" x2="{left + slot * 0.8 + 2:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
            parts.append(f'<line {ends} stroke="#111827" stroke-width="2"/>')
    return _document(title, parts, list(series), floor=floors is not None)


def _document(title: str, parts: Sequence[str], names: Sequence[str], *, floor: bool = False) -> str:
    legend: list[str] = []
    for number, (color, name) in enumerate(zip(_colors(len(names)), names, strict=True)):
        y = TOP + 8 + number * 20
        legend.append(f'<rect x="{_RIGHT_X + 14}" y="{y - 9}" width="10" height="10" fill="{color}"/>')
        legend.append(_text(_RIGHT_X + 30, y, name, "start"))
    if floor:
        y = TOP + 8 + len(names) * 20
        ends = f'x1="{_RIGHT_X + 12}" x2="{_RIGHT_X + 26}" y1="{y - 4}" y2="{y - 4}"'
        legend += [f'<line {ends} stroke="#111827" stroke-width="2"/>', _text(_RIGHT_X + 30, y, "floor", "start")]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12" fill="#111827">'
    )
    background = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>'
    heading = f'<text x="{LEFT}" y="26" font-size="16" font-weight="bold">{escape(title)}</text>'
    return "\n".join([head, background, heading, *parts, *legend, "</svg>", ""])


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
