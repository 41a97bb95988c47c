"""Frozen dataclasses with vLLM's arguments: neutral values are dropped, and errors of other uses say what works."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, fields
from typing import Any, TypeVar

from phonograph.errors import RequestError, shortened

Made = TypeVar("Made")


def checks_arguments(
    noun: str, *, neutral: Mapping[str, tuple[object, ...]], hints: Mapping[str, str]
) -> Callable[[type[Made]], type[Made]]:
    """Return a decorator of a frozen dataclass that explains unknown arguments and assignments.

    Args:
        noun: name of an argument in errors, such as "sampling parameter".
        neutral: arguments of vLLM that are taken with these values, which change nothing here; None is one of them.
        hints: other arguments of vLLM, each with the problem and what works instead, in words that follow its name.
    """

    def decorate(cls: type[Any]) -> type[Any]:
        construct = cls.__init__
        known = [one.name for one in fields(cls)]

        @functools.wraps(construct)
        def checked(self: Any, *args: Any, **values: Any) -> None:
            try:
                construct(self, *args, **values)
            except TypeError:
                unknown = values.keys() - set(known)
                if not unknown:
                    raise
                for name in sorted(unknown):
                    value = values.pop(name)
                    # Other types, such as arrays, may not compare.
                    plain = isinstance(value, bool | int | float | str)
                    if name not in neutral or not (value is None or (plain and value in neutral[name])):
                        raise RequestError(name, shortened(repr(value)), _problem(name)) from None
                construct(self, *args, **values)

        def _problem(name: str) -> str:
            if name in hints:
                return hints[name]
            if name in neutral:
                return "is vLLM's and not here yet; leave it out"
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(known)}"
            return f"is not a {noun}; {hint}"

        def refuse_change(self: Any, name: str, value: Any) -> None:
            works = f"dataclasses.replace(params, {name}={shortened(repr(value), 50)}) returns a changed copy"
            raise FrozenInstanceError(f"{cls.__name__} cannot be changed; {works}")

        cls.__init__ = checked
        cls.__setattr__ = refuse_change  # pyright: ignore[reportAttributeAccessIssue]
        return cls

    return decorate
