"""`phonograph eval`: lm-evaluation-harness's own command, with the engine as its model."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from phonograph.cli.show import check_installed
from phonograph.errors import ConfigError


def eval(*words: Annotated[str, Parameter(allow_leading_hyphen=True, help="Words of the harness's command.")]) -> int:
    """Run lm-evaluation-harness (extra `eval`) on the offline API. --model_args takes the engine's settings."""
    if words and words[0] in ("demo", "compare"):
        problem = "is `python -m demo_evaluation` in a checkout; other words go to lm-evaluation-harness, as `run`"
        raise ConfigError("eval", words[0], problem)
    check_installed("eval", ["lm_eval"], extra="eval")
    from phonograph.bench.harness.__main__ import main

    return main(words or ["--help"])
