"""Records of the source lines that each test runs, one file per test module.

A record also has the seconds of each test, and digests of the sources, so that it is made again after a change.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from checks.mutants.rooms import PACKAGE

PYTEST_OPTIONS = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
"""Libraries are imported before pytest looks at them."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Lines that the tests of one module run.

    Attributes:
        digests: of the test module and of the sources it runs, by path.
        seconds: of each test, by node id.
        lines: `{source: {node id: bits}}`; bit L is set where line L runs. The id of the module itself stands for what
            runs while it is imported and its fixtures are made.
    """

    digests: dict[str, str]
    seconds: dict[str, float]
    lines: dict[str, dict[str, int]]

    def tests_of(self, source: str, span: range) -> list[str]:
        """Return the tests that run a line of the span; all of the module if fixtures ran it."""
        wanted = sum(1 << line for line in span)
        nodes = [node for node, bits in self.lines.get(source, {}).items() if bits & wanted]
        return list(self.seconds) if any("::" not in node for node in nodes) else nodes

    def is_valid(self, root: Path, paths: Iterable[str]) -> bool:
        return all(self.digests[path] == digest(root / path) for path in paths if path in self.digests)


def digest(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes() if path.exists() else b"", digest_size=8).hexdigest()


def load(path: Path) -> Record:
    fields = json.loads(path.read_text())
    lines = {source: {node: int(bits, 16) for node, bits in of.items()} for source, of in fields.pop("lines").items()}
    return Record(**fields, lines=lines)


class _Contexts:
    """Tells coverage which test runs; what its fixtures run belongs to the module, whose other tests may use them."""

    def __init__(self, cover: Any) -> None:
        self.cover = cover
        self.seconds = dict[str, float]()

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.cover.switch_context(item.nodeid.partition("::")[0])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        self.cover.switch_context(item.nodeid)
        start = time.perf_counter()
        try:
            return (yield)
        finally:
            self.seconds[item.nodeid] = round(time.perf_counter() - start, 3)

    def pytest_runtest_teardown(self) -> None:
        self.cover.switch_context("")


def record(root: Path, module: str, path: Path) -> int:
    """Run a test module, write its record and return pytest's exit status; for a process of its own."""
    import coverage

    cover = coverage.Coverage(data_file=None, source=[str(root / PACKAGE)], config_file=False)
    contexts = _Contexts(cover)
    cover.start()
    status = pytest.main([module, "-q", *PYTEST_OPTIONS], plugins=[contexts])
    cover.stop()
    data = cover.get_data()
    lines = dict[str, dict[str, int]]()
    for file in data.measured_files():
        of = lines.setdefault(str(Path(file).relative_to(root)), {})
        for line, nodes in data.contexts_by_lineno(file).items():
            for node in filter(None, nodes):
                of[node] = of.get(node, 0) | 1 << line
    lines = {source: of for source, of in lines.items() if of}
    digests = {name: digest(root / name) for name in (module, *lines)}
    fields = asdict(Record(digests=digests, seconds=contexts.seconds, lines={}))
    fields["lines"] = {source: {node: hex(bits) for node, bits in of.items()} for source, of in lines.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(fields))
    return int(status)
