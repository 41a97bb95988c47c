"""The engine's configuration: one frozen object, the same from Python, flags, YAML and the environment.

None means that the engine decides when it knows the model and the device. Whatever is wrong or contradicts itself is a
ConfigError that names the setting, its value and what would work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from phonograph.config import values
from phonograph.config.base import Settings, located
from phonograph.config.server_config import ServerConfig
from phonograph.config.sources import Given
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode

COMPILATION_KEYS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""The keys of `compilation_config` that mean something here; each is a setting of its own too."""


class EngineConfig(Settings):
    """Every setting of the engine.

    Raises:
        ConfigError: a setting is unknown, has a value that does not work, or contradicts another.
    """

    model: values.Text = Field(description="Hugging Face name or folder of the model; demo is the one in the package.")
    tokenizer: values.OptionalText = Field(
        default=None, description="Name or folder of the tokenizer, if not the model's own."
    )
    revision: values.OptionalText = Field(default=None, description="Branch, tag or commit of a model that has a name.")
    trust_remote_code: values.Flag = Field(
        default=False, description="Run code that comes with the tokenizer; that of the model is not run."
    )
    hf_overrides: values.OptionalObject = Field(
        default=None, description="Fields of the model's config.json to replace, as a JSON object."
    )
    load_format: Annotated[values.LoadFormat, values.one_of(values.LoadFormat)] = Field(
        default="auto", description="Where weights come from; dummy makes random ones."
    )
    dtype: Annotated[values.DType, values.one_of(values.DType)] = Field(
        default="auto", description="Type of weights and activations; auto takes the model's own."
    )
    device: Annotated[values.DeviceKind, values.one_of(values.DeviceKind)] = Field(
        default="auto", description="Where the model runs; auto takes a GPU where there is one."
    )
    seed: values.OptionalSeed = Field(default=None, description="Seed of the requests that bring none.")

    max_model_len: values.OptionalSize = Field(default=None, description="Tokens of prompt and output together.")
    max_num_seqs: values.OptionalSeqs = Field(default=None, description="Requests that run in one step, at most.")
    max_num_batched_tokens: values.OptionalStepTokens = Field(default=None, description="Tokens of one step, at most.")
    scheduling_policy: Annotated[values.SchedulingPolicy, values.one_of(values.SchedulingPolicy)] = Field(
        default="fcfs", description="Who goes first: first come, or the lowest priority number."
    )
    structured_outputs_strictness: Annotated[values.Strictness, values.one_of(values.Strictness)] = Field(
        default="strict",
        description="What of a JSON schema no grammar can hold: strict refuses it, relaxed leaves it out and warns.",
    )
    num_speculative_tokens: values.Count = Field(default=0, description="Draft tokens of each decode step.")

    block_size: values.OptionalSize = Field(default=None, description="Tokens in one block of the KV cache.")
    kv_cache_dtype: Annotated[values.KVCacheDType, values.one_of(values.KVCacheDType)] = Field(
        default="auto", description="Type of the KV cache; auto takes that of the model."
    )
    kv_cache_layout: Annotated[values.KVCacheLayout, values.one_of(values.KVCacheLayout)] = Field(
        default="NHD", description="Order inside one block: tokens then heads, or heads then tokens."
    )
    kv_cache_memory_bytes: values.OptionalSize = Field(default=None, description="Bytes of the KV cache.")
    num_kv_blocks: values.OptionalSize = Field(default=None, description="Blocks of the KV cache, instead of bytes.")
    gpu_memory_utilization: values.Fraction = Field(
        default=0.9, description="Share of the GPU's memory to use; the CUDA context comes on top."
    )
    enable_prefix_caching: values.Flag = Field(default=True, description="Reuse the KV blocks of a prefix seen before.")

    attention_backend: values.OptionalText = Field(
        default=None,
        description="Attention backend by name, prefill=NAME,decode=NAME for one each, or auto for the best that fits.",
    )
    flash_attn_version: Annotated[values.FlashAttnVersion | None, values.one_of(values.FlashAttnVersion)] = Field(
        default=None, description="Version of the flash_attn backend."
    )
    cascade_attention: values.Flag = Field(
        default=False, description="Attend a prefix that a whole decode batch shares once, where that pays."
    )
    batch_invariant: values.Flag = Field(
        default=False,
        description="A request's tokens are the same, bit by bit, whatever runs beside it; slower, and on a GPU only.",
    )
    cudagraph_mode: values.OptionalMode = Field(
        default=None, description=f"Which batches run as CUDA graphs: {', '.join(GraphMode.__members__)}."
    )
    cudagraph_capture_sizes: values.OptionalSizes = Field(
        default=None, description="Numbers of tokens to capture graphs for: one, or several as 1,2,4."
    )
    max_cudagraph_capture_size: values.OptionalSize = Field(
        default=None, description="Largest number of tokens to capture a graph for."
    )
    enforce_eager: values.Flag = Field(default=False, description="No graphs; the same as cudagraph_mode NONE.")
    verify_graphs: values.Flag = Field(default=False, description="Compare each graph with eager before serving.")
    compilation_config: Mapping[str, object] | str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description=f"For compatibility: JSON with {', '.join(COMPILATION_KEYS)}.",
    )

    @classmethod
    def select(cls, source: Mapping[str, Given]) -> dict[str, Given]:
        # An unknown setting is an error here, and no other setting of the server is.
        engine = {name: setting for name, setting in source.items() if name not in ServerConfig.model_fields}
        try:
            unfolded = _unfolded({name: setting.value for name, setting in engine.items()})
        except ConfigError as error:
            raise located(error, engine) from None
        # Unfolded source by source, so that precedence holds for each setting in compilation_config.
        return {
            name: engine[name]
            if name in engine and engine[name].value is value
            else replace(engine["compilation_config"], value=value)
            for name, value in unfolded.items()
        }

    @classmethod
    def known_names(cls) -> list[str]:
        return [*cls.model_fields, *ServerConfig.model_fields]

    @model_validator(mode="before")
    @classmethod
    def _unfold(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return _unfolded(settings)

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            raise _contradiction(self, "num_kv_blocks", "kv_cache_memory_bytes", "give one of them")
        # A choice of its own for each part is for selection to read.
        backend = (self.attention_backend or "flash_attn").lower()
        if self.flash_attn_version is not None and "flash_attn" not in backend and backend != "auto":
            raise _contradiction(
                self, "flash_attn_version", "attention_backend", "works with attention_backend flash_attn or none given"
            )
        if self.cascade_attention and not self.enable_prefix_caching:
            raise _contradiction(
                self,
                "cascade_attention",
                "enable_prefix_caching",
                "requests share blocks through the prefix cache only",
            )
        if self.cascade_attention and self.batch_invariant:
            raise _contradiction(
                self,
                "cascade_attention",
                "batch_invariant",
                "a cascade is there for what requests share; give one of them",
            )
        if self.enforce_eager and self.cudagraph_mode not in (None, GraphMode.NONE):
            raise _contradiction(self, "enforce_eager", "cudagraph_mode", "give one of them")
        if self.verify_graphs and (self.enforce_eager or self.cudagraph_mode is GraphMode.NONE):
            other = "enforce_eager" if self.enforce_eager else "cudagraph_mode"
            raise _contradiction(self, "verify_graphs", other, "there is no graph to verify; give one of them")
        sizes, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if sizes and largest is not None and sizes[-1] > largest:
            raise _contradiction(
                self, "max_cudagraph_capture_size", "cudagraph_capture_sizes", f"needs {sizes[-1]} or more, or no list"
            )
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise _contradiction(
                self, "max_num_batched_tokens", "max_num_seqs", f"each request needs a token: {seqs} or more works"
            )
        return self


def _unfolded(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with what `compilation_config` holds as settings of their own, and itself gone.

    Raises:
        ConfigError: it is not an object of known keys, or says otherwise than the setting it stands for.
    """
    unfolded = dict(settings)
    folded = values.unless_null(unfolded.pop("compilation_config", None))
    for key, value in _compilation_items(folded):
        own = values.unless_null(unfolded.get(key))
        if own is None:
            unfolded[key] = value
        elif values.unless_null(value) is not None and _read(key, own) != _read(key, value):
            raise ConfigError("compilation_config", folded, f"contradicts {key}={_plain(own)!r}; give one of them")
    return unfolded


def _compilation_items(folded: object) -> list[tuple[str, object]]:
    parsed = folded
    if isinstance(folded, str):
        try:
            parsed = json.loads(folded, object_pairs_hook=_without_duplicates)
        except ValueError as error:
            example = '{"cudagraph_mode": "FULL"}'
            raise ConfigError(
                "compilation_config", folded, f"must be a JSON object such as {example}: {error}"
            ) from None
    if parsed is None:
        return []
    if not isinstance(parsed, Mapping):
        raise ConfigError("compilation_config", folded, f"must be an object with {', '.join(COMPILATION_KEYS)}")
    for key, value in parsed.items():
        if key not in COMPILATION_KEYS:
            raise ConfigError("compilation_config", {key: value}, f"known keys are {', '.join(COMPILATION_KEYS)}")
    return list(parsed.items())


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is given twice")
    return dict(pairs)


def _read(setting: str, value: object) -> object:
    """The value as the setting would store it."""
    try:
        return EngineConfig.kind(setting).read(value)
    except ValueError:
        raise EngineConfig.bad_value(setting, value) from None


def _contradiction(config: EngineConfig, setting: str, other: str, remedy: str) -> ConfigError:
    problem = f"contradicts {other}={_plain(getattr(config, other))!r}; {remedy}"
    return ConfigError(setting, getattr(config, setting), problem)


def _plain(value: object) -> object:
    return value.value if isinstance(value, GraphMode) else value
