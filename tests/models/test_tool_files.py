"""Files that quantization tools wrote: each means what its tool says, or is refused by the name of a setting.

`scripts/tool-files` made the files and the reference logits; `tests/data/tool_files/README.md` has the table.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import load_model
from dense import DenseSequences
from safetensors.torch import load_file

from phonograph.errors import UnsupportedModelError
from phonograph.models.spec import read_model_spec

FILES = Path(__file__).parents[1] / "data" / "tool_files"
CASES = sorted(str(path.parent.relative_to(FILES)) for path in FILES.glob("*/*/made_by.json"))
REFUSED = {
    "auto-round-0.16.1/auto-round-fp8-block": "quant_method='auto-round'",
    "auto-round-0.16.1/auto-round-fp8-static": "quant_method='auto-round'",
    "autoawq-0.2.9/gemv": "version='gemv'",
    "gptqmodel-7.7.0/fp8-block": "weight_scale_semantics",
    "gptqmodel-7.7.0/fp8-row": "weight_scale_semantics",
    "llmcompressor-0.14.0.1/nvfp4a16": "format='nvfp4-pack-quantized'",
}
"""Cases that no reader takes, with the setting and value that the error names."""
LIMIT = 3e-6
"""Relative error of logits in float32. The largest of these files is 1.1e-6."""
LIMIT_OF_LLAMA_CPP = 0.04
"""Relative error against llama.cpp's own logits, whose activations have 8 bits."""


def model_path(case: str) -> Path:
    """Return the folder of a case, or its GGUF file."""
    file = FILES / case / "model.gguf"
    return file if file.is_file() else FILES / case


def error_of(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((logits - wanted).norm() / wanted.norm())


def test_each_refused_case_is_there() -> None:
    assert REFUSED.keys() < set(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED])
def test_logits_are_those_of_the_tool(case: str) -> None:
    expected = load_file(FILES / case / "expected.safetensors")
    path = model_path(case)
    sequences = DenseSequences(
        load_model(read_model_spec(path), path, dtype=torch.float32, device=torch.device("cpu"))
    )
    sequences.add()
    (logits,) = sequences.step([(0, expected["tokens"].tolist())])
    assert error_of(logits, expected["logits"]) <= LIMIT
    if "theirs" in expected:
        assert error_of(logits, expected["theirs"]) <= LIMIT_OF_LLAMA_CPP


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_setting(case: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[case]):
        read_model_spec(model_path(case))
