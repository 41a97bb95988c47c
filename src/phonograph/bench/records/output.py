"""Result files: checked before the work, and named in the error of a failed write.

No import of torch, so that `--help` stays quick.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from phonograph.errors import ConfigError


def check_output(path: Path) -> None:
    """Check that a result file can be written, and leave it as it was.

    Raises:
        ConfigError: it cannot be written.
    """
    with writing(path):
        # The reader of a pipe would take the end of this check for the end of the results.
        if path.is_fifo():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not os.path.lexists(path)
        path.open("a").close()
        if new:
            path.unlink()


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn an OSError into an error that names the file, which that of a full disk does not.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError("output", str(path), f"cannot be written: {error}") from error
