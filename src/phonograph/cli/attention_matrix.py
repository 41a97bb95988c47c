"""Every backend in every mode: what a batch of each kind runs as, and why. The same functions decide for an engine.

`phonograph explain --matrix` prints it, and docs/attention-matrix.md is made of it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.attention.composite.capabilities import SplitCapabilities
from phonograph.attention.flash_attn.capabilities import FlashAttention3Capabilities
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.selection import BUILT_IN
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import DeviceSpec, known_device
from phonograph.engine.plan import PIECES
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode, Support
from phonograph.graphs.resolve import Resolution, resolve_mode, without_support

DOCUMENTED = AttentionSpec(
    num_query_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=64
)
DOCUMENTED_DEVICES = ("a100-80gb", "h200", "b200")
DRAFTS = 3
"""Speculative tokens of a step in the column of decodes with drafts."""
BATCHES = ("decode", f"decode with {DRAFTS} drafts", "mixed or prefill")
MODES = (None, GraphMode.FULL, GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_DECODE_ONLY, GraphMode.PIECEWISE)
"""The default, and the modes of a request. NONE is eager everywhere."""
COLUMNS = 118
"""Width of the page's paragraphs."""


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


def make_matrix(
    spec: AttentionSpec, device: DeviceSpec, backends: Sequence[Capabilities] | None = None
) -> list[BackendRows]:
    """Return the matrix of the built-in backends and some pairs of them, or of `backends`."""
    if backends is None:
        triton, flash, infer = TritonCapabilities(), FlashAttention3Capabilities(), FlashInferCapabilities()
        pairs = (SplitCapabilities(triton, flash), SplitCapabilities(infer, flash))
        backends = [*(one.capabilities for one in BUILT_IN), *pairs]
    found: list[BackendRows] = []
    for backend in backends:
        refusals = tuple(backend.why_not(spec, device))
        support = None if refusals else backend.graph_support(spec, device)
        modes = () if support is None else tuple(_mode_rows(backend, spec, device))
        found.append(
            BackendRows(backend=backend.label, varies=backend.varies, refusals=refusals, support=support, modes=modes)
        )
    return found


def markdown() -> str:
    """Return the text of docs/attention-matrix.md."""
    spec = DOCUMENTED
    lines = [
        "# Attention backends and graph modes",
        "",
        _paragraph(
            "Written by `scripts/attention-matrix` from the declarations of the backends; a test compares both. "
            f"Configuration: {spec.num_query_heads} query and {spec.num_kv_heads} KV heads of size {spec.head_size}, "
            f"{spec.dtype}, blocks of {spec.block_size}, causal, no window. `phonograph explain --matrix` prints the "
            "same for any model, and with `--device-name` for any known device."
        ),
    ]
    for name in DOCUMENTED_DEVICES:
        device = known_device(name)
        lines += ["", f"## {device.name}, compute capability {'.'.join(map(str, device.capability))}"]
        for rows in make_matrix(spec, device):
            lines += ["", f"### {rows.backend}", ""]
            if rows.support is None:
                lines.append(_paragraph(f"Refused: {'; '.join(rows.refusals)}."))
                continue
            lines += [_paragraph(f"{rows.support.level.name}: {rows.support.reason}."), ""]
            lines += [_paragraph(f"{rows.invariance}."), ""]
            lines += [f"| asked | runs as | {' | '.join(BATCHES)} |", f"|---|---|{'---|' * len(BATCHES)}"]
            for mode in rows.modes:
                runs = " | ".join(mode.batches[kind] for kind in BATCHES)
                lines.append(f"| {mode.asked_as} | {mode.runs_as} | {runs} |")
            steps = (reason for mode in rows.modes for reason in mode.reasons[1:])
            why = dict.fromkeys(without_support(step, rows.support) for step in steps)
            lines += ["", *(_paragraph(f"- {text}", "  ") for text in why)] if why else []
    return "\n".join(lines) + "\n"


def _paragraph(text: str, indent: str = "") -> str:
    return textwrap.fill(text, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


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
