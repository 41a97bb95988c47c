"""The exceptions a user can meet, in one tree, so that a caller can catch as widely or as narrowly as it wants.

`assert` is kept for our own bugs; whatever a user, a file or a machine can cause raises one of these.

    PhonographError
    ├── ConfigError            a setting of the engine is unknown, out of range or contradicts another
    ├── ModelError             a model folder cannot be used
    │   ├── UnsupportedModelError   its architecture, or a feature of it, is not implemented
    │   └── WeightError             a weight file or tensor is missing, truncated, corrupt or of the wrong shape
    ├── RequestError           one request is refused; the others go on
    ├── RequestFailure         one request could not be completed, by no fault of its own; the others go on
    ├── EngineUnavailable      the engine takes no requests: it has not started, has ended, or shuts down
    ├── BackendError           an attention backend cannot serve this configuration, or is not there
    ├── CaptureError           something a graph capture cannot hold was done while capturing
    ├── ReplayError            a graph was asked to replay with inputs that it was not captured for
    ├── MemoryLimitError       the memory granted is too small for what was asked
    └── EndpointError          a server that is to be measured is not there, or refuses what a benchmark sends
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import cast

_SHOWN = 200
"""Characters of a value in a message."""


class PhonographError(Exception):
    """Base of every error that Phonograph raises on purpose."""

    def __reduce__(self) -> tuple[Callable[..., PhonographError], tuple[type[PhonographError], str], dict[str, object]]:
        return _unpickled, (type(self), str(self)), vars(self)


class ConfigError(PhonographError):
    """A setting is wrong; the message names it, its value and what would work."""

    def __init__(self, setting: str, value: object, problem: str) -> None:
        self.setting = setting
        self.value = value
        self.problem = problem
        super().__init__(f"{setting}={quoted(value)}: {problem}")


class ModelError(PhonographError):
    """A model folder cannot be used as it is."""


class UnsupportedModelError(ModelError):
    """The model's architecture, or a feature of its configuration, is not implemented."""


class WeightError(ModelError):
    """A weight file or tensor is missing, truncated, corrupt or of the wrong shape."""


class RequestError(PhonographError):
    """One request is refused; the message names the parameter, its value and what would work."""

    def __init__(self, parameter: str, value: object, problem: str) -> None:
        self.parameter = parameter
        self.value = value
        self.problem = problem
        super().__init__(f"{shortened(parameter)}={quoted(value)}: {problem}")


class RequestFailure(PhonographError):
    """One request ended because work for it failed; the message names the request, the work and the cause.

    part: the work that failed, such as "grammar"
    """

    def __init__(self, request_id: str, part: str, problem: str) -> None:
        self.request_id = request_id
        self.part = part
        self.problem = problem
        super().__init__(f"request {shortened(request_id)!r} failed ({part}): {problem}")


class EngineUnavailable(PhonographError):
    """The engine takes no requests.

    code: `not_started`, `engine_died` or `shutting_down`
    """

    def __init__(self, problem: str, code: str) -> None:
        self.problem = problem
        self.code = code
        super().__init__(problem)


class BackendError(PhonographError):
    """An attention backend cannot serve this configuration, or is not there."""


class CaptureError(PhonographError):
    """Something that a graph cannot hold was done inside a capture."""


class ReplayError(PhonographError):
    """A graph was asked to replay with inputs unlike those it was captured for."""


class MemoryLimitError(PhonographError):
    """The memory granted is too small for what was asked."""


class EndpointError(PhonographError):
    """A server that is to be measured is not there, or refuses what a benchmark sends."""


def _unpickled(kind: type[PhonographError], message: str) -> PhonographError:
    """Return an error with its message; pickle sets its attributes. The constructor would make another message."""
    return kind.__new__(kind, message)


def cause_text(error: BaseException) -> str:
    """An exception as a message can show it: its type and a shortened text."""
    return f"{type(error).__name__}: {shortened(str(error), 300)}"


def shortened(text: str, limit: int = 100) -> str:
    """Cut a text that a user gave to what a message can show."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def quoted(value: object, limit: int = _SHOWN) -> str:
    """Write a value as `repr` does, cut to about `limit` characters. No more of a long value is read than is shown."""
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= limit else f"{value[:limit]!r}..."
    if isinstance(value, int) and value.bit_length() > 10_000:  # Python refuses to write longer ones
        return f"<an integer of {value.bit_length()} bits>"
    if isinstance(value, list | tuple | set | frozenset | dict):
        return _quoted_items(cast("Collection[object]", value), limit)
    return shortened(repr(value), limit)


def _quoted_items(items: Collection[object], limit: int) -> str:
    each = limit // 4
    if each < 4:
        return "..."
    first = [
        f"{quoted(item, each)}: {quoted(items[item], each)}" if isinstance(items, Mapping) else quoted(item, each)
        for item in islice(items, each)
    ]
    text = shortened(", ".join([*first, "..."] if len(items) > each else first), limit)
    return f"[{text}]" if isinstance(items, list) else f"({text})" if isinstance(items, tuple) else f"{{{text}}}"
