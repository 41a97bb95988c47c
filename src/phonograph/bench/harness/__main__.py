"""lm-evaluation-harness's own command, which knows `--model phonograph` and the demo tasks."""

# pyright: basic, reportMissingImports=false

from __future__ import annotations

import sys
from pathlib import Path

from phonograph.errors import PhonographError

TASKS = Path(__file__).parent / "tasks"


def main() -> int:
    try:
        from lm_eval.__main__ import cli_evaluate

        import phonograph.bench.harness.adapter  # registers the model  # noqa: F401
    except ImportError as error:
        print(f"phonograph: error: {error}; pip install 'phonograph[eval]'", file=sys.stderr)
        return 2
    if "run" in sys.argv[1:2] and not any(word.startswith("--include_path") for word in sys.argv):
        sys.argv += ["--include_path", str(TASKS)]
    try:
        cli_evaluate()
    except PhonographError as error:
        print(f"phonograph: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
