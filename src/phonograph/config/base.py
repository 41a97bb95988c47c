"""What all settings objects have in common: frozen, strict, read by their `Kind`, and errors in our words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from phonograph.config.sources import Given
from phonograph.config.values import Kind, unless_null
from phonograph.errors import ConfigError


class Settings(BaseModel):
    """Base of the settings objects; every field has a `Kind` or reads its value in a validator.

    Raises:
        ConfigError: a setting is unknown, is missing, or has a value that does not work.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # a type checker keeps the keywords that pydantic derives from the fields

        def __init__(self, **settings: object) -> None:
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise self._explained(error, settings) from None

    @classmethod
    def kind(cls, setting: str) -> Kind:
        """How values of a setting are read."""
        return next(kind for kind in cls.model_fields[setting].metadata if isinstance(kind, Kind))

    @classmethod
    def bad_value(cls, setting: str, value: object) -> ConfigError:
        """The error of a value that does not work."""
        return ConfigError(setting, value, f"must be {cls.kind(setting).works}")

    @classmethod
    def _explained(cls, error: ValidationError, settings: Mapping[str, object]) -> ConfigError:
        """The first thing that pydantic found."""
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            return ConfigError(name, settings[name], f"is not a setting; {nearest(name, cls.known_names())}")
        if first["type"] == "missing":
            return ConfigError(name, None, f"must be given: {cls.model_fields[name].description}")
        return cls.bad_value(name, first["input"])

    @classmethod
    def without_nulls(cls, given: Mapping[str, Given]) -> dict[str, Given]:
        """What is left once the sources are laid over each other: null takes back what those below gave, so that the
        default holds, whether or not that is None."""
        return {
            name: setting
            for name, setting in given.items()
            if name not in cls.model_fields or unless_null(setting.value) is not None
        }

    @classmethod
    def known_names(cls) -> list[str]:
        """The names that a user may have meant by one that is no setting."""
        return list(cls.model_fields)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to say of a name that is not known."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f"did you mean {near[0]}?" if near else f"settings are {', '.join(known)}"


def located(error: ConfigError, given: Mapping[str, Given]) -> ConfigError:
    """The error with the place that gave the value, where one did."""
    if error.setting not in given:
        return error
    return ConfigError(error.setting, error.value, f"{error.problem} (given by {given[error.setting].where})")
