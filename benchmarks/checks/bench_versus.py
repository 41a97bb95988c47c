"""Ratios of our figures to those of a peer, and the bars that they meet.

A system is "ours[@BACKEND[:VERSION]][:MODE]" or, of the peer, "BACKEND/MODE[/CAPTURE_MAX]", as `benchmarks/vs_vllm.py`
runs them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

OURS = "ours"
HIGHER_IS_BETTER = ("throughput",)
SAME_KIND = {"FLASH_ATTN": "flash_attn", "FLASHINFER": "flashinfer", "TRITON_ATTN": "triton"}
"""Backends of vLLM, each with our backend of the same library or kind."""


def backend_of(system: str) -> str | None:
    """Return the backend in the name of one of our systems, without its version; None if there is none."""
    _, at, rest = system.partition("@")
    return rest.partition(":")[0] if at else None


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return for each of our cases the ratio to each peer, and the result of its bars.

    One row for "ours" and for each of its systems with a backend, neighbours where the case is the same; our modes
    without one have a table of their own. Only "ours" has bars; the others say which peers are of the same kind.
    """
    best: dict[tuple[str, str, str], float] = {}
    for row in rows:
        key = row["system"], row["suite"], row["case"]
        choose = max if row["suite"] in HIGHER_IS_BETTER else min
        best[key] = choose(best.get(key, row["value"]), row["value"])
    table: list[dict[str, Any]] = []
    for (system, suite, case), ours in best.items():
        if system != OURS and not system.startswith(f"{OURS}@"):
            continue
        peers = {
            peer: value for (peer, *of), value in best.items() if of == [suite, case] and not peer.startswith(OURS)
        }
        speedups = {
            peer: round(ours / value if suite in HIGHER_IS_BETTER else value / ours, 3) for peer, value in peers.items()
        }
        bars = [
            {
                "against": bar.peer,
                "least": round(bar.least, 3),
                "speedup": speedups[bar.peer],
                "pass": bar.met(speedups[bar.peer]),
            }
            for bar in (bars_of(suite, case, speedups) if system == OURS else [])
        ]
        row = {"suite": suite, "case": case, "system": system, "ours": ours, "peers": peers, "speedups": speedups}
        table.append({**row, "same_kind": [peer for peer in peers if is_same_kind(system, peer)], "bars": bars})
    order = list(dict.fromkeys((row["suite"], row["case"]) for row in table))
    return sorted(table, key=lambda row: order.index((row["suite"], row["case"])))


def is_same_kind(system: str, peer: str) -> bool:
    """Return True if our backend, or its backend for one part, runs the same library as the peer's."""
    backend = backend_of(system)
    names = [part.rpartition("=")[2] for part in backend.split(",")] if backend else []
    return SAME_KIND.get(peer.partition("/")[0]) in names


@dataclass(frozen=True, slots=True)
class Bar:
    """Smallest ratio to a peer that passes; with `more` an equal ratio fails."""

    peer: str
    least: float
    more: bool = False

    def met(self, speedup: float) -> bool:
        return speedup > self.least if self.more else speedup >= self.least


def bars_of(suite: str, case: str, speedups: dict[str, float]) -> list[Bar]:
    """Return the bars of a case against the peers that ran it: the strongest one, or each by name."""
    if not speedups:
        return []
    strongest = min(speedups, key=lambda peer: speedups[peer])
    if suite == "decode":
        return [Bar(strongest, 1.1) if case.startswith("1x") else Bar(strongest, 1.0, more=True)]
    if suite == "throughput":
        return [Bar(strongest, 1.05)]
    if suite == "startup":
        return [Bar(strongest, 1.0, more=True)]
    if suite == "latency":
        least = 1.0 if int(case) <= 2000 else 1 / 1.15
        return [Bar(peer, least) for peer in speedups if peer.startswith("FLASH_ATTN")]
    bars: list[Bar] = []
    for peer in speedups:
        if peer.count("/") == 2:  # the peer tuned by hand
            bars.append(Bar(peer, 1.0, more=True))
        elif not peer.startswith("TRITON_ATTN"):
            bars.append(Bar(peer, 2.0))
        elif case == "65536":
            bars.append(Bar(peer, 4.0))
    return bars


def summarise(table: list[dict[str, Any]]) -> dict[str, int]:
    passed = [bar["pass"] for row in table for bar in row["bars"]]
    return {"bars": len(passed), "passed": sum(passed)}
