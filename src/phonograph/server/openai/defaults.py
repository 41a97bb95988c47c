"""What comes with a model for those who serve it: sampling defaults, and a chat template from a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig, ToolCallParser
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import ConfigError, ModelError, RequestError, shortened
from phonograph.models.weights.model_files import model_folder

SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""The fields of a generation_config.json that are defaults of requests here."""


def sampling_defaults(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """The model's own sampling parameters, for what requests leave open; none where they are not wanted.

    Raises:
        ModelError: the model's file of them is unusable.
    """
    if server.generation_config == "none":
        return {}
    folder = model_folder(engine.model, revision=engine.revision, config_only=engine.load_format == "dummy")
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


def check_tools(server: ServerConfig) -> None:
    """Raises ConfigError where tool calls are to be found, and nothing says in which form."""
    if server.enable_auto_tool_choice and server.tool_call_parser is None:
        known = ", ".join(get_args(ToolCallParser))
        raise ConfigError("enable_auto_tool_choice", True, f"needs tool_call_parser, one of {known}")


def chat_template(server: ServerConfig) -> str | None:
    """The template that the setting names or is.

    Raises:
        ConfigError: it names a file that cannot be read, or the template is none.
    """
    given = server.chat_template
    if given is None:
        return None
    template = given
    if "{" not in given and "\n" not in given:
        try:
            template = Path(given).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("chat_template", given, f"is no template and no file that can be read: {error}") from None
    _check_syntax(template, given)
    return template


def _check_syntax(template: str, given: str) -> None:
    """Now, and not by the first request: compiled for no conversation at all."""
    # These take a second to import, which only those with a template of their own should wait for.
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        render_jinja_template([], chat_template=template)
    except TemplateSyntaxError as error:
        problem = f"has a syntax error in line {error.lineno}: {error.message}"
        raise ConfigError("chat_template", shortened(given), problem) from None
