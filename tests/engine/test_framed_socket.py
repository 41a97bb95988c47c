"""Messages between a server's event loop and an engine's process: order, parts, slow readers, ends."""

from __future__ import annotations

import asyncio
import pickle
import random
import socket
import threading
import time
from typing import Any

import pytest

from phonograph.engine.process.framed_socket import EngineSocket, Frames, ServerSocket, framed
from phonograph.engine.process.messages import Abort, Progress, Stop

LARGE = 3_000_000
"""Bytes that no buffer of a socket takes at once."""


@pytest.mark.parametrize("seed", range(5))
def test_messages_arrive_whole_however_the_bytes_are_cut(seed: int) -> None:
    rng = random.Random(seed)
    messages = [rng.randbytes(rng.choice((0, 1, 7, 300, 5000))) for _ in range(200)]
    data, frames, found = b"".join(map(framed, messages)), Frames(), list[Any]()
    while data:
        size = rng.choice((1, 2, 7, 8, 9, 100, 4000))
        found += map(pickle.loads, frames.feed(data[:size]))
        data = data[size:]
    assert found == messages


def test_a_slow_server_delays_no_step_and_gets_all_messages_in_order() -> None:
    server, end = socket.socketpair()
    engine = EngineSocket(end)
    began = time.perf_counter()
    for number in range(50):
        # Small messages behind large ones must not overtake the rest of these.
        engine.send(Progress("x" * (LARGE if number % 10 == 3 else 10), number, 50))
    assert time.perf_counter() - began < 1, "a send waited"

    async def run() -> list[int]:
        connection = ServerSocket()
        await connection.connect(server)
        found: list[int] = []
        while len(found) < 50:
            several = await connection.take(8)
            assert len(several) <= 8
            found += [message.done for message in several]
        connection.close()
        return found

    assert asyncio.run(asyncio.wait_for(run(), 30)) == list(range(50))
    engine.send(Progress("lost", 0, 1))
    engine.close()


def test_the_last_messages_are_sent_before_the_end() -> None:
    server, end = socket.socketpair()
    engine, arrived = EngineSocket(end), bytearray()

    def read() -> None:
        time.sleep(0.2)
        while data := server.recv(1 << 20):
            arrived.extend(data)

    reader = threading.Thread(target=read)
    reader.start()
    engine.send(Progress("x" * LARGE, 1, 2))
    engine.close()
    reader.join(10)
    assert [pickle.loads(one).done for one in Frames().feed(bytes(arrived))] == [1]


def test_a_part_of_a_command_does_not_stop_the_engine() -> None:
    server, end = socket.socketpair()
    engine, command = EngineSocket(end), framed(Abort(7))
    assert engine.receive(wait=False) is None
    server.sendall(command[:11])
    assert engine.receive(wait=False) is None
    server.sendall(command[11:] + framed(Abort(8)))
    assert [engine.receive(wait=False), engine.receive(wait=True)] == [Abort(7), Abort(8)]
    assert engine.receive(wait=False) is None
    server.sendall(framed(Abort(9)))
    server.shutdown(socket.SHUT_WR)
    assert engine.receive(wait=True) == Abort(9)
    assert [engine.receive(wait=wait) for wait in (True, False)] == [Stop(), Stop()]


def test_the_event_loop_does_not_wait_for_a_busy_engine() -> None:
    async def run() -> list[Any]:
        server, end = socket.socketpair()
        connection, engine = ServerSocket(), EngineSocket(end)
        connection.send(Abort(0))  # before the connection: lost
        await connection.connect(server)
        began = time.perf_counter()
        for number in range(1, 4):
            connection.send(Abort(number, "x" * LARGE))  # pyright: ignore[reportArgumentType]
        assert time.perf_counter() - began < 1, "a send waited"
        found = [await asyncio.to_thread(engine.receive, wait=True) for _ in range(3)]
        end.close()
        await asyncio.sleep(0.05)
        for _ in range(10):
            connection.send(Abort(5))  # the engine has ended: lost
        return found

    assert [command.key for command in asyncio.run(asyncio.wait_for(run(), 30))] == [1, 2, 3]
