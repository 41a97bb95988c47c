"""The page of vLLM's flags, for the site and its test. `scripts/vllm-flags` makes the list of flags."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phonograph.config.vllm_flag_table import (
    ABSENT,
    ALWAYS,
    MISSING,
    NEUTRAL,
    NO_MEANING,
    RENAMED,
    VARIABLES,
)

FLAGS = Path(__file__).with_name("vllm-flags.txt")


def page() -> str:
    """Return the page: each flag with its state, values that change nothing, and environment variables."""
    version, *names = FLAGS.read_text(encoding="utf-8").splitlines()
    same = [name for name in names if name not in {*RENAMED, *ALWAYS, *MISSING, *NO_MEANING}]
    neutral = (
        (f"`{name}`", "any" if values == ("*",) else ", ".join(f"`{value}`" for value in values))
        for name, values in sorted(NEUTRAL.items())
        if name not in NO_MEANING
    )
    parts = [
        "# Flags of vLLM",
        f"Every flag of `vllm serve` in {version[2:]} is on this page, with flags of earlier versions and of its "
        "benchmarks. The command line answers a flag with its row, and Python and YAML do the same for a setting.",
        "## The same here",
        "[The settings](settings.md) describe them.",
        rows(("vLLM",), ((f"`{name}`",) for name in same)),
        "## Other names",
        rows(("vLLM", "Phonograph"), ((f"`{name}`", f"`{ours}`") for name, ours in sorted(RENAMED.items()))),
        "## Always on or always off",
        rows(("vLLM", "reason"), ((f"`{name}`", reason) for name, reason in sorted(ALWAYS.items()))),
        "## Not here",
        "The headings are the subjects of [the roadmap](../roadmap.md).",
    ]
    for subject in dict.fromkeys(subject for subject, _ in ABSENT):
        found = [(name, why) for (one, why), flags in ABSENT.items() if one == subject for name in flags.split()]
        parts += [f"### {subject}", rows(("vLLM", "limit"), ((f"`{name}`", why) for name, why in found))]
    parts += [
        "## Without meaning here",
        "These choose among ways that only vLLM has. They are taken with every value, have no effect, and the command "
        "line says so.",
        rows(("vLLM", "reason"), ((f"`{name}`", reason) for name, reason in sorted(NO_MEANING.items()))),
        "## Values that change nothing",
        "These values of the flags above are taken and have no effect, as flags, as arguments in Python and in YAML; "
        "so is null for every flag of this page.",
        rows(("vLLM", "values"), neutral),
        "## Environment variables",
        "Variables that begin with `VLLM_` are not read. A command that finds some says once which they are, and names "
        "the one that means the same.",
        rows(("vLLM", "Phonograph"), ((f"`{name}`", ours) for name, ours in sorted(VARIABLES.items()))),
    ]
    return "\n\n".join(parts)


def rows(headings: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, ("---",) * len(headings), *lines))
