"""Text that comes from outside: lines of standard input, and arguments, which need not be text at all."""

from __future__ import annotations

import io
import sys

from phonograph.errors import RequestError, shortened


def read_line() -> str | None:
    """The next line of standard input, or None at its end.

    Raises:
        RequestError: it is not in the encoding of standard input.
    """
    if isinstance(sys.stdin, io.TextIOWrapper) and sys.stdin.errors != "surrogateescape":
        # Else the lines before one that cannot be decoded would be lost with it.
        sys.stdin.reconfigure(errors="surrogateescape")
    line = sys.stdin.readline()
    return check_text("standard input", line.rstrip("\r\n")) if line else None


def check_text(source: str, text: str) -> str:
    """The text itself, if all of it could be decoded.

    Raises:
        RequestError: it could not; the tokenizer would refuse it in words of its own.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        problem = f"is not {sys.stdin.encoding or 'UTF-8'}; convert it, as by iconv -f latin1 -t utf-8"
        raise RequestError(source, shortened(text), problem) from None
    return text
