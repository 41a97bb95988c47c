"""Format of GPTQ weights as the files have it, where the configuration says something else.

The configuration says whether zeros and an order of the inputs exist. Files of several tools have both in any case, and
some have other ones than the configuration says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open

from phonograph.models.quantization.gptq import Gptq
from phonograph.models.spec import ModelSpec


def match_format(spec: ModelSpec, files: Iterable[Path]) -> ModelSpec:
    """Return the model with the zeros and the order of inputs that its GPTQ files have, and a note on differences.

    Damaged files are skipped: loading reports them.
    """
    stated = None if spec.quantization is None else spec.quantization.scheme
    if spec.quantization is None or not isinstance(stated, Gptq):
        return spec
    scheme = stated
    for file in files:
        try:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in cast("list[str]", tensors.keys()):
                    module, _, end = name.rpartition(".")
                    if end in ("qzeros", "g_idx") and spec.scheme_of(module) is not None:
                        scheme = scheme.with_tensor(end, cast("torch.Tensor", tensors.get_tensor(name)))
        except (SafetensorError, OSError):
            continue
    notes = list(spec.notes)
    if scheme.zeros != stated.zeros:
        notes.append(
            "sym=true of quantization_config ignored: qzeros of the checkpoint has other zeros, which are used"
        )
    if scheme.ordered != stated.ordered:
        notes.append(
            "desc_act=false of quantization_config ignored: g_idx of the checkpoint has another order of inputs"
        )
    return replace(spec, quantization=replace(spec.quantization, scheme=scheme), notes=tuple(notes))
