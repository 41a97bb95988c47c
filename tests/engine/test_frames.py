"""Messages behind their lengths, also where they come in pieces, or not to their end."""

from __future__ import annotations

import os
import threading

import pytest

from phonograph.kernels.triton.launch.frames import framed, read_frame

MESSAGES = [b"", b"one", bytes(range(256)) * 1000]


def test_messages_come_as_they_were_sent() -> None:
    """Through a pipe that holds less than one of them, read without a buffer."""
    out, into = os.pipe()

    def write() -> None:
        with os.fdopen(into, "wb") as stream:
            for message in MESSAGES:
                stream.write(framed(message))

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(out, "rb", buffering=0) as stream:
        assert [read_frame(stream) for _ in MESSAGES] == MESSAGES
        with pytest.raises(EOFError):
            read_frame(stream)
    writer.join()


@pytest.mark.parametrize("size", [3, 10])
def test_a_message_cut_short_is_none(size: int) -> None:
    out, into = os.pipe()
    os.write(into, framed(b"twelve bytes")[:size])
    os.close(into)
    with os.fdopen(out, "rb") as stream, pytest.raises(EOFError):
        read_frame(stream)
