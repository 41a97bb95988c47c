"""Rooms of the package in which faults are planted, each with the folders of its tests."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "src/phonograph"
_IS_FOR_GPUS = re.compile(r"^pytestmark = .*\bmark\.gpu\b", re.MULTILINE)


@dataclass(frozen=True)
class Room:
    """Sources below the package, and folders below `tests`."""

    sources: tuple[str, ...]
    tests: tuple[str, ...]


ROOMS = {
    "scheduling": Room(("scheduling",), ("scheduler",)),
    "kv_cache": Room(("kv_cache",), ("cache", "scheduler")),
    "graphs": Room(("graphs",), ("graphs",)),
    "runner": Room(("runner",), ("engine",)),
    "engine": Room(("engine",), ("engine",)),
    "sampling": Room(("sampling",), ("sampling",)),
    "text": Room(("text",), ("engine",)),
    "structured": Room(("structured",), ("structured", "sampling")),
    "models": Room(("models",), ("models",)),
    "attention": Room(("attention",), ("attention",)),
    "torch kernels": Room(("kernels/torch",), ("kernels", "attention", "sampling", "models")),
    "plans": Room(
        (
            *("kernels/triton/step", "kernels/triton/attention/decode_plan.py"),
            *("kernels/triton/attention/prefill_plan.py", "kernels/triton/attention/page_indices.py"),
            "kernels/triton/attention/split_batch.py",
        ),
        ("kernels", "attention"),
    ),
    "http": Room(("server/http",), ("server",)),
}
ALL = Room((), tuple({folder for room in ROOMS.values() for folder in room.tests}))


def sources_of(root: Path, room: str) -> list[str]:
    """Return the sources of a room, from the root of the repository."""
    places = [root / PACKAGE / name for name in ROOMS[room].sources]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("*.py")))]
    return [str(file.relative_to(root)) for file in files if file.read_text().strip()]


def all_tests(root: Path) -> list[str]:
    """Return the test modules; those that are marked `gpu` as a whole are left out."""
    files = sorted((root / "tests").rglob("test_*.py"))
    return [str(file.relative_to(root)) for file in files if not _IS_FOR_GPUS.search(file.read_text())]


def own_tests(root: Path, room: str, source: str) -> list[str]:
    """Return the test modules of a source: those of its room, and those of other rooms that name it."""
    name = ".".join(Path(source).relative_to("src").with_suffix("").parts)
    own, others = ({f"tests/{one}" for one in some.tests} for some in (ROOMS[room], ALL))
    found: list[str] = []
    for module in all_tests(root):
        folder = str(Path(module).parent)
        if folder in own or (folder in others and re.search(rf"\b{re.escape(name)}\b", (root / module).read_text())):
            found.append(module)
    return found
