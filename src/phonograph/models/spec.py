"""Specification of a model as plain values: enough for weights, attention, memory and `explain`, without the weights.

Defaults and older spellings of config.json have transformers' meaning (`hf_config.py`).
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError, ModelError, UnsupportedModelError, shortened
from phonograph.files.catalog import CONFIGS_DIRECTORY, HUB_IDS
from phonograph.files.gguf_file import read_gguf
from phonograph.files.model_files import is_gguf, model_path
from phonograph.models.context_length import context_length
from phonograph.models.end_tokens import read_end_tokens, split_end_tokens
from phonograph.models.hf_config import FULL, check_overrides, read_settings, with_overrides
from phonograph.models.layers.rope import rope_frequencies
from phonograph.models.quantization.float8 import Fp8Head
from phonograph.models.quantization.quantization_config import choose_quantization, read_quantization
from phonograph.models.quantization.scheme import Quantization, Scheme
from phonograph.models.registry import Architecture, find_architecture
from phonograph.models.rope_parameters import read_rope
from phonograph.models.weights.gguf_config import (
    config_of_gguf,
    end_tokens_of_gguf,
    notes_of_gguf,
    quantization_of_gguf,
    rope_frequencies_of_gguf,
)

log = logging.getLogger(__name__)

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
UNLIMITED = (-1, -1)
_MOST_HEAD_SIZE = 1 << 16
"""Largest head size; larger numbers are of damaged files, and a rotary embedding has a frequency for each pair."""


class LayerMatrix(NamedTuple):
    """A matrix of a layer, in which projections of the same input are fused.

    Attributes:
        prefix: prefix of the projections' names in a checkpoint.
        parts: outputs of each projection by the rest of its name, in the order of the matrix.
        inputs: inputs of the product.
        bias: True if the projections have a bias.
    """

    prefix: str
    parts: dict[str, int]
    inputs: int
    bias: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder-only model.

    Attributes:
        windows: by layer, (left, right) keys beside the query itself; -1 is unlimited. A `sliding_window` of W keys is
            (W - 1, 0).
        context_length: positions that the model serves; `context_source` describes the fields that determine it.
        rope_frequencies: angle per position of each of the head_size / 2 pairs.
        rope_factor: factor on cos and sin.
        dtype: type in the configuration, as torch names it.
        eos_token_ids: from config.json and generation_config.json, within the vocabulary.
        quantization: format of quantized projections, or None.
        fp8_kv_cache: True if the configuration says that the checkpoint has scales for keys and values in FP8.
        lm_head_scheme: format of the language model's head in memory, or None for the model's type.
        notes: decisions while reading, for `explain`.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    context_source: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[tuple[int, int], ...]
    rope_frequencies: tuple[float, ...]
    rope_factor: float
    dtype: str
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None = None
    fp8_kv_cache: bool = False
    lm_head_scheme: Scheme | None = None
    notes: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        matrices = [outputs * inputs for _, outputs, inputs in self.quantized_projections()]
        if self.lm_head_scheme is not None and not self.tie_word_embeddings:
            matrices.append(self.vocab_size * self.hidden_size)
        return sum(math.prod(shape) for shape in self.tensor_shapes().values()) + sum(matrices)

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights, of which those that are not quantized are in `dtype`."""
        element = DTYPE_BYTES[dtype]
        dense = sum(math.prod(shape) for shape in self.tensor_shapes().values()) * element
        matrices = self.quantized_matrices()
        return dense + sum(scheme.nbytes(outputs, inputs, element) for scheme, outputs, inputs in matrices)

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the weight format of a projection, by its name in a checkpoint; None for the model's type."""
        return None if self.quantization is None else self.quantization.scheme_of(module)

    def with_tokenizer_end(self, eos_token_id: int | None) -> ModelSpec:
        """Return the model with the tokenizer's end-of-sequence token added, if the vocabulary has it."""
        if eos_token_id is None:
            return self
        token_ids, note = split_end_tokens((*self.eos_token_ids, eos_token_id), self.vocab_size)
        if note is not None:
            log.warning("tokenizer: %s", note)
        return replace(self, eos_token_ids=token_ids)

    def matrix_scheme(self, matrix: LayerMatrix) -> Scheme | None:
        """Return the weight format of a matrix of a layer, whose parts have one layout in memory."""
        return self.scheme_of(f"{matrix.prefix}.{next(iter(matrix.parts))}")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor that a checkpoint must have, but those of quantized matrices."""
        hidden = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, hidden)}
        for layer in range(self.num_layers):
            shapes[f"model.layers.{layer}.input_layernorm.weight"] = (hidden,)
            shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (hidden,)
            for name, rows, columns, bias in self._projections(layer):
                if self.scheme_of(name) is None:
                    shapes[f"{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{name}.bias"] = (rows,)
            if self.qk_norm:
                for name in ("q_norm", "k_norm"):
                    shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = (self.head_size,)
        shapes["model.norm.weight"] = (hidden,)
        if not self.tie_word_embeddings and self.lm_head_scheme is None:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        return shapes

    def matrices(self, layer: int) -> list[LayerMatrix]:
        """Return the matrices of a layer: query, key and value; output; gate and up; down."""
        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_query_heads * self.head_size, self.num_kv_heads * self.head_size
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        return [
            LayerMatrix(attention, {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}, hidden, self.qkv_bias),
            LayerMatrix(attention, {"o_proj": hidden}, q_rows, self.o_bias),
            LayerMatrix(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, self.mlp_bias),
            LayerMatrix(mlp, {"down_proj": hidden}, inner, self.mlp_bias),
        ]

    def _projections(self, layer: int) -> Iterator[tuple[str, int, int, bool]]:
        """Yield the name, outputs, inputs and bias of each projection."""
        for matrix in self.matrices(layer):
            for name, outputs in matrix.parts.items():
                yield f"{matrix.prefix}.{name}", outputs, matrix.inputs, matrix.bias

    def has_projection(self, module: str) -> bool:
        """Return True for the name of a projection in a checkpoint."""
        layer = module.removeprefix("model.layers.").partition(".")[0]
        index = int(layer) if layer.isdecimal() else self.num_layers
        return index < self.num_layers and any(module == name for name, *_ in self._projections(index))

    def quantized_projections(self) -> Iterator[tuple[Scheme, int, int]]:
        """Yield the format, outputs and inputs of each quantized projection."""
        for layer in range(self.num_layers if self.quantization is not None else 0):
            for name, outputs, inputs, _ in self._projections(layer):
                scheme = self.scheme_of(name)
                if scheme is not None:
                    yield scheme, outputs, inputs

    def quantized_matrices(self) -> Iterator[tuple[Scheme, int, int]]:
        """Yield the format, outputs and inputs of each quantized projection, and of a quantized head."""
        yield from self.quantized_projections()
        if self.lm_head_scheme is not None:
            yield self.lm_head_scheme, self.vocab_size, self.hidden_size


def read_configured_model(config: EngineConfig, *, config_only: bool) -> ModelSpec:
    """Return the spec of the configured model, in the configured weight format.

    Raises:
        ConfigError: the checkpoint is in another weight format, or its head cannot be converted.
        ModelError: as `read_model_spec`.
    """
    if config.quantize_lm_head is not None:
        folder = model_path(config.model, revision=config.revision, config_only=config_only)
        if is_gguf(folder):
            raise ConfigError("quantize_lm_head", config.quantize_lm_head, f"{folder} is a GGUF file; leave it out")
    spec = read_model_spec(
        config.model,
        trust_remote_code=config.trust_remote_code,
        revision=config.revision,
        hf_overrides=config.hf_overrides,
        config_only=config_only,
    )
    if spec.fp8_kv_cache and config.kv_cache_dtype != "fp8":
        note = "the checkpoint has scales for a KV cache in FP8, which kv_cache_dtype=fp8 uses"
        spec = replace(spec, notes=(*spec.notes, note))
    if config.quantize_lm_head is not None:
        spec = replace(spec, lm_head_scheme=Fp8Head(origin="FP8, made at load", scales="channel"))
    quantization = choose_quantization(spec.quantization, config.quantization)
    if quantization is spec.quantization:
        return spec
    spec = replace(spec, quantization=quantization)
    _check_quantization(spec)
    return spec


def read_model_spec(
    model: str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    config_only: bool = False,
) -> ModelSpec:
    """Return the spec of a local folder or GGUF file, a hub id or "demo". Reads no weights.

    Args:
        model: folder, GGUF file, hub id or "demo".
        trust_remote_code: reject models with code of their own, which does not run here.
        revision: branch, tag or commit on the hub.
        hf_overrides: fields that replace those of config.json.
        config_only: allow names of the catalog.

    Raises:
        UnsupportedModelError: the architecture, or a feature that the configuration requires, is not implemented.
        ModelError: there is no such model, or its config.json is missing or unusable.
        ConfigError: hf_overrides names no field.
    """
    folder = model_path(model, revision=revision, config_only=config_only)
    overrides = dict(hf_overrides or {})
    if is_gguf(folder):
        return _read_gguf_spec(folder, overrides)
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give the folder of a model in the transformers format")
    raw = _read_json(path)
    check_overrides(overrides, raw)
    raw = with_overrides(raw, overrides)
    with _located(path, overrides):
        if trust_remote_code and raw.get("auto_map"):
            raise UnsupportedModelError(
                f"auto_map={shortened(repr(raw['auto_map']))} names model code of the checkpoint, which does not run "
                "here; leave out trust_remote_code, or set auto_map to null by hf_overrides to run only that of the "
                "tokenizer"
            )
        names = raw.get("architectures")
        name = str(names[0]) if isinstance(names, list) and names else "(none named in config.json)"
        architecture = find_architecture(name)
        settings = read_settings(raw, name, architecture.model_type)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.is_file() else {}
    end_tokens = (
        *read_end_tokens(settings["eos_token_id"], path),
        *read_end_tokens(generation.get("eos_token_id"), generation_path),
    )
    with _located(path, overrides):
        spec = _make_spec(settings, name, architecture, end_tokens)
    if folder.parent != CONFIGS_DIRECTORY:
        return spec
    note = f"the configuration is that of {HUB_IDS[folder.name]}, as it ships with the package"
    return replace(spec, notes=(note, *spec.notes))


def _read_gguf_spec(path: Path, overrides: dict[str, Any]) -> ModelSpec:
    file = read_gguf(path)
    with _located(path, overrides):
        raw = config_of_gguf(file)
        check_overrides(overrides, raw)
        raw |= overrides
        name = str(raw["architectures"][0])
        architecture = find_architecture(name)
        settings = read_settings(raw, name, architecture.model_type)
        spec = _make_spec(settings, name, architecture, end_tokens_of_gguf(file))
        if spec.quantization is not None:
            raise UnsupportedModelError("a GGUF file has no quantization_config; its tensors say their formats")
        quantization = quantization_of_gguf(file)
        spec = replace(
            spec,
            quantization=quantization,
            rope_frequencies=rope_frequencies_of_gguf(file, spec.rope_frequencies),
            notes=(*spec.notes, *notes_of_gguf(file, quantization)),
        )
        _check_quantization(spec)
    return spec


@contextmanager
def _located(path: Path, overrides: Mapping[str, Any]) -> Generator[None]:
    """Prefix a ModelError's message with the file, and with the overrides if there are any."""
    try:
        yield
    except ModelError as error:
        where = f"{path} with hf_overrides={shortened(repr(overrides))}" if overrides else str(path)
        raise type(error)(f"{where}: {error}") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return cast("dict[str, Any]", content)


def _make_spec(
    settings: Mapping[str, Any], name: str, architecture: Architecture, end_tokens: tuple[int, ...]
) -> ModelSpec:
    if settings["hidden_act"] not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={settings['hidden_act']!r} is not supported; supported is silu")
    dtype = settings["dtype"] or "float32"
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(f"dtype={dtype!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    num_query_heads, num_kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    head_size = settings["head_dim"] or settings["hidden_size"] // num_query_heads
    if num_query_heads % num_kv_heads:
        raise ModelError(
            f"num_attention_heads={num_query_heads} must be a multiple of num_key_value_heads={num_kv_heads}"
        )
    if not 0 < head_size <= _MOST_HEAD_SIZE or head_size % 2:
        raise ModelError(
            f"head_dim={head_size} must be positive and even, for the rotary embedding, and at most {_MOST_HEAD_SIZE}"
        )
    rope = read_rope(settings)
    frequencies, factor = rope_frequencies(rope, head_size)
    length, source = context_length(settings, rope)
    eos_token_ids, note = split_end_tokens(end_tokens, settings["vocab_size"])
    quantized = settings["quantization_config"]
    quantization = None if quantized is None else read_quantization(quantized)
    spec = ModelSpec(
        architecture=name,
        num_layers=settings["num_hidden_layers"],
        hidden_size=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=settings["vocab_size"],
        context_length=length,
        context_source=source,
        rms_norm_eps=settings["rms_norm_eps"],
        tie_word_embeddings=settings["tie_word_embeddings"],
        qkv_bias=_switch(settings, architecture.qkv_bias),
        o_bias=_switch(settings, architecture.o_bias),
        mlp_bias=_switch(settings, architecture.mlp_bias),
        qk_norm=architecture.qk_norm,
        windows=_windows(settings),
        rope_frequencies=frequencies,
        rope_factor=factor,
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        # A checkpoint whose weights are in 16 bits may have scales for the KV cache alone.
        quantization=quantization if quantization is not None and quantization.has_schemes else None,
        fp8_kv_cache=quantization is not None and quantization.fp8_kv_cache,
        notes=() if note is None else (note,),
    )
    _check_quantization(spec)
    return spec


def _check_quantization(spec: ModelSpec) -> None:
    """Check that the parts of each fused matrix have one layout, and that the format has matrices of these sizes."""
    if spec.quantization is None:
        return
    for prefix, parts, _, _ in (matrix for layer in range(spec.num_layers) for matrix in spec.matrices(layer)):
        spec.quantization.check_parts(prefix, parts)
    for scheme, outputs, inputs in spec.quantized_projections():
        scheme.stored(outputs, inputs)


def _switch(settings: Mapping[str, Any], rule: bool | str) -> bool:
    return settings[rule] if isinstance(rule, str) else rule


def _windows(settings: Mapping[str, Any]) -> tuple[tuple[int, int], ...]:
    types = settings.get("layer_types", [FULL] * settings["num_hidden_layers"])
    return tuple(UNLIMITED if kind == FULL else (settings["sliding_window"] - 1, 0) for kind in types)
