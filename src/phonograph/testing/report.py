"""Report of the conformance suite: checks, each with the name of its fault, and a table of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One fault that was looked for.

    name:    the fault, as "stale split count"
    subject: where: a graph, a configuration, or ""
    text:    of a failure the batch that showed it and the suspected cause; why a check is not applicable; else ""
    """

    name: str
    subject: str
    outcome: Outcome
    text: str = ""

    def __str__(self) -> str:
        mark = {Outcome.PASSED: "ok", Outcome.FAILED: "FAILED", Outcome.NOT_APPLICABLE: "-"}[self.outcome]
        return f"{mark:<7}{self.name:<42} {self.subject:<42} {self.text}".rstrip()


def passed(name: str, subject: str, text: str = "") -> Check:
    return Check(name=name, subject=subject, outcome=Outcome.PASSED, text=text)


def failed(name: str, subject: str, text: str) -> Check:
    return Check(name=name, subject=subject, outcome=Outcome.FAILED, text=text)


def not_applicable(name: str, subject: str, text: str) -> Check:
    return Check(name=name, subject=subject, outcome=Outcome.NOT_APPLICABLE, text=text)


@dataclass(slots=True, kw_only=True)
class ConformanceReport:
    """backend: its label; device: where it ran; checks: in the order in which they were made."""

    backend: str
    device: str
    checks: list[Check] = field(default_factory=list[Check])

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.checks if check.outcome is Outcome.FAILED]

    @property
    def ok(self) -> bool:
        return not self.failures

    def facts(self) -> dict[str, Any]:
        """For JSON."""
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
