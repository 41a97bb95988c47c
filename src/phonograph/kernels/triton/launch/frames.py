"""Messages between a process and a program that it started, over standard streams, each behind its length."""

from __future__ import annotations

import struct
from typing import IO

_LENGTH = struct.Struct("<Q")


def framed(data: bytes) -> bytes:
    """A message as it travels."""
    return _LENGTH.pack(len(data)) + data


def read_frame(stream: IO[bytes]) -> bytes:
    """The next message, waiting for all of it.

    Raises:
        EOFError: the other end is gone.
    """
    (length,) = _LENGTH.unpack(_read(stream, _LENGTH.size))
    return _read(stream, length)


def _read(stream: IO[bytes], size: int) -> bytes:
    parts: list[bytes] = []
    while size:  # without a buffer a stream gives what is there
        part = stream.read(size)
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
