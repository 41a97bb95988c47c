"""`phonograph eval`: lm-evaluation-harness's own command, with the engine as its model."""

# pyright: reportMissingImports=false, reportUnknownVariableType=false

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from phonograph.cli.show import check_installed
from phonograph.errors import ConfigError, PhonographError


def eval(*words: Annotated[str, Parameter(allow_leading_hyphen=True, help="Words of the harness's command.")]) -> int:
    """Run lm-evaluation-harness (extra `eval`) on the offline API. --model_args takes the engine's settings."""
    if words and words[0] in ("demo", "compare"):
        problem = "is `python -m demo_evaluation` in a checkout; other words go to lm-evaluation-harness, as `run`"
        raise ConfigError("eval", words[0], problem)
    check_installed("eval", ["lm_eval"], extra="eval")
    try:
        from lm_eval.__main__ import cli_evaluate

        import phonograph.bench.harness.adapter  # registers the model  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise PhonographError(f"{error}; pip install 'phonograph[eval]'") from error
    words = words or ("--help",)
    # `run` has `--model phonograph` unless it names another, or a file of arguments.
    named = any(word.partition("=")[0] in ("-M", "--model", "-C", "--config") for word in words)
    model = ["--model", "phonograph"] if words[0] == "run" and not named else []
    sys.argv = ["phonograph eval", *words, *model]
    cli_evaluate()
    return 0
