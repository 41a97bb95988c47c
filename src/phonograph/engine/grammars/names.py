r"""Names of additional properties, none of which is a name of `properties` in another spelling.

The library's own rules take names by the bytes that stand in the schema. So a name beyond ASCII may come again as an
additional one, with a value of the wrong schema; a name with a quote lets a bare quote through; and any name may come
again with a letter written as an escape (`"\u0061"`, `"a\/b"`).

Here they are written anew, character by character. While a known name may still come, a character is written as it is
or by its short escape; behind it anything goes. So names that leave all known ones by a control character without a
short escape (`\u0001`) cannot be written: narrower, and valid.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_KEY = re.compile(r'(\w+_addl_key)=\(\("\\"" (\1_\d+)\)\) \(=')
"""The rule of a name, and its body: a quote, and the rule of all that follows it."""
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|.)")
_END = r'("\"")'
_SHORT = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r", '"': '\\"', "\\": "\\\\", "/": "/"}
"""Characters that JSON writes as a backslash and one more, which stands here as in a class of the grammar."""


@dataclass(slots=True)
class _Node:
    """What known names go on with behind the same beginning; ends: one of them is complete."""

    ends: bool = False
    children: dict[str, _Node] = field(default_factory=dict["str", "_Node"])


def told_apart(grammar: str) -> str | None:
    """A grammar of a JSON schema, in the library's text, with other rules for names of additional properties.

    None where there are no such names beside those of `properties`. The text is to be compiled as it is: the library
    writes down what it has read, and reads some of it wrongly the second time.

    Raises:
        ValueError: the library has written such rules in another way than it was found to.
    """
    rules = dict(line.split(" ::= ", 1) for line in grammar.split("\n") if line)
    keys = [key for name, body in rules.items() if (key := _KEY.match(f"{name}={body}")) is not None]
    if not keys:
        return None
    for key in keys:
        names, replaced = _names(key[1], key[2], rules)
        root = _Node()
        for name in names:
            node = root
            for character in name:
                node = node.children.setdefault(character, _Node())
            node.ends = True
        for name in replaced:
            del rules[name]
        rules |= _written(root, replaced)
    text = "".join(f"{name} ::= {body}\n" for name, body in rules.items())
    # The library writes two digits and reads as many as come: "éb" would be another character.
    return _ESCAPE.sub(lambda escape: f"\\U000000{escape[1]}" if escape[1] else escape[0], text)


def _names(key: str, first: str, rules: dict[str, str]) -> tuple[list[str], list[str]]:
    """The names that the library's rules of a key leave out, and what these rules are called, the first one first."""
    child = re.compile(rf'\("((?:\\.|[^"\\])+)" ({key}_\d+)\)')
    names, found, pending = list[str](), list[str](), [(first, b"")]
    while pending:
        rule, beginning = pending.pop()
        body = rules.get(rule, "")
        following = [(text.encode().decode("unicode_escape"), name) for text, name in child.findall(body)]
        if "basic_string_sub" not in body or any(len(byte) != 1 for byte, _ in following):
            raise ValueError(f"the rule {rule} of additional names is not as it was expected: {body!r}")
        found.append(rule)
        if _END not in body:
            names.append(beginning.decode())
        pending += [(name, beginning + byte.encode("latin-1")) for byte, name in following]
    return names, found


def _written(root: _Node, names: list[str]) -> dict[str, str]:
    """The new rules by name; `names` are those of the old ones, of which there were as many at least, one a byte."""
    rules: dict[str, str] = {}
    free = iter(names)
    pending = [(root, next(free))]
    while pending:
        node, rule = pending.pop()
        others = "".join(short for character, short in _SHORT.items() if character not in node.children)
        # In this order: the library mistakes classes of more than ASCII whose characters do not ascend.
        special = "".join(map(_escaped, sorted({'"', "\\", *filter(_is_plain, node.children)})))
        ways = [] if node.ends else [_END]
        ways.append(rf"([^\0-\x1f{special}] basic_string_sub)")
        if not node.children:
            ways.append(r'("\\" basic_escape basic_string_sub)')
        elif others:
            ways.append(rf'("\\" [{others}] basic_string_sub)')
        for character, child in node.children.items():
            short = _SHORT.get(character)
            spelled = [f'"{_escaped(character)}"'] if _is_plain(character) else []
            spelled += [] if short is None else [rf'"\\" [{short}]']
            if spelled:
                following = next(free)
                ways += [f"({one} {following})" for one in spelled]
                pending.append((child, following))
        rules[rule] = f"({' | '.join(ways)})"
    return rules


def _is_plain(character: str) -> bool:
    """Whether JSON has it as it is, too."""
    return character >= " " and character not in '"\\'


def _escaped(character: str) -> str:
    return f"\\U{ord(character):08x}"
