"""Files for results: tried before the work, and named where they cannot be written.

Without torch, which those who only ask how a program is called should not wait for.
"""

from __future__ import annotations

import os
from argparse import ArgumentTypeError
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from phonograph.errors import ConfigError


def check_output(path: Path) -> None:
    """Tries whether a file can be written, before the work whose results it is for.

    Raises:
        ConfigError: it cannot.
    """
    with writing(path):
        # A pipe's reader would take the end of the try for the end of the results.
        if path.is_fifo():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        new = not os.path.lexists(path)
        path.open("a").close()
        if new:
            path.unlink()


def output_file(text: str) -> Path:
    """A file for results as an option names it, tried: a type for `argparse`.

    Raises:
        ArgumentTypeError: it cannot be written.
    """
    try:
        check_output(Path(text))
    except ConfigError as error:
        raise ArgumentTypeError(str(error)) from None
    return Path(text)


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Makes an error of the system one that names the file, as that of a full disk does not.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError("output", str(path), f"cannot be written: {error}") from error
