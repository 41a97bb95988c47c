"""Every backend in every mode: what a batch of each kind runs as, and why. The same functions decide for an engine.

`phonograph explain --matrix` prints it, and `scripts/attention_matrix.py` writes it as a page.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.attention.composite.capabilities import SplitCapabilities
from phonograph.attention.flash_attn.capabilities import FlashAttention3Capabilities
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.selection import BUILT_IN
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import DeviceSpec
from phonograph.engine.plan import PIECES
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode, Support
from phonograph.graphs.resolve import Resolution, resolve_mode

DRAFTS = 3
"""Speculative tokens of a step in the column of decodes with drafts."""
BATCHES = ("decode", f"decode with {DRAFTS} drafts", "mixed or prefill")
MODES = (None, GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_DECODE_ONLY, GraphMode.PIECEWISE)
"""The default, and the modes of a request. NONE is eager everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRow:
    """One mode of a backend. batches: by kind, how it runs; reasons: the steps from `asked` (None: by default)."""

    asked: GraphMode | None
    resolved: GraphMode | None
    batches: dict[str, str]
    reasons: tuple[str, ...]

    @property
    def asked_as(self) -> str:
        return "the default" if self.asked is None else self.asked.value

    @property
    def runs_as(self) -> str:
        return "refused" if self.resolved is None else self.resolved.value


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendRows:
    """One backend. refusals: why it does not serve the configuration at all; then there is no support and no mode.

    varies: why it bears no batch invariance, or ""
    """

    backend: str
    varies: str
    refusals: tuple[str, ...]
    support: Support | None
    modes: tuple[ModeRow, ...]

    @property
    def invariance(self) -> str:
        return f"Not batch-invariant: {self.varies}" if self.varies else "Batch-invariant where that is asked for"


def make_matrix(spec: AttentionSpec, device: DeviceSpec) -> list[BackendRows]:
    """Return the matrix of the built-in backends and some pairs of them."""
    triton, flash, infer = TritonCapabilities(), FlashAttention3Capabilities(), FlashInferCapabilities()
    pairs = (SplitCapabilities(triton, flash), SplitCapabilities(infer, flash))
    found: list[BackendRows] = []
    for backend in (*(one.capabilities for one in BUILT_IN), *pairs):
        refusals = tuple(backend.why_not(spec, device))
        support = None if refusals else backend.graph_support(spec, device)
        modes = () if support is None else tuple(_mode_rows(backend, spec, device))
        found.append(
            BackendRows(backend=backend.label, varies=backend.varies, refusals=refusals, support=support, modes=modes)
        )
    return found


def _mode_rows(backend: Capabilities, spec: AttentionSpec, device: DeviceSpec) -> Iterator[ModeRow]:
    drafting = replace(spec, speculative_tokens=DRAFTS)
    for asked in MODES:
        try:
            plain = resolve_mode(asked, backend.graph_support(spec, device), PIECES)
        except ConfigError as error:
            assert asked is not None, "the default never fails"
            reasons = f"{asked.value}: asked for", error.problem
            yield ModeRow(asked=asked, resolved=None, batches=dict.fromkeys(BATCHES, "-"), reasons=reasons)
            continue
        support = backend.graph_support(drafting, device)
        drafted = resolve_mode(asked, support, PIECES, speculative_tokens=DRAFTS)
        runs = (_decode(plain), _decode(drafted), _mixed(plain))
        yield ModeRow(
            asked=asked,
            resolved=plain.mode,
            batches=dict(zip(BATCHES, runs, strict=True)),
            reasons=tuple(str(reason) for reason in plain.reasons),
        )


def _decode(resolution: Resolution) -> str:
    return "full graph" if resolution.mode.decode_full else _mixed(resolution)


def _mixed(resolution: Resolution) -> str:
    mode = resolution.mode
    return "full graph" if mode.mixed_full else "pieces" if mode.piecewise else "eager"
