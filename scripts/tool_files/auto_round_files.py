"""Cases of AutoRound. The reference has the weights as AutoRound's torch kernels dequantize them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from auto_round import AutoRound
from auto_round.export.export_to_awq.utils import dequantize_gemm
from auto_round_extension.torch.qlinear_torch_zp import QuantLinear
from decompressed import decompressed
from tiny_models import keep_case, logits_of, make_source, stored_tensors
from transformers import AutoModelForCausalLM, AutoTokenizer

SIZES = {"intermediate_size": 128}
W4 = {"scheme": "W4A16", "group_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "auto-round": ("auto_round", W4),
    "auto-round-asym": ("auto_round", W4 | {"sym": False}),
    "auto-round-8-bits": ("auto_round", {"scheme": "W8A16", "group_size": 32}),
    "auto-round-mixed-bits": ("auto_round", W4 | {"layer_config": {"model.layers.1.mlp.down_proj": {"bits": 8}}}),
    "auto-gptq": ("auto_gptq", W4),
    "auto-gptq-asym": ("auto_gptq", W4 | {"sym": False}),
    "auto-gptq-mixed-bits": ("auto_gptq", W4 | {"layer_config": {"model.layers.1.mlp.down_proj": {"bits": 16}}}),
    "auto-awq": ("auto_awq", W4 | {"sym": False}),
    "auto-awq-skipped": ("auto_awq", W4 | {"layer_config": {"model.layers.1.mlp.down_proj": {"bits": 16}}}),
    "llm-compressor-w4a16": ("llm_compressor", W4),
    "llm-compressor-fp8-static": ("llm_compressor", {"scheme": "FP8_STATIC"}),
    "auto-round-fp8-static": ("auto_round", {"scheme": "FP8_STATIC"}),
    "auto-round-fp8-block": ("auto_round", {"scheme": "FP8_BLOCK"}),
}


def dequantized(tensors: dict[str, torch.Tensor], bits: int, group: int, packing: str) -> torch.Tensor:
    """Return the weight [outputs, inputs] of a module's tensors in float32."""
    scales = tensors["scales"].float()
    inputs = tensors["qweight"].shape[0] * (1 if packing == "awq" else 32 // bits)
    if packing == "awq":
        return dequantize_gemm(tensors["qweight"], tensors["qzeros"], scales, bits, group).t()
    module = QuantLinear(bits, group, inputs, scales.shape[1], False)
    module.qweight, module.qzeros, module.scales = tensors["qweight"], tensors["qzeros"], scales
    return module(torch.eye(inputs)).t()


def reference(written: Path) -> torch.Tensor:
    """Return logits of the weights that AutoRound, or compressed-tensors where it writes its format, dequantizes."""
    config = json.loads((written / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "compressed-tensors":
        return logits_of(written, decompressed(written))
    tensors = stored_tensors(written)
    weights = {name: tensor for name, tensor in tensors.items() if name.endswith((".weight", ".bias"))}
    packing = "awq" if "awq" in config["quant_method"] + config.get("packing_format", "") else "gptq"
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end in ("weight_scale", "weight_scale_inv"):
            # One scale an output, or one a block of 128 by 128, which no size here exceeds.
            weights[f"{module}.weight"] = weights[f"{module}.weight"].float() * tensor.float().view(-1, 1)
        if end == "qweight":
            parts = {end: tensors[f"{module}.{end}"] for end in ("qweight", "qzeros", "scales")}
            bits = config.get("extra_config", {}).get(module, config).get("bits", config["bits"])
            weights[f"{module}.weight"] = dequantized(parts, bits, config["group_size"], packing)
    return logits_of(written, weights)


def main(out: Path, only: list[str]) -> None:
    for case, (layout, settings) in CASES.items():
        if only and case not in only:
            continue
        try:
            source = make_source(
                Path(mkdtemp()), family="qwen2" if case == "auto-gptq-asym" else "llama", dtype=torch.float16, **SIZES
            )
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float16)
            rows = torch.randint(4, 96, (32, 32))
            data = [{"input_ids": row[None]} for row in rows]
            rounding = AutoRound(
                model, AutoTokenizer.from_pretrained(source), iters=0, dataset=data, nsamples=16, seqlen=32, **settings
            )
            written = Path(mkdtemp())
            rounding.quantize_and_save(str(written), format=layout)
        except Exception as error:
            print("no file", case, repr(error)[:900], flush=True)
            continue
        subs = [p.parent for p in written.rglob("config.json")]
        logits = None
        try:
            logits = reference(subs[0])
        except Exception as error:
            print("no reference", case, repr(error)[:600], flush=True)
        how = "weights by AutoRound's torch kernels or CompressedTensorsDequantizer; transformers, float32"
        keep_case(out, subs[0], case, packages=["auto-round", "transformers", "torch"], logits=logits, reference=how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
