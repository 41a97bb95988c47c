"""Specification of a model as plain values: enough for weights, attention, memory and `explain`, without the weights.

Defaults and older spellings of config.json have transformers' meaning (`hf_config.py`).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.files.catalog import CONFIGS_DIRECTORY, HUB_IDS
from phonograph.files.gguf_file import read_gguf
from phonograph.files.model_files import is_gguf, model_path, read_json
from phonograph.models.context_length import context_length, rope_notes
from phonograph.models.end_tokens import end_tokens_of_gguf, model_end_tokens, read_generation, split_end_tokens
from phonograph.models.families.family import Family, TensorFactors
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.models.heads.feature_input import FeatureInput
from phonograph.models.heads.find_pooler import with_pooler
from phonograph.models.heads.pooler_spec import InputEmbedding, Pooler
from phonograph.models.hf_config import check_code, check_overrides, read_settings, window_notes, with_overrides
from phonograph.models.layer_spec import (
    NO_FACTORS,
    PLAIN_NORMS,
    Factors,
    LayerAttention,
    LayerSpec,
    NormKind,
    RopeTable,
)
from phonograph.models.layers.layer_embedding import LayerEmbeddings
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.layers.rope import rope_tables, with_ropes
from phonograph.models.layers.states.state_mixer import StateMixer
from phonograph.models.quantization.quantization_config import read_quantization
from phonograph.models.quantization.scheme import Quantization, Scheme
from phonograph.models.registry import architecture_name, find_architecture, known_fields, module_reason
from phonograph.models.weights.gguf_config import (
    config_of_gguf,
    notes_of_gguf,
    quantization_of_gguf,
    rope_of_gguf,
)
from phonograph.models.weights.tensor_shapes import DTYPE_BYTES, tensor_shapes, weight_bytes
from phonograph.models.weights.wrapper import TEXT_PREFIXES, head_tensor_name, text_name, unwrapped

log = logging.getLogger(__name__)

LAYERS = "model.layers"
"""Prefix of the names of layers in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model: a decoder, or an encoder.

    Attributes:
        layers: the layers; equal ones are one object.
        head: matrix of the logits; of one rank of several it has a part of the vocabulary.
        context_length: positions that the model serves; `context_source` describes the fields that determine it.
        dtype: type in the configuration, as torch names it.
        eos_token_ids: from config.json and generation_config.json, within the vocabulary.
        norms: arithmetic of the norms.
        factors: of embeddings, layers and logits.
        layer_embeddings: embeddings of a token in all layers, or None.
        input: embeddings beside those of tokens, or None.
        encoder: encoder of audio or text whose states the layers' cross attention reads, or None.
        pooler: end of a model that generates nothing; None for logits.
        causal: a token attends to no later one.
        renames: patterns of names in the checkpoint, each with what replaces it.
        tensor_factors: factors of weights, which loading multiplies (`Family.tensor_factors`).
        features: input of a draft head, whose `vocab_size` is that of its logits; None for a model of its own.
        quantization: format of quantized projections, or None.
        fp8_kv_cache: True if the configuration says that the checkpoint has scales for keys and values in FP8.
        wrapper: architecture of the model around this one in the checkpoint, or None.
        skipped: beginnings of the names of tensors in the checkpoint that are not of this model.
        notes: decisions while reading, for `explain`.
    """

    architecture: str
    layers: tuple[LayerSpec, ...]
    head: LayerMatrix
    hidden_size: int
    vocab_size: int
    context_length: int
    context_source: str
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    norms: NormKind = PLAIN_NORMS
    factors: Factors = NO_FACTORS
    layer_embeddings: LayerEmbeddings | None = None
    input: InputEmbedding | None = None
    encoder: AudioEncoder | TextEncoder | None = None
    pooler: Pooler | None = None
    causal: bool = True
    final_norm: bool = True
    renames: tuple[tuple[str, str], ...] = ()
    tensor_factors: TensorFactors = ()
    features: FeatureInput | None = None
    quantization: Quantization | None = None
    fp8_kv_cache: bool = False
    wrapper: str | None = None
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> dict[int, LayerAttention]:
        """Attention by the index of the layer, of those that have it. Cross attention has `num_layers` added to it."""
        found = {index: one.mixer for index, one in enumerate(self.layers) if isinstance(one.mixer, LayerAttention)}
        crosses = enumerate((one.cross for one in self.layers), self.num_layers)
        return found | {index: cross for index, cross in crosses if cross is not None}

    @property
    def states(self) -> dict[int, StateMixer]:
        """Mixers with a state by the index of the layer."""
        return {index: state for index, one in enumerate(self.layers) if (state := one.state) is not None}

    @property
    def owns_head(self) -> bool:
        """False for a draft head with the logits' matrix of its target, and for a model that generates nothing."""
        return self.pooler is None and (self.features is None or self.features.owns_head)

    @property
    def has_final_norm(self) -> bool:
        """True if the stream is normed after the last layer."""
        return self.final_norm and (self.features is None or not self.features.joins_embedding)

    @property
    def has_token_types(self) -> bool:
        """True if tokens have types beside their ids."""
        return self.input is not None and self.input.token_types > 1

    @property
    def num_outputs(self) -> int:
        """Numbers of a row that a step ends with: logits, or those of the pooler."""
        return self.vocab_size if self.pooler is None else self.pooler.num_outputs(self.hidden_size)

    @property
    def kinds(self) -> tuple[LayerSpec, ...]:
        """The first layer of each kind."""
        return tuple({layer.kind: layer for layer in reversed(self.layers)}.values())

    @property
    def num_parameters(self) -> int:
        matrices = [outputs * inputs for _, outputs, inputs in self._quantized_parts()]
        if self.head.scheme is not None and not self.tie_word_embeddings and self.owns_head:
            matrices.append(self.head.num_outputs * self.hidden_size)
        return sum(math.prod(shape) for shape in self.tensor_shapes().values()) + sum(matrices)

    def weight_bytes(self, dtype: str) -> int:
        """Return the bytes of all weights, of which those that are not quantized are in `dtype`."""
        return weight_bytes(self, dtype)

    def scheme_of(self, module: str) -> Scheme | None:
        """Return the weight format of a projection, by its name in a checkpoint; None for the model's type."""
        return None if self.quantization is None else self.quantization.scheme_of(module)

    def tensor_name(self, name: str) -> str | None:
        """Return a name of the checkpoint without the prefixes of a wrapper; None for a tensor of another part."""
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        name = name if self.features is None else head_tensor_name(name)
        found = name if self.wrapper is None else text_name(name)
        return None if found is None or found.startswith(self.skipped) else found

    def with_tokenizer_end(self, eos_token_id: int | None) -> ModelSpec:
        """Return the model with the tokenizer's end-of-sequence token added, if the vocabulary has it."""
        if eos_token_id is None:
            return self
        token_ids, note = split_end_tokens((*self.eos_token_ids, eos_token_id), self.vocab_size)
        if note is not None:
            log.warning("tokenizer: %s", note)
        return replace(self, eos_token_ids=token_ids)

    def with_quantization(self, quantization: Quantization | None) -> ModelSpec:
        """Return the model with its projections in other formats.

        Raises:
            UnsupportedModelError: the parts of a fused matrix have several layouts, or a format has no matrix of these
                sizes.
        """
        equal: dict[LayerSpec, LayerSpec] = {}
        layers: list[LayerSpec] = []
        for index, layer in enumerate(self.layers):
            made = layer.with_schemes(partial(_scheme_in, quantization, f"{LAYERS}.{index}."))
            if quantization is not None:
                for matrix in made.matrices:
                    quantization.check_parts(f"{LAYERS}.{index}.{matrix.module}", matrix.quantized_names)
            layers.append(equal.setdefault(made, made))
        spec = replace(self, layers=tuple(layers), quantization=quantization)
        for scheme, outputs, inputs in spec._quantized_parts():
            scheme.stored(outputs, inputs)
        return spec

    def with_ropes(self, change: Callable[[RopeTable], RopeTable]) -> ModelSpec:
        """Return the model with changed rotary embeddings."""
        ropes = {index: change(one.rope) for index, one in self.attentions.items() if one.rope is not None}
        return replace(self, layers=with_ropes(self.layers, [ropes.get(index) for index in range(self.num_layers)]))

    def with_head_scheme(self, scheme: Scheme) -> ModelSpec:
        """Return the model with its head in another format."""
        return replace(self, head=self.head.with_schemes(lambda _: scheme))

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every tensor that a checkpoint must have, but those of quantized matrices."""
        return tensor_shapes(self)

    def has_projection(self, module: str) -> bool:
        """Return True for the name of a projection in a checkpoint."""
        index, _, name = module.removeprefix(f"{LAYERS}.").partition(".")
        if not (index.isdecimal() and int(index) < self.num_layers):
            return False
        return any(name == known for known, _, _ in self.layers[int(index)].modules())

    def _quantized_parts(self) -> Iterator[tuple[Scheme, int, int]]:
        """Yield the format, outputs and inputs of each quantized projection."""
        for layer in self.layers:
            for _, part, matrix in layer.modules():
                if part.scheme is not None:
                    yield part.scheme, part.num_outputs, matrix.num_inputs

    def quantized_matrices(self) -> Iterator[tuple[Scheme, int, int]]:
        """Yield the format, outputs and inputs of each quantized projection, and of a quantized head."""
        yield from self._quantized_parts()
        if self.head.scheme is not None and self.owns_head:
            yield self.head.scheme, self.head.num_outputs, self.hidden_size


def _scheme_in(quantization: Quantization | None, prefix: str, name: str) -> Scheme | None:
    return None if quantization is None else quantization.scheme_of(prefix + name)


def read_model_spec(
    model: str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    hf_overrides: Mapping[str, Any] | None = None,
    config_only: bool = False,
    convert: str = "auto",
    model_impl: str = "auto",
) -> ModelSpec:
    """Return the spec of a local folder or GGUF file, a hub id or "demo". Reads no weights.

    Args:
        model: folder, GGUF file, hub id or "demo".
        trust_remote_code: reject models with code of their own.
        revision: branch, tag or commit on the hub.
        hf_overrides: fields that replace those of config.json.
        config_only: allow names of the catalog.
        convert: see `with_pooler`.
        model_impl: see `module_reason`.

    Raises:
        UnsupportedModelError: the architecture, or a feature that the configuration requires, is not implemented.
        ModelError: there is no such model, or its config.json is missing or unusable.
        ConfigError: hf_overrides names no field.
    """
    folder, overrides = model_path(model, revision=revision, config_only=config_only), dict(hf_overrides or {})
    if is_gguf(folder):
        return _read_gguf_spec(folder, overrides)
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json; give the folder of a model in the transformers format")
    with _located(path, {}):
        raw, wrapper = unwrapped(read_json(path))
    with _located(path, overrides):
        given = {**raw, **overrides}
        check_code(given, trust_remote_code)
        name = architecture_name(given)
        reason = module_reason(name, model_impl)
        if reason is not None:
            from phonograph.models.modules.read_module import read_module_spec  # It imports transformers.

            return read_module_spec(path, raw, overrides, reason, wrapper)
    check_overrides(overrides, raw, known_fields())
    raw = with_overrides(raw, overrides)
    with _located(path, overrides):
        family = find_architecture(name)
        settings = read_settings(raw, name, family)
    end_tokens = model_end_tokens(settings["eos_token_id"], path)
    with _located(path, overrides):
        spec = make_spec(settings, name, family, end_tokens, wrapper)
        spec = with_pooler(spec, family, settings, raw, folder, convert)
        generation = {} if spec.encoder is None else read_generation(path)
        if isinstance(spec.encoder, TextEncoder):
            spec = replace(spec, encoder=spec.encoder.starting(generation, raw, spec.vocab_size))
        elif spec.encoder is not None:
            sizes = spec.num_layers, spec.attentions[0].num_query_heads
            encoder = spec.encoder.suppressing(generation, raw, spec.vocab_size, sizes)
            for other in (path.with_name("preprocessor_config.json"), path.with_name("processor_config.json")):
                encoder.check_frames(read_json(other) if other.is_file() else {})
            spec = replace(spec, encoder=encoder)
    if folder.parent != CONFIGS_DIRECTORY:
        return spec
    note = f"the configuration is that of {HUB_IDS[folder.name]}, as it ships with the package"
    return replace(spec, notes=(note, *spec.notes))


def _read_gguf_spec(path: Path, overrides: dict[str, Any]) -> ModelSpec:
    file = read_gguf(path)
    with _located(path, overrides):
        raw = config_of_gguf(file)
        check_overrides(overrides, raw, known_fields())
        raw |= overrides
        name = str(raw["architectures"][0])
        family = find_architecture(name)
        settings = read_settings(raw, name, family)
        spec = make_spec(settings, name, family, end_tokens_of_gguf(file))
        if spec.quantization is not None:
            raise UnsupportedModelError("a GGUF file has no quantization_config; its tensors say their formats")
        quantization = quantization_of_gguf(file, spec.layers)
        spec = replace(
            spec.with_ropes(partial(rope_of_gguf, file)).with_quantization(quantization),
            notes=(*spec.notes, *notes_of_gguf(file, quantization, spec.layers)),
        )
    return spec


@contextmanager
def _located(path: Path, overrides: Mapping[str, Any]) -> Generator[None]:
    """Prefix a ModelError's message with the file, and with the overrides if there are any."""
    try:
        yield
    except ModelError as error:
        where = f"{path} with hf_overrides={shortened(repr(overrides))}" if overrides else str(path)
        raise type(error)(f"{where}: {error}") from error


def make_spec(
    settings: Mapping[str, Any], name: str, family: Family, end_tokens: tuple[int, ...], wrapper: str | None = None
) -> ModelSpec:
    dtype = settings["dtype"] or "float32"
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(f"dtype={dtype!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    ropes = family.ropes(settings)
    layers = family.layers(settings)
    tables = rope_tables(ropes, layers)
    tables_added = family.input(settings)
    # BART's number of positions is without those before the first token.
    before = 0 if tables_added is None or family.encoder(settings) is not None else tables_added.first_position
    length, source = context_length(settings, ropes, before)
    eos_token_ids, note = split_end_tokens(end_tokens, settings["vocab_size"])
    quantized = settings["quantization_config"]
    quantization = None if quantized is None else read_quantization(quantized)
    if quantization is not None and wrapper is not None:
        quantization = replace(quantization, prefixes=TEXT_PREFIXES)
    factors = family.tensor_factors(settings)
    if factors and quantization is not None and quantization.has_schemes:
        raise UnsupportedModelError(
            f"quantization_config of {name}: its multipliers are folded into the weights, which must be in 16 bits for "
            "that; give the model without it (--quantization fp8 works)"
        )
    hidden_size, vocab_size = settings["hidden_size"], settings["vocab_size"]
    spec = ModelSpec(
        architecture=name,
        layers=with_ropes([layer.within(length) for layer in layers], tables),
        head=LayerMatrix("lm_head", "", (MatrixPart("lm_head", vocab_size),), hidden_size),
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        context_length=length,
        context_source=source,
        rms_norm_eps=settings["rms_norm_eps"],
        tie_word_embeddings=settings["tie_word_embeddings"],
        dtype=dtype,
        eos_token_ids=eos_token_ids,
        norms=family.norms,
        input=tables_added,
        encoder=family.encoder(settings),
        final_norm=family.final_norm,
        renames=family.renames,
        tensor_factors=factors,
        causal=family.is_causal(settings),
        factors=family.factors(settings),
        layer_embeddings=family.layer_embeddings(settings),
        fp8_kv_cache=quantization is not None and quantization.fp8_kv_cache,
        wrapper=wrapper,
        skipped=family.skipped(settings),
        notes=(*(() if note is None else (note,)), *rope_notes(ropes), *window_notes(settings)),
    )
    # A checkpoint whose weights are in 16 bits may have scales for the KV cache alone.
    return spec.with_quantization(quantization if quantization is not None and quantization.has_schemes else None)
