"""Programs that a comparison runs one after the other: started, watched, and ended with all that they started."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import FrameType

from phonograph.errors import EndpointError

POLL_SECONDS = 0.1
"""Interval in seconds of the requests to /health while a server starts."""
PROGRESS_SECONDS = 10.0
STOP_SECONDS = 40.0
"""Time that a server has to end by itself, which is longer than ours drains."""
SHOWN_LINE = 120
_SOURCES = Path(__file__).resolve().parents[2] / "src"
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Without the proxies that the environment may name: servers are on this machine."""


class ServerProcess:
    """A server in a process group of its own, which writes to a log.

    ready_seconds: from the start of the process to the first /health with status 200
    """

    def __init__(self, name: str, command: Sequence[str], *, url: str, log: Path, environment: Mapping[str, str]):
        self.name = name
        self.url = url
        self.ready_seconds: float | None = None
        self._log = log
        self._began = time.monotonic()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command), env=dict(environment), stdout=file, stderr=file, start_new_session=True
            )

    @classmethod
    def of_checkout(cls, arguments: Sequence[str], log: Path) -> ServerProcess:
        """Start `phonograph serve` with the sources of this checkout in front, on a free port."""
        port = free_port()
        command = [sys.executable, "-m", "phonograph", "serve", *arguments, "--port", str(port)]
        environment = {**os.environ, "PYTHONPATH": python_path(_SOURCES)}
        return cls("the server", command, url=f"http://127.0.0.1:{port}", log=log, environment=environment)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self, timeout: float, report: Callable[[str], None]) -> float:
        """Wait for /health, printing the last line of the log now and then; return the seconds of the start.

        Raises:
            EndpointError: the process ended, or is not ready in time.
        """
        said = time.monotonic()
        while self.health() != 200:
            now = time.monotonic()
            if self._process.poll() is not None:
                raise EndpointError(f"{self.name} ended with {self._process.returncode} while it started; {self._last}")
            if now - self._began > timeout:
                raise EndpointError(f"{self.name} was not ready after {timeout:g} s; {self._last}")
            if now - said >= PROGRESS_SECONDS:
                said = now
                report(f"{self.name}: starting for {now - self._began:.0f} s; {self._last}")
            time.sleep(POLL_SECONDS)
        self.ready_seconds = time.monotonic() - self._began
        return self.ready_seconds

    def health(self, path: str = "/health") -> int | None:
        """Return the status of a probe, or None without an answer."""
        try:
            with _DIRECT.open(f"{self.url}{path}", timeout=5) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def version(self) -> str | None:
        """Return the version of /version, or None."""
        try:
            with _DIRECT.open(f"{self.url}/version", timeout=5) as answer:
                return json.load(answer)["version"]
        except (OSError, ValueError, KeyError):
            return None

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self, timeout: float = STOP_SECONDS) -> int | None:
        """Return the exit code, or None if the process still runs."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> int | None:
        """Terminate it, then kill what remains of its group; return its exit code."""
        if self._process.poll() is None:
            self.terminate()
        code = self.wait()
        end_group(self._process, (signal.SIGKILL,))
        return code

    @property
    def _last(self) -> str:
        lines = self._log.read_bytes()[-4096:].decode("utf-8", "replace").split("\n")
        shown = [line.strip() for line in lines if line.strip()]
        return f"its log ends: {shown[-1][:SHOWN_LINE]}" if shown else "its log is empty"


def leave_at_sigterm() -> None:
    """Make SIGTERM raise SystemExit in this program, so that it ends what it started: a server may hold a GPU."""

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def end_group(
    process: subprocess.Popen[str] | subprocess.Popen[bytes],
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGKILL),
) -> None:
    """End a process that leads a group, and all of the group: an engine may live in processes of its own."""
    for kind in signals:
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            break
        time.sleep(2 if kind is signal.SIGTERM else 0.2)
    process.wait()


def python_path(*folders: Path) -> str:
    """Return PYTHONPATH with some folders in front."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def gpu_uuid() -> str | None:
    """Return the id of the GPU, which shows that two programs ran on the same one."""
    return _nvidia_smi("uuid")


def gpu_memory_mib() -> int | None:
    """Return the memory of the GPU that all processes use, in MiB; None without a GPU."""
    used = _nvidia_smi("memory.used")
    return sum(map(int, used.split())) if used and used.replace("\n", "").isdecimal() else None


def _nvidia_smi(field: str) -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    query = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    query += [f"--id={visible}"] if visible else []
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip() or None


def portable(command: Sequence[str]) -> str:
    """Return the command without the folders of this machine."""
    return shlex.join(Path(word).name if Path(word).is_absolute() else word for word in command)
