"""Report of the conformance suite: checks, each with the name of its fault, and a table of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Outcome(Enum):
    """Results of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Check:
    """Result for one fault.

    Attributes:
        name: the fault, as "stale split count".
        subject: graph or configuration that was checked, or "".
        outcome: the result.
        text: batch and suspected cause of a failure, or the reason why a check is not applicable; else "".
    """

    name: str
    subject: str
    outcome: Outcome
    text: str = ""

    def __str__(self) -> str:
        mark = {Outcome.PASSED: "ok", Outcome.FAILED: "FAILED", Outcome.NOT_APPLICABLE: "-"}[self.outcome]
        return f"{mark:<7}{self.name:<42} {self.subject:<42} {self.text}".rstrip()


@dataclass(slots=True, kw_only=True)
class ConformanceReport:
    """Results of the suite for one backend. `str` makes a table.

    Attributes:
        backend: label of the backend.
        device: name of the device.
        checks: in order.

    Example:
        ```python
        report = ConformanceReport(backend="my_backend", device="cpu")
        check = Check("stale split count", "decode[8 tokens, 8 slots]", Outcome.FAILED, "a batch of longer sequences")
        report.checks.append(check)
        assert not report.ok and report.failures[0].name == "stale split count"
        ```
    """

    backend: str
    device: str
    checks: list[Check] = field(default_factory=list[Check])

    @property
    def failures(self) -> list[Check]:
        """Checks that found their fault."""
        return [check for check in self.checks if check.outcome is Outcome.FAILED]

    @property
    def ok(self) -> bool:
        """True if no check found a fault."""
        return not self.failures

    def facts(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return {
            "backend": self.backend,
            "device": self.device,
            "ok": self.ok,
            "checks": [
                {"name": one.name, "subject": one.subject, "outcome": one.outcome.value, "text": one.text}
                for one in self.checks
            ],
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{sum(one.outcome is kind for one in self.checks)} {kind.value}" for kind in Outcome)
        lines = [str(check) for check in self.checks]
        verdict = "conforms" if self.ok else f"does NOT conform; first: {self.failures[0].name}"
        return "\n".join([*lines, f"{self.backend} on {self.device} {verdict} ({counts})"])
