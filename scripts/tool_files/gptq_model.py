"""Cases of GPTQModel. The reference has the weights as its own modules dequantize them, with scales in float32."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gptqmodel
import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from tiny_models import keep_case, logits_of, make_source, random_texts, stored_tensors
from transformers import AutoTokenizer

# Its pool of threads needs two workers, more than it makes on a machine of two cores.
gptqmodel._default_cpu_workers = lambda: 2
OLD = int(version("gptqmodel").split(".")[0]) < 5
SMALL_BITS = {"bits": 4, "group_size": 32}
CASES: dict[str, dict[str, Any]] = {
    "gptq": SMALL_BITS,
    "gptq-asym": SMALL_BITS | {"sym": False},
    "gptq-v2-asym": SMALL_BITS | {"sym": False, "format": "gptq_v2"},
    "gptq-desc-act": SMALL_BITS | {"desc_act": True},
    "gptq-8-bits": {"bits": 8, "group_size": 32},
    "gptq-8-bits-asym-channel": {
        "bits": 8,
        "group_size": -1,
        "sym": False,
        "format": "gptq_v2",
        "act_group_aware": False,
    },
    "gptq-mixed-bits": SMALL_BITS | {"dynamic": {"+:.*down_proj": {"bits": 8}}},
    "gptq-skipped": SMALL_BITS | {"dynamic": {"-:.*down_proj": {}}},
    "awq": SMALL_BITS | {"method": "awq", "format": "gemm", "sym": False},
    "awq-sym": SMALL_BITS | {"method": "awq", "format": "gemm", "sym": True},
    "awq-skipped": SMALL_BITS | {"method": "awq", "format": "gemm", "sym": False, "dynamic": {"-:.*down_proj": {}}},
    "fp8-row": {"method": "fp8", "bits": 8},
    "fp8-block": {"method": "fp8", "bits": 8, "weight_block_size": [16, 32]},
}


def known(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings that this version has."""
    if OLD:
        return {"desc_act": False, **{name: value for name, value in settings.items() if name != "act_group_aware"}}
    return settings | {"offload_to_disk": False}


def dequantized(module: torch.nn.Module, scales: torch.Tensor) -> torch.Tensor:
    """Return the weight [outputs, inputs] in float32. `scales` are the file's; loading may round them to bfloat16."""
    if hasattr(module, "weight_scale_inv"):
        module.weight_scale_inv = scales
        return module.dequantize_weight(dtype=torch.float32).t()
    module.scales = scales.float()
    if "Awq" in type(module).__name__:
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size).t()
    return module.dequantize_weight().t()


def reference(written: Path, loaded: torch.nn.Module) -> torch.Tensor:
    """Return logits of the weights that the modules of a loaded model dequantize."""
    tensors = stored_tensors(written)
    weights = {name: tensor for name, tensor in tensors.items() if name.endswith((".weight", ".bias"))}
    for name, module in loaded.named_modules():
        if hasattr(module, "dequantize_weight") or hasattr(module, "qweight"):
            scales = tensors.get(f"{name}.scales", tensors.get(f"{name}.weight_scale_inv"))
            weights[f"{name}.weight"] = dequantized(module, scales)
    return logits_of(written, weights)


def main(out: Path, only: list[str]) -> None:
    for case, settings in CASES.items():
        if (only and case not in only) or (OLD and case != "gptq"):
            continue
        family = "qwen2" if case in ("gptq-v2-asym", "awq") else "llama"
        # Its AWQ takes outputs of multiples of 64.
        heads = {"num_key_value_heads": 4} if "awq" in case else {}
        source = make_source(Path(mkdtemp()), family=family, dtype=torch.float16, intermediate_size=128, **heads)
        model = GPTQModel.load(str(source), QuantizeConfig(**known(settings)), device="cpu")
        tokenizer = AutoTokenizer.from_pretrained(source)
        model.quantize([dict(tokenizer(text)) for text in random_texts(64, 32)], batch_size=4)
        written = Path(mkdtemp())
        model.save(str(written))
        backend = "torch" if OLD else "fp8_torch" if "fp8" in case else "awq_torch" if "awq" in case else "gptq_torch"
        logits, how = None, "weights by GPTQModel's torch modules with scales in float32; transformers, float32"
        try:
            logits = reference(written, GPTQModel.load(str(written), backend=BACKEND(backend), device="cpu").model)
        except Exception as error:
            print("no reference", case, repr(error)[:600])
        keep_case(out, written, case, packages=["gptqmodel", "transformers", "torch"], logits=logits, reference=how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
