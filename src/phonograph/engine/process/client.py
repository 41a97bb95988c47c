"""`EngineClient`: connection between an event loop and an engine on a thread or in a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from phonograph.engine.process.messages import Command, EngineFacts, Message, Progress, Report, StartFailed

REPORTS_AT_ONCE = 8
STOP_SECONDS = 5.0
"""Time that an engine has to end after `Stop`."""

StartProgress = Callable[[str, int, int], None]
"""Called with the phase of a start ("weights", on a GPU "kernels", "graphs"), the work done and the total work."""


def no_progress(phase: str, done: int, total: int) -> None:
    """Ignore the progress of a start."""


class EngineClient(Protocol):
    """Connection to one engine. It starts the engine when it is made; one event loop makes, uses and closes it."""

    async def ready(self, progress: StartProgress) -> EngineFacts:
        """Wait until the engine has started. It serves requests after `Begin` was sent.

        Raises:
            PhonographError: the engine could not start.
        """
        ...

    def send(self, command: Command) -> None:
        """Send without waiting. Commands to an engine that has ended are lost."""
        ...

    async def receive(self) -> list[Report]:
        """Wait for reports; return at least one and at most `REPORTS_AT_ONCE`, in order.

        If the engine has ended, it waits forever.
        """
        ...

    def on_death(self, callback: Callable[[], None]) -> None:
        """Call `callback` once, in the event loop, when the engine ends without having been closed."""
        ...

    def end(self) -> str:
        """Return a description of how the engine ended."""
        ...

    async def close(self) -> None:
        """End the engine, whatever its state."""
        ...

    def close_now(self) -> None:
        """Do the same while the event loop waits."""
        ...


def started(message: Message, progress: StartProgress) -> EngineFacts | None:
    """Handle a message of a starting engine; return its facts once it has started.

    Raises:
        PhonographError: the engine could not start.
    """
    if isinstance(message, Progress):
        progress(*message)
        return None
    if isinstance(message, StartFailed):
        raise message.error
    assert isinstance(message, EngineFacts), message
    return message
