"""Where settings come from besides Python, each read as text and remembered with its place for the messages.

YAML scalars are taken as the text they are written as, so that `010`, `1e3` or `no` mean in a file what they mean in a
flag or in the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from phonograph.errors import ConfigError

ENVIRONMENT_PREFIX = "PHONOGRAPH_"
OTHER_VARIABLES = {"PHONOGRAPH_VENV": "the virtual environment that scripts/demo and scripts/test use"}
"""Environment variables with our prefix that are no settings of the engine."""


@dataclass(frozen=True, slots=True)
class Given:
    """A value as it was given.

    source: "flag", "environment" or "file"
    where:  the flag, the variable, or the file with its line
    """

    value: object
    source: str
    where: str


class _TextLoader(yaml.BaseLoader):
    """Every scalar as text; a key that comes twice is an error rather than lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_flags(flags: Mapping[str, object]) -> dict[str, Given]:
    """Flags by the name of their setting; None is a flag that was not given."""
    return {
        name: Given(value, "flag", ("--no-" if value is False else "--") + name.replace("_", "-"))
        for name, value in flags.items()
        if value is not None
    }


def read_environment(environ: Mapping[str, str]) -> dict[str, Given]:
    """PHONOGRAPH_<SETTING> of the environment. Whether such a setting exists is for the configuration to say."""
    return {
        variable.removeprefix(ENVIRONMENT_PREFIX).lower(): Given(value, "environment", variable)
        for variable, value in environ.items()
        if variable.startswith(ENVIRONMENT_PREFIX) and variable not in OTHER_VARIABLES
    }


def read_file(path: Path | None) -> dict[str, Given]:
    """The top-level mapping of a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else than one mapping.
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
    return {name: Given(value, "file", f"{path}:{lines[name]}") for name, value in settings.items()}
