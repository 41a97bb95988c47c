"""The settings as flags, the same in every command.

A decorated command takes the configuration as its first parameter; its other parameters are its own flags. Flags carry
text that the configuration parses, so that flags, environment and files are read alike.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Concatenate, ParamSpec, TypeVar

from cyclopts import Group, Parameter
from pydantic.fields import FieldInfo

from phonograph.cli.other_programs import LOCAL_URL
from phonograph.cli.remote import RemoteModel
from phonograph.cli.show import note
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.config.sources import SourcedValue, read_environment, read_file, read_flags
from phonograph.config.values import ValueKind
from phonograph.config.vllm_flags import explain_variables
from phonograph.errors import UNSET, ConfigError, EndpointError
from phonograph.files.model_files import names_model

P = ParamSpec("P")
R = TypeVar("R")
First = TypeVar("First")

HEADINGS: Mapping[str, str] = {
    "model": "Model",
    "max_model_len": "Scheduling",
    "block_size": "KV cache",
    "attention_backend": "Attention and graphs",
    "host": "Server",
    "served_model_name": "Requests",
    "max_queued_requests": "Request limits",
}
"""Headings of the help by the first setting below each; settings follow in the order of their fields."""

ENGINE_FIELDS: Mapping[str, FieldInfo] = EngineConfig.model_fields
SERVER_FIELDS: Mapping[str, FieldInfo] = ServerConfig.model_fields

SHORT_NAMES: Mapping[str, str] = {
    "attention_backend": "--backend",
    "data_parallel_size": "-dp",
    "decode_context_parallel_size": "-dcp",
    "quantization": "-q",
    "tensor_parallel_size": "-tp",
    "gpu_memory_utilization": "--device-memory-utilization",
    "max_queued_requests": "--max-num-queued-reqs",
}
"""Second names of flags."""


def takes_engine_config(command: Callable[Concatenate[EngineConfig, P], R]) -> Callable[..., R]:
    """Decorate a command that takes an EngineConfig: the model as first argument, engine flags, `--config FILE`."""
    return _with_engine_flags(command, EngineConfig.load)


def takes_engine_or_url(command: Callable[Concatenate[EngineConfig | RemoteModel, P], R]) -> Callable[..., R]:
    """Decorate a command that takes an EngineConfig, or with `--url` the model of a server."""
    return _with_engine_flags(command, EngineConfig.load, remote=True)


def takes_engine_settings(
    command: Callable[Concatenate[tuple[EngineConfig, dict[str, SourcedValue]], P], R],
) -> Callable[..., R]:
    """Decorate a command that takes an EngineConfig and the source of each value."""
    return _with_engine_flags(command, EngineConfig.load_with_sources)


def takes_serve_config(
    command: Callable[Concatenate[tuple[EngineConfig, ServerConfig], P], R],
) -> Callable[..., R]:
    """Decorate a command that takes the configurations of engine and server, with the flags of both."""

    def load(*, flags: Mapping[str, object], **sources: Any) -> tuple[EngineConfig, ServerConfig]:
        engine, server = (
            {name: flags[name] for name in fields if name in flags} for fields in (ENGINE_FIELDS, SERVER_FIELDS)
        )
        return EngineConfig.load(flags=engine, **sources), ServerConfig.load(flags=server, **sources)

    return _with_engine_flags(command, load, fields={**ENGINE_FIELDS, **SERVER_FIELDS})


def _with_engine_flags(
    command: Callable[Concatenate[First, P], R],
    load: Callable[..., First],
    *,
    fields: Mapping[str, FieldInfo] = ENGINE_FIELDS,
    remote: bool = False,
) -> Callable[..., R]:
    """Add the flags, `--config FILE`, and a first argument that names the model instead of its flag.

    With `remote` there are `--url` and `--api-key` too, and with `--url` the command gets a RemoteModel.
    """
    parameters = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    takes_words = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    flags = list(_flags(fields))
    file = Annotated[Path | None, Parameter(name="--config", group=_group("Model"), help="YAML file of settings.")]

    def run(*arguments: Any, config_file: Path | None = None, **keywords: Any) -> R:
        values = {flag.name: keywords.pop(flag.name, None) for flag in flags}
        url, api_key = keywords.pop("url", None), keywords.pop("api_key", None)
        asked: dict[str, object] = {**values, "config": config_file}
        found = None if url is None else _remote_model(url, api_key, asked)
        if remote and url is None and not arguments and all(value is None for value in asked.values()):
            found = _local_server(api_key)
        if found is not None:
            if arguments and arguments[0] in found.names:
                found.name, arguments = arguments[0], arguments[1:]
            return command(found, *arguments, **keywords)  # pyright: ignore[reportArgumentType]
        if api_key is not None:
            raise ConfigError("api_key", UNSET, "needs --url, the server that it is for")
        if arguments and not (takes_words and _is_word(arguments[0], values["model"], config_file)):
            model, arguments = arguments[0], arguments[1:]
            if values["model"] not in (None, model):
                raise ConfigError("model", values["model"], f"contradicts the argument {model!r}; give one of them")
            values["model"] = model
        first = load(flags=values, config_file=config_file, environ=os.environ)
        if (said := explain_variables(os.environ)) is not None:
            note(said)
        return command(first, *arguments, **keywords)

    model = Annotated[str | None, Parameter(show_default=False, help="The model, if not given by --model.")]
    parameters = [
        inspect.Parameter("model_tag", inspect.Parameter.POSITIONAL_ONLY, default=None, annotation=model),
        *parameters,
        *(_remote_flags() if remote else ()),
        *flags,
        inspect.Parameter("config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file),
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _remote_flags() -> Iterator[inspect.Parameter]:
    for name, text in (
        ("url", "Use the model of a server with OpenAI's interface, such as http://127.0.0.1:8000, and no engine."),
        ("api_key", "Key for the server at --url; default: OPENAI_API_KEY of the environment."),
    ):
        annotation = Annotated[str | None, Parameter(show_default=False, help=text)]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _local_server(api_key: str | None) -> RemoteModel | None:
    """Return the model of the server that clients without a model use; None if the environment names a model.

    Raises:
        ConfigError: there is no server.
    """
    if _sets_model(None, None):
        return None
    try:
        return RemoteModel(LOCAL_URL, None, api_key)
    except EndpointError as error:
        raise ConfigError("model", UNSET, f"is required without a server: {error}") from None


def _remote_model(url: str, api_key: str | None, values: Mapping[str, object]) -> RemoteModel:
    """Return the model of a server. Settings of an engine are refused, since the server has its own."""
    for name, value in values.items():
        if value is not None and name != "model":
            raise ConfigError(name, str(value), "is for an engine of this command; the server at --url has its own")
    model = values["model"]
    return RemoteModel(url, None if model is None else str(model), api_key)


def _is_word(argument: str, model_flag: str | None, config_file: Path | None) -> bool:
    """Return True if a first argument belongs to the command: the model is set elsewhere, and it names no model."""
    return _sets_model(model_flag, config_file) and not names_model(argument)


def _sets_model(flag: str | None, config_file: Path | None) -> bool:
    """Return True if a flag, the environment or a file names the model."""
    sources = {**read_file(config_file), **read_environment(os.environ), **read_flags({"model": flag})}
    return "model" in EngineConfig.without_nulls(sources)


def _flags(fields: Mapping[str, FieldInfo]) -> Iterator[inspect.Parameter]:
    heading = ""
    for name, field in fields.items():
        heading = HEADINGS.get(name, heading)
        default = "" if field.is_required() or field.default in (None, ()) else field.default
        default = ",".join(default) if isinstance(default, tuple) else str(default)
        parameter = Parameter(
            alias=SHORT_NAMES.get(name),
            group=_group(heading),
            help=field.description,
            metavar=next((kind.metavar for kind in field.metadata if isinstance(kind, ValueKind)), "JSON"),
            show_default=(default.lower() if field.annotation is bool else default) or False,
        )
        annotation = Annotated[bool | None if field.annotation is bool else str | None, parameter]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _group(heading: str) -> Group:
    return Group(heading, sort_key=list(HEADINGS.values()).index(heading))
