"""lm-evaluation-harness's own command, which knows `--model phonograph`."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Sequence

from phonograph.errors import PhonographError


def main(words: Sequence[str]) -> int:
    """Run the harness's command; `run` has `--model phonograph` unless it names another, or a file of arguments."""
    try:
        from lm_eval.__main__ import cli_evaluate

        import phonograph.bench.harness.adapter  # registers the model  # noqa: F401
    except ImportError as error:
        print(f"phonograph: error: {error}; pip install 'phonograph[eval]'", file=sys.stderr)
        return 2
    named = any(word.partition("=")[0] in ("-M", "--model", "-C", "--config") for word in words)
    model = ["--model", "phonograph"] if words and words[0] == "run" and not named else []
    sys.argv = ["phonograph eval", *words, *model]
    try:
        cli_evaluate()
    except PhonographError as error:
        print(f"phonograph: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
