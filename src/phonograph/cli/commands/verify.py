"""`phonograph verify`: compares every captured graph with eager runs, on batches unlike the captured ones."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from phonograph.cli.options import takes_engine_config
from phonograph.cli.progress import progress_bar
from phonograph.cli.show import Json, compact, engine_facts, note, print_json, print_lines, print_table, start
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError, counted

if TYPE_CHECKING:
    from phonograph.graphs.modes import GraphKey
    from phonograph.graphs.verification import VerifyReport


@takes_engine_config
def verify(
    config: EngineConfig,
    *,
    replays: Annotated[int, Parameter(help="Replays in all; each graph has at least one.")] = 200,
    verify_seed: Annotated[int, Parameter(help="Seed of the random batches.")] = 0,
    as_json: Json = False,
) -> int:
    """Replay every captured graph on random batches and compare with eager; exit code 1 where they differ."""
    for name, value, least in (("replays", replays, 1), ("verify_seed", verify_seed, 0)):
        if value < least:
            raise ConfigError(name, value, f"must be a whole number >= {least}")
    llm = start(config, serves=False)
    began = time.perf_counter()
    with progress_bar() as report_progress:
        report = llm.verify(
            num_replays=replays,
            seed=verify_seed,
            progress=lambda done, total: report_progress("replays", done, total),
        )
    seconds = time.perf_counter() - began
    mismatches = Counter(mismatch.key for mismatch in report.mismatches)
    if as_json:
        print_json({**engine_facts(llm), "seconds": round(seconds, 4), **_facts(report, mismatches)})
    else:
        _print(report, mismatches)
        note(llm.plan.resolution.label)
    return 0 if report.ok else 1


def _facts(report: VerifyReport, mismatches: Counter[GraphKey]) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "replays": report.num_replays,
        "num_graphs": len(report.replays),
        "num_mismatches": len(report.mismatches),
        "batches": {
            "mixed": report.num_mixed,
            "skewed": report.num_skewed,
            "longest_sequence": report.longest_sequence,
        },
        "graphs": [
            {**_graph_facts(key), "replays": count, "mismatches": mismatches[key]}
            for key, count in report.replays.items()
        ],
        "mismatches": [
            {
                **_graph_facts(mismatch.key),
                "batch": mismatch.batch,
                "tensor": mismatch.tensor,
                "num_different": mismatch.num_different,
                "num_elements": mismatch.num_elements,
                "max_abs_error": mismatch.max_abs_error,
            }
            for mismatch in report.mismatches
        ],
    }


def _graph_facts(key: GraphKey) -> dict[str, Any]:
    return {
        "graphs": key.kind,
        "num_tokens": key.num_tokens,
        "num_reqs": key.num_reqs,
        "query_len": key.query_len,
    }


def _print(report: VerifyReport, mismatches: Counter[GraphKey]) -> None:
    kinds = dict.fromkeys(key.kind for key in report.replays)
    keys = {kind: [key for key in report.replays if key.kind == kind] for kind in kinds}
    rows = [
        (
            kind,
            compact(sorted(key.num_tokens for key in keys[kind])),
            str(sum(report.replays[key] for key in keys[kind])),
            str(sum(mismatches[key] for key in keys[kind])),
        )
        for kind in kinds
    ]
    print_table(("graphs", "sizes in tokens", "replays", "mismatches"), rows)
    print_lines(report.mismatches)
    if report.ok:
        replays, graphs = counted(report.num_replays, "replay"), counted(len(report.replays), "graph")
        print(f"{replays} of {graphs}, each equal to eager bit by bit")
