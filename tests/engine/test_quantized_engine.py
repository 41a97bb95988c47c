"""The engine with the demo model in quantized formats: graphs answer as eager steps do, near what the weights mean."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FAMILIES, FORMATS, quantized_demo
from transformers import AutoModelForCausalLM

from phonograph import LLM, SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.engine.outputs import RequestOutput

PROMPTS = [*(f"{number} + {3 * number} =" for number in range(6)), "Once upon a time " * 9]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)
NEAR = {"cpu": 1e-3, "cuda": 0.06}
"""By how much a token may be less likely than the best, by torch's model of the dequantized weights in float32."""
NEAR_FP8 = 0.15
"""The same where activations are FP8, for the nearer of two models: with activations rounded to FP8, and without."""


def make_llm(folder: Path, device: str, **settings: Any) -> LLM:
    return LLM(
        model=str(folder),
        device=device,
        dtype="float16" if device == "cuda" else "float32",
        max_num_seqs=4,
        max_model_len=256,
        num_kv_blocks=200,
        **({} if device == "cuda" else {"cudagraph_capture_sizes": [1, 2, 4, 64], "cpu_products": "float32"}),
        **settings,
    )


def answers(folder: Path, mode: str, device: str) -> list[RequestOutput]:
    return make_llm(folder, device, cudagraph_mode=mode).generate(PROMPTS, PARAMS)


def tokens_of(outputs: list[RequestOutput]) -> list[Sequence[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def round_to_fp8(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Return a layer's rows as FP8 with one scale each means them."""
    scales = inputs[0].abs().amax(-1, keepdim=True) / 448
    return (inputs[0] / scales).to(torch.float8_e4m3fn).float() * scales


def check(folder: Path, name: str, device: str) -> None:
    meant = quantized_demo(folder, name)
    references = [model_of(meant)]
    if device == "cuda" and name in ("fp8", "float tensor", "float channel"):
        references.append(model_of(meant))
        for layer in references[1].model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(round_to_fp8)
    full, eager = (answers(folder, mode, device) for mode in ("FULL", "NONE"))
    for output, alone in zip(full, eager, strict=True):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        # Rounding activations moves some of these log-probabilities by 0.5, and other sums round others.
        less = torch.stack([less_likely(reference, prompt, tokens) for reference in references]).amin(0)
        assert float(less.max()) <= (NEAR_FP8 if len(references) > 1 else NEAR[device])


def model_of(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return torch's demo model with the weights, in float32."""
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIRECTORY).float().eval()
    model.load_state_dict({key: value.float() for key, value in weights.items()}, strict=False)
    return model


def less_likely(reference: torch.nn.Module, prompt: list[int], tokens: Sequence[int]) -> torch.Tensor:
    """Return by how much each token is less likely than the best."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0].log_softmax(-1)
    rows = logits[len(prompt) - 1 : -1]
    return rows.amax(1) - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]


@pytest.mark.parametrize("name", ["gptq order", "awq"])
def test_on_a_cpu(name: str, tmp_path: Path) -> None:
    check(tmp_path / "model", name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    check(tmp_path / "model", name, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_modes(name: str, tmp_path: Path) -> None:
    """All modes give the same tokens, and each replay of a full graph is equal to eager."""
    quantized_demo(tmp_path / "model", name)
    llm = make_llm(tmp_path / "model", "cuda", cudagraph_mode="FULL")
    wanted = tokens_of(llm.generate(PROMPTS, PARAMS))
    for mode in ("FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "PIECEWISE", "NONE"):
        assert tokens_of(answers(tmp_path / "model", mode, "cuda")) == wanted, mode
    report = llm.verify(num_replays=100)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]
