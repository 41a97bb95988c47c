"""Result files of scripts: the option that names one, the file, and records read back."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from phonograph.bench.records.output import check_output, writing
from phonograph.errors import ConfigError


def output_file(text: str) -> Path:
    """Parse and check an option that names a result file, as a type for `argparse`.

    Raises:
        ArgumentTypeError: the file cannot be written.
    """
    try:
        check_output(Path(text))
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None
    return Path(text)


def write_result(path: Path, origin: dict[str, Any], result: dict[str, Any]) -> None:
    """Write a result after its provenance, `origin`, as indented JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**origin, **result}, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_records(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """Read the records that `append_record` wrote; a missing file has none."""
    lines = (line for path in paths if path.exists() for line in path.read_text(encoding="utf-8").splitlines())
    return [json.loads(line) for line in lines if line.strip()]
