"""Random regular expressions and grammars that try to cost much."""

from __future__ import annotations

import random

_ATOMS = ("a", "b", "ab", ".", r"\d", r"\w", r"\s", "[a-z]", "[^a]", r"\p{L}", r"\p{Lu}", "é", r"\.", "[0-9a-f]", "日")
_COUNTS = ("*", "+", "?", "*", "{%d}", "{%d,}", "{0,%d}", "{%d,%d}")


def _count(rng: random.Random) -> str:
    form = rng.choice(_COUNTS)
    low = int(rng.choice([10, 100, 3000]) ** rng.random())
    numbers = (low, low + int(1000 ** rng.random()))[: form.count("%d")]
    return form % numbers


def random_regex(rng: random.Random, depth: int, *, anchored: bool = False) -> str:
    """Return an expression of nested repetitions, alternatives and classes."""
    if anchored:
        return f"^{random_regex(rng, depth)}$"
    if depth <= 0:
        return "".join(rng.choices(_ATOMS, k=rng.randint(1, 3)))
    kind = rng.choice(["repeat", "repeat", "choice", "sequence", "blowup", "flags"])
    if kind == "repeat":
        return f"({random_regex(rng, depth - 1)}){_count(rng)}"
    if kind == "choice":
        return "(" + "|".join(random_regex(rng, depth - 1) for _ in range(int(30 ** rng.random()) + 1)) + ")"
    if kind == "blowup":
        # Its deterministic automaton has 2^n states.
        words = [random_regex(rng, 0) for _ in range(3)]
        return f"({words[0]}|{words[1]})*{words[2]}({random_regex(rng, depth - 1)}){_count(rng)}"
    if kind == "flags":
        return f"(?i:{random_regex(rng, depth - 1)})"
    return "".join(random_regex(rng, depth - 1) for _ in range(rng.randint(1, 6)))


def random_gbnf(rng: random.Random) -> str:
    """Return a GBNF grammar. Ambiguity, empty rules, recursion and large counts are frequent."""
    names = ["root", *(f"x{index}" for index in range(int(40 ** rng.random())))]
    return "\n".join(f"{name} ::= {_body(rng, name, names, gbnf=True)}" for name in names)


def random_lark(rng: random.Random) -> str:
    """Return a grammar in llguidance's Lark, with terminals that are regular expressions."""
    names = ["start", *(f"x{index}" for index in range(int(20 ** rng.random())))]
    terminals = [f"T{index}" for index in range(rng.randint(1, 6))]
    lines = [f"{name}: {_body(rng, name, names + terminals, gbnf=False)}" for name in names]
    lines += [f"{name}: /{random_regex(rng, rng.randint(0, 3)).replace('/', '')}/" for name in terminals]
    return "\n".join(lines)


def _body(rng: random.Random, name: str, names: list[str], *, gbnf: bool) -> str:
    if name != names[0]:
        return _expression(rng, names, rng.randint(1, 3), gbnf=gbnf)
    parts = [_expression(rng, names, rng.randint(1, 3), gbnf=gbnf) for _ in range(rng.randint(1, 4))]
    return rng.choice([" ", " | "]).join(parts)


def _expression(rng: random.Random, names: list[str], depth: int, *, gbnf: bool) -> str:
    kind = rng.choice(["literal", "class", "name", "name", *["sequence", "choice", "repeat"] * (2 if depth > 0 else 0)])
    if kind == "literal":
        return f'"{rng.choice(["a", "b", "ab", "ba", "aab", "x" * int(300 ** rng.random()), ""])}"'
    if kind == "class":
        text = rng.choice(["[ab]", "[a-z]", "[^a]", "[^b]", "[0-9]"])
        return text if gbnf else f"/{text}/"
    if kind == "name":
        return rng.choice(names)
    if kind == "repeat":
        return f"({_expression(rng, names, depth - 1, gbnf=gbnf)}){_count(rng)}"
    parts = [_expression(rng, names, depth - 1, gbnf=gbnf) for _ in range(int(6 ** rng.random()) + 1)]
    return f"({(' | ' if kind == 'choice' else ' ').join(parts)})"
