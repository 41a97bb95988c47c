"""Grammar of text with JSON after some triggers, such as an answer with calls, in the library's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any


def lark_of_tags(tags: Mapping[str, Any], json_rule: Callable[[Mapping[str, Any] | bool], str]) -> str:
    """Return the grammar of structural tags.

    Text is free up to the first trigger. A trigger ends its lexeme at once (`lazy`), so that no text contains one. The
    output continues as one of the structures that begin with the trigger, and then is free again.

    Args:
        tags: checked `StructuredOutputs.structural_tag`.
        json_rule: returns a schema as a part of a rule.
    """
    structures: dict[str, list[str]] = {}
    for structure in tags["structures"]:
        begin: str = structure["begin"]
        trigger = next(one for one in tags["triggers"] if begin.startswith(one))
        parts = [_text(begin.removeprefix(trigger)), json_rule(structure["schema"]), _text(structure.get("end", ""))]
        structures.setdefault(trigger, []).append(" ".join(filter(None, parts)))
    names = [f"tag_{index}" for index in range(len(structures))]
    rules = [f"start: ({' | '.join(names)})* TEXT", r"TEXT: /(.|\n)*/"]
    for name, (trigger, bodies) in zip(names, structures.items(), strict=True):
        rules.append(f"{name}_trigger[lazy]: TEXT {_text(trigger)}")
        rules.append(f"{name}: {name}_trigger ({' | '.join(bodies)})")
    return "\n".join(rules)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
