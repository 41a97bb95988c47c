"""Small checkpoints in quantized formats, packed by numpy after the published layouts, apart from the engine's code."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from phonograph.demo import MODEL_DIRECTORY

PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj"),
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of a file.

    `order` spreads the inputs of a group over the matrix; `scales` are those of FP8; `int8` files have one integer a
    byte; a `group` of -1 has all inputs of an output, of 0 all of the matrix.
    """

    method: str
    bits: int = 4
    group: int = 32
    scales: str = ""
    symmetric: bool = True
    order: bool = False
    version: int = 1
    int8: bool = False

    @property
    def config(self) -> dict[str, Any]:
        if self.method == "gptq":
            checkpoint = "gptq_v2" if self.version == 2 else "gptq"
            return {
                **{"quant_method": "gptq", "bits": self.bits, "group_size": self.group, "desc_act": self.order},
                **{"sym": self.symmetric, "checkpoint_format": checkpoint, "damp_percent": 0.01},
            }
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        if self.method == "fp8":
            block = {"weight_block_size": [16, 24]} if self.scales == "block" else {}
            return {"quant_method": "fp8", "activation_scheme": "dynamic", **block}
        if self.scales:
            weights = {
                **{"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": self.scales},
                **{"group_size": None, "actorder": None, "observer": "minmax"},
                "block_structure": [16, 24] if self.scales == "block" else None,
            }
            group = {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True, "num_bits": 8}}
            return {
                **{"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]},
                "config_groups": {"group_0": group},
            }
        weights = {
            **{"num_bits": self.bits, "type": "int", "symmetric": self.symmetric, "dynamic": False},
            **{"strategy": {-1: "channel", 0: "tensor"}.get(self.group, "group"), "observer": "minmax"},
            **{"group_size": None if self.group < 1 else self.group, "actorder": "group" if self.order else None},
        }
        activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"} if self.int8 else None
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        layout = "int-quantized" if self.int8 else "pack-quantized"
        return {
            **{"quant_method": "compressed-tensors", "format": layout, "ignore": ["lm_head"]},
            **{"sparsity_config": {"format": "dense", "targets": ["Linear"]}},
            **{"config_groups": {"group_0": group}, "kv_cache_scheme": None, "quantization_status": "compressed"},
        }

    def quantize(self, weight: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Return the tensors of a matrix [outputs, inputs] by the ends of their names, and the matrix they mean."""
        if self.scales:
            return self._fp8(weight)
        outputs, inputs = weight.shape
        group = inputs if self.group < 1 else self.group
        count = -(-inputs // group)
        group_of = np.arange(inputs) // group
        if self.order:
            group_of = np.random.default_rng(seed).permutation(group_of)
        levels = 1 << self.bits
        values, meant = np.zeros((outputs, inputs), np.int64), np.zeros((outputs, inputs))
        scales, zeros = np.zeros((outputs, count), np.float16), np.full((outputs, count), levels // 2)
        for g in range(count):
            part = weight[:, group_of == g].astype(np.float64)
            over = part if self.group else part.reshape(1, -1)
            low, high = over.min(1), over.max(1)
            if self.symmetric:
                scales[:, g] = np.maximum(np.abs(over).max(1), 1e-4) / (levels // 2 - 1)
            else:
                scales[:, g] = np.maximum(high - low, 1e-4) / (levels - 1)
                zeros[:, g] = np.clip(np.round(-low / scales[:, g].astype(np.float64)), 1, levels - 1)
            scale = scales[:, g, None].astype(np.float64)
            values[:, group_of == g] = np.clip(np.round(part / scale) + zeros[:, g, None], 0, levels - 1)
            meant[:, group_of == g] = (values[:, group_of == g] - zeros[:, g, None]) * scale
        return self._packed(values, scales, zeros, group_of), meant

    def _fp8(self, weight: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
        outputs, inputs = weight.shape
        rows, columns = {"tensor": (outputs, inputs), "channel": (1, inputs), "block": (16, 24)}[self.scales]
        scales = np.zeros((-(-outputs // rows), -(-inputs // columns)), np.float32)
        values, meant = torch.zeros(outputs, inputs, dtype=torch.float8_e4m3fn), np.zeros((outputs, inputs))
        for (row, column), _ in np.ndenumerate(scales):
            place = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
            scales[row, column] = np.abs(weight[place]).max() / 448
            values[place] = torch.from_numpy(weight[place] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[place] = values[place].double().numpy() * scales[row, column]
        end = "weight_scale_inv" if self.method == "fp8" and self.scales == "block" else "weight_scale"
        return {"weight": values, end: scales.reshape(-1)[:1] if self.scales == "tensor" else scales}, meant

    def _packed(
        self, values: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray
    ) -> dict[str, np.ndarray]:
        if self.method == "gptq":
            return {
                "qweight": words(values.T, self.bits, 0),
                "qzeros": words((zeros - (self.version == 1)).T, self.bits, 1),
                "scales": scales.T.copy(),
                "g_idx": group_of.astype(np.int32),
            }
        if self.method == "awq":
            order = [8 * (n // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8] for n in range(len(values))]
            return {
                "qweight": words(values.T[:, order], 4, 1),
                "qzeros": words(zeros.T[:, order], 4, 1),
                "scales": scales.T.copy(),
            }
        if self.int8:
            # Activations in int8 have parameters of their own in files with a static scale.
            shape = (1,) if self.group == 0 else scales.shape
            return {
                "weight": (values - 128).astype(np.int8),
                "weight_scale": scales[:1].reshape(1) if self.group == 0 else scales,
                "weight_zero_point": (zeros - 128).astype(np.int8)[: shape[0]].reshape(shape),
                "input_scale": np.full(1, 0.1, np.float32),
                "input_zero_point": np.zeros(1, np.int8),
            }
        tensors = {
            "weight_packed": words(values, self.bits, 1),
            "weight_scale": scales,
            "weight_shape": np.array(values.shape, np.int64),
        }
        if not self.symmetric:
            tensors["weight_zero_point"] = words(zeros, self.bits, 0)
        if self.order:
            tensors["weight_g_idx"] = group_of.astype(np.int32)
        return tensors


FORMATS = {
    "gptq": Format(method="gptq"),
    "gptq v2": Format(method="gptq", version=2, symmetric=False),
    "gptq zeros": Format(method="gptq", symmetric=False),
    "gptq order": Format(method="gptq", order=True),
    "gptq 128": Format(method="gptq", group=128),
    "gptq one group": Format(method="gptq", group=-1),
    "gptq 8 bits": Format(method="gptq", bits=8, symmetric=False, group=64),
    "gptq uneven": Format(method="gptq", group=48),
    "awq": Format(method="awq", symmetric=False),
    "awq one group": Format(method="awq", symmetric=False, group=-1),
    "packed": Format(method="compressed-tensors"),
    "packed zeros": Format(method="compressed-tensors", symmetric=False),
    "packed channel": Format(method="compressed-tensors", group=-1),
    "packed 8 bits": Format(method="compressed-tensors", bits=8),
    "packed 8 bits channel": Format(method="compressed-tensors", bits=8, group=-1),
    "int8 channel": Format(method="compressed-tensors", bits=8, int8=True, group=-1),
    "int8 tensor": Format(method="compressed-tensors", bits=8, int8=True, group=0),
    "int8 zeros": Format(method="compressed-tensors", bits=8, int8=True, symmetric=False),
    "fp8": Format(method="fp8", scales="tensor"),
    "fp8 blocks": Format(method="fp8", scales="block"),
    "float tensor": Format(method="compressed-tensors", scales="tensor"),
    "float channel": Format(method="compressed-tensors", scales="channel"),
    "float blocks": Format(method="compressed-tensors", scales="block"),
    "packed order": Format(method="compressed-tensors", order=True, symmetric=False, group=16),
}
FAMILIES = "gptq", "gptq 128", "packed zeros", "int8 channel", "fp8", "fp8 blocks"
"""A format of each family of kernels."""


def words(values: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Pack integers along an axis into words of 32 bits, the lowest bits first; the last word is filled with zeros."""
    count = 32 // bits
    moved = np.moveaxis(values, axis, -1).astype(np.uint64)
    padded = np.concatenate([moved, np.zeros((len(moved), -moved.shape[1] % count), np.uint64)], 1)
    parts = padded.reshape(len(padded), -1, count)
    packed = sum(parts[..., place] << np.uint64(bits * place) for place in range(count))
    return np.ascontiguousarray(np.moveaxis(packed.astype(np.uint32).view(np.int32), -1, axis))


def quantize_checkpoint(folder: Path, kind: Format) -> dict[str, torch.Tensor]:
    """Rewrite a checkpoint in a quantized format. Returns the weights that it means, in float64, by their old names."""
    path = folder / "model.safetensors"
    dense, packed = load_file(path), {}
    for name, tensor in sorted(dense.items()):
        module, _, end = name.rpartition(".")
        if end == "weight" and module.rpartition(".")[2] in PROJECTIONS:
            # The order of inputs is the same for projections of the same input, as in GPTQ's files.
            seed = sum(map(ord, module.rpartition(".")[0])) + 7 * (module.endswith(("o_proj", "down_proj")))
            tensors, meant = kind.quantize(tensor.float().numpy(), seed)
            packed |= {f"{module}.{end}": torch.as_tensor(value) for end, value in tensors.items()}
            dense[name] = torch.from_numpy(meant)
        else:
            packed[name] = tensor
    save_file(packed, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kind.config}))
    return dense


def quantized_demo(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Write the demo model to a new folder in the format of this name. Returns what `quantize_checkpoint` does."""
    shutil.copytree(MODEL_DIRECTORY, folder)
    return quantize_checkpoint(folder, FORMATS[name])
