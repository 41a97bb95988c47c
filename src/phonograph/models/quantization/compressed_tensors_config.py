"""Weight formats by the `quantization_config` of compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable

from phonograph.errors import ModelError, UnsupportedModelError
from phonograph.models.quantization.compressed_tensors import IntQuantized, PackQuantized
from phonograph.models.quantization.float8 import Fp8, check_block
from phonograph.models.quantization.quantization_settings import QuantizationSettings
from phonograph.models.quantization.scheme import Quantization, Scheme


def read_compressed_tensors(settings: QuantizationSettings) -> Quantization:
    """Return the formats of the modules that each of `config_groups` targets.

    Raises:
        UnsupportedModelError: a format, or a setting of it, is not implemented.
        ModelError: a setting has the wrong type.
    """
    layout = settings.take("format", None, "text", str)
    fp8_kv_cache = _has_fp8_kv_cache(settings)
    sparsity = settings.take("sparsity_config", None, "an object or null", dict, type(None)) or {}
    _check_dense(settings.within("sparsity_config", sparsity))
    rules: list[tuple[str, Scheme | None]] = [(entry, None) for entry in settings.names("ignore")]
    groups = settings.take("config_groups", None, "an object", dict)
    if not groups and layout != "dense":
        raise UnsupportedModelError(f"quantization_config has no config_groups and format={layout!r}")
    every: Scheme | None = None
    for name, values in groups.items():
        group = settings.within("config_groups", {}).within(name, values)
        targets = group.names("targets")
        scheme = _read_group(group, layout)
        rules += [(target, scheme) for target in targets if target != _EVERY]
        every = scheme if _EVERY in targets else every
    lists = ("ignore", "config_groups")
    return Quantization("compressed-tensors", every, tuple(rules), (), lists, fp8_kv_cache=fp8_kv_cache)


def _read_group(group: QuantizationSettings, layout: str) -> Scheme:
    """Return the format of a group; `layout` is that of the file, for groups without their own."""
    own = group.one_of("format", None, None, *_LAYOUTS)
    reader = _LAYOUTS.get(own or layout)
    if reader is None:
        raise UnsupportedModelError(
            f"quantization_config has format={layout!r}, which is not supported; supported are {', '.join(_LAYOUTS)}"
        )
    activations = group.take("input_activations", None, "an object or null", dict, type(None))
    group.one_of("output_activations", None, None)
    weights = group.within("weights", group.take("weights", None, "an object", dict))
    if activations is not None and reader is _packed_of:
        raise UnsupportedModelError(
            "quantization_config has input_activations with packed integers; supported are activations in 16 bits"
        )
    weights.one_of("dynamic", False, False)
    scheme = reader(weights)
    for name in ("observer", "observer_kwargs", "block_structure", "scale_dtype", "zp_dtype"):
        weights.take(name, None, "any value", str, dict, list, type(None))
    return scheme


def _check_dense(sparsity: QuantizationSettings) -> None:
    sparsity.one_of("format", "dense", "dense")
    for name in ("global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets"):
        sparsity.take(name, None, "any value", str, float, int, list, bool, type(None))


def _has_fp8_kv_cache(settings: QuantizationSettings) -> bool:
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
    return True


def _packed_of(weights: QuantizationSettings) -> Scheme:
    bits = weights.one_of("num_bits", None, 4, 8)
    weights.one_of("type", "int", "int")
    size = _group_of(weights, weights.one_of("strategy", None, "group", "channel", None))
    order = weights.one_of("actorder", None, None, False, "group", "weight", "static", True)
    zeros = not weights.take("symmetric", True, "true or false", bool)
    # With "weight" (or "static") the order is used while the weights are rounded; the file's groups are in order.
    return PackQuantized(bits=bits, group_size=size, zeros=zeros, ordered=order in ("group", True))


def _int8_of(weights: QuantizationSettings) -> Scheme:
    # Integers of 4 bits have a byte each in these files too.
    weights.one_of("num_bits", None, 4, 8)
    weights.one_of("type", "int", "int")
    strategy = weights.one_of("strategy", None, "channel", "tensor", "group")
    size = _group_of(weights, strategy)
    weights.one_of("actorder", None, None, False, "weight", "static")
    zeros = not weights.take("symmetric", True, "true or false", bool)
    return IntQuantized(bits=8, group_size=size, zeros=zeros, one_scale=strategy == "tensor")


def _fp8_of(weights: QuantizationSettings) -> Scheme:
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


def _group_of(weights: QuantizationSettings, strategy: str | None) -> int:
    """Return the inputs of a group, -1 for all."""
    size = weights.take("group_size", None, "an integer or null", int, type(None))
    if strategy == "group" and (size is None or size < 1):
        raise ModelError(f"config_groups.weights has group_size={size} with strategy='group'; it must be positive")
    return -1 if strategy in ("channel", "tensor") or size is None else size


_EVERY = "Linear"
"""Target that stands for all projections."""
_LAYOUTS: dict[str, Callable[[QuantizationSettings], Scheme]] = {
    "pack-quantized": _packed_of,
    "int-quantized": _int8_of,
    "float-quantized": _fp8_of,
    "naive-quantized": _fp8_of,
}
"""Readers of the weights' settings by the `format` of compressed-tensors."""
