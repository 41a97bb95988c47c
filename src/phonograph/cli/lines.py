"""Reading of text from standard input and arguments, which may be in another encoding."""

from __future__ import annotations

import io
import sys

from phonograph.errors import RequestError, shortened


def read_line() -> str | None:
    """Return the next line of standard input, or None at its end.

    Raises:
        RequestError: the line is not in the encoding of standard input.
    """
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        # A line that cannot be decoded would otherwise lose the lines read with it.
        sys.stdin.reconfigure(errors="surrogateescape")
    line = sys.stdin.readline()
    return check_text("standard input", line.rstrip("\r\n")) if line else None


def check_text(source: str, text: str) -> str:
    """Return the text if all of it was decoded.

    Raises:
        RequestError: a part was not decoded.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = f"is not {sys.stdin.encoding or 'UTF-8'}; convert it, as by iconv -f latin1 -t utf-8"
        raise RequestError(source, shortened(text), problem) from None
    return text
