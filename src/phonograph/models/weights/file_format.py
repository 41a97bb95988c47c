"""Format of weights as the files have it, where the configuration says something else, or nothing.

Experts may have a tensor each, or one for all of a layer. The configuration of GPTQ says whether zeros and an order of
the inputs exist. Files of several tools have both in any case, and some have other ones than the configuration says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from phonograph.models.layer_spec import LayerSpec
from phonograph.models.layers.expert_spec import STACKED, LayerExperts, with_stacked_experts
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.spec import LAYERS, ModelSpec


def match_experts(spec: ModelSpec, files: Mapping[Path, list[str]]) -> ModelSpec:
    """Return the model with the layout of experts that its files have: tensors of each expert, or of all of a layer.

    Damaged files are skipped: loading reports them.
    """
    experts = {index for index, layer in enumerate(spec.layers) if isinstance(layer.feed_forward, LayerExperts)}
    names: set[str | None] = set()
    for file, indexed in files.items() if experts else ():
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                names |= {spec.tensor_name(name) for name in indexed or cast("list[str]", tensors.keys())}
        except (SafetensorError, OSError):
            continue
    made: dict[LayerSpec, LayerSpec] = {}
    layers = [
        made.setdefault(layer, with_stacked_experts(layer))
        if index in experts and f"{LAYERS}.{index}.mlp.experts.{STACKED}" in names
        else layer
        for index, layer in enumerate(spec.layers)
    ]
    return replace(spec, layers=tuple(layers)) if made else spec


def match_format(spec: ModelSpec, files: Iterable[Path]) -> ModelSpec:
    """Return the model with the zeros and the order of inputs that its GPTQ files have, and a note on differences.

    Damaged files are skipped: loading reports them.
    """
    quantization = spec.quantization
    stated = () if quantization is None else (quantization.scheme, *(scheme for _, scheme in quantization.rules))
    # Files in other formats need not be opened.
    if quantization is None or not any(isinstance(scheme, Gptq) for scheme in stated):
        return spec
    found: dict[Gptq, Gptq] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in cast("list[str]", tensors.keys()):
                    module, _, end = (spec.tensor_name(name) or "").rpartition(".")
                    scheme = spec.scheme_of(module) if end in ("qzeros", "g_idx") else None
                    if isinstance(scheme, Gptq):
                        tensor = cast("torch.Tensor", tensors.get_tensor(name))
                        found[scheme] = found.get(scheme, scheme).with_tensor(end, tensor)
        except (SafetensorError, OSError):
            continue
    notes = list(spec.notes)
    if any(stated.zeros != scheme.zeros for stated, scheme in found.items()):
        notes.append(
            "sym=true of quantization_config ignored: qzeros of the checkpoint has other zeros, which are used"
        )
    if any(stated.ordered != scheme.ordered for stated, scheme in found.items()):
        notes.append(
            "desc_act=false of quantization_config ignored: g_idx of the checkpoint has another order of inputs"
        )
    if isinstance(quantization.scheme, Gptq):
        quantization = replace(quantization, scheme=found.get(quantization.scheme, quantization.scheme))
    rules = tuple((entry, found.get(one, one) if isinstance(one, Gptq) else one) for entry, one in quantization.rules)
    return replace(spec.with_quantization(replace(quantization, rules=rules)), notes=tuple(notes))
