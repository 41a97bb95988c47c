"""Parses large JSON bodies in short steps, so that the event loop serves other requests in between.

`json.loads` holds the interpreter until it returns: tens of milliseconds for 100,000 names. NumPy finds the commas and
brackets outside of strings. Each list or object with many commas is then cut at its own commas, `json.loads` reads
groups of its members, and a member that is large itself is cut likewise. The result is that of `json.loads`.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

WHOLE_BYTES = 65_536
"""Longest body that is parsed in one step."""
STEP_COMMAS = 4096
STEP_BYTES = 262_144
"""Limits of one step, in which at least one member is parsed."""

_QUOTE, _COMMA, _OPENER, _CLOSER = 1, 2, 3, 4
_CLASSES = np.zeros(256, np.uint8)
for _characters, _class in ((b'"', _QUOTE), (b",", _COMMA), (b"[{", _OPENER), (b"]}", _CLOSER)):
    _CLASSES[list(_characters)] = _class
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_CLOSING = {b"[": b"]", b"{": b"}"}
_SPACE = re.compile(rb"[ \t\r\n]*")

Positions = npt.NDArray[np.int64]


async def parse_json(body: bytes) -> Any:
    """Parse a body as `json.loads` does. A byte-order mark before it is white space.

    Raises:
        ValueError: the body is not JSON.
        UnicodeDecodeError: it is not UTF-8; the position is the byte in the body.
        RecursionError: lists and objects are too deep in each other.
    """
    if len(body) <= WHOLE_BYTES:
        return json.loads(body.decode("utf-8-sig"))
    start = len(_BYTE_ORDER_MARK) if body.startswith(_BYTE_ORDER_MARK) else 0
    parser = _Parser(body, await _structure(body))
    # A list, not recursion: the depth of a body is that of the client's choice.
    root: list[Any] = [None]
    pending = [_Member(root, 0, None, start, len(body), depth=0)]
    while pending:
        member = pending.pop()
        await asyncio.sleep(0)
        value = await parser.parse(member, pending)
        # Of two members with one name, the later one counts, though it may have been parsed before.
        if member.container[member.place] is member.stand_in:
            member.container[member.place] = value
    return root[0]


@dataclass(frozen=True, slots=True)
class _Member:
    """A value that is still to be parsed, and its place. `stand_in` is there until then.

    depth: number of lists and objects around it
    """

    container: Any
    place: Any
    stand_in: object
    start: int
    end: int
    depth: int


class _ByDepth:
    """Positions in ascending order, by depth."""

    def __init__(self, positions: Positions, depths: npt.NDArray[np.int16]) -> None:
        order = np.argsort(depths, kind="stable")
        self._positions, self._depths = positions[order], depths[order]

    def at(self, depth: int) -> Positions:
        first, last = np.searchsorted(self._depths, (depth, depth + 1))
        return self._positions[first:last]


@dataclass(frozen=True, slots=True)
class _Structure:
    """Commas and brackets outside of strings. A closing bracket has the depth of what surrounds it."""

    commas: Positions
    openers: Positions
    commas_by_depth: _ByDepth
    closers_by_depth: _ByDepth


async def _structure(body: bytes) -> _Structure:
    kinds: list[npt.NDArray[np.uint8]] = []
    places: list[Positions] = []
    num_quotes, start = 0, 0
    while start < len(body):
        piece = body[start : start + WHOLE_BYTES]
        # The character after an odd backslash belongs to it.
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            piece += body[start + len(piece) : start + len(piece) + 1]
        plain = piece.replace(b"\\\\", b"  ").replace(b'\\"', b"  ") if b"\\" in piece else piece
        classes = _CLASSES[np.frombuffer(plain, np.uint8)]
        found = np.flatnonzero(classes)
        kind = classes[found]
        quotes = num_quotes + np.cumsum(kind == _QUOTE)
        outside = (quotes % 2 == 0) & (kind != _QUOTE)
        kinds.append(kind[outside])
        places.append(found[outside] + start)
        num_quotes = int(quotes[-1]) if len(quotes) else num_quotes
        start += len(piece)
        await asyncio.sleep(0)
    kind, place = np.concatenate(kinds), np.concatenate(places)
    depth = np.cumsum((kind == _OPENER).astype(np.int64) - (kind == _CLOSER))
    depth = np.clip(depth, -1, 2**15 - 1).astype(np.int16)
    await asyncio.sleep(0)
    comma, closer = kind == _COMMA, kind == _CLOSER
    commas = _ByDepth(place[comma], depth[comma])
    await asyncio.sleep(0)
    return _Structure(place[comma], place[kind == _OPENER], commas, _ByDepth(place[closer], depth[closer]))


class _Parser:
    """Parses members of a body whose structure is known."""

    def __init__(self, body: bytes, structure: _Structure) -> None:
        self._body = body
        self._structure = structure

    async def parse(self, member: _Member, pending: list[_Member]) -> Any:
        """Parse a member. Large members of it become stand-ins, and are added to `pending`."""
        body, structure, depth = self._body, self._structure, member.depth
        start = self._after_space(member.start, member.end)
        if self._num_commas(start, member.end) <= STEP_COMMAS:
            return self._loads(b"", start, member.end, b"")
        bracket = body[start : start + 1]
        closers = structure.closers_by_depth.at(depth)
        closer = int(closers[index]) if (index := np.searchsorted(closers, start)) < len(closers) else -1
        if bracket not in _CLOSING or body[closer : closer + 1] != _CLOSING[bracket]:  # b"" if there is no closer
            raise ValueError(f"no value at byte {start}")
        if self._after_space(closer + 1, member.end) != member.end:
            raise ValueError(f"extra data at byte {closer + 1}")
        commas = structure.commas_by_depth.at(depth + 1)
        first, last = np.searchsorted(commas, (start, closer))
        bounds = np.concatenate(([start], commas[first:last], [closer]))
        value: Any = [] if bracket == b"[" else {}
        index = 0
        while index < len(bounds) - 1:
            limit = min(self._comma_after(int(bounds[index])), int(bounds[index]) + STEP_BYTES)
            after = max(index + 1, int(np.searchsorted(bounds, limit, "right")) - 1)
            begin, end = int(bounds[index]) + 1, int(bounds[after])
            if after == index + 1 and self._num_commas(begin, end) > STEP_COMMAS:
                stand_in = object()
                if isinstance(value, list):
                    place = len(value)
                    value.append(stand_in)
                else:
                    place, begin = self._name(begin, end)
                    value[place] = stand_in
                pending.append(_Member(value, place, stand_in, begin, end, depth + 1))
            else:
                members = self._loads(bracket, begin, end, _CLOSING[bracket])
                if not members:
                    raise ValueError(f"no value at byte {begin}")
                (value.extend if isinstance(value, list) else value.update)(members)
                await asyncio.sleep(0)
            index = after
        return value

    def _name(self, begin: int, end: int) -> tuple[str, int]:
        """Return the name of a large member of an object, and the position of its value, a list or an object."""
        openers = self._structure.openers
        start = min(end, int(openers[np.searchsorted(openers, begin)]))
        # An empty list in place of the value: only a name and a colon may precede it.
        (name,) = self._loads(b"{", begin, start, b"[]}")
        return name, start

    def _comma_after(self, begin: int) -> int:
        """Return the position of the comma that follows a step's commas, or the end of the body."""
        commas = self._structure.commas
        index = int(np.searchsorted(commas, begin)) + STEP_COMMAS
        return int(commas[index]) if index < len(commas) else len(self._body)

    def _num_commas(self, begin: int, end: int) -> int:
        first, last = np.searchsorted(self._structure.commas, (begin, end))
        return int(last - first)

    def _after_space(self, begin: int, end: int) -> int:
        space = _SPACE.match(self._body, begin, end)
        return begin if space is None else space.end()

    def _loads(self, before: bytes, begin: int, end: int, after: bytes) -> Any:
        """Parse a part of the body between two texts. Errors have the position in the body."""
        try:
            return json.loads((before + self._body[begin:end] + after).decode())
        except UnicodeDecodeError as error:
            place = begin + error.start - len(before)
            raise UnicodeDecodeError("utf-8", self._body, place, place + 1, error.reason) from None
        except json.JSONDecodeError as error:
            place = begin + len(error.doc[: error.pos].encode()) - len(before)
            raise ValueError(f"{error.msg} at byte {place}") from None
