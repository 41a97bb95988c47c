"""Defaults of a server that come with the model: sampling parameters and the chat template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.offline.model_defaults import FIELDS, model_sampling_defaults
from phonograph.errors import ConfigError, RequestError, shortened


def sampling_defaults(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """Return the defaults of requests: the model's sampling parameters, replaced by those of the server.

    Raises:
        ConfigError: override_generation_config has an unknown parameter or a value out of range.
        ModelError: the model's generation_config.json is unusable.
    """
    interval = {} if server.stream_interval == 1 else {"stream_interval": server.stream_interval}
    return {**_of_model(engine, server), **_of_server(server), **interval}


def _of_server(server: ServerConfig) -> Mapping[str, Any]:
    found = server.override_generation_config or {}
    for name, value in found.items():
        if name not in FIELDS:
            raise ConfigError("override_generation_config", dict(found), f"has {name!r}; known are {', '.join(FIELDS)}")
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            raise ConfigError("override_generation_config", dict(found), f"has {error}") from None
    return found


def _of_model(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    if server.generation_config != "auto":
        return {}
    return model_sampling_defaults(engine, remedy="--generation-config none does without it")


def chat_template(server: ServerConfig) -> str | None:
    """Return the template that the setting contains or names.

    Raises:
        ConfigError: the file cannot be read, the template has a syntax error, or there are variables for no template.
    """
    variables = server.default_chat_template_kwargs
    if variables is not None and server.chat_format == "harmony":
        problem = "chat_format=harmony has no template; leave it out"
        raise ConfigError("default_chat_template_kwargs", dict(variables), problem)
    setting = server.chat_template
    if setting is None:
        return None
    template = setting
    if "{" not in setting and "\n" not in setting:
        try:
            template = Path(setting).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("chat_template", setting, f"is neither a template nor a readable file: {error}") from None
    _check_syntax(template, setting)
    return template


def _check_syntax(template: str, setting: str) -> None:
    """Compile the template without a conversation, so that a syntax error ends the start."""
    # Imported late: they take a second, and only a configured template needs them.
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)
    except TemplateSyntaxError as error:
        problem = f"has a syntax error in line {error.lineno}: {error.message}"
        raise ConfigError("chat_template", shortened(setting), problem) from None
