"""Names of the parts of a GGUF file, as llama.cpp gives them: NAME-00001-of-00003.gguf."""

from __future__ import annotations

import re
from pathlib import Path

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")


def parts_of(path: Path) -> list[Path]:
    """Return the paths of all parts of the file that `path` is one of; the path itself without such a name."""
    match = _PART.search(path.name)
    if match is None:
        return [path]
    start, end = path.name[: match.start()], path.name[match.end() :]
    count = int(match[2])
    return [path.with_name(f"{start}-{number:05d}-of-{count:05d}{end}") for number in range(1, count + 1)]


def without_part(name: str) -> str:
    """Return the name of a file without the number of its part."""
    return _PART.sub("", name)
