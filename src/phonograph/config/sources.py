"""Sources of settings: flags, environment and YAML file. Each value keeps its source for messages.

YAML scalars are read as the text in the file, so that `010`, `1e3` and `no` mean the same in a file, a flag and the
environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from phonograph.errors import ConfigError

ENVIRONMENT_PREFIX = "PHONOGRAPH_"
OTHER_VARIABLES = {
    "PHONOGRAPH_USE_MODELSCOPE": "true takes models from ModelScope, by the package modelscope",
    "PHONOGRAPH_VENV": "the virtual environment that scripts/demo and scripts/test use",
}
"""Environment variables with the prefix that are not settings."""


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """Value of a setting with its source.

    Attributes:
        source: "flag", "environment" or "file".
        where: the flag, the variable, or the file with the line.
    """

    value: object
    source: str
    where: str


class _TextLoader(yaml.BaseLoader):
    """YAML loader that reads scalars as text and rejects duplicate keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is set twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_flags(flags: Mapping[str, object]) -> dict[str, SourcedValue]:
    """Return the flags by setting; a flag that is None is not set."""
    return {
        name: SourcedValue(value, "flag", ("--no-" if value is False else "--") + name.replace("_", "-"))
        for name, value in flags.items()
        if value is not None
    }


def read_environment(environ: Mapping[str, str]) -> dict[str, SourcedValue]:
    """Return the variables PHONOGRAPH_<SETTING> by setting. The names are not checked."""
    return {
        variable.removeprefix(ENVIRONMENT_PREFIX).lower(): SourcedValue(value, "environment", variable)
        for variable, value in environ.items()
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES
    }


def read_file(path: Path | None) -> dict[str, SourcedValue]:
    """Return the top-level mapping of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not hold one mapping.
    """
    if path is None:
        return {}
    try:
        loader = _TextLoader(path.read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            return {}
        settings = loader.construct_document(root)
    except OSError as error:
        raise ConfigError("config", str(path), f"cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError("config", str(path), f"is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigError("config", str(path), "must hold one mapping of settings, such as `max_num_seqs: 64`")
    lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
    return {name: SourcedValue(value, "file", f"{path}:{lines[name]}") for name, value in settings.items()}
