"""`CallLock`: calls of the offline API from several threads, one after the other on one session."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from phonograph.engine.outputs import RequestOutput
from phonograph.errors import RequestError


class CallLock:
    """Lock of a session, which is not thread-safe.

    Args:
        abort: ends a request in the session.
    """

    def __init__(self, abort: Callable[[RequestOutput], None]) -> None:
        self._abort = abort
        self._lock = threading.Lock()
        self._owner: int | None = None
        self._abandoned: deque[RequestOutput] = deque()

    @contextmanager
    def held(self, method: str) -> Generator[None]:
        """Wait for the calls of other threads, and hold the session.

        Args:
            method: name of the caller, for errors.

        Raises:
            RequestError: this thread is inside a call, which could never end if this one waited for it.
        """
        if self._owner == threading.get_ident():
            problem = "is called inside another call of this LLM on the same thread; call it after that has returned"
            raise RequestError(method, "now", problem)
        try:
            with self._lock:  # Ctrl-C interrupts the wait
                self._owner = threading.get_ident()
                try:
                    self._end_abandoned()
                    yield
                finally:
                    self._owner = None
        finally:
            self._sweep()

    def close(self) -> None:
        """Forget the session, which has ended all its requests. The caller holds the lock."""
        self._abort = _ignore

    def abandon(self, output: RequestOutput) -> None:
        """End a request now, or when the call that holds the session returns.

        A generator can be closed by the garbage collector, on any thread and in the middle of a step.
        """
        self._abandoned.append(output)
        self._sweep()

    def _sweep(self) -> None:
        """End abandoned requests, unless a call holds the session, which does so later."""
        while self._abandoned and self._lock.acquire(blocking=False):
            self._owner = threading.get_ident()
            try:
                self._end_abandoned()
            finally:
                self._owner = None
                self._lock.release()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._abort(self._abandoned.popleft())


def _ignore(output: RequestOutput) -> None:
    """Do nothing: the session has ended the request."""
