"""Summary of a measurement over real schemas, and the bars that it has to pass."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]
MIN_STRICT_SHARE = 0.74
MIN_RELAXED_SHARE = 0.92
MIN_ENDED = 2000
MAX_COMPILE_P50_MS = 3.0
MAX_COMPILE_MS = 150.0


def percentiles(values: Sequence[float], digits: int = 3) -> Record:
    """Count, median, 99th percentile and maximum."""
    if not len(values):
        return {"count": 0}
    p50, p99, most = np.percentile(values, (50, 99, 100)).tolist()
    return {"count": len(values), "p50": round(p50, digits), "p99": round(p99, digits), "max": round(most, digits)}


def summarize(schemas: Sequence[Record], fill_us: Sequence[float]) -> Record:
    """Summarize the records of one vocabulary's schemas; `fill_us` has the time of each mask."""
    strict = [one for one in schemas if one["strict"]["accepted"]]
    relaxed = [one for one in schemas if one["relaxed"]["accepted"]]
    walked = [one["walks"] for one in strict]
    lenient = [one["walks"] for one in relaxed if not one["strict"]["accepted"]]
    return {
        "schemas": len(schemas),
        "strict_accepted": len(strict),
        "relaxed_accepted": len(relaxed),
        "strict_refusals": grouped([one["strict"]["refusal"] for one in schemas if not one["strict"]["accepted"]]),
        "relaxed_refusals": grouped([one["relaxed"]["refusal"] for one in schemas if not one["relaxed"]["accepted"]]),
        "compile_ms": percentiles([one["strict"]["compile_ms"] for one in strict]),
        "compile_wall_ms": percentiles([one["strict"]["compile_wall_ms"] for one in strict]),
        "relaxed_compile_ms": percentiles([one["relaxed"]["compile_ms"] for one in relaxed]),
        "refusal_ms": percentiles([one["strict"].get("compile_ms", 0.0) for one in schemas if one not in strict]),
        "fill_us": percentiles(fill_us, 1),
        "strict_texts": _texts(walked),
        "relaxed_texts": _texts(lenient),
    }


def _texts(walks: Sequence[Record]) -> Record:
    invalid = [fault for one in walks for fault in one.get("invalid", ())]
    return {
        "walked": sum(one["texts"] for one in walks),
        "ended": sum(one["ended"] for one in walks),
        "unjudged_schemas": sum("unjudged" in one for one in walks),
        "schemas_with_problems": sum(bool(one["problems"]) for one in walks),
        "invalid": len(invalid),
        "invalid_by_overlapping_one_of": sum(fault["one_of_overlap"] for fault in invalid),
        "invalid_and_not_in_warnings": sum(not fault["explained"] for fault in invalid),
    }


def grouped(refusals: Sequence[str]) -> dict[str, int]:
    """Count refusals by what cannot be enforced, the most frequent first."""
    return dict(Counter(map(_cause, refusals)).most_common())


def _cause(refusal: str) -> str:
    text = refusal.removeprefix("cannot be compiled: ").partition("; strictness=")[0]
    for words in ("the reference", "characters", "regex parse error", "circular references", "min/maxProperties"):
        if words in text:
            return words
    return text.partition(" while processing ")[0][:80]


def bars(summaries: dict[str, Record]) -> list[tuple[str, bool]]:
    """Return each bar as text, with what was measured, and whether it is passed."""
    found: list[tuple[str, bool]] = []
    for size, one in summaries.items():
        total, texts = one["schemas"], one["strict_texts"]
        for kind, least in (("strict", MIN_STRICT_SHARE), ("relaxed", MIN_RELAXED_SHARE)):
            share = one[f"{kind}_accepted"] / total
            text = f"{size}: {kind} accepts {one[f'{kind}_accepted']} of {total}, {share:.1%}; at least {least:.0%}"
            found.append((text, share >= least))
        found.append(
            (f"{size}: {texts['ended']} strict texts ended; at least {MIN_ENDED}", texts["ended"] >= MIN_ENDED)
        )
        wrong = texts["invalid"] - texts["invalid_by_overlapping_one_of"]
        text = f"{size}: {texts['invalid']} strict texts are invalid, {wrong} not by a oneOf that a warning names; 0"
        found.append((text, not wrong))
        times = one["compile_ms"]
        for name, most in (("p50", MAX_COMPILE_P50_MS), ("max", MAX_COMPILE_MS)):
            text = f"{size}: compile {name} {times.get(name, 0.0)} ms; at most {most:g}"
            found.append((text, times.get(name, 0.0) <= most))
    return found


def refusals_by_text(schemas: Sequence[Record], strictness: str) -> dict[str, list[str]]:
    """Return the names of the schemas that are refused, by the refusal."""
    found: dict[str, list[str]] = defaultdict(list)
    for one in schemas:
        if not one[strictness]["accepted"]:
            found[one[strictness]["refusal"]].append(one["name"])
    return dict(found)
