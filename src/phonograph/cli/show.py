"""What several commands print in the same way: JSON, the bars of a start, the graphs that ran and why.

Results go to stdout, everything about how they came to be to stderr, so that a pipe gets results only. Nothing here
imports torch before a command runs, which keeps `--help` quick.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from phonograph.cli.progress import progress_bar
from phonograph.config.engine_config import EngineConfig
from phonograph.core.batch import TokenLogprobs

if TYPE_CHECKING:
    from phonograph.engine.llm import LLM
    from phonograph.engine.outputs import CompletionOutput
    from phonograph.engine.plan import EnginePlan

Json = Annotated[
    bool, Parameter(name="--json", negative="", show_default=False, help="Print JSON, one object a line, for programs.")
]


def _check_output(kind: object, path: Path | None) -> None:
    if path is not None:
        from phonograph.bench.records.output import check_output

        check_output(path)


OUTPUT = Parameter(show_default=False, validator=_check_output)
"""What every `--output FILE` is made of, beside its help: one that cannot be written is refused before the work."""


def print_json(value: object) -> None:
    """One line. JSON knows neither NaN nor infinity: they become null."""
    print(json.dumps(_finite(value), ensure_ascii=False, allow_nan=False), flush=True)


def note(text: str, *, style: str = "dim") -> None:
    """One line on stderr about how a result came to be."""
    Console(stderr=True).print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def start(config: EngineConfig, *, serves: bool = True) -> LLM:
    """The engine, with bars for the weights and the graphs while it starts. serves: as `LLM` has it."""
    from phonograph.engine.llm import LLM

    with progress_bar() as report:
        return LLM(config=config, progress=report, serves=serves)


def steps_text(steps: Counter[str]) -> str:
    """Returns the steps by what ran them, as "15 steps: 14 full decode, 1 full mixed"."""
    total = steps.total()
    kinds = ", ".join(f"{count} {label}" for label, count in steps.most_common())
    return f"{total} step{'' if total == 1 else 's'}" + (f": {kinds}" if kinds else "")


def engine_facts(llm: LLM) -> dict[str, Any]:
    """The fields that the JSON of every command has that runs an engine."""
    plan = llm.plan
    return {
        "model": llm.config.model,
        "dtype": plan.dtype,
        "device": plan.device.name,
        "attention_backend": plan.selection.capabilities.label,
        "mode": mode_facts(plan),
        "start_seconds": round(llm.start_seconds, 4),
    }


def mode_facts(plan: EnginePlan) -> dict[str, Any]:
    """The mode asked for (null: the default), the one that runs, and the chain of reasons from one to the other."""
    resolution = plan.resolution
    return {
        "asked": None if resolution.asked is None else resolution.asked.value,
        "resolved": resolution.mode.value,
        "reasons": [str(reason) for reason in resolution.reasons],
    }


def completion_facts(completion: CompletionOutput) -> dict[str, Any]:
    """One sample."""
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
    """Ascending sizes in few words: "1-16, 18-32 by 2, 40"."""
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


def _logprob_facts(position: TokenLogprobs) -> dict[str, Any]:
    """The sampled token, and the most likely ones beside it."""
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
