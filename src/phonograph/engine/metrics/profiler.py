"""`Profiler`: traces of an engine's thread between two verbs, written by torch's profiler."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import torch

from phonograph.errors import ConfigError, RequestError


class Profiler:
    """Profile of the operators and kernels that one thread starts.

    Args:
        folder: of the traces; None if `profile_dir` is not set.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._running: Any = None  # torch's class is imported when it is used
        self._numbers = itertools.count(1)

    def start(self) -> None:
        """Start a profile.

        Raises:
            ConfigError: there is no folder for traces, or it cannot be written.
            RequestError: a profile is running.
        """
        if self._folder is None:
            raise ConfigError("profile_dir", None, "start_profile needs the folder that traces are written to")
        if self._running is not None:
            raise RequestError("start_profile", "now", "a profile is running; stop_profile ends it")
        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("profile_dir", self._folder, f"cannot be made ({error})") from error
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
        self._running = profile(activities=[ProfilerActivity.CPU, *gpu])
        self._running.start()

    def close(self) -> None:
        """End a profile without a trace, if one is running."""
        if self._running is not None:
            self._running.stop()
            self._running = None

    def stop(self) -> str:
        """End the profile, and return the file of its trace, which Perfetto and chrome://tracing show.

        Raises:
            RequestError: no profile is running.
            ConfigError: the folder cannot be written.
        """
        if self._running is None:
            raise RequestError("stop_profile", "now", "no profile is running; start_profile begins one")
        running, self._running = self._running, None
        running.stop()
        path = Path(self._folder or "") / f"phonograph-{os.getpid()}-{next(self._numbers)}.json.gz"
        try:
            running.export_chrome_trace(str(path))
        except OSError as error:
            raise ConfigError("profile_dir", self._folder, f"cannot be written ({error})") from error
        return str(path)
