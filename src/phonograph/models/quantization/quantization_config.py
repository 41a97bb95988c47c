"""Weight formats by the `quantization_config` of a model's config.json. A setting that is not known is rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from phonograph.errors import ConfigError, ModelError, UnsupportedModelError, shortened
from phonograph.models.quantization.awq import Awq
from phonograph.models.quantization.compressed_tensors import IntQuantized, PackQuantized
from phonograph.models.quantization.float8 import Fp8, Fp8AtLoad, check_block
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.scheme import Quantization, Scheme

_TOOLS = (
    "quant_method batch_size block_name_to_quantize cache_block_outputs damp_percent damp_auto_increment dataset "
    "exllama_config use_exllama max_input_length model_seqlen module_name_preceding_first_block pad_token_id "
    "static_groups tokenizer true_sequential use_cuda_fp16 is_marlin_format model_name_or_path model_file_base_name "
    "quantizer meta mse backend do_fuse fuse_max_seq_len modules_to_fuse version_info quantization_status "
    "global_compression_ratio version"
)
"""Settings of the tools that made a checkpoint, without effect on the weights' meaning."""


def read_quantization(config: Any) -> Quantization:
    """Return the weight format of a model.

    Args:
        config: `quantization_config` of config.json.

    Raises:
        UnsupportedModelError: the format, or a setting of it, is not implemented.
        ModelError: a setting has the wrong type.
    """
    if not isinstance(config, Mapping):
        raise ModelError(f"quantization_config={shortened(repr(config))} must be an object")
    settings = cast("Mapping[str, Any]", config)
    method = settings.get("quant_method")
    reader = _READERS.get(cast("str", method))
    if reader is None:
        raise UnsupportedModelError(
            f"quantization_config has quant_method={method!r}, which is not supported; supported are "
            f"{', '.join(QUANT_METHODS)}"
        )
    return reader(_Settings(settings))


def choose_quantization(in_file: Quantization | None, asked: str | None) -> Quantization | None:
    """Return the weight format to load.

    Args:
        in_file: format of the checkpoint.
        asked: value of the setting `quantization`.

    Raises:
        ConfigError: the checkpoint has another format.
    """
    if asked is None or (in_file is not None and in_file.method == asked):
        return in_file
    if in_file is not None:
        raise ConfigError("quantization", asked, f"the checkpoint is in {in_file.method}; leave it out")
    if asked != "fp8":
        raise ConfigError("quantization", asked, "the checkpoint has no quantization_config; only fp8 is made from it")
    return Quantization("fp8", Fp8AtLoad(origin="FP8, made at load", scales="channel"))


class _Settings:
    """Settings that are read one after another; `finish` rejects those left."""

    def __init__(self, settings: Mapping[str, Any], within: str = "quantization_config") -> None:
        self._settings = dict(settings)
        self._within = within

    def take(self, name: str, default: Any, works: str, *kinds: type) -> Any:
        value = self._settings.pop(name, default)
        if type(value) not in kinds:
            raise ModelError(f"{self._within} has {name}={shortened(repr(value))}; it must be {works}")
        return value

    def one_of(self, name: str, default: Any, *values: Any) -> Any:
        value = self._settings.pop(name, default)
        if value not in values:
            supported = ", ".join(map(repr, values))
            raise UnsupportedModelError(
                f"{self._within} has {name}={shortened(repr(value))}, which is not supported; supported is {supported}"
            )
        return value

    def group_size(self, default: Any) -> int:
        size = self.take("group_size", default, "-1 or a positive integer", int)
        if size == 0 or size < -1:
            raise ModelError(f"{self._within} has group_size={size}; it must be -1 or a positive integer")
        return size

    def names(self, name: str) -> tuple[str, ...]:
        value = self.take(name, None, "a list of names or null", list, type(None))
        return tuple(str(item) for item in value or ())

    def finish(self) -> None:
        for name, value in self._settings.items():
            if name not in _TOOLS.split() and value not in (None, {}, []):
                raise UnsupportedModelError(
                    f"{self._within} has {name}={shortened(repr(value))}, whose effect is not known; if it has none, "
                    "null takes it out"
                )


def _gptq(settings: _Settings) -> Quantization:
    checkpoint = settings.one_of("checkpoint_format", "gptq", "gptq", "gptq_v2")
    settings.one_of("lm_head", False, False)
    scheme = Gptq(
        bits=settings.one_of("bits", None, 4, 8),
        group_size=settings.group_size(128),
        zeros=not settings.take("sym", True, "true or false", bool),
        ordered=settings.take("desc_act", False, "true or false", bool),
        version=2 if checkpoint == "gptq_v2" else 1,
    )
    # A list of projections in a block is complete in every checkpoint that has one; another is a mixed model.
    settings.finish()
    return Quantization("gptq", scheme)


def _awq(settings: _Settings) -> Quantization:
    settings.one_of("bits", 4, 4)
    settings.one_of("zero_point", True, True)
    layout = settings.take("version", "gemm", "text", str)
    if layout.lower() != "gemm":
        raise UnsupportedModelError(f"quantization_config has version={layout!r} of AWQ; supported is 'gemm'")
    scheme = Awq(bits=4, group_size=settings.group_size(128), zeros=True)
    ignored = settings.names("modules_to_not_convert")
    settings.finish()
    return Quantization("awq", scheme, ignored)


def _fp8(settings: _Settings) -> Quantization:
    settings.one_of("activation_scheme", "dynamic", "dynamic", "static")
    settings.one_of("fmt", "e4m3", "e4m3")
    block = settings.take("weight_block_size", None, "two integers or null", list, type(None))
    ignored = settings.names("modules_to_not_convert") + settings.names("ignored_layers")
    settings.finish()
    scheme = Fp8(origin="FP8", scales="tensor")
    if block is not None:
        scheme = Fp8(origin="FP8", scales="block", block=check_block(block), scale_end="weight_scale_inv")
    return Quantization("fp8", scheme, ignored)


def _compressed_tensors(settings: _Settings) -> Quantization:
    layout = settings.one_of("format", None, *_LAYOUTS)
    settings.one_of("kv_cache_scheme", None, None)
    sparsity = settings.take("sparsity_config", None, "an object or null", dict, type(None)) or {}
    if sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError("quantization_config has a sparsity_config; supported is one of format 'dense'")
    ignored = settings.names("ignore")
    groups = settings.take("config_groups", None, "an object", dict)
    if len(groups) != 1:
        raise UnsupportedModelError(
            f"quantization_config has {len(groups)} config_groups; supported are models whose projections have one"
        )
    group = _Settings(next(iter(groups.values())), f"config_groups.{next(iter(groups))}")
    group.one_of("targets", None, ["Linear"])
    activations = group.take("input_activations", None, "an object or null", dict, type(None))
    group.one_of("output_activations", None, None)
    group.one_of("format", None, None, layout)
    weights = _Settings(group.take("weights", None, "an object", dict), "config_groups.weights")
    group.finish()
    if activations is not None and layout == "pack-quantized":
        raise UnsupportedModelError(
            "quantization_config has input_activations with packed integers; supported are activations in 16 bits"
        )
    weights.one_of("dynamic", False, False)
    scheme = _LAYOUTS[layout](weights)
    for name in ("observer", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype"):
        weights.take(name, None, "any value", str, dict, list, type(None))
    weights.finish()
    settings.finish()
    return Quantization("compressed-tensors", scheme, ignored)


def _packed_of(weights: _Settings) -> Scheme:
    bits = weights.one_of("num_bits", None, 4, 8)
    weights.one_of("type", "int", "int")
    size = _group_of(weights, weights.one_of("strategy", None, "group", "channel", None))
    order = weights.one_of("actorder", None, None, False, "group", "weight", "static", True)
    zeros = not weights.take("symmetric", True, "true or false", bool)
    # With "weight" (or "static") the order is used while the weights are rounded; the file's groups are in order.
    return PackQuantized(bits=bits, group_size=size, zeros=zeros, ordered=order in ("group", True))


def _int8_of(weights: _Settings) -> Scheme:
    weights.one_of("num_bits", None, 8)
    weights.one_of("type", "int", "int")
    strategy = weights.one_of("strategy", None, "channel", "tensor", "group")
    size = _group_of(weights, strategy)
    weights.one_of("actorder", None, None, False, "weight", "static")
    zeros = not weights.take("symmetric", True, "true or false", bool)
    return IntQuantized(bits=8, group_size=size, zeros=zeros, one_scale=strategy == "tensor")


def _fp8_of(weights: _Settings) -> Scheme:
    weights.one_of("num_bits", None, 8)
    weights.one_of("type", None, "float")
    scales = weights.one_of("strategy", None, "tensor", "channel", "block")
    weights.one_of("symmetric", True, True)
    weights.one_of("group_size", None, None)
    weights.one_of("actorder", None, None, False)
    block = weights.take("block_structure", None, "two integers or null", list, type(None))
    return Fp8(
        origin="compressed-tensors, FP8", scales=scales, block=check_block(block) if scales == "block" else (0, 0)
    )


def _group_of(weights: _Settings, strategy: str | None) -> int:
    """Return the inputs of a group, -1 for all."""
    size = weights.take("group_size", None, "an integer or null", int, type(None))
    if strategy == "group" and (size is None or size < 1):
        raise ModelError(f"config_groups.weights has group_size={size} with strategy='group'; it must be positive")
    return -1 if strategy in ("channel", "tensor") or size is None else size


_LAYOUTS: dict[str, Callable[[_Settings], Scheme]] = {
    "pack-quantized": _packed_of,
    "int-quantized": _int8_of,
    "float-quantized": _fp8_of,
}
"""Readers of the weights' settings by the `format` of compressed-tensors."""
_READERS: dict[str, Callable[[_Settings], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
}
QUANT_METHODS = tuple(_READERS)
"""Values of `quant_method` that are supported."""
