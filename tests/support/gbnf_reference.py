"""Random GBNF grammars, and the texts and prefixes of texts that they derive, from sets of strings alone."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class Node:
    """A part of a grammar: a text, a set of characters, a rule's name, a sequence, a choice or a repetition."""

    kind: str
    text: str = ""
    parts: tuple[Node, ...] = ()
    low: int = 0
    high: int | None = None


Grammar = dict[str, Node]


def random_grammar(rng: random.Random, alphabet: str) -> Grammar:
    """Return up to four rules, of few characters: ambiguity, recursion, empty rules and endless ones are frequent."""
    names = ["root", "x", "some-rule", "y_2"][: rng.randint(1, 4)]
    bounds = [(0, 1), (0, None), (0, None), (1, None), (1, None), (2, 3), (0, 2), (2, 2), (3, None), (0, 0)]

    def repeated(node: Node) -> Node:
        low, high = rng.choice(bounds)
        return Node("repeat", "", (node,), low, high)

    def characters(limit: int) -> Node:
        return Node("class", "".join(sorted(rng.sample(alphabet, rng.randint(1, limit)))))

    def node(depth: int) -> Node:
        kind = rng.choice(["text", "text", "class", "rule", "rule", *["sequence", "choice", "repeat"] * (depth > 0)])
        if kind == "text":
            return Node(kind, "".join(rng.choices(alphabet, k=rng.choice([0, 1, 1, 1, 2, 3]))))
        if kind == "class":
            return characters(len(alphabet))
        if kind == "rule":
            return Node(kind, rng.choice(names))
        if kind == "repeat":
            return repeated(node(depth - 1))
        return Node(kind, "", tuple(node(depth - 1) for _ in range(rng.randint(1, 3))))

    def paths(depth: int) -> Node:
        """Alternatives of short sequences of small classes, many of which repeat and do not overlap."""

        def step() -> Node:
            if rng.random() < 0.1:
                return Node("rule", rng.choice(names))
            return rng.choice([repeated, lambda one: one])(characters(2 if len(alphabet) > 2 else 1))

        ways = [Node("sequence", "", tuple(step() for _ in range(rng.randint(1, 4)))) for _ in range(rng.randint(1, 3))]
        whole = Node("choice", "", tuple(ways))
        return repeated(whole) if rng.random() < 0.4 else whole

    maker = rng.choice([node, paths])
    return {name: maker(rng.choice([1, 2, 2, 3])) for name in names}


def languages(grammar: Grammar, alphabet: str, length: int) -> tuple[set[str], set[str]]:
    """Return the texts up to a length that the grammar derives, and the prefixes up to it of texts of any length."""
    texts: dict[str, set[str]] = {name: set() for name in grammar}
    prefixes: dict[str, set[str]] = {name: set() for name in grammar}

    def join(first: set[str], second: set[str]) -> set[str]:
        return {one + two for one, two in product(first, second) if len(one) + len(two) <= length}

    def both(node: Node) -> tuple[set[str], set[str]]:
        """Texts and prefixes as far as they are known; a prefix is empty where no text is known yet."""
        if node.kind == "rule":
            return texts[node.text], prefixes[node.text]
        if node.kind == "text":
            return {node.text} if len(node.text) <= length else set(), {
                node.text[:n] for n in range(len(node.text) + 1)
            }
        if node.kind == "class":
            return set(node.text), {"", *node.text}
        if node.kind == "choice":
            found = [both(part) for part in node.parts]
            return set().union(*(one for one, _ in found)), set().union(*(two for _, two in found))
        parts = list(node.parts)
        if node.kind == "repeat":
            # More rounds than characters add nothing but empty rounds.
            rounds = node.low + length + 1 if node.high is None else node.high
            part = both(node.parts[0])
            done, begun = ({""}, {""}) if node.low == 0 else (set(), set())
            whole, partial = {""}, {""}
            for index in range(1, min(rounds, node.low + length + 1) + 1):
                if not part[1]:
                    break
                partial = join(whole, part[1])
                whole = join(whole, part[0])
                begun |= partial
                if index >= node.low:
                    done |= whole
            return done, begun
        whole, begun = {""}, {""}
        for part in map(both, parts):
            if not part[1]:
                return set(), set()
            begun |= join(whole, part[1])
            whole = join(whole, part[0])
        return whole, begun

    while True:
        before = sum(map(len, [*texts.values(), *prefixes.values()]))
        for name, node in grammar.items():
            new_texts, new_prefixes = both(node)
            texts[name] = texts[name] | new_texts
            prefixes[name] = prefixes[name] | new_prefixes
        if sum(map(len, [*texts.values(), *prefixes.values()])) == before:
            return texts["root"], prefixes["root"]


def written(grammar: Grammar, rng: random.Random, alphabet: str) -> str:
    """Write a grammar as GBNF, with spaces, line breaks, comments and escapes where they may be."""

    def space() -> str:
        return rng.choice([" ", " ", " ", "  ", "\n  ", ' # "note" ::= (\n\t'])

    def character(one: str, special: str) -> str:
        forms = [rf"\U{ord(one):08X}", *[rf"\u{ord(one):04x}"] * (ord(one) < 65_536)]
        forms += [rf"\x{ord(one):02x}"] * (ord(one) < 256) + ["\\n" if one == "\n" else one] * 5
        return "\\" + one if one in special else rng.choice(forms)

    def write(node: Node) -> str:
        if node.kind == "rule":
            return node.text
        if node.kind == "text":
            text = "".join(character(one, '"\\') for one in node.text)
            return f'"{text}"' if text else rng.choice(['""', ""])
        if node.kind == "class":
            inside, outside = node.text, "".join(one for one in alphabet if one not in node.text)
            if not outside and rng.random() < 0.5:
                return "."
            if outside.isascii() and outside and rng.random() < 0.4:
                return "[^" + "".join(character(one, "]\\^-") for one in outside) + "]"
            return "[" + "".join(character(one, "]\\^-") for one in inside) + "]"
        if node.kind == "repeat":
            counts = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((node.low, node.high))
            high = "" if node.low == node.high else f", {'' if node.high is None else node.high}"
            part = write(node.parts[0])
            if not part or node.parts[0].kind == "repeat" or rng.random() < 0.5:
                part = f"({part})"
            return f"{part}{counts or f'{{{node.low}{high}}}'}"
        joint = f"{space()}|{space()}" if node.kind == "choice" else space()
        return f"({space()}{joint.join(map(write, node.parts))})"

    return "\n".join(f"{name} ::={space()}{write(node)}" for name, node in grammar.items()) + rng.choice(["", "\n"])
