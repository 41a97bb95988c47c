"""What all settings objects have in common: frozen, strict, read by their `Kind`, and errors in our words."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from phonograph.config.sources import Given, read_environment, read_file, read_flags
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
    def load(cls, *, flags: Mapping[str, object], config_file: Path | None, environ: Mapping[str, str]) -> Self:
        """Return the settings of a process: flags go before the environment, and that before the file.

        Args:
            flags: settings by name; None is a flag that is not set.
            config_file: YAML, one mapping of settings.
            environ: PHONOGRAPH_<SETTING>; every other name that starts so must be known (`OTHER_VARIABLES`).
        """
        return cls.load_with_sources(flags=flags, config_file=config_file, environ=environ)[0]

    @classmethod
    def load_with_sources(
        cls, *, flags: Mapping[str, object], config_file: Path | None, environ: Mapping[str, str]
    ) -> tuple[Self, dict[str, Given]]:
        """Return the settings as `load` does, and the source of each value that is not a default."""
        given: dict[str, Given] = {}
        for source in (read_file(config_file), read_environment(environ), read_flags(flags)):
            given |= cls.select(source)
        given = cls.without_nulls(given)
        try:
            return cls(**{name: setting.value for name, setting in given.items()}), given
        except ConfigError as error:
            raise located(error, given) from None

    @classmethod
    def select(cls, source: Mapping[str, Given]) -> dict[str, Given]:
        """Return the values of a source that are for this object: one file and one environment serve all commands."""
        return {name: setting for name, setting in source.items() if name in cls.model_fields}

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
