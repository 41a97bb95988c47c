"""Ctrl-C between two steps: an interrupted step would leave cache and slots in an unknown state."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts() -> Generator[Callable[[], bool]]:
    """Defer the first Ctrl-C until the caller asks for it; the second interrupts as usual.

    It has no effect where Python would not raise KeyboardInterrupt: outside the main thread, and if the program handles
    SIGINT itself.

    Yields:
        A function that returns True after Ctrl-C was pressed.
    """
    seen: list[int] = []
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return

    def take(number: int, frame: object) -> None:
        seen.append(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, take)
    try:
        yield lambda: bool(seen)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
