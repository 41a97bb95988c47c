"""`EngineClient`: the connection between an event loop and an engine, wherever the engine runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phonograph.engine.process.messages import Command, EngineFacts, Message, Progress, Report, StartFailed

REPORTS_AT_ONCE = 8
STOP_SECONDS = 5.0
"""Time that an engine has to end after it was told to."""

StartProgress = Callable[[str, int, int], None]
"""Called with the phase of a start ("weights", on a GPU "kernels", "graphs"), the work done of it, and all of it."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore the progress of a start."""


class EngineClient(Protocol):
    """One engine. It is made, used and closed in one event loop, and starts when it is made."""

    async def ready(self, progress: StartProgress) -> EngineFacts:
        """Wait until the engine has started. It takes requests once `Begin` was sent to it.

        Raises:
            PhonographError: the engine could not start.
        """
        ...

    def send(self, command: Command) -> None:
        """Send without waiting. What is sent to an engine that has ended is lost."""
        ...

    async def receive(self) -> list[Report]:
        """Return the next reports in their order, at least one and at most `REPORTS_AT_ONCE`.

        Waits for the first one, without end if the engine has ended.
        """
        ...

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, in the event loop, when the engine has ended without being closed."""
        ...

    def end(self) -> str:
        """Return how the engine ended, in words."""
        ...

    async def close(self) -> None:
        """End the engine, whatever it is doing."""
        ...


def started(message: Message, progress: StartProgress) -> EngineFacts | None:
    """Take a message of an engine that starts; return its facts once it has started.

    Raises:
        PhonographError: the engine could not start.
    """
    if isinstance(message, Progress):
        progress(message.phase, message.done, message.total)
        return None
    if isinstance(message, StartFailed):
        raise message.error
    assert isinstance(message, EngineFacts), message
    return message
