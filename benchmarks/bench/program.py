"""Entry of developers' programs: a mistake of the user is one line, and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from phonograph.errors import PhonographError


def run_program(app: App, name: str, tokens: Sequence[str] | None = None) -> int:
    """Run a command of the program `name`; the exit code is 2 for a user error."""
    try:
        return app(tokens, exit_on_error=False, print_error=False, result_action="return_value") or 0
    except (PhonographError, CycloptsError) as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
