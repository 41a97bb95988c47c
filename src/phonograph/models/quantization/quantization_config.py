"""Weight formats by the `quantization_config` of a model's config.json. A setting that is not known is rejected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

from phonograph.errors import ConfigError, ModelError, UnsupportedModelError, shortened
from phonograph.models.quantization.awq import Awq
from phonograph.models.quantization.compressed_tensors_config import read_compressed_tensors
from phonograph.models.quantization.float8 import Fp8, Fp8AtLoad, check_block
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme
from phonograph.models.quantization.quantization_settings import QuantizationSettings
from phonograph.models.quantization.scheme import Quantization, Rules, Scheme


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
    method = cast("Mapping[str, Any]", config).get("quant_method")
    reader = _READERS.get(cast("str", method))
    if reader is None:
        raise UnsupportedModelError(
            f"quantization_config has quant_method={method!r}, which is not supported; supported are "
            f"{', '.join(QUANT_METHODS)}"
        )
    settings = QuantizationSettings(cast("Mapping[str, Any]", config))
    quantization = reader(settings)
    settings.finish()
    return quantization


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


def _gptq(settings: QuantizationSettings) -> Quantization:
    old, new = (settings.one_of(name, None, None, "gptq", "gptq_v2") for name in ("checkpoint_format", "format"))
    if old and new and old != new:
        raise ModelError(f"quantization_config has checkpoint_format={old!r} and format={new!r}, which mean the same")
    scheme = _gptq_scheme(settings, Gptq(bits=4, group_size=128, version=2 if "gptq_v2" in (old, new) else 1))
    rules, only = _rules_of_dynamic(settings, scheme), settings.names("modules_in_block_to_quantize")
    return Quantization("gptq", scheme, rules, only, ("modules_in_block_to_quantize", "dynamic"))


def _gptq_scheme(settings: QuantizationSettings, default: Gptq) -> Gptq:
    """Return the format of these settings; those that are missing have the default's values."""
    return replace(
        default,
        bits=settings.one_of("bits", default.bits, 4, 8),
        group_size=settings.group_size(default.group_size),
        zeros=not settings.take("sym", not default.zeros, "true or false", bool),
        ordered=settings.take("desc_act", default.ordered, "true or false", bool),
    )


def _rules_of_dynamic(settings: QuantizationSettings, scheme: Gptq) -> Rules:
    """Return the rules of GPTQModel's `dynamic`: patterns with settings of their own, "-:" for modules in 16 bits."""
    dynamic = settings.take("dynamic", None, "an object or null", dict, type(None)) or {}
    rules: list[tuple[str, Scheme | None]] = []
    for key, values in dynamic.items():
        entry = settings.check_entry("dynamic", f"re:{key.removeprefix('+:').removeprefix('-:')}")
        own = settings.within("dynamic", {}).within(key, values)
        rules.append((entry, None if key.startswith("-:") else _gptq_scheme(own, scheme)))
    return tuple(rules)


def _awq(settings: QuantizationSettings) -> Quantization:
    settings.one_of("bits", 4, 4)
    for name in ("version", "format", "checkpoint_format"):
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
    rules, only = _unquantized(settings, "modules_to_not_convert"), settings.names("modules_in_block_to_quantize")
    return Quantization("awq", scheme, rules, only, ("modules_to_not_convert", "modules_in_block_to_quantize"))


def _fp8(settings: QuantizationSettings) -> Quantization:
    block = settings.take("weight_block_size", None, "two integers or null", list, tuple, type(None))
    scales = "tensor" if block is None else "block"
    # GPTQModel divides by its scales.
    if settings.one_of("weight_scale_semantics", None, None, "inverse"):
        for name in ("format", "checkpoint_format"):
            settings.one_of(name, "float8_e4m3fn", "float8_e4m3fn")
        settings.one_of("bits", 8, 8)
        settings.one_of("group_size", -1, -1)
        settings.one_of("desc_act", False, False)
        method = settings.one_of("weight_scale_method", None, "tensor", "row", "block")
        scales, inverse = "channel" if method == "row" else method, True
    else:
        inverse = False
    return _read_fp8(settings, Fp8(origin="FP8", scales=scales, inverse=inverse), block)


def _read_fp8(settings: QuantizationSettings, scheme: Fp8, block: object) -> Quantization:
    """Read the settings that all tools have for FP8."""
    settings.one_of("activation_scheme", "dynamic", "dynamic", "static")
    settings.one_of("fmt", "e4m3", "e4m3")
    rules = _unquantized(settings, "modules_to_not_convert") + _unquantized(settings, "ignored_layers")
    scheme = replace(scheme, block=check_block(block) if scheme.scales == "block" else (0, 0))
    return Quantization("fp8", scheme, rules, lists=("modules_to_not_convert", "ignored_layers"))


def _auto_round(settings: QuantizationSettings) -> Quantization:
    """Read the format of AutoRound, which packs weights as another tool does and names exceptions in `extra_config`."""
    packing = settings.one_of("packing_format", "auto_round:gptq", *_PACKINGS)
    extra = settings.take("extra_config", None, "an object or null", dict, type(None)) or {}
    settings.one_of("data_type", "int", "fp" if "fp8" in packing else "int")
    if "fp8" in packing:
        for name in ("act_bits", "act_data_type", "act_group_size", "act_sym", "act_dynamic", "bits", "sym"):
            settings.take(name, None, "a value of the tool", int, str, list, bool, type(None))
        size = settings.take("group_size", -1, "-1, 0 or two integers", int, list)
        block = settings.take("weight_block_size", size, "two integers", int, list)
        scales = {-1: "channel", 0: "tensor"}.get(size, "block") if isinstance(size, int) else "block"
        base = _read_fp8(settings, Fp8(origin="FP8", scales=scales), block)
    else:
        base = _PACKINGS[packing](settings)
    rules: list[tuple[str, Scheme | None]] = []
    for module, values in extra.items():
        own = settings.within("extra_config", {}).within(module, values)
        bits = own.take("bits", None, "an integer or null", int, type(None))
        if bits is not None and bits >= _UNQUANTIZED_BITS:
            scheme = None
            for name in ("group_size", "sym", "data_type"):
                own.take(name, None, "a value of the tool", int, str, bool, type(None))
        elif isinstance(base.scheme, Gptq):
            scheme = _gptq_scheme(own, base.scheme if bits is None else replace(base.scheme, bits=bits))
        else:
            raise UnsupportedModelError(
                f"quantization_config has extra_config for {module}, which gives it settings of its own; supported "
                f"are those of packing_format 'auto_round:auto_gptq', and bits=16"
            )
        rules.append((settings.check_entry("extra_config", module), scheme))
    return replace(base, method="auto-round", rules=(*rules, *base.rules), lists=("extra_config", *base.lists))


def _mxfp4(settings: QuantizationSettings) -> Quantization:
    """Read the format of gpt-oss, in which experts are quantized only."""
    name = "modules_to_not_convert"
    return Quantization("mxfp4", Mxfp4Scheme(), _unquantized(settings, name), ("mlp.experts",), (name,))


def _unquantized(settings: QuantizationSettings, name: str) -> Rules:
    """Return rules for the modules of a list that are in the model's type.

    transformers takes entries for patterns of the beginning of a name. One with a star is no name.
    """
    entries = (f"re:{entry}" if "*" in entry and entry[:3] != "re:" else entry for entry in settings.names(name))
    return tuple((settings.check_entry(name, entry), None) for entry in entries)


_UNQUANTIZED_BITS = 16
_PACKINGS: dict[str, Callable[[QuantizationSettings], Quantization]] = {
    "auto_round:auto_gptq": _gptq,
    "auto_round:gptq": _gptq,
    "auto_round:auto_awq": _awq,
    "auto_round:awq": _awq,
    "auto_round:fp8": _fp8,
    "auto_round:fp8_static": _fp8,
}
"""Readers by AutoRound's `packing_format`."""
_READERS: dict[str, Callable[[QuantizationSettings], Quantization]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": read_compressed_tensors,
    "fp8": _fp8,
    "auto-round": _auto_round,
    "mxfp4": _mxfp4,
}
QUANT_METHODS = tuple(_READERS)
"""Values of `quant_method` that are supported."""
