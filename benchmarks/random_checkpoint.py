"""Random quantized checkpoint for comparisons with peers, written by a model's config.json.

    python benchmarks/random_checkpoint.py MODEL_DIR OUT_DIR --device cuda

A peer's dummy weights may be zeros or one value, on which a GPU draws less power and runs faster than on a model's
weights: vLLM leaves integers as they were allocated, and rounds numbers below 0.001 to FP8. With a checkpoint both
sides read the same random numbers, and the peer decides by the files which modules are quantized, as for a real model.
Supported are GPTQ of 4 bits, compressed-tensors in FP8 with a scale for each output, and experts in MXFP4.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from phonograph.models.quantization.float8 import Fp8
from phonograph.models.quantization.gptq import Gptq
from phonograph.models.quantization.mxfp4 import Mxfp4Scheme
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.spec import read_model_spec

STD = 0.02


def tensors_of(scheme: Scheme, outputs: int, inputs: int, device: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a module by the ends of their names, with weights of a standard deviation of 0.02."""
    if isinstance(scheme, Gptq) and scheme.bits == 4 and scheme.version == 1 and not scheme.ordered:
        shapes = scheme.stored(outputs, inputs)
        # Values of 1 to 15, whose mean is the zero of 8.
        values = torch.randint(1, 16, (inputs // 8, 8, outputs), dtype=torch.int32, device=device)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=device)[None, :, None]
        return {
            "qweight": (values << shifts).sum(1, dtype=torch.int32),
            "qzeros": torch.full(shapes["qzeros"].shape, 0x77777777, dtype=torch.int32),
            "scales": (STD / 4.32 * (0.8 + 0.4 * torch.rand(shapes["scales"].shape))).half(),
            "g_idx": torch.arange(inputs, dtype=torch.int32) // scheme.group(inputs),
        }
    if isinstance(scheme, Fp8) and scheme.scales == "channel":
        values = torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device)
        scales = values.abs().amax(1, keepdim=True).float() / 448
        return {
            "weight": (values / scales).clamp(-448, 448).to(torch.float8_e4m3fn),
            "weight_scale": (scales * STD).bfloat16(),
        }
    if isinstance(scheme, Mxfp4Scheme):
        shapes = scheme.stored(outputs, inputs)
        # The root mean square of all codes is 2.9, so that factors of 2^-8 and 2^-7 give about 0.02.
        return {
            "blocks": torch.randint(256, shapes["blocks"].shape, dtype=torch.uint8, device=device),
            "scales": torch.randint(119, 121, shapes["scales"].shape, dtype=torch.uint8, device=device),
        }
    raise SystemExit(f"{scheme.name} is not supported; see --help")


def shards(folder: Path, device: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors outside of layers, then those of each layer."""
    spec = read_model_spec(folder)
    dtype = getattr(torch, spec.dtype)
    dense = spec.tensor_shapes()

    def draw(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(dense[name], dtype=dtype)
        return (torch.randn(dense[name], device=device) * STD).to(dtype)

    yield {name: draw(name) for name in dense if not name.startswith("model.layers.")}
    for layer in range(spec.num_layers):
        tensors = {name: draw(name) for name in dense if name.startswith(f"model.layers.{layer}.")}
        for module, part, matrix in spec.layers[layer].modules():
            if part.scheme is not None:
                made = tensors_of(part.scheme, part.num_outputs, matrix.num_inputs, device)
                prefix, fused = f"model.layers.{layer}.{module}", matrix.fused
                for end, tensor in made.items():
                    if fused is None:
                        tensors[f"{prefix}.{end}"] = tensor
                    else:
                        tensors[fused.name(prefix, end)] = tensor.view(fused.shape(end, tensor.shape))
        yield tensors


def main(tokens: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("output", type=Path)
    parser.add_argument("--device", default="cpu", help="where the numbers are drawn")
    arguments = parser.parse_args(tokens)
    torch.manual_seed(0)
    arguments.output.mkdir(parents=True)
    shutil.copy(arguments.model / "config.json", arguments.output)
    index: dict[str, str] = {}
    for number, tensors in enumerate(shards(arguments.model, arguments.device)):
        name = f"model-{number:05d}.safetensors"
        save_file({key: tensor.cpu().contiguous() for key, tensor in tensors.items()}, arguments.output / name)
        index |= dict.fromkeys(tensors, name)
        print(f"{name}: {len(tensors)} tensors", flush=True)
    (arguments.output / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


if __name__ == "__main__":
    main()
