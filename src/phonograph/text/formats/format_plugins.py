"""Formats of answers that other packages have, by their entry points. A package is imported if a setting names it."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import entry_points
from typing import TypeVar

from phonograph.errors import ConfigError, cause_text

_Form = TypeVar("_Form")


def load_plugin(
    setting: str, name: str, group: str, kind: type[_Form], built_in: Collection[str]
) -> tuple[_Form, str] | None:
    """Return the format that a setting names, and its package; None if it is a built-in one.

    Args:
        setting: name of the setting.
        name: value of the setting.
        group: group of the entry points.
        kind: class of the formats.
        built_in: names of the built-in formats.

    Raises:
        ConfigError: no package has the format, several have it, one has the name of a built-in format, or what it has
            cannot be imported or is no such format.
    """
    points = [point for point in entry_points(group=group) if point.name.lower() == name]
    packages = [f"{point.dist.name} {point.dist.version}" if point.dist else point.value for point in points]
    shown = f"the package {' and the package '.join(packages)}"
    if name in built_in:
        if points:
            problem = f"is a built-in format, and {shown} has an entry point of this name; rename or uninstall that one"
            raise ConfigError(setting, name, problem)
        return None
    if len(points) != 1:
        problem = f"is an entry point of {shown}; uninstall all but one" if points else "no package has this format"
        raise ConfigError(setting, name, problem)
    try:
        form = points[0].load()
    except Exception as error:  # whatever another package's import raises
        problem = f"{shown} cannot be imported ({points[0].value}): {cause_text(error)}"
        raise ConfigError(setting, name, problem) from error
    if not isinstance(form, kind) or str(getattr(form, "name", "")).lower() != name:
        wanted = f"{kind.__module__}.{kind.__name__} with the name {name!r}"
        problem = (
            f"{shown} has {type(form).__name__} {getattr(form, 'name', '')!r} ({points[0].value}); must be {wanted}"
        )
        raise ConfigError(setting, name, problem)
    return form, packages[0]
