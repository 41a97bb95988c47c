"""Reports of compute-sanitizer's racecheck, without those that come from Triton's dispatch of warps.

A kernel whose warps have work of their own begins and ends in code of Triton's: idle warps read from shared memory what
they are to do, which the first warps wrote. The checker reports that as a race, although barriers order it. A kernel
whose warps share nothing (tests/support/warps_apart.py) has these reports too, and so shows on each run whose they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

CONTROL = "_apart_kernel"
"""Kernel whose warps share nothing: its reports come from Triton's dispatch."""

_SIDE = re.compile(r"(Read|Write) access at (\w+)\+0x[0-9a-f]+ in (\S+?):(\d+)")


@dataclass(frozen=True, kw_only=True)
class Side:
    """An access, at a line (from 1) of a file without its folder."""

    access: str
    kernel: str
    file: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Race:
    """All accesses that one report names, the text of the report among them."""

    sides: tuple[Side, ...]
    text: str

    @property
    def kernel(self) -> str:
        return self.sides[0].kernel


def read_races(report: str) -> list[Race]:
    """Return the races of racecheck's report. Races without line numbers (kernels without debug information) have no
    sides and are kept with what was written."""
    lines: list[list[str]] = []
    for line in report.splitlines():
        text = line.strip("= \t")
        if "Race reported" in text:
            lines.append([text])
        elif lines and text.startswith("and ") and " access at " in text:
            lines[-1].append(text)
    return [_read_race(texts) for texts in lines]


def _read_race(texts: Sequence[str]) -> Race:
    sides: list[Side] = []
    for text in texts:
        match = _SIDE.search(text)
        if match is None:
            sides.append(Side(access="?", kernel=text, file="", line=0))
        else:
            access, kernel, file, line = match.groups()
            sides.append(Side(access=access, kernel=kernel, file=file, line=int(line)))
    return Race(sides=tuple(sides), text="; ".join(texts))


def races_of_kernels(races: Sequence[Race], source_line: Callable[[str, int], str]) -> list[Race]:
    """Return the races outside Triton's dispatch: with a side at another line than the kernel's first or its
    `warp_specialize`, or all, where the control shows none.

    source_line: the text of a line of a file.
    """

    def of_dispatch(race: Race) -> bool:
        return all(
            source_line(side.file, side.line).strip().startswith((f"def {side.kernel}(", "gl.warp_specialize("))
            for side in race.sides
        )

    if not any(race.kernel == CONTROL and of_dispatch(race) for race in races):
        return list(races)
    return [race for race in races if not of_dispatch(race)]
