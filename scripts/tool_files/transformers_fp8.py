"""Cases of transformers' own FP8. The reference has the logits of the files as transformers dequantizes them."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tiny_models import TOKENS, keep_case, make_source
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

CASES: dict[str, dict[str, Any]] = {
    "blocks": {"weight_block_size": (32, 32)},
    "blocks-skipped": {"weight_block_size": (16, 64), "modules_to_not_convert": ["lm_head", "o_proj"]},
    "blocks-ue8m0": {"weight_block_size": (32, 32), "scale_fmt": "ue8m0"},
    "tensor": {"weight_block_size": None},
}


def main(out: Path, only: list[str]) -> None:
    # Quantizing asks for a GPU, which only the products need.
    check = FineGrainedFP8HfQuantizer.validate_environment
    for case, settings in CASES.items():
        if only and case not in only:
            continue
        source = make_source(Path(mkdtemp()), intermediate_size=128)
        FineGrainedFP8HfQuantizer.validate_environment = lambda *arguments, **settings: None
        model = AutoModelForCausalLM.from_pretrained(source, quantization_config=FineGrainedFP8Config(**settings))
        written = Path(mkdtemp())
        model.save_pretrained(written)
        FineGrainedFP8HfQuantizer.validate_environment = check
        logits = None
        try:
            loaded = AutoModelForCausalLM.from_pretrained(written, dtype=torch.float32)
            with torch.inference_mode():
                logits = loaded(torch.tensor([TOKENS])).logits[0]
        except Exception as error:
            print("no reference", case, repr(error)[:600])
        how = "transformers, float32, of weights that it dequantizes while it loads the files"
        keep_case(out, written, case, packages=["transformers", "torch"], logits=logits, reference=how)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
