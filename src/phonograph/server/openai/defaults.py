"""Defaults of a server that come with the model: sampling parameters and the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import ConfigError, ModelError, RequestError, shortened
from phonograph.files.model_files import model_path

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that become defaults of requests."""


def sampling_defaults(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """Return the model's sampling parameters, as defaults of requests; empty with generation_config "none".

    Raises:
        ModelError: the model's generation_config.json is unusable.
    """
    if server.generation_config == "none":
        return {}
    folder = model_path(engine.model, revision=engine.revision, config_only=engine.load_format == "dummy")
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    problem = f"{file}: is unusable; --generation-config none does without it"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = {name: content[name] for name in SAMPLING if content.get(name) is not None}
        SamplingParams(**found)
    except (OSError, ValueError, AttributeError, RequestError) as error:
        raise ModelError(f"{problem} ({error})") from error
    return found


def chat_template(server: ServerConfig) -> str | None:
    """Return the template that the setting contains or names.

    Raises:
        ConfigError: the file cannot be read, or the template has a syntax error.
    """
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
