"""Conversion of GBNF, llama.cpp's grammar format, to an equivalent grammar in llguidance's Lark.

llguidance matches lexemes greedily. UTF-8 is prefix-free, so a lexeme of one character cannot be extended to another.
The conversion makes each terminal such a lexeme and leaves the rest to rules, whose alternatives the Earley parser
follows in parallel. Repeated classes become longer lexemes where the language stays the same (`runs.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from phonograph.errors import quoted
from phonograph.structured.runs import LarkItem, Rules, deriving, with_runs

MAX_COUNT = 1_000_000
"""Largest count of a repetition."""
_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n\r]*)+) |(?P<rule>[\w-]+)\s*::= |(?P<name>[\w-]+) |(?P<or>\|) |(?P<open>\() |(?P<close>\))
    |"(?P<literal>(?:[^"\\\n\r]|\\.)*)" |(?P<any>\.) |\[(?P<not>\^?)(?P<class>(?:[^\]\\\n\r]|\\.)*)\]
    |(?P<count>[*+?]|\{\s*(?P<low>\d{1,9})\s*(?P<comma>,?)\s*(?P<high>\d{0,9})\s*\})""",
    re.VERBOSE | re.ASCII,
)
_CHARACTER = re.compile(
    r"\\(?:x([\da-fA-F]{2})|u([\da-fA-F]{4})|U([\da-fA-F]{8})|([nrt]|[^\w\s]))|([^\\])|(.+)", re.DOTALL | re.ASCII
)
_CONTROL = {"n": "\n", "r": "\r", "t": "\t"}
_COUNTS = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def lark_from_gbnf(source: str) -> str:
    """Return a Lark grammar of exactly the texts that a GBNF grammar derives from its rule `root`.

    Raises:
        ValueError: the text is not GBNF, a rule is missing, or `root` derives no text. The message names the line.
    """
    rules = with_runs(_finite(_parse(source)))
    names = {name: f"r{index}" for index, name in enumerate(rules)}
    lines = [f"start: {names['root']}"]
    for name, alternatives in rules.items():
        texts = (" ".join(_lark(item, names.get(item.symbol, item.symbol)) for item in items) for items in alternatives)
        lines.append(f"{names[name]}: {' | '.join(texts)}")
    return "\n".join(lines)


def _lark(item: LarkItem, symbol: str) -> str:
    return symbol if item[1:] == (1, 1) else f"{symbol}{{{item.low},{'' if item.high is None else item.high}}}"


def _finite(rules: Rules) -> Rules:
    """Drop rules that derive no text, so that each prefix that the parser accepts can be completed."""
    finite = deriving(rules, empty=False)
    if "root" not in finite:
        raise ValueError("line 1: the rule 'root' derives no text, because its recursion has no end")
    endless = rules.keys() - finite
    return {
        name: [
            [item for item in items if item.symbol not in endless]
            for items in rules[name]
            if not any(item.low and item.symbol in endless for item in items)
        ]
        for name in rules
        if name in finite
    }


def _parse(source: str) -> Rules:
    """Parse the rules. A group, a literal or a repeated repetition becomes a rule whose name GBNF cannot spell."""
    rules: Rules = {}
    uses = {"root": 1}
    stack: list[list[list[LarkItem]]] = []
    position, line = 0, 1
    try:
        while position < len(source):
            token = _TOKEN.match(source, position)
            if token is None:
                raise ValueError(f"cannot read {quoted(source[position : position + 30])}")
            _take(token, f"{position}:", rules, stack)
            if token["name"]:
                uses.setdefault(token["name"], line)
            position = token.end()
            line += token[0].count("\n")
        if len(stack) > 1:
            raise ValueError("a ( is not closed")
        if missing := [name for name in uses if name not in rules]:
            line = uses[missing[0]]
            raise ValueError(f"there is no rule {quoted(missing[0])}")
    except ValueError as error:
        raise ValueError(f"line {line}: {error}") from None
    return rules


def _take(token: re.Match[str], place: str, rules: Rules, stack: list[list[list[LarkItem]]]) -> None:
    """Add a token to the rules. The stack has the alternatives of the rule and of its open groups."""
    kind, text = token.lastgroup, token[0]
    if kind == "space":
        return
    if kind == "rule":
        if len(stack) > 1:
            raise ValueError(f"a ( is not closed before the rule {quoted(token['rule'])}")
        if token["rule"] in rules:
            raise ValueError(f"the rule {quoted(token['rule'])} is defined twice")
        rules[token["rule"]] = [[]]
        stack[:] = [rules[token["rule"]]]
        return
    if not stack:
        raise ValueError(f"{quoted(text)} comes before the first rule; a rule begins with `name ::=`")
    items = stack[-1][-1]
    if kind == "or":
        stack[-1].append([])
    elif kind == "open":
        items.append(LarkItem(place))
        rules[place] = [[]]
        stack.append(rules[place])
    elif kind == "close":
        if len(stack) == 1:
            raise ValueError("a ) closes no (")
        stack.pop()
    elif kind == "name":
        items.append(LarkItem(text))
    elif kind == "any":
        items.append(LarkItem(r"/[\u{0}-\u{10ffff}]/"))
    elif kind == "class":
        items.append(LarkItem(f"/[{token['not']}{''.join(_ranges(list(_characters(token['class'])), text))}]/"))
    elif kind == "literal":
        rules[place] = [[LarkItem(rf"/[\u{{{code:x}}}-\u{{{code:x}}}]/") for code, _ in _characters(token["literal"])]]
        items.append(LarkItem(place))
    elif not items:
        raise ValueError(f"{text} has nothing before it to repeat")
    else:
        low, high = _COUNTS.get(text, (int(token["low"] or 0), None if token["comma"] else int(token["low"] or 0)))
        high = int(token["high"]) if token["high"] else high
        if low > MAX_COUNT or not low <= (low if high is None else high) <= MAX_COUNT:
            raise ValueError(f"the counts of {text} must be in order and at most {MAX_COUNT}")
        item = items.pop()
        if item[1:] != (1, 1):
            rules[place] = [[item]]
            item = LarkItem(place)
        items += [] if high == 0 else [LarkItem(item.symbol, low, high)]


def _characters(text: str) -> Iterator[tuple[int, bool]]:
    """Yield each code point of a literal or class, and True if it was escaped."""
    for match in _CHARACTER.finditer(text):
        digits = match[1] or match[2] or match[3]
        if match[6]:
            raise ValueError(rf"unknown escape {quoted(match[6][:10])}; use \n \r \t \\ \" \xNN \uNNNN or \UNNNNNNNN")
        code = int(digits, 16) if digits else ord(match[5] or _CONTROL.get(match[4], match[4]))
        if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
            raise ValueError(f"U+{code:04X} is not a character")
        yield code, not match[5]


def _ranges(codes: list[tuple[int, bool]], text: str) -> Iterator[str]:
    """Yield the ranges of a character class in regular-expression syntax."""
    if not codes:
        raise ValueError(f"the class {text} is empty")
    index = 0
    while index < len(codes):
        is_range = codes[index + 1 : index + 2] == [(ord("-"), False)] and index + 2 < len(codes)
        low, high = codes[index][0], codes[index + 2 * is_range][0]
        if high < low:
            raise ValueError(f"the range {chr(low)}-{chr(high)} in {quoted(text)} is not in order")
        yield rf"\u{{{low:x}}}-\u{{{high:x}}}"
        index += 1 + 2 * is_range
