"""Entry point of `python -m phonograph`, the same as the `phonograph` command."""

from __future__ import annotations

import sys

from phonograph.cli.app import main

sys.exit(main())
