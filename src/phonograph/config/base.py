"""Base of the settings objects: frozen, strict, with values read by their `ValueKind`. Errors name the setting."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from phonograph.config.sources import SourcedValue, read_environment, read_file, read_flags
from phonograph.config.values import ValueKind, unless_null
from phonograph.config.vllm_flags import sampling_hint
from phonograph.errors import UNSET, ConfigError


class Settings(BaseModel):
    """Base of the settings objects. Every field has a `ValueKind` or reads its value in a validator.

    Raises:
        ConfigError: a setting is unknown or missing, or its value is invalid.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # for type checkers, pydantic derives the keywords from the fields

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
    ) -> tuple[Self, dict[str, SourcedValue]]:
        """Return the settings as `load` does, and the source of each setting that is not a default."""
        sources: dict[str, SourcedValue] = {}
        for source in (read_file(config_file), read_environment(environ), read_flags(flags)):
            sources |= cls.select(source)
        sources = cls.without_nulls(sources)
        try:
            return cls(**{name: setting.value for name, setting in sources.items()}), sources
        except ConfigError as error:
            raise located(error, sources) from None

    @classmethod
    def select(cls, source: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
        """Return the settings of a source that are for this object. One file and one environment serve all commands."""
        return {name: setting for name, setting in source.items() if name in cls.model_fields}

    @classmethod
    def kind(cls, setting: str) -> ValueKind:
        """Return the kind of a setting's values."""
        return next(kind for kind in cls.model_fields[setting].metadata if isinstance(kind, ValueKind))

    @classmethod
    def bad_value(cls, setting: str, value: object) -> ConfigError:
        """Return the error of an invalid value."""
        kind = cls.kind(setting)
        return ConfigError(setting, value, f"must be {', '.join([kind.works, *kind.installed()])}")

    @classmethod
    def _explained(cls, error: ValidationError, settings: Mapping[str, object]) -> ConfigError:
        """Return the first error that pydantic found as a ConfigError."""
        first = error.errors()[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            hint = sampling_hint(name, cls.known_names()) or nearest(name, cls.known_names())
            return ConfigError(name, settings[name], f"is not a setting; {hint}")
        if first["type"] == "missing":
            return ConfigError(name, UNSET, f"is required: {cls.model_fields[name].description}")
        return cls.bad_value(name, first["input"])

    @classmethod
    def without_nulls(cls, sources: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
        """Drop settings whose value is null. A null overrides lower sources, so that the default applies."""
        return {
            name: setting
            for name, setting in sources.items()
            if name not in cls.model_fields or unless_null(setting.value) is not None
        }

    @classmethod
    def known_names(cls) -> list[str]:
        """Return the names to suggest for an unknown setting."""
        return list(cls.model_fields)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name."""
    near = difflib.get_close_matches(name.lower().replace("-", "_"), known, n=1)
    return f"did you mean {near[0]}?" if near else f"settings are {', '.join(known)}"


def located(error: ConfigError, sources: Mapping[str, SourcedValue]) -> ConfigError:
    """Return the error with the source of the value, if it has one."""
    if error.setting not in sources:
        return error
    return ConfigError(error.setting, error.value, f"{error.problem} (set by {sources[error.setting].where})")
