"""Rules of a grammar over characters, and repeated classes that llguidance may match as long lexemes.

llguidance matches lexemes greedily. A lexeme of one character cannot be extended to another, because UTF-8 is
prefix-free. Grammars of such lexemes are exact, but cost a parser step for each character of a token. A run is a
repeated class as one lexeme. A set of runs is safe if each text has a derivation in which all runs are as long as its
characters allow. For all sets of terminals that may come next after some text:

- No terminal beside a run begins with one of the run's characters, unless it is the same run.
- No terminal after the run begins so either, unless the run ends at its greatest length. A run may follow itself if
  both are rounds of one loop, because one longer run derives the same text.

Characters count as equal if their first bytes are. The sets are those of the automaton of terminals that follow each
other. It ignores the callers of a rule, so its sets include those of the parser.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

MAX_WORK = 200_000
"""Steps of the search for sets, about 0.1 s. A grammar that needs more gets no runs."""


class LarkItem(NamedTuple):
    """A rule's name or a character class in Lark's syntax, with its repetition counts."""

    symbol: str
    low: int = 1
    high: int | None = 1


Rules = dict[str, list[list[LarkItem]]]
"""Alternatives of each rule by its name."""
Place = tuple[str, int, int]
"""Rule, alternative and item."""


def deriving(rules: Rules, *, empty: bool) -> set[str]:
    """Return the rules that derive a text, or with `empty` the empty text."""
    found: set[str] = set()
    todo: list[str] = []
    waiting: dict[str, list[tuple[str, set[str]]]] = defaultdict(list)
    for name, alternatives in rules.items():
        for items in alternatives:
            needs = {item.symbol for item in items if item.low and (empty or item.symbol in rules)}
            for need in needs:
                waiting[need].append((name, needs))
            todo += [] if needs else [name]
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            for user, needs in waiting[name]:
                needs.discard(name)
                todo += [] if needs else [user]
    return found


def with_runs(rules: Rules) -> Rules:
    """Return rules of the same language, in which a repeated class is one item where that is safe."""
    search = _Search(_with_loops(_without_recursion(rules)))
    try:
        while unsafe := search.unsafe_runs():
            for place in unsafe:
                del search.runs[place]
    except TimeoutError:
        search.runs.clear()
    return search.result()


def _without_recursion(rules: Rules) -> Rules:
    """Rewrite `x: head x | base | x tail` as `x: head* base tail*`: right recursion costs more with each round."""
    made: Rules = {}
    for name, alternatives in rules.items():
        itself = LarkItem(name)
        tails = [items[1:] for items in alternatives if items[:1] == [itself] and len(items) > 1]
        heads = [items[:-1] for items in alternatives if items[-1:] == [itself] != items[:1]]
        base = [items for items in alternatives if itself not in (*items[:1], *items[-1:])]
        before, after = (
            [LarkItem(f"{name}{side}", 0, None)] if parts else [] for side, parts in (("<", heads), (">", tails))
        )
        made[name] = [[*before, *items, *after] for items in base]
        made |= {f"{name}<": heads} if heads else {}
        made |= {f"{name}>": tails} if tails else {}
    return made


def _with_loops(rules: Rules) -> Rules:
    """Give each repeated rule a copy for the repetition, with rules that are only alternatives inlined."""
    made: Rules = {}
    pending = dict(rules)
    while pending:
        name, alternatives = pending.popitem()
        made[name] = [list(items) for items in alternatives]
        for items in made[name]:
            for index, item in enumerate(items):
                if item.symbol in rules and item.high is None and item.low < 2:
                    loop = f"{item.symbol}*"
                    items[index] = item._replace(symbol=loop)
                    if loop not in made:
                        pending[loop] = list(_choices(rules, item.symbol))
    return made


def _choices(rules: Rules, name: str) -> Iterator[list[LarkItem]]:
    seen, todo = {name}, [name]
    while todo:
        for items in rules[todo.pop()]:
            if len(items) > 1 or not items or items[0][1:] != (1, 1) or items[0].symbol not in rules:
                yield items
            elif items[0].symbol not in seen:
                seen.add(items[0].symbol)
                todo.append(items[0].symbol)


class _Search:
    """Search for unsafe runs. `runs` has the classes that are candidates."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._work = 0
        self._nullable = deriving(rules, empty=True)
        self._sites: dict[str, list[Place]] = defaultdict(list)
        self._leads: dict[Place, int] = {}
        self._firsts: dict[str, set[Place]] = {}
        self.runs: dict[Place, LarkItem] = {}
        for name, alternatives in rules.items():
            for number, items in enumerate(alternatives):
                for index, item in enumerate(items):
                    place = name, number, index
                    if item.symbol in rules:
                        self._sites[item.symbol].append(place)
                        continue
                    self._leads[place] = _lead_bytes(item.symbol)
                    if _is_round(place, items):
                        self.runs[place] = LarkItem(item.symbol, 1, None)
                    elif item.high != 1:
                        self.runs[place] = item._replace(low=max(item.low, 1))
        masks = set(self._leads.values())
        self._bytes = {tuple(mask >> byte & 1 for mask in masks): byte for byte in range(256)}.values()

    def result(self) -> Rules:
        rules = {name: [list(items) for items in alternatives] for name, alternatives in self._rules.items()}
        for (name, number, index), run in self.runs.items():
            item = rules[name][number][index]
            counts = "+" if run[1:] == (1, None) else f"{{{run.low},{'' if run.high is None else run.high}}}"
            rules[name][number][index] = LarkItem(f"{run.symbol[:-1]}{counts}/", min(item.low, 1))
        return rules

    def unsafe_runs(self) -> set[Place]:
        """Return the runs that a set of terminals makes unsafe.

        Raises:
            TimeoutError: there are too many sets.
        """
        unsafe: set[Place] = set()
        follows: dict[Place, set[Place]] = {}
        pending = [frozenset(self._first("root"))] if self.runs else []
        seen = set(pending)
        while pending:
            places = pending.pop()
            for group in {
                frozenset(place for place in places if self._leads[place] >> byte & 1) for byte in self._bytes
            }:
                after: set[Place] = set()
                for place in group:
                    if place not in follows:
                        follows[place] = self._follow(place)
                    after |= follows[place]
                leads = 0
                for place in after:
                    leads |= self._leads[place]
                lexemes = {self.runs.get(place, place) for place in group}
                for place in group & self.runs.keys():
                    run = self.runs[place]
                    if len(lexemes) > 1 or (run.low != run.high and leads & self._leads[place]):
                        unsafe.add(place)
                self._spend(len(places) + len(after))
                if (following := frozenset(after)) not in seen:
                    seen.add(following)
                    pending.append(following)
        return unsafe

    def _follow(self, place: Place) -> set[Place]:
        """Return the terminals after one, without the next round after a run that is a round itself."""
        item = self._rules[place[0]][place[1]][place[2]]
        found = {place} if item.high != 1 and place not in self.runs else set[Place]()
        is_round = place in self.runs and _is_round(place, self._rules[place[0]][place[1]])
        pending, seen = [place], {place}
        while pending:
            name, number, index = pending.pop()
            if not self._starts(found, name, number, index + 1):
                continue
            for site in self._sites[name]:
                if self._rules[site[0]][site[1]][site[2]].high != 1:
                    for other in range(len(self._rules[name])):
                        if not is_round or other != number:
                            self._starts(found, name, other)
                if site not in seen:
                    seen.add(site)
                    pending.append(site)
            is_round = False
        return found

    def _starts(self, found: set[Place], name: str, number: int, index: int = 0) -> bool:
        """Add the terminals that may come first from an item on; return True if there may be none."""
        items = self._rules[name][number]
        for later in range(index, len(items)):
            symbol = items[later].symbol
            first = self._first(symbol) if symbol in self._rules else {(name, number, later)}
            self._spend(len(first))
            found |= first
            if items[later].low and symbol not in self._nullable:
                return False
        return True

    def _first(self, name: str) -> set[Place]:
        if name not in self._firsts:
            found: set[Place] = set()
            pending, seen = [name], {name}
            while pending:
                rule = pending.pop()
                for number, items in enumerate(self._rules[rule]):
                    for index, item in enumerate(items):
                        self._spend(1)
                        if item.symbol not in self._rules:
                            found.add((rule, number, index))
                        elif item.symbol not in seen:
                            seen.add(item.symbol)
                            pending.append(item.symbol)
                        if item.low and item.symbol not in self._nullable:
                            break
            self._firsts[name] = found
        return self._firsts[name]

    def _spend(self, work: int) -> None:
        self._work += work
        if self._work > MAX_WORK:
            raise TimeoutError


def _is_round(place: Place, items: list[LarkItem]) -> bool:
    """Return True for a class that is a whole alternative of a loop, so that two of them equal one."""
    return (
        place[0].endswith("*")
        and len(items) == 1
        and ((items[0].high is None and items[0].low < 2) or items[0][1:] == (1, 1))
    )


def _lead_bytes(symbol: str) -> int:
    """Return a set of bytes as bits: at least those that begin a character of a class."""
    negated = symbol.startswith("/[^")
    bits = 0
    for low, high in re.findall(r"{(\w+)}-\\u{(\w+)}", symbol):
        # Each lead byte beyond ASCII begins many characters, so a negated class keeps them all.
        first, last = int(low, 16), min(int(high, 16), 0x7F if negated else 0x10FFFF)
        if first <= last:
            bits |= (2 << chr(last).encode()[0]) - (1 << chr(first).encode()[0])
    return bits ^ ((1 << 256) - 1) if negated else bits
