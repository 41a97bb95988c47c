"""Cases of Optimum's GPTQ, which transformers' GPTQConfig starts. The reference is that of GPTQModel's cases."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from gptq_model import reference
from tiny_models import keep_case, make_source, random_texts
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTQConfig

CASES: dict[str, dict[str, Any]] = {
    "gptq-asym": {"sym": False},
    "gptq-some-projections": {"modules_in_block_to_quantize": [["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]},
}


def main(out: Path, only: list[str]) -> None:
    for case, settings in CASES.items():
        if only and case not in only:
            continue
        source = make_source(Path(mkdtemp()), dtype=torch.float16, intermediate_size=128)
        config = GPTQConfig(
            bits=4,
            group_size=32,
            dataset=random_texts(32, 32),
            tokenizer=AutoTokenizer.from_pretrained(source),
            model_seqlen=32,
            backend="gptq_torch",
            **settings,
        )
        model = AutoModelForCausalLM.from_pretrained(
            source, quantization_config=config, dtype=torch.float16, device_map="cpu"
        )
        written = Path(mkdtemp())
        model.save_pretrained(written)
        logits = reference(written, AutoModelForCausalLM.from_pretrained(written, device_map="cpu"))
        how = "weights by GPTQModel's torch modules with scales in float32; transformers, float32"
        packages = ["optimum", "gptqmodel", "transformers", "torch"]
        keep_case(out, written, case, packages=packages, logits=logits, reference=how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
