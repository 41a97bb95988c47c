"""Quantized weights with each attention backend on a GPU: problems have the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from quantized_checkpoints import FAMILIES, quantized_demo

from phonograph import LLM, SamplingParams
from phonograph.errors import ConfigError

pytestmark = pytest.mark.gpu


def texts(folder: Path, backend: str) -> list[str]:
    llm = LLM(
        model=str(folder),
        device="cuda",
        dtype="float16",
        attention_backend=backend,
        max_num_seqs=4,
        max_model_len=256,
        num_kv_blocks=200,
    )
    asked = [f"{number} + {3 * number} =" for number in range(12)]
    outputs = llm.generate(asked, SamplingParams(max_tokens=12, temperature=0.0))
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("backend", ["reference", "flash_attn", "flashinfer"])
@pytest.mark.parametrize("name", FAMILIES)
def test_backends(name: str, backend: str, tmp_path: Path) -> None:
    quantized_demo(folder := tmp_path / "model", name)
    try:
        found = texts(folder, backend)
    except ConfigError as error:
        pytest.skip(f"{backend}: {error}")
    assert found == texts(folder, "triton")
