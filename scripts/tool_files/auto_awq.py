"""Cases of AutoAWQ. The reference has the weights as its own code unpacks and dequantizes them."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp

import torch
from awq import AutoAWQForCausalLM
from awq.utils.packing_utils import dequantize_gemm
from tiny_models import keep_case, logits_of, make_source, random_texts, stored_tensors
from transformers import AutoTokenizer

GEMM = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
CASES = {
    "gemm": GEMM,
    "gemv": GEMM | {"version": "GEMV"},
}


def reference(written: Path) -> torch.Tensor:
    tensors = stored_tensors(written)
    weights = {name: tensor for name, tensor in tensors.items() if name.endswith((".weight", ".bias"))}
    for name, scales in tensors.items():
        module, _, end = name.rpartition(".")
        if end == "scales":
            packed = tensors[f"{module}.qweight"], tensors[f"{module}.qzeros"]
            weights[f"{module}.weight"] = dequantize_gemm(*packed, scales.float(), 4, 32).t()
    return logits_of(written, weights)


def main(out: Path, only: list[str]) -> None:
    for case, settings in CASES.items():
        if only and case not in only:
            continue
        source = make_source(
            Path(mkdtemp()),
            family="qwen2" if case == "gemm" else "llama",
            dtype=torch.float16,
            intermediate_size=128,
            num_key_value_heads=4,
        )
        model = AutoAWQForCausalLM.from_pretrained(str(source), device_map="cpu", torch_dtype=torch.float16)
        model.quantize(
            AutoTokenizer.from_pretrained(source),
            quant_config=dict(settings),
            calib_data=random_texts(64, 48),
            max_calib_samples=64,
            max_calib_seq_len=64,
        )
        written = Path(mkdtemp())
        model.save_quantized(str(written))
        logits = reference(written) if case.startswith("gemm") else None
        how = "weights by AutoAWQ's dequantize_gemm with scales in float32; transformers, float32"
        keep_case(out, written, case, packages=["autoawq", "transformers", "torch"], logits=logits, reference=how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
