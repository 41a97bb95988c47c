"""Exceptions of the package, in one tree.

Errors that a user, a file or a machine can cause raise one of these. `assert` is for errors in Phonograph itself.

    PhonographError
    ├── ConfigError            a setting of the engine is unknown, out of range or contradicts another
    ├── ModelError             a model folder cannot be used
    │   ├── UnsupportedModelError   its architecture, or a feature of it, is not implemented
    │   └── WeightError             a weight file or tensor is missing, truncated, corrupt or of the wrong shape
    ├── RequestError           one request is refused; the others continue
    ├── RequestFailure         one request failed without a fault of its own; the others continue
    ├── EngineUnavailable      the engine takes no requests: it has not started, has ended, or is shutting down
    ├── BackendError           an attention backend is missing or does not support this configuration
    ├── CaptureError           an operation that a graph cannot record was called inside a capture
    ├── ReplayError            a graph was replayed with inputs unlike the captured ones
    ├── MemoryLimitError       the available memory is too small
    ├── RankError              a rank of an engine on several devices has ended, failed or stopped
    └── EndpointError          a server to be measured cannot be reached or refuses the benchmark's requests
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from itertools import islice
from typing import Final, cast

UNSET: Final = object()
"""Value of a setting that is missing, in an error. None is a value that was given."""
_SHOWN = 200
"""Characters of a value in a message."""


class PhonographError(Exception):
    """Base of every exception of the package."""

    def __reduce__(self) -> tuple[Callable[..., PhonographError], tuple[type[PhonographError], str], dict[str, object]]:
        return _unpickled, (type(self), str(self)), vars(self)


class ConfigError(PhonographError):
    """A setting is invalid; the message names it, its value and what would work.

    Of a setting without a value (UNSET) the message is the name and the problem, which begins with a verb.
    """

    def __init__(self, setting: str, value: object, problem: str) -> None:
        self.setting = setting
        self.value = None if value is UNSET else value
        self.problem = problem
        super().__init__(f"{setting} {problem}" if value is UNSET else f"{setting}={quoted(value)}: {problem}")


class ModelError(PhonographError):
    """A model folder cannot be used."""


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
    """One request failed because of an error in its work; the message names the request, the work and the cause.

    `part` is the failed work, such as "grammar".
    """

    def __init__(self, request_id: str, part: str, problem: str) -> None:
        self.request_id = request_id
        self.part = part
        self.problem = problem
        super().__init__(f"request {shortened(request_id)!r} failed ({part}): {problem}")


class EngineUnavailable(PhonographError):
    """The engine takes no requests.

    `code` is `not_started`, `engine_died`, `shutting_down`, `closed` or `asleep`.
    """

    def __init__(self, problem: str, code: str) -> None:
        self.problem = problem
        self.code = code
        super().__init__(problem)


class BackendError(PhonographError):
    """An attention backend is missing or does not support this configuration."""


class CaptureError(PhonographError):
    """An operation that a graph cannot record was called inside a capture."""


class ReplayError(PhonographError):
    """A graph was replayed with inputs unlike those of its capture."""


class MemoryLimitError(PhonographError):
    """The available memory is too small."""


class RankError(PhonographError):
    """A rank of an engine on several devices has ended, failed or stopped; the engine cannot go on.

    `of_another` is True if this rank only noticed that another one is missing.
    """

    def __init__(self, problem: str, *, of_another: bool = False) -> None:
        self.of_another = of_another
        super().__init__(problem)


class EndpointError(PhonographError):
    """A server to be measured cannot be reached or refuses the benchmark's requests."""


def help_section(error: object) -> str | None:
    """Return the section of the documentation about an error, or None."""
    if isinstance(error, MemoryLimitError):
        section = "out-of-memory"
    elif isinstance(error, BackendError):
        section = "no-kernel"
    elif isinstance(error, ConfigError) and error.setting == "max_model_len":
        section = "context-too-long"
    else:
        return None
    return f"docs/guides/troubleshooting.md#{section}"


def _unpickled(kind: type[PhonographError], message: str) -> PhonographError:
    """Return an error with its message; pickle restores its attributes. The constructor would format another one."""
    return kind.__new__(kind, message)


def cause_text(error: BaseException) -> str:
    """Return an exception's type and shortened text, for a message."""
    return f"{type(error).__name__}: {shortened(str(error), 300)}"


def shortened(text: str, limit: int = 100) -> str:
    """Return the beginning of a text, for a message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, for a message: "1 token", "2 tokens"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def quoted(value: object, limit: int = _SHOWN) -> str:
    """Return the `repr` of a value, cut to about `limit` characters. Only the shown part of a long value is read."""
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
