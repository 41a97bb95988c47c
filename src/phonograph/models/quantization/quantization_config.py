"""Weight formats by the `quantization_config` of a model's config.json. A setting that is not known is rejected."""

from __future__ import annotations

import json
import re
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
    "global_compression_ratio version act_group_aware iters low_gpu_mem_usage autoround_version provider amp "
    "enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input enable_torch_compile lr minmax_lr "
    "gradient_accumulate_steps nsamples scale_dtype seqlen to_quant_block_names"
)
"""Settings of the tools that made a checkpoint, without effect on the weights' meaning."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "pack_dtype": ("int32",),
    "method": ("gptq", "awq"),
    "data_type": ("int",),
    "dequantize": (False,),
    "scale_fmt": ("float",),
    "act_bits": (16, 32),
    "act_data_type": ("float",),
    "quant_lm_head": (False,),
    "lm_head": (False,),
    "is_mx_fp": (False,),
}
"""Settings without effect if they have these values."""


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
    """Settings that are read one after another; `finish` rejects those left. `path` has the keys that lead to them."""

    def __init__(self, settings: Mapping[str, Any], path: tuple[str, ...] = ("quantization_config",)) -> None:
        self._settings = dict(settings)
        self._path = path
        self._within = ".".join(path[-2:])

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
        """Return the entries of a list that names modules, also of a list of lists."""
        value = self.take(name, None, "a list of names or null", list, type(None))
        entries: list[Any] = []
        for item in value or ():
            entries += cast("list[Any]", item) if isinstance(item, list) else [item]
        return tuple(self.check_entry(name, entry) for entry in entries)

    def check_entry(self, name: str, entry: Any) -> str:
        """Return an entry of the setting `name`: the name of a module, or "re:" and a regular expression.

        Raises:
            ModelError: it is something else.
        """
        problem = "" if isinstance(entry, str) and entry.strip(".") else "; it must be the name of a module"
        if not problem and entry.startswith("re:"):
            try:
                re.compile(entry.removeprefix("re:"))
            except re.error as error:
                problem = f", which is not a regular expression: {error}"
        if problem:
            raise ModelError(f"{self._within} has {shortened(repr(entry))} in {name}{problem}")
        return entry

    def within(self, name: str, value: Mapping[str, Any]) -> _Settings:
        """Return the settings of an object among these."""
        return _Settings(value, (*self._path, name))

    def finish(self) -> None:
        for name, value in self._settings.items():
            if name in _TOOLS.split() or value in (None, {}, [], *_WITHOUT_EFFECT.get(name, ())):
                continue
            override: Any = None
            for key in (name, *reversed(self._path)):
                override = {key: override}
            raise UnsupportedModelError(
                f"{self._within} has {name}={shortened(repr(value))}, whose effect is not known or not implemented; if "
                f"it has none, null takes it out: --hf-overrides '{json.dumps(override)}'"
            )


def _gptq(settings: _Settings) -> Quantization:
    old, new = (settings.one_of(name, None, None, "gptq", "gptq_v2") for name in ("checkpoint_format", "format"))
    if old and new and old != new:
        raise ModelError(f"quantization_config has checkpoint_format={old!r} and format={new!r}, which mean the same")
    scheme = Gptq(
        bits=settings.one_of("bits", None, 4, 8),
        group_size=settings.group_size(128),
        zeros=not settings.take("sym", True, "true or false", bool),
        ordered=settings.take("desc_act", False, "true or false", bool),
        version=2 if "gptq_v2" in (old, new) else 1,
    )
    only, ignored = settings.names("modules_in_block_to_quantize"), _skipped_by_dynamic(settings)
    settings.finish()
    return Quantization("gptq", scheme, ignored, only, ("modules_in_block_to_quantize", "dynamic"))


def _skipped_by_dynamic(settings: _Settings) -> tuple[str, ...]:
    """Return the modules that GPTQModel's `dynamic` leaves in 16 bits: keys that are "-:" and a pattern.

    Raises:
        UnsupportedModelError: other keys give modules settings of their own.
    """
    dynamic = settings.take("dynamic", None, "an object or null", dict, type(None)) or {}
    for key, value in dynamic.items():
        if not key.startswith("-:"):
            raise UnsupportedModelError(
                f"quantization_config has dynamic={shortened(repr({key: value}))}, which gives modules settings of "
                'their own; supported are keys that begin with "-:", whose modules are not quantized'
            )
    return tuple(settings.check_entry("dynamic", f"re:{key.removeprefix('-:')}") for key in dynamic)


def _awq(settings: _Settings) -> Quantization:
    settings.one_of("bits", 4, 4)
    for name in ("version", "format"):
        layout = settings.take(name, "gemm", "text", str)
        if layout.lower() != "gemm":
            raise UnsupportedModelError(f"quantization_config has {name}={layout!r} of AWQ; supported is 'gemm'")
    # Only zero_point says that there are zeros.
    settings.take("sym", True, "true or false", bool)
    settings.one_of("desc_act", False, False)
    scheme = Awq(
        bits=4,
        group_size=settings.group_size(128),
        zeros=True,
        zeros_required=settings.take("zero_point", True, "true or false", bool),
    )
    ignored, only = settings.names("modules_to_not_convert"), settings.names("modules_in_block_to_quantize")
    settings.finish()
    return Quantization("awq", scheme, ignored, only, ("modules_to_not_convert", "modules_in_block_to_quantize"))


def _fp8(settings: _Settings) -> Quantization:
    settings.one_of("activation_scheme", "dynamic", "dynamic", "static")
    settings.one_of("fmt", "e4m3", "e4m3")
    block = settings.take("weight_block_size", None, "two integers or null", list, tuple, type(None))
    ignored = settings.names("modules_to_not_convert") + settings.names("ignored_layers")
    settings.finish()
    scheme = Fp8(origin="FP8", scales="tensor")
    if block is not None:
        scheme = Fp8(origin="FP8", scales="block", block=check_block(block))
    return Quantization("fp8", scheme, ignored, lists=("modules_to_not_convert", "ignored_layers"))


def _compressed_tensors(settings: _Settings) -> Quantization:
    layout = settings.one_of("format", None, *_LAYOUTS, "dense")
    fp8_kv_cache = _has_fp8_kv_cache(settings)
    sparsity = settings.take("sparsity_config", None, "an object or null", dict, type(None)) or {}
    if sparsity.get("format", "dense") != "dense":
        raise UnsupportedModelError("quantization_config has a sparsity_config; supported is one of format 'dense'")
    ignored = settings.names("ignore")
    groups = settings.take("config_groups", None, "an object", dict)
    if layout == "dense" and not groups:
        settings.finish()
        return Quantization("compressed-tensors", {}, fp8_kv_cache=fp8_kv_cache)
    if len(groups) != 1 or layout not in _LAYOUTS:
        raise UnsupportedModelError(
            f"quantization_config has {len(groups)} config_groups and format={layout!r}; supported are models whose "
            "projections have one format"
        )
    (group_name, group_settings), *_ = groups.items()
    group = settings.within("config_groups", {}).within(group_name, group_settings)
    group.one_of("targets", None, ["Linear"])
    activations = group.take("input_activations", None, "an object or null", dict, type(None))
    group.one_of("output_activations", None, None)
    group.one_of("format", None, None, layout)
    weights = group.within("weights", group.take("weights", None, "an object", dict))
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
    return Quantization("compressed-tensors", scheme, ignored, lists=("ignore",), fp8_kv_cache=fp8_kv_cache)


def _has_fp8_kv_cache(settings: _Settings) -> bool:
    """Return True if the checkpoint has scales for keys and values in FP8.

    Raises:
        UnsupportedModelError: it was made for another type of keys and values.
    """
    values = settings.take("kv_cache_scheme", None, "an object or null", dict, type(None))
    if values is None:
        return False
    scheme = settings.within("kv_cache_scheme", values)
    for name, value in (("num_bits", 8), ("type", "float"), ("dynamic", False), ("symmetric", True)):
        scheme.one_of(name, value, value)
    scheme.one_of("strategy", "tensor", "tensor", None)
    for name in ("observer", "observer_kwargs", "scale_dtype", "zp_dtype"):
        scheme.take(name, None, "any value", str, dict, type(None))
    scheme.finish()
    return True


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
    "naive-quantized": _fp8_of,
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
