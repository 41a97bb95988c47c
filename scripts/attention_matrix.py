"""Prints docs/attention-matrix.md, from the declarations of the backends."""

from __future__ import annotations

import textwrap

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.cli.attention_matrix import BATCHES, make_matrix
from phonograph.core.device import known_device
from phonograph.graphs.resolve import without_support

DOCUMENTED = AttentionSpec(
    num_query_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16", block_size=64
)
DOCUMENTED_DEVICES = ("a100-80gb", "h200", "b200")
COLUMNS = 118
"""Width of the page's paragraphs."""


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


if __name__ == "__main__":
    print(markdown(), end="")
