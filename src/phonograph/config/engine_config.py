"""Configuration of the engine: one frozen object, the same from Python, flags, YAML and the environment.

None leaves the choice to the engine, which makes it when it knows the model and the device.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from phonograph.config import values
from phonograph.config.base import Settings, located
from phonograph.config.kv_events_config import KVEventsConfig, read_kv_events_config
from phonograph.config.server_config import ServerConfig
from phonograph.config.sources import SourcedValue
from phonograph.config.speculative_config import SpeculativeConfig, read_speculative_config
from phonograph.config.vllm_flags import explain_setting, is_neutral, no_meaning
from phonograph.errors import ConfigError
from phonograph.graphs.modes import GraphMode

log = logging.getLogger(__name__)

COMPILATION_KEYS = ("cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size")
"""Supported keys of `compilation_config`; each is also a setting."""
_PYTHON_LOGPROBS = 1024
"""Maximum log-probabilities of a position, as of `SamplingParams`, which this room cannot import."""
_IN_PYTHON = {
    "chat_template": "LLM.chat has an argument of that name",
    "generation_config": "requests with sampling_params do not use the model's",
    "max_logprobs": f"requests from Python may ask for up to {_PYTHON_LOGPROBS} without it",
}
"""Settings of the server, each with what works for an engine in Python."""


class EngineConfig(Settings):
    """Every setting of the engine.

    Raises:
        ConfigError: a setting is unknown, has an invalid value, or contradicts another.

    Example:
        ```python
        config = EngineConfig(model="demo", max_num_seqs=8, cudagraph_mode="FULL")
        assert config.max_model_len is None  # The engine chooses it.
        ```
    """

    model: values.ModelName = Field(
        description="Hugging Face name, folder or GGUF file of the model; demo is the model in the package."
    )
    tokenizer: values.OptionalText = Field(
        default=None, description="Name or folder of the tokenizer; default: the model's."
    )
    revision: values.OptionalText = Field(default=None, description="Branch, tag or commit of a model on the hub.")
    skip_tokenizer_init: values.Flag = Field(
        default=False, description="Load no tokenizer: prompts and outputs are token ids, without text."
    )
    tokenizer_revision: values.OptionalText = Field(
        default=None,
        description="Branch, tag or commit of the tokenizer on the hub; default: that of the model, or the latest with "
        "tokenizer.",
    )
    download_dir: values.OptionalText = Field(
        default=None, description="Folder of downloads from the hub; default: its cache, below HF_HOME."
    )
    trust_remote_code: values.Flag = Field(
        default=False, description="Run code that comes with the tokenizer; code of the model is never run."
    )
    hf_overrides: values.OptionalObject = Field(
        default=None, description="Fields that replace those of the model's config.json, as a JSON object."
    )
    load_format: Annotated[values.LoadFormat, values.one_of(values.LoadFormat)] = Field(
        default="auto", description="Source of the weights; dummy draws random ones."
    )
    convert: Annotated[values.Convert, values.one_of(values.Convert)] = Field(
        default="auto",
        description="What a model that generates becomes: embed makes embeddings of its last layer; auto does so where "
        "the folder has modules.json, none never.",
    )
    model_impl: Annotated[values.ModelImpl, values.one_of(values.ModelImpl, {"vllm": "phonograph"})] = Field(
        default="auto",
        description="Code of the model: that of phonograph, or the module of transformers with phonograph's attention; "
        "auto takes the latter where the former does not know the architecture.",
    )
    quantization: Annotated[values.QuantizationMethod | None, values.one_of(values.QuantizationMethod)] = Field(
        default=None,
        description="Weight format; default: the checkpoint's. fp8 converts weights in 16 bits while they are loaded.",
    )
    quantize_lm_head: Annotated[values.HeadFormat | None, values.one_of(values.HeadFormat)] = Field(
        default=None, description="Format that the head is converted to while it is loaded; default: the checkpoint's."
    )
    dtype: Annotated[values.DType, values.one_of(values.DType, values.DTYPE_SYNONYMS)] = Field(
        default="auto", description="Type of weights and activations; auto is the model's."
    )
    cpu_products: Annotated[values.CpuProductsChoice, values.one_of(values.CpuProductsChoice)] = Field(
        default="auto",
        description="Products of quantized weights on a CPU: int4 packs them for products in bfloat16, float32 "
        "dequantizes them, for exact products; auto is the faster.",
    )
    device: Annotated[values.DeviceKind, values.one_of(values.DeviceKind)] = Field(
        default="auto", description="Device of the model; auto is a GPU if there is one."
    )
    tensor_parallel_size: values.Size = Field(
        default=1, description="GPUs that share the model, each with a part of every layer; on a CPU processes."
    )
    decode_context_parallel_size: values.Size = Field(
        default=1,
        description="Ranks with the same KV head that share its tokens, in place of copies of all. It divides "
        "tensor_parallel_size / KV heads.",
    )
    seed: values.Seed = Field(default=0, description="Seed of requests that set none, so that a run can be repeated.")

    data_parallel_size: Annotated[int, values.whole(1, 64)] = Field(
        default=1, description="Engines behind one server, each in a process and on a GPU of its own."
    )

    max_model_len: values.OptionalContext = Field(
        default=None,
        description="Maximum tokens of prompt and output together; auto is the largest that the memory holds for one "
        "sequence, up to the model's.",
    )
    max_num_seqs: values.OptionalSeqs = Field(default=None, description="Maximum requests in one step.")
    max_num_batched_tokens: values.OptionalStepTokens = Field(default=None, description="Maximum tokens in one step.")
    scheduling_policy: Annotated[values.SchedulingPolicy, values.one_of(values.SchedulingPolicy)] = Field(
        default="fcfs", description="Order of requests: by arrival, or lowest priority number first."
    )
    structured_outputs_strictness: Annotated[values.Strictness, values.one_of(values.Strictness)] = Field(
        default="strict",
        description="JSON Schema keywords that cannot be enforced: strict rejects them, relaxed warns and drops them.",
    )
    logprobs_mode: Annotated[values.LogprobsMode, values.one_of(values.LogprobsMode)] = Field(
        default="raw_logprobs",
        description="Numbers reported as log-probabilities: those of the model, or of the logits after penalties, "
        "masks, temperature and filters; or these logits themselves. Those of prompts are always raw.",
    )
    num_speculative_tokens: values.Count = Field(
        default=0, description="Draft tokens of each decode step, to explain and verify graphs; see speculative_config."
    )
    speculative_config: values.OptionalObject = Field(
        default=None,
        description='Speculation, such as {"method": "ngram", "num_speculative_tokens": 4}; further keys are '
        "prompt_lookup_min, prompt_lookup_max, adaptive_depth and num_speculative_tokens_per_batch_size; methods are "
        "ngram, suffix, draft_model, eagle and eagle3.",
    )

    block_size: values.OptionalSize = Field(default=None, description="Tokens in one block of the KV cache.")
    kv_cache_dtype: Annotated[values.KVCacheDType, values.one_of(values.KVCacheDType)] = Field(
        default="auto", description="Type of the KV cache; auto is the model's."
    )
    kv_cache_layout: Annotated[values.KVCacheLayout, values.one_of(values.KVCacheLayout)] = Field(
        default="NHD", description="Order of dimensions in a block: tokens then heads, or heads then tokens."
    )
    kv_cache_memory_bytes: values.OptionalSize = Field(default=None, description="Size of the KV cache in bytes.")
    num_kv_blocks: values.OptionalSize = Field(
        default=None, description="Size of the KV cache in blocks, instead of bytes."
    )
    gpu_memory_utilization: values.Fraction = Field(
        default=0.9, description="Fraction of the GPU's memory to use, without the CUDA context."
    )
    enable_prefix_caching: values.Flag = Field(default=True, description="Reuse the KV blocks of known prefixes.")
    state_checkpoint_share: values.Fraction = Field(
        default=0.1,
        description="Share of the KV cache's memory for checkpoints of states, of models whose layers have them.",
    )
    state_checkpoint_interval: values.Count = Field(
        default=0,
        description="Tokens between checkpoints of a prompt's states; 0 for one at its end and at shared prefixes.",
    )
    kv_events_config: values.OptionalObject = Field(
        default=None,
        description="Publication of the prefix cache's contents over ZeroMQ, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}; further keys are publisher, replay_endpoint, '
        "buffer_steps, hwm, max_queue_size and topic. A server and AsyncLLM do it.",
    )
    enable_sleep_mode: values.Flag = Field(
        default=False, description="Let sleep give the memory of weights and KV cache back until wake_up."
    )

    attention_backend: values.OptionalText = Field(
        default=None,
        description="Attention backend by name; prefill=NAME,decode=NAME for two; auto for the best supported one.",
    )
    flash_attn_version: Annotated[values.FlashAttnVersion | None, values.one_of(values.FlashAttnVersion)] = Field(
        default=None, description="Version of the flash_attn backend."
    )
    cascade_attention: Annotated[
        values.CascadeAttention, values.one_of(values.CascadeAttention, {"true": "auto", "false": "off"})
    ] = Field(default="auto", description="Attend a prefix that decodes share once where that is faster, or never.")
    batch_invariant: values.Flag = Field(
        default=False,
        description="Make a request's tokens independent, bit by bit, of other requests; slower, and on a GPU only.",
    )
    expert_load_metrics: values.Flag = Field(
        default=False,
        description="Count the tokens of each expert for /metrics, in models with experts; on a GPU one more launch in "
        "each of their layers.",
    )
    profile_dir: values.OptionalText = Field(
        default=None, description="Folder of the traces that start_profile and stop_profile write."
    )
    cudagraph_mode: values.OptionalMode = Field(
        default=None, description=f"Batches that run as CUDA graphs: {', '.join(GraphMode.__members__)}."
    )
    cudagraph_capture_sizes: values.OptionalSizes = Field(
        default=None, description="Numbers of tokens to capture graphs for, such as 1,2,4."
    )
    max_cudagraph_capture_size: values.OptionalSize = Field(
        default=None, description="Largest number of tokens to capture a graph for; default: 8 on a CPU, 2048 on a GPU."
    )
    enforce_eager: values.Flag = Field(default=False, description="Run without graphs, as cudagraph_mode NONE.")
    verify_graphs: values.Flag = Field(
        default=False, description="Compare each graph with eager execution before serving."
    )
    compilation_config: Mapping[str, object] | str | None = Field(
        default=None,
        exclude=True,
        repr=False,
        description=f"JSON with {', '.join(COMPILATION_KEYS)}, for compatibility with vLLM.",
    )

    @classmethod
    def select(cls, source: Mapping[str, SourcedValue]) -> dict[str, SourcedValue]:
        # Unknown settings pass, so that they raise an error.
        engine = {name: setting for name, setting in source.items() if name not in ServerConfig.model_fields}
        try:
            unfolded = _unfolded({name: setting.value for name, setting in engine.items()})
        except ConfigError as error:
            raise located(error, engine) from None
        # Each source is unfolded alone, so that precedence applies to each setting in compilation_config.
        return {
            name: engine[name]
            if name in engine and engine[name].value is value
            else replace(engine["compilation_config"], value=value)
            for name, value in unfolded.items()
        }

    @classmethod
    def known_names(cls) -> list[str]:
        return [*cls.model_fields, *ServerConfig.model_fields]

    @property
    def speculation(self) -> SpeculativeConfig | None:
        """Speculation, or None without."""
        return None if self.speculative_config is None else read_speculative_config(self.speculative_config)

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """Publisher of the prefix cache's events, or None without."""
        return None if self.kv_events_config is None else read_kv_events_config(self.kv_events_config)

    @property
    def draft_tokens(self) -> int:
        """Most draft tokens of a decode."""
        return self.num_speculative_tokens if self.speculation is None else self.speculation.num_speculative_tokens

    @model_validator(mode="before")
    @classmethod
    def _unfold(cls, settings: dict[str, Any]) -> dict[str, Any]:
        return _unfolded(settings)

    @model_validator(mode="after")
    def _check_contradictions(self) -> Self:
        if self.speculation is not None and self.num_speculative_tokens:
            raise _contradiction(
                self, "num_speculative_tokens", "speculative_config", "give num_speculative_tokens in the latter"
            )
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise _contradiction(self, "kv_events_config", "enable_prefix_caching", "the events are those of its cache")
        if self.kv_cache_memory_bytes is not None and self.num_kv_blocks is not None:
            raise _contradiction(self, "num_kv_blocks", "kv_cache_memory_bytes", "give one of them")
        # Backend selection reads prefill=NAME,decode=NAME.
        backend = (self.attention_backend or "flash_attn").lower()
        if self.flash_attn_version is not None and "flash_attn" not in backend and backend != "auto":
            raise _contradiction(
                self,
                "flash_attn_version",
                "attention_backend",
                "works with attention_backend flash_attn or auto, or without one",
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
    """Return the settings with the keys of `compilation_config` as settings, and without itself.

    Raises:
        ConfigError: it is not an object of known keys, or contradicts a setting; or a setting is vLLM's, and its value
            would change something.
    """
    unfolded = _without_vllms(settings)
    folded = values.unless_null(unfolded.pop("compilation_config", None))
    for key, value in _compilation_items(folded):
        outside = values.unless_null(unfolded.get(key))
        if outside is None:
            unfolded[key] = value
        elif values.unless_null(value) is not None and _read(key, outside) != _read(key, value):
            raise ConfigError("compilation_config", folded, f"contradicts {key}={_plain(outside)!r}; give one of them")
    return unfolded


def _without_vllms(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of vLLM whose value changes nothing here.

    Raises:
        ConfigError: another value would change something.
    """
    kept: dict[str, Any] = {}
    for name, value in settings.items():
        if name == "max_logprobs" and value in range(-1, _PYTHON_LOGPROBS + 1):
            continue  # requests from Python may ask for as many without it
        if name in EngineConfig.model_fields or not is_neutral(name, value):
            kept[name] = value
            problem = None if name in EngineConfig.model_fields else explain_setting(name, EngineConfig.known_names())
            if name in ServerConfig.model_fields:
                problem = f"is a setting of phonograph serve; {_IN_PYTHON.get(name, 'leave it out')}"
            if problem is not None:
                raise ConfigError(name, value, problem)
        elif (said := no_meaning(name)) is not None:
            log.warning("%s", said)
    return kept


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
        raise ValueError(f"{twice[0]} is set twice")
    return dict(pairs)


def _read(setting: str, value: object) -> object:
    """Return the value as the setting stores it."""
    try:
        return EngineConfig.kind(setting).read(value)
    except ValueError:
        raise EngineConfig.bad_value(setting, value) from None


def _contradiction(config: EngineConfig, setting: str, other: str, remedy: str) -> ConfigError:
    problem = f"contradicts {other}={_plain(getattr(config, other))!r}; {remedy}"
    return ConfigError(setting, getattr(config, setting), problem)


def _plain(value: object) -> object:
    return value.value if isinstance(value, GraphMode) else value
