"""Output that several commands share: JSON, tables, notes, and facts about an engine.

Results go to stdout, everything else to stderr, so that a pipe gets results only. No import here loads torch before a
command runs, which keeps `--help` quick.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from phonograph.cli.progress import progress_bar
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError, counted
from phonograph.text.logprob_views import PositionLogprobs

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.outputs import CompletionOutput
    from phonograph.engine.plan import EnginePlan

Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON, one object a line, for programs.")
]
MAX_LINES = 10
"""Lines that `print_lines` prints at most."""


def _check_output(kind: object, path: Path | None) -> None:
    if path is not None:
        from phonograph.bench.records.output import check_output

        check_output(path)


OUTPUT = Parameter(show_default=False, validator=_check_output)
"""Base of every `--output FILE`: refuses a file that cannot be written before the work starts."""
Output = Annotated[Path | None, OUTPUT, Parameter(help="File to append the result to, one JSON object a line.")]


def print_json(value: object) -> None:
    """Print one line of JSON; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False), flush=True)


def print_table(columns: Iterable[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on stdout."""
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def print_lines(lines: Sequence[object]) -> None:
    """Print the first lines of a list that may be long, and the number of the others."""
    for line in lines[:MAX_LINES]:
        print(line)
    if len(lines) > MAX_LINES:
        print(f"... and {len(lines) - MAX_LINES} more; --json has them all")


def note(text: str, *, style: str = "dim") -> None:
    """Print one line on stderr."""
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def report(
    record: dict[str, Any], print_tables: Callable[[], None], *, as_json: bool, save: Callable[[], None] | None
) -> None:
    """Save a result and print it. It is printed even if saving fails, since the disk may have become full."""
    try:
        if save is not None:
            save()
    finally:
        if as_json:
            print_json(record)
        else:
            print_tables()


def check_installed(command: str, packages: Iterable[str], extra: str) -> None:
    """Check that the packages of an extra are installed.

    Raises:
        ConfigError: a package is missing.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(command, ", ".join(missing), f"not installed; pip install 'phonograph[{extra}]'")


class _Notes(logging.Handler):
    """Handler that prints records as notes."""

    def emit(self, record: logging.LogRecord) -> None:
        note(record.getMessage())


@contextmanager
def notes_of_downloads() -> Generator[None]:
    """Print the sizes of downloads, which are logged, as notes."""
    log, handler = logging.getLogger("phonograph.files.hub_client"), _Notes()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def start(config: EngineConfig, *, serves: bool = True) -> LLM:
    """Start an engine with progress bars. See `LLM` for `serves`."""
    from phonograph.engine.llm import LLM

    with notes_of_downloads(), progress_bar() as progress:
        return LLM(config=config, progress=progress, serves=serves)


def steps_text(steps: Counter[str]) -> str:
    """Return the steps by kind of decision, as "15 steps: 14 full decode, 1 full mixed"."""
    kinds = ", ".join(f"{count} {label}" for label, count in steps.most_common())
    return counted(steps.total(), "step") + (f": {kinds}" if kinds else "")


def engine_facts(llm: LLM) -> dict[str, Any]:
    """Return the JSON fields of every command that runs an engine."""
    plan = llm.plan
    return {
        "model": llm.config.model,
        "dtype": plan.dtype,
        "device": plan.device.name,
        "attention_backend": plan.backends,
        "mode": mode_facts(plan),
        "start_seconds": round(llm.start_seconds, 4),
    }


def mode_facts(plan: EnginePlan) -> dict[str, Any]:
    """Return the requested mode (None: the default), the resolved one, and the reasons in between."""
    resolution = plan.resolution
    return {
        "asked": None if resolution.asked is None else resolution.asked.value,
        "resolved": resolution.mode.value,
        "reasons": [str(reason) for reason in resolution.reasons],
    }


def completion_facts(completion: CompletionOutput) -> dict[str, Any]:
    """Return the JSON fields of one sample."""
    facts: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if completion.logprobs is not None:
        facts["logprobs"] = [_logprob_facts(position) for position in completion.logprobs]
    return facts


def compact(sizes: Sequence[int]) -> str:
    """Return ascending sizes as ranges: "1-16, 18-32 by 2, 40"."""
    parts: list[str] = []
    start = 0
    while start < len(sizes):
        end = start
        step = sizes[start + 1] - sizes[start] if start + 1 < len(sizes) else 0
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == step:
            end += 1
        if end - start < 2:
            end = start
            parts.append(str(sizes[start]))
        else:
            parts.append(f"{sizes[start]}-{sizes[end]}" + ("" if step == 1 else f" by {step}"))
        start = end + 1
    return ", ".join(parts) or "none"


def _logprob_facts(position: PositionLogprobs) -> dict[str, Any]:
    rows = [
        {"token_id": token_id, "logprob": logprob, "rank": rank}
        for token_id, logprob, rank in zip(position.token_ids, position.logprobs, position.ranks, strict=True)
    ]
    return {**rows[0], "top": rows[1:]}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
