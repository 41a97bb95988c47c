"""The engine's settings as flags, in one place, so that every command has the same ones.

A command takes what is decorated here as its first parameter; its other parameters are its own flags. Flags carry text,
which the configuration reads: no second parser that could differ.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from cyclopts import Group, Parameter
from pydantic.fields import FieldInfo

from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.config.sources import SourcedValue, read_environment, read_file, read_flags
from phonograph.config.values import Kind
from phonograph.errors import ConfigError
from phonograph.models.weights.model_files import names_model

P = ParamSpec("P")
R = TypeVar("R")
First = TypeVar("First")

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "model",
        "tokenizer",
        "revision",
        "trust_remote_code",
        "hf_overrides",
        "load_format",
        "dtype",
        "device",
        "seed",
    ),
    "Scheduling": (
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "scheduling_policy",
        "structured_outputs_strictness",
        "num_speculative_tokens",
    ),
    "KV cache": (
        "block_size",
        "kv_cache_dtype",
        "kv_cache_layout",
        "kv_cache_memory_bytes",
        "num_kv_blocks",
        "gpu_memory_utilization",
        "enable_prefix_caching",
    ),
    "Attention and graphs": (
        "attention_backend",
        "flash_attn_version",
        "cascade_attention",
        "batch_invariant",
        "cudagraph_mode",
        "cudagraph_capture_sizes",
        "max_cudagraph_capture_size",
        "enforce_eager",
        "verify_graphs",
        "compilation_config",
    ),
}
"""The headings of the help, and the settings below each."""


SERVER_GROUPS: Mapping[str, tuple[str, ...]] = {
    "Server": (
        "host",
        "port",
        "root_path",
        "api_key",
        "allowed_origins",
        "allowed_methods",
        "allowed_headers",
        "allow_credentials",
        "uvicorn_log_level",
        "disable_uvicorn_access_log",
    ),
    "Requests": (
        "served_model_name",
        "chat_template",
        "generation_config",
        "enable_auto_tool_choice",
        "tool_call_parser",
        "max_logprobs",
        "request_timeout",
        "shutdown_timeout",
    ),
    "Request limits": (
        "max_queued_requests",
        "max_queued_bytes",
        "max_request_bytes",
        "max_request_fields",
        "max_request_token_ids",
        "max_request_depth",
        "max_request_prompts",
        "max_request_messages",
        "max_request_tools",
        "max_request_stops",
        "max_request_stop_token_ids",
        "max_request_biases",
        "header_timeout",
        "body_timeout",
    ),
}
"""The same for the settings of the server."""

ENGINE_FIELDS: Mapping[str, FieldInfo] = EngineConfig.model_fields
SERVER_FIELDS: Mapping[str, FieldInfo] = ServerConfig.model_fields
_TITLES = {name: title for title, names in {**GROUPS, **SERVER_GROUPS}.items() for name in names}

SHORTER: Mapping[str, str] = {"attention_backend": "--backend"}
"""Flags that have a second name."""


def takes_engine_config(command: Callable[Concatenate[EngineConfig, P], R]) -> Callable[..., R]:
    """The command with the model as its first argument, all engine flags and `--config FILE`; it gets the configuration
    that they make. Further arguments are the command's own, if it takes any."""
    return _with_engine_flags(command, EngineConfig.load)


def takes_engine_settings(
    command: Callable[Concatenate[tuple[EngineConfig, dict[str, SourcedValue]], P], R],
) -> Callable[..., R]:
    """The same for a command that also wants to know which source gave what."""
    return _with_engine_flags(command, EngineConfig.load_with_sources)


def takes_serve_config(
    command: Callable[Concatenate[tuple[EngineConfig, ServerConfig], P], R],
) -> Callable[..., R]:
    """The command with the flags of engine and server; it gets both configurations."""

    def load(
        *, flags: Mapping[str, object], config_file: Path | None, environ: Mapping[str, str]
    ) -> tuple[EngineConfig, ServerConfig]:
        split = [{name: flags[name] for name in fields if name in flags} for fields in (ENGINE_FIELDS, SERVER_FIELDS)]
        engine = EngineConfig.load(flags=split[0], config_file=config_file, environ=environ)
        return engine, ServerConfig.load(flags=split[1], config_file=config_file, environ=environ)

    return _with_engine_flags(command, load, fields={**ENGINE_FIELDS, **SERVER_FIELDS})


def _with_engine_flags(
    command: Callable[Concatenate[First, P], R],
    load: Callable[..., First],
    *,
    fields: Mapping[str, FieldInfo] = ENGINE_FIELDS,
) -> Callable[..., R]:
    """Adds the flags, `--config FILE`, and a first argument that names the model in place of its flag."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    takes_words = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in own)
    flags = [_flag(name, field) for name, field in fields.items()]
    file = Annotated[Path | None, Parameter(name="--config", group=_group("Model"), help="YAML file of settings.")]

    def run(*arguments: Any, config_file: Path | None = None, **keywords: Any) -> R:
        given = {flag.name: keywords.pop(flag.name, None) for flag in flags}
        if arguments and not (takes_words and _is_word(arguments[0], given["model"], config_file)):
            named, arguments = arguments[0], arguments[1:]
            if given["model"] not in (None, named):
                raise ConfigError("model", given["model"], f"contradicts the argument {named!r}; give one of them")
            given["model"] = named
        first = load(flags=given, config_file=config_file, environ=os.environ)
        return command(first, *arguments, **keywords)

    model = Annotated[str | None, Parameter(show_default=False, help="The model, if not given by --model.")]
    parameters = [
        inspect.Parameter("model_tag", inspect.Parameter.POSITIONAL_ONLY, default=None, annotation=model),
        *own,
        *flags,
        inspect.Parameter("config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file),
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _is_word(argument: str, model_flag: str | None, config_file: Path | None) -> bool:
    """Returns True if a first argument is a word of the command: a model is given elsewhere, and it names none."""
    sources = {**read_file(config_file), **read_environment(os.environ), **read_flags({"model": model_flag})}
    return "model" in EngineConfig.without_nulls(sources) and not names_model(argument)


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    default = "" if field.is_required() or field.default in (None, ()) else field.default
    default = ",".join(default) if isinstance(default, tuple) else str(default)
    parameter = Parameter(
        alias=SHORTER.get(name),
        group=_group(_TITLES[name]),
        help=field.description,
        metavar=next((kind.metavar for kind in field.metadata if isinstance(kind, Kind)), "JSON"),
        show_default=(default.lower() if field.annotation is bool else default) or False,
    )
    annotation = Annotated[bool | None if field.annotation is bool else str | None, parameter]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _group(title: str) -> Group:
    return Group(title, sort_key=[*GROUPS, *SERVER_GROUPS].index(title))
