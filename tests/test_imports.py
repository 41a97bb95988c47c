"""Direction of imports and sizes of rooms, over every module.

Lazy imports, imports for types and names of modules in strings are included.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "phonograph"

# Who may import whom, lowest first. A room is the folder below `phonograph`; `graphs.modes` is apart from `graphs`
# because it is a vocabulary that others speak, and ROOT is the package's own file.
ROOT = "(root)"
COMMON = frozenset({"errors", "graphs.modes", "core", "config", "demo"})
BELOW_RUNNER = COMMON | {"files", "kernels", "graphs", "attention", "models", "sampling"}
BELOW_ENGINE = BELOW_RUNNER | {"kv_cache", "speculation", "scheduling", "runner", "text", "structured"}
ALLOWED: dict[str, frozenset[str]] = {
    "errors": frozenset(),
    "demo": frozenset(),
    "graphs.modes": frozenset({"errors"}),
    "core": frozenset({"errors"}),
    "config": frozenset({"errors", "graphs.modes"}),
    "files": frozenset({"errors", "demo"}),
    "kernels": COMMON,
    "graphs": COMMON,
    "attention": COMMON | {"kernels"},
    "models": COMMON - {"demo"} | {"files", "graphs", "kernels"},
    "sampling": COMMON | {"kernels"},
    "text": COMMON | {"files"},
    "structured": COMMON | {"text"},
    "kv_cache": COMMON,
    "scheduling": COMMON | {"kv_cache"},
    "speculation": COMMON | {"scheduling"},
    "runner": BELOW_RUNNER | {"speculation"},
    "engine": BELOW_ENGINE,
    "server": BELOW_ENGINE - {"models"} | {"engine", ROOT},
    "bench": BELOW_ENGINE | {"engine", ROOT},
    "testing": BELOW_RUNNER | {"engine"},
    "cli": BELOW_ENGINE | {"engine", "server", "bench", ROOT},
    "__main__": frozenset({"cli"}),
    ROOT: BELOW_ENGINE | {"engine"},
}
SERVER_PACKAGES = frozenset({"fastapi", "httptools", "prometheus_client", "starlette", "uvicorn", "uvloop", "zmq"})
"""Packages that only an extra installs, and that only the server may import, except zmq."""
PUBLISHER = "phonograph.engine.process.kv_publisher"
"""The publisher of KV events: only it may import zmq."""
BENCH_PACKAGES = frozenset({"httptools", "uvloop"})
"""Server packages that the extra `bench` installs too, for the client that loads servers."""
WITHOUT_TORCH = COMMON | {"files", "kv_cache", "scheduling", "structured"}

MOST_ENTRIES = 15
"""Modules and folders of one folder, without `__init__.py`. The entries of the package's own folder are the rooms."""
MOST_LINES = 400
MOST_ROOMS, MOST_ARROWS = 24, 100
PROTOCOLS = {
    "__init__.py": "",
    "__main__.py": "",
    "backend.py": "attention/",
    "capabilities.py": "attention/",
    "causal_conv.py": "kernels/",
    "decode.py": "kernels/",
    "expert_products.py": "kernels/",
    "gated_delta.py": "kernels/",
    "layers.py": "kernels/",
    "mamba2.py": "kernels/",
    "prefill.py": "kernels/",
    "route.py": "kernels/",
}
"""Names that several modules have because they implement one protocol, and below which folder: the contract of
attention and its backends, and two sets of kernels with the same functions."""

MODULE_NAME = re.compile(r"(phonograph(?:\.\w+)+)(?::\w+)?")


def modules(package: Path) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found: dict[str, Path] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def part_of(module: str) -> str:
    names = module.split(".")[1:]
    if names[:2] == ["graphs", "modes"]:
        return "graphs.modes"
    return names[0] if names else ROOT


def room_of(module: str) -> str:
    """Return the folder below the package, or the module beside the folders."""
    return (module.split(".")[1:] or [ROOT])[0]


def imported(tree: ast.AST, module: str, is_package: bool, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that a module imports, anywhere in it; names of our modules in strings count."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = node.module or ""
            if node.level:
                here = module.split(".")
                package = here[: len(here) - node.level + is_package]
                origin = ".".join([*package, origin] if origin else package)
            for alias in node.names:
                full = f"{origin}.{alias.name}"
                yield node.lineno, full if full in known else origin
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = MODULE_NAME.fullmatch(node.value)
            if match and match[1] in known:
                yield node.lineno, match[1]


def violations(package: Path) -> list[str]:
    """Every import that goes the wrong way, as text."""
    found: list[str] = []
    known = modules(package)
    for module, path in known.items():
        part = part_of(module)
        if part not in ALLOWED:
            found.append(f"{module}: is in no layer; give {part!r} its place in this test")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in imported(tree, module, path.name == "__init__.py", set(known)):
            where = f"{path.relative_to(package)}:{line}"
            if name.split(".")[0] == "torch" and part in WITHOUT_TORCH:
                found.append(f"{where}: {part} must do without torch")
            package_name = name.split(".")[0]
            served = part == "server" or (part == "bench" and package_name in BENCH_PACKAGES)
            if package_name == "zmq":
                if module != PUBLISHER:
                    found.append(f"{where}: only the publisher may import {name}")
            elif package_name in SERVER_PACKAGES and not served:
                found.append(f"{where}: only server may import {name}")
            if name.split(".")[0] != "phonograph":
                continue
            other = part_of(name)
            if other != part and other not in ALLOWED[part]:
                found.append(f"{where}: {part} must not import {other} ({name})")
    return found


def test_the_package_imports_one_way() -> None:
    assert len(modules(PACKAGE)) > 10
    assert violations(PACKAGE) == []


def test_layers_have_no_cycle() -> None:
    done: set[str] = set()
    while len(done) < len(ALLOWED):
        ready = {part for part, below in ALLOWED.items() if part not in done and below - {part} <= done}
        assert ready, f"a cycle among {set(ALLOWED) - done}"
        done |= ready


def test_the_rooms_are_few_and_so_are_the_arrows_between_them() -> None:
    found = modules(PACKAGE)
    arrows = {
        (room_of(module), room_of(name))
        for module, path in found.items()
        for _, name in imported(ast.parse(path.read_text()), module, path.name == "__init__.py", set(found))
        if name.split(".")[0] == "phonograph"
    }
    arrows = {(room, other) for room, other in arrows if room != other}
    assert len({room_of(module) for module in found}) <= MOST_ROOMS
    assert len(arrows) <= MOST_ARROWS


def outgrown(package: Path) -> list[str]:
    """Folders with too many entries, modules with too many lines, and names that two modules have, as text."""
    paths = {path.relative_to(package): path for path in modules(package).values()}
    entries: dict[Path, set[str]] = {}
    for path in paths:
        for entry in (path, *path.parents[:-1]):
            entries.setdefault(entry.parent, set()).add(entry.name)
    del entries[Path()]
    found = [
        f"{folder}/: has {len(names - {'__init__.py'})} entries"
        for folder, names in entries.items()
        if len(names - {"__init__.py"}) > MOST_ENTRIES
    ]
    for name, path in paths.items():
        count = len(path.read_text().splitlines())
        if count > MOST_LINES and not name.is_relative_to("kernels/triton"):
            found.append(f"{name}: has {count} lines")
    counts = Counter(name.name for name in paths if not str(name).startswith(PROTOCOLS.get(name.name, str(package))))
    return found + [f"{name}: is the name of {count} modules" for name, count in counts.items() if count > 1]


def test_folders_and_modules_are_small_and_have_names_of_their_own() -> None:
    assert outgrown(PACKAGE) == []


def repeated_classes(package: Path) -> dict[str, list[str]]:
    """Return the names that several classes of the package have, each with the modules of the classes."""
    found: dict[str, list[str]] = {}
    for module, path in modules(package).items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    return {name: owners for name, owners in found.items() if len(owners) > 1}


def test_classes_have_names_of_their_own() -> None:
    assert repeated_classes(PACKAGE) == {}


def test_a_planted_repeated_class_is_found(tmp_path: Path) -> None:
    package = tmp_path / "phonograph"
    for name in ("graphs/tape.py", "text/tape_text.py"):
        (package / name).parent.mkdir(parents=True)
        (package / name).write_text("def make():\n    class Tape: ...\n")
    assert repeated_classes(package) == {"Tape": ["phonograph.graphs.tape", "phonograph.text.tape_text"]}


@pytest.mark.parametrize(
    ("files", "lines", "problem"),
    [
        ([f"graphs/part_{number}.py" for number in range(16)], 1, "graphs/: has 16 entries"),
        (["graphs/tape.py"], 401, "graphs/tape.py: has 401 lines"),
        (["graphs/chat.py", "cli/commands/chat.py"], 1, "chat.py: is the name of 2 modules"),
        (["graphs/backend.py", "cli/backend.py", "attention/backend.py"], 1, "backend.py: is the name of 2 modules"),
        (["kernels/triton/decode.py", "kernels/torch/decode.py", "kernels/__init__.py"], 1, None),
        (["kernels/triton/decode.py"], 500, None),
    ],
)
def test_a_planted_growth_is_found(tmp_path: Path, files: list[str], lines: int, problem: str | None) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#\n" * lines)
    assert outgrown(tmp_path) == ([] if problem is None else [problem])


@pytest.mark.parametrize(
    ("module", "source", "problem"),
    [
        (
            "models/decoder.py",
            "from phonograph.attention.attention_spec import KVLayout",
            "models must not import attention",
        ),
        (
            "graphs/cuda.py",
            "def capture():\n    import phonograph.runner.runner",
            "graphs must not import runner",
        ),
        ("graphs/cuda.py", "if TYPE_CHECKING:\n    from phonograph import models", "graphs must not import models"),
        ("attention/selection.py", "from ..graphs import resolve", "attention must not import graphs"),
        ("text/chat.py", "from phonograph.models import spec", "text must not import models"),
        ("server/openai/chat.py", "def late():\n    import phonograph.models.spec", "server must not import models"),
        ("files/hub.py", "import torch", "files must do without torch"),
        ("kernels/norm.py", "from phonograph import LLM", "kernels must not import (root)"),
        ("engine/llm.py", "importlib.import_module('phonograph.cli.app')", "engine must not import cli"),
        (
            "bench/tasks.py",
            "LAZY = {'app': 'phonograph.server.http.application:make'}",
            "bench must not import server",
        ),
        ("scheduling/scheduler_stats.py", "from phonograph.runner import steps", "scheduling must not import runner"),
        ("runner/__init__.py", "from .. import scheduling", "runner must not import scheduling"),
        ("kv_cache/pool.py", "def late():\n    from torch import empty", "kv_cache must do without torch"),
        ("graphs/modes.py", "from .resolve import resolve", "graphs.modes must not import graphs"),
        ("telemetry.py", "import json", "'telemetry'"),
        ("engine/llm.py", "def late():\n    from zmq.asyncio import Context", "the publisher may import zmq.asyncio"),
        ("engine/process/core_loop.py", "import zmq", "only the publisher may import zmq"),
        ("server/http/run.py", "import zmq", "only the publisher may import zmq"),
        ("engine/async_llm.py", "import starlette", "only server may import starlette"),
        ("bench/load.py", "import fastapi", "only server may import fastapi"),
        ("engine/llm.py", "import uvloop", "only server may import uvloop"),
    ],
)
def test_a_planted_violation_is_found(tmp_path: Path, module: str, source: str, problem: str) -> None:
    package = tmp_path / "phonograph"
    for name in modules(PACKAGE).values():
        target = package / name.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    for name in (
        "graphs/resolve.py",
        "runner/runner.py",
        "sampling/sampler.py",
        "server/http/application.py",
        "scheduling/scheduler.py",
    ):
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).touch()
    assert violations(package) == []
    (package / module).parent.mkdir(exist_ok=True)
    (package / module).write_text(source)
    found = violations(package)
    assert len(found) == 1 and problem in found[0]


def test_an_import_downwards_is_no_violation(tmp_path: Path) -> None:
    package = tmp_path / "phonograph"
    for name in (
        "graphs/modes.py",
        "graphs/__init__.py",
        "attention/selection.py",
        "errors.py",
        "cli/commands/serve.py",
        "server/http/application.py",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).touch()
    (package / "attention/selection.py").write_text(
        "import torch\nfrom ..graphs.modes import Support\nfrom .. import errors"
    )
    (package / "cli/commands/serve.py").write_text("from phonograph.server.http.application import make")
    assert violations(package) == []


def test_modules_without_torch_are_imported_without_it() -> None:
    names = [name for name in modules(PACKAGE) if part_of(name) in WITHOUT_TORCH | {ROOT}]
    names += ["phonograph.cli.app", "phonograph.cli.commands.config"]
    program = (
        "import sys, importlib\nsys.modules['torch'] = None\nfor name in sys.argv[1:]: importlib.import_module(name)"
    )
    result = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
