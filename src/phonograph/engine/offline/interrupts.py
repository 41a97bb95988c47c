"""Ctrl-C between two steps: a step that is cut in its middle leaves cache and slots that nothing can go on from."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def deferred_interrupts() -> Generator[Callable[[], bool]]:
    """Turns the first Ctrl-C into a question to ask between steps; the second one interrupts as usual.

    Yields a function that returns True once Ctrl-C was pressed. Has no effect where Python would not raise
    KeyboardInterrupt: outside the main thread, and where the program handles SIGINT itself.
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
