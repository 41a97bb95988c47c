"""QuantizationSettings of `quantization_config` in a model's config.json, read one after another."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

from phonograph.errors import ModelError, UnsupportedModelError, shortened

_TOOLS = (
    "quant_method batch_size block_name_to_quantize cache_block_outputs damp_percent damp_auto_increment dataset "
    "exllama_config use_exllama max_input_length model_seqlen module_name_preceding_first_block pad_token_id "
    "static_groups tokenizer true_sequential use_cuda_fp16 is_marlin_format model_name_or_path model_file_base_name "
    "quantizer meta mse backend do_fuse fuse_max_seq_len modules_to_fuse version_info quantization_status "
    "global_compression_ratio version act_group_aware iters low_gpu_mem_usage autoround_version provider amp "
    "enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input enable_torch_compile lr minmax_lr "
    "gradient_accumulate_steps nsamples scale_dtype seqlen to_quant_block_names"
)
"""QuantizationSettings of the tools that made a checkpoint, without effect on the weights' meaning."""
_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "pack_dtype": ("int32",),
    "method": ("gptq", "awq", "fp8"),
    "data_type": ("int",),
    "dequantize": (False,),
    "scale_fmt": ("float",),
    "act_bits": (16, 32),
    "act_data_type": ("float",),
    "quant_lm_head": (False,),
    "lm_head": (False,),
    "is_mx_fp": (False,),
}
"""QuantizationSettings without effect if they have these values."""


class QuantizationSettings:
    """QuantizationSettings that are read one after another; `finish` rejects those left, also in objects among them.

    `path` has the keys that lead to them.
    """

    def __init__(self, settings: Mapping[str, Any], path: tuple[str, ...] = ("quantization_config",)) -> None:
        self._settings = dict(settings)
        self._path = path
        self._within = ".".join(path[-2:])
        self._objects: list[QuantizationSettings] = []

    def take(self, name: str, default: Any, works: str, *kinds: type) -> Any:
        """Return a setting of one of these types; raises a ModelError with `works` for another."""
        value = self._settings.pop(name, default)
        if type(value) not in kinds:
            raise ModelError(f"{self._within} has {name}={shortened(repr(value))}; it must be {works}")
        return value

    def one_of(self, name: str, default: Any, *values: Any) -> Any:
        """Return a setting that has one of these values; raises an UnsupportedModelError for another."""
        value = self._settings.pop(name, default)
        if value not in values:
            supported = ", ".join(repr(one) for one in values if one is not None)
            raise UnsupportedModelError(
                f"{self._within} has {name}={shortened(repr(value))}, which is not supported; supported is {supported}"
            )
        return value

    def group_size(self, default: Any) -> int:
        """Return the inputs of a group, -1 for all."""
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

    def within(self, name: str, value: Any) -> QuantizationSettings:
        """Return the settings of an object among these.

        Raises:
            ModelError: it is not an object.
        """
        if not isinstance(value, Mapping):
            raise ModelError(f"{self._within} has {name}={shortened(repr(value))}; it must be an object")
        settings = QuantizationSettings(cast("Mapping[str, Any]", value), (*self._path, name))
        self._objects.append(settings)
        return settings

    def finish(self) -> None:
        """Reject settings that were not read, unless they have no effect, here and in each object of `within`.

        Raises:
            UnsupportedModelError: the effect of a setting is not known, or not implemented.
        """
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
        for settings in self._objects:
            settings.finish()
