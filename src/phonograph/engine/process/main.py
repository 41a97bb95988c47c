"""Entry point of the engine's process, which runs until `Stop` or until the server's process ends."""

from __future__ import annotations

import logging.config
import multiprocessing
import os
import signal
import socket
import threading
from contextlib import closing
from multiprocessing.connection import Connection, wait
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.process.framed_socket import EngineSocket
from phonograph.engine.process.messages import StartFailed
from phonograph.engine.process.ranks.rank_processes import RankProcesses
from phonograph.engine.startup.early_start import select_devices, start_early
from phonograph.errors import PhonographError


def run_core(
    config: EngineConfig,
    end_of_engine: socket.socket,
    log_settings: dict[str, Any] | None,
    last_words: Connection,
    rank: int = 0,
) -> None:
    """Run the engine's process at its end of a pair of sockets. The exit code is not 0 only if a step failed.

    `last_words` takes the reason of an end that no message can tell. `rank` is the number of the engine among
    `data_parallel_size`.
    """
    if log_settings is not None:
        logging.config.dictConfig(log_settings)
    # Ctrl-C reaches both processes; the server ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _end_with_the_server()

    def end(reason: str) -> None:
        last_words.send(reason)
        os._exit(1)

    with closing(EngineSocket(end_of_engine)) as channel:
        if config.device != "cpu":
            try:
                select_devices(rank, config.data_parallel_size, config.tensor_parallel_size)
            except PhonographError as error:
                channel.send(StartFailed(error))
                return
            start_early()
        ranks = None
        if config.tensor_parallel_size > 1:
            # Their imports run beside those of this process.
            ranks = RankProcesses(
                config.tensor_parallel_size,
                on_gpu=config.device != "cpu",
                last_words=last_words,
                on_failure=end,
            )
        # A late import: the server's process imports this module too, and must not import torch.
        from phonograph.engine.process.run_engine import run_engine

        run_engine(config, channel, owns_process=True, rank=rank, rank_processes=ranks)


def _end_with_the_server() -> None:
    server = multiprocessing.parent_process()
    assert server is not None, "this is a process that the server starts"

    def watch() -> None:
        wait([server.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="end-with-the-server", daemon=True).start()
