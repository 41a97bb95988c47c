"""`python -m phonograph` does what the `phonograph` command does."""

from __future__ import annotations

import sys

from phonograph.cli.app import main

sys.exit(main())
