"""Results of the GPU tests from pytest's JUnit XML: counts, combinations, errors and skips."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from checks.checks import Result

COMBINATIONS = 1500
"""Smallest number of combinations (models, windows, batches) of the attention kernels that a run must cover."""
OF_OPTIONAL_LIBRARIES = ("test_flash_attn_gpu", "test_flashinfer_gpu", "test_quantized_backends")
"""Files whose tests need a library that a machine may lack in whole or in part; their skips are reported and do not
fail the run. So are those of whole files, which are of optional libraries too."""
_WHOLE_FILE = "collection skipped"


def report_result(facts: dict[str, Any], *, code: int | None) -> Result:
    """Return success if all tests passed except skips for optional libraries, which the text counts. `code` is pytest's
    exit code."""
    attention = facts["attention_combinations"]
    text = (
        f"{facts['passed']} tests passed, {len(facts['failed'])} failed; {attention} combinations of attention, "
        f"largest relative error {facts['largest_error']}"
    )
    if facts["failed"]:
        text += f"; failed: {', '.join(facts['failed'][:3])}"
    optional, others = facts["skipped_optional"], facts["skipped"]
    for what, reasons in (("for optional libraries", optional), ("WITHOUT AN EXCUSE", others)):
        if reasons:
            listed = "; ".join(f"{count} x {reason}" for reason, count in reasons.items())
            text += f"; {sum(reasons.values())} SKIPPED {what}: {listed}"
    ok = code == 0 and attention >= COMBINATIONS and not others
    return Result(name="tests", ok=ok, text=text, facts=facts)


def read_report(report: Path) -> dict[str, Any]:
    """Return the counts of a report. A test of attention that does not say how much it checked counts as one.

    skipped and skipped_optional are {reason: how many}.
    """
    failed: list[str] = []
    reasons: dict[str, str] = {}
    files: Counter[str] = Counter()
    skipped: Counter[str] = Counter()
    optional: Counter[str] = Counter()
    combinations = 0
    largest: dict[str, float] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        file = str(case.get("classname"))
        name = f"{file}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(name)
            reasons[name] = _why_failed(case)
            continue
        skip = case.find("skipped")
        if skip is not None:
            why = str(skip.get("message"))
            if why == _WHOLE_FILE:
                optional[_reason(skip.text or why)] += 1
            else:
                of_library = any(part in OF_OPTIONAL_LIBRARIES for part in file.split("."))
                (optional if of_library else skipped)[why] += 1
            continue
        files[file] += 1
        properties = {str(one.get("name")): str(one.get("value")) for one in case.iter("property")}
        if re.search(r"attention_decode|attention_prefill|triton_backend|triton_gpu_matrix", name):
            combinations += int(properties.get("combinations", 1))
        if "largest_error" in properties:
            dtype, error = properties["largest_error"].split()
            largest[dtype] = max(largest.get(dtype, 0.0), float(error))
    return {
        "passed": files.total(),
        "skipped": dict(skipped.most_common()),
        "skipped_optional": dict(optional.most_common()),
        "failed": failed,
        "reasons": reasons,
        "by_file": dict(files),
        "attention_combinations": combinations,
        "largest_error": largest,
    }


def _reason(text: str) -> str:
    """Return the reason of a skipped file, which pytest writes as a tuple of file, line and reason."""
    return text.rpartition("Skipped: ")[2].rstrip("\"')")


def _why_failed(case: ElementTree.Element) -> str:
    """Return the last lines of pytest's message."""
    found = case.find("failure")
    found = case.find("error") if found is None else found
    return "" if found is None else f"{found.get('message')}\n{found.text}"[-1500:]
