"""Messages over a pair of Unix sockets between an event loop and an engine's process: pickles behind their lengths.

Each way has one switch of threads. A library with threads of its own at both ends takes three, which cost more than
the work of a message.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import threading
from collections import deque
from contextlib import suppress
from queue import Queue
from typing import Any, cast

from phonograph.engine.process.messages import Command, Message, Stop

_LENGTH = 8
_READ_BYTES = 1 << 18
FAREWELL_SECONDS = 2.0
"""Time for the last messages to be sent when an engine's process ends."""


def framed(message: object) -> bytes:
    """Return the bytes of a message."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(_LENGTH, "little") + data


class Frames:
    """Bytes that have arrived, and the messages that are complete in them."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes, and return the pickles that are complete with them."""
        self._data += data
        complete: list[bytes] = []
        start, size = 0, len(self._data)
        while size - start >= _LENGTH:
            end = start + _LENGTH + int.from_bytes(self._data[start : start + _LENGTH], "little")
            if end > size:
                break
            complete.append(bytes(self._data[start + _LENGTH : end]))
            start = end
        del self._data[:start]
        return complete


class EngineSocket:
    """The engine's end. A step waits neither for the server nor for a message of which a part has arrived.

    What the socket does not take at once, as the server is slow, a thread sends.
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames()
        self._commands: deque[bytes] = deque()
        self._later: Queue[memoryview] = Queue()
        self._sender: threading.Thread | None = None

    def send(self, message: Message) -> None:
        frame = memoryview(framed(message))
        # Nothing overtakes what the thread still has.
        if not self._later.unfinished_tasks:
            try:
                frame = frame[self._socket.send(frame, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                pass
            except OSError:  # the server has ended
                return
        if not frame:
            return
        self._later.put(frame)
        if self._sender is None:
            self._sender = threading.Thread(target=self._send_later, name="engine-messages", daemon=True)
            self._sender.start()

    def _send_later(self) -> None:
        while True:
            frame = self._later.get()
            with suppress(OSError):  # the server has ended
                self._socket.sendall(frame)
            self._later.task_done()

    def receive(self, *, wait: bool) -> Command | None:
        while not self._commands:
            try:
                data = self._socket.recv(_READ_BYTES, 0 if wait else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
            except ConnectionError:
                data = b""
            if not data:  # the server has closed its end, or has ended itself
                return Stop()
            self._commands += self._frames.feed(data)
        return pickle.loads(self._commands.popleft())

    def close(self) -> None:
        """Wait a while until the last messages are sent."""
        with self._later.all_tasks_done:
            self._later.all_tasks_done.wait_for(lambda: not self._later.unfinished_tasks, FAREWELL_SECONDS)
        self._socket.close()


class ServerSocket(asyncio.Protocol):
    """The event loop's end, after `connect`."""

    def __init__(self) -> None:
        self._frames = Frames()
        self._messages: deque[bytes] = deque()
        self._arrived = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        """Read and write in the running event loop, which gets the socket."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # That of uvloop is of no class of asyncio.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._messages += self._frames.feed(data)
        if self._messages:
            self._arrived.set()

    def send(self, command: Command) -> None:
        """Send without waiting. A command to an engine that has ended is lost."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(framed(command))

    async def take(self, most: int) -> list[Any]:
        """Wait for messages, and return at most so many."""
        await self._arrived.wait()
        taken = [pickle.loads(self._messages.popleft()) for _ in range(min(most, len(self._messages)))]
        if not self._messages:
            self._arrived.clear()
        return taken

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
