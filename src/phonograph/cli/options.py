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

from phonograph.config import EngineConfig
from phonograph.config_sources import Given
from phonograph.config_values import Kind

P = ParamSpec("P")
R = TypeVar("R")
First = TypeVar("First")

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Model": (
        "model",
        "tokenizer",
        "revision",
        "trust_remote_code",
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


SHORTER: Mapping[str, str] = {"attention_backend": "--backend"}
"""Flags that have a second name."""


def takes_engine_config(command: Callable[Concatenate[EngineConfig, P], R]) -> Callable[..., R]:
    """The command with all engine flags and `--config FILE`; it gets the configuration they make."""
    return _with_engine_flags(command, EngineConfig.load)


def takes_engine_settings(
    command: Callable[Concatenate[tuple[EngineConfig, dict[str, Given]], P], R],
) -> Callable[..., R]:
    """The same for a command that also wants to know which source gave what."""
    return _with_engine_flags(command, EngineConfig.load_with_sources)


def _with_engine_flags(command: Callable[Concatenate[First, P], R], load: Callable[..., First]) -> Callable[..., R]:
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    flags = [_flag(name, field) for name, field in EngineConfig.model_fields.items()]
    file = Annotated[Path | None, Parameter(name="--config", group=_group("Model"), help="YAML file of settings.")]

    def run(*arguments: Any, config_file: Path | None = None, **keywords: Any) -> R:
        given = {flag.name: keywords.pop(flag.name, None) for flag in flags}
        first = load(flags=given, config_file=config_file, environ=os.environ)
        return command(first, *arguments, **keywords)

    parameters = [
        *own,
        *flags,
        inspect.Parameter("config_file", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file),
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _flag(name: str, field: FieldInfo) -> inspect.Parameter:
    title = next(title for title, names in GROUPS.items() if name in names)
    default = "" if field.is_required() or field.default is None else str(field.default)
    parameter = Parameter(
        alias=SHORTER.get(name),
        group=_group(title),
        help=field.description,
        metavar=next((kind.metavar for kind in field.metadata if isinstance(kind, Kind)), "JSON"),
        show_default=(default.lower() if field.annotation is bool else default) or False,
    )
    annotation = Annotated[bool | None if field.annotation is bool else str | None, parameter]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _group(title: str) -> Group:
    return Group(title, sort_key=list(GROUPS).index(title))
