"""`python -m phonograph.testing NAME`: runs a registered backend through the conformance suite."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Literal

from cyclopts import App, CycloptsError, Parameter

from phonograph.errors import PhonographError
from phonograph.testing.suite import check_conformance

app = App(
    name="python -m phonograph.testing",
    help="Run an attention backend through the conformance suite; exit code 1 where it fails.",
    help_format="plaintext",
)


@app.default
def verify_backend(
    name: Annotated[
        str, Parameter(help="Name of a registered backend, or of its version: flash_attn, 'flash_attn 3'.")
    ],
    *,
    device: Annotated[Literal["cpu", "cuda", "auto"], Parameter(help="Where to run it.")] = "auto",
    seed: Annotated[int, Parameter(help="Seed of the batches' contents.")] = 0,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print JSON, one line, for programs.")] = False,
) -> int:
    """Print every check; exit code 1 where one fails."""
    report = check_conformance(name, device=None if device == "auto" else device, seed=seed)
    print(json.dumps(report.facts(), ensure_ascii=False) if as_json else report)
    return 0 if report.ok else 1


def main(tokens: Sequence[str] | None = None) -> int:
    """Return the exit code, 2 for a user error."""
    try:
        return app(tokens, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except (PhonographError, CycloptsError) as error:
        print(f"phonograph.testing: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
