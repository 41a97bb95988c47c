"""Grammar of text with JSON after some triggers, such as an answer with calls, in the library's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from phonograph.core.grammar import GrammarError
from phonograph.structured.call_arguments import ArgumentRules

_TEXT = r"/(.|\n)*/"


def lark_of_tags(tags: Mapping[str, Any], arguments: ArgumentRules) -> str:
    """Return the grammar of structural tags.

    Text is free up to the first trigger. A trigger ends its lexeme at once (`lazy`), so that no text contains one; a
    trigger that is a special token is none of the text's. The output continues as one of the structures that begin with
    the trigger, and then is free again.

    The key `layout` is that of `phonograph.text.formats.call_layouts`: structures may be the items of a list, with
    which the output ends, and without a trigger the output is such a list, or text that does not begin like one.

    Args:
        tags: checked `StructuredOutputs.structural_tag`.
        arguments: writes the rules of schemas.
    """
    writer = _TagWriter(tags.get("layout", {}), arguments)
    rules = writer.triggered(tags) if tags["triggers"] else writer.whole(tags["structures"])
    return "\n".join([*rules, f"TEXT: {_TEXT}", *arguments.lines])


class _TagWriter:
    def __init__(self, layout: Mapping[str, Any], arguments: ArgumentRules) -> None:
        self._layout = layout
        self._arguments = arguments
        self._tokens: dict[str, int] = layout.get("tokens", {})
        self._separator: str | None = layout.get("separator")

    def triggered(self, tags: Mapping[str, Any]) -> list[str]:
        """Return the rules of text with triggers."""
        bodies: dict[str, list[str]] = {trigger: [] for trigger in tags["triggers"]}
        if self._separator is not None:
            items = self._items(tags["structures"])
            bodies = {trigger: [items] for trigger in bodies}
        else:
            for structure in tags["structures"]:
                trigger = next(one for one in bodies if structure["begin"].startswith(one))
                bodies[trigger].append(self._item(structure, structure["begin"].removeprefix(trigger)))
        used = {trigger: found for trigger, found in bodies.items() if found}
        names = [f"tag_{index}" for index in range(len(used))]
        tags_rule = " | ".join(names)
        # Text after a list would be read as more of its items.
        rules = [f"start: ({tags_rule})* TEXT" if self._separator is None else f"start: {tags_rule} | TEXT"]
        for name, (trigger, found) in zip(names, used.items(), strict=True):
            if trigger in self._tokens:
                rules.append(f"{name}: TEXT <[{self._tokens[trigger]}]> ({' | '.join(found)})")
            else:
                rules.append(f"{name}_trigger[lazy]: TEXT {self._literal(trigger)}")
                rules.append(f"{name}: {name}_trigger ({' | '.join(found)})")
        return rules

    def whole(self, structures: Iterable[Mapping[str, Any]]) -> list[str]:
        """Return the rules of an answer that is a list of calls, or other text."""
        around = "".join(f"<[{token_id}]>? " for token_id in self._layout.get("around", ()))
        return [
            f"start: {around}{self._items(structures)} {around}| OTHER",
            f"OTHER: {_TEXT} & ~/{self._layout['unlike']}(.|\\n)*/",
        ]

    def _items(self, structures: Iterable[Mapping[str, Any]]) -> str:
        """Return a part of a rule: the calls of a list. Its texts are one lexeme each, which no other one cuts."""
        first: list[str] = []
        further: list[str] = []
        for structure in structures:
            first.append(self._item(structure, self._layout["opening"] + structure["begin"]))
            further.append(self._item(structure, f"{self._separator}{structure['begin']}"))
        return f"({' | '.join(first)}) ({' | '.join(further)})* {self._literal(self._layout['closing'])}"

    def _item(self, structure: Mapping[str, Any], begin: str) -> str:
        try:
            rule = self._arguments.rule(structure)
        except GrammarError as error:
            raise GrammarError(f"after {structure['begin']!r}: {error}") from None
        except (AttributeError, TypeError) as error:
            problem = f"a keyword of the schema has a value of a wrong type ({error})"
            raise GrammarError(f"after {structure['begin']!r}: {problem}") from None
        return " ".join(filter(None, (self._literal(begin), rule, self._literal(structure.get("end", "")))))

    def _literal(self, text: str) -> str:
        """Return a text whose special tokens are their ids."""
        for name, token_id in self._tokens.items():
            before, marker, after = text.partition(name)
            if marker:
                return f"{self._literal(before)} <[{token_id}]> {self._literal(after)}".strip()
        return lark_text(text)


def lark_text(text: str) -> str:
    """Return a text as a string of Lark, or nothing for no text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") if text else ""
