"""The engine with the demo model in quantized formats: graphs answer as eager steps do, near what the weights mean."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import FORMATS, quantize_checkpoint
from transformers import AutoModelForCausalLM

import phonograph.demo
from phonograph import LLM, SamplingParams
from phonograph.engine.outputs import RequestOutput

PROMPTS = [*(f"{number} + {3 * number} =" for number in range(6)), "Once upon a time " * 9]
PARAMS = SamplingParams(max_tokens=8, temperature=0.0, logprobs=1, ignore_eos=True)
NEAR = {"cpu": 1e-3, "cuda": 0.06}
"""By how much a token may be less likely than the best, by torch's model of the dequantized weights in float32."""
NEAR_FP8 = 0.15
"""The same where activations are FP8: those that lie between two numbers of the type may become the other one."""


def answers(folder: Path, mode: str, device: str) -> list[RequestOutput]:
    llm = LLM(
        model=str(folder),
        device=device,
        dtype="float16" if device == "cuda" else "float32",
        cudagraph_mode=mode,
        max_num_seqs=4,
        max_model_len=256,
        num_kv_blocks=200,
    )
    return llm.generate(PROMPTS, PARAMS)


def round_to_fp8(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
    """Return a layer's rows as FP8 with one scale each means them."""
    scales = inputs[0].abs().amax(-1, keepdim=True) / 448
    return (inputs[0] / scales).to(torch.float8_e4m3fn).float() * scales


def check(folder: Path, name: str, device: str) -> None:
    shutil.copytree(Path(phonograph.demo.__file__).parent / "model", folder)
    meant = quantize_checkpoint(folder, FORMATS[name])
    reference = AutoModelForCausalLM.from_pretrained(Path(phonograph.demo.__file__).parent / "model").float().eval()
    reference.load_state_dict({key: value.float() for key, value in meant.items()}, strict=False)
    has_fp8_activations = device == "cuda" and name in ("fp8", "float tensor", "float channel")
    if has_fp8_activations:
        for layer in reference.model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_pre_hook(round_to_fp8)
    full, eager = (answers(folder, mode, device) for mode in ("FULL", "NONE"))
    for output, alone in zip(full, eager, strict=True):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
        rows = logits[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert bool((rows.amax(1) - chosen <= (NEAR_FP8 if has_fp8_activations else NEAR[device])).all())


@pytest.mark.parametrize("name", ["gptq order", "awq"])
def test_on_a_cpu(name: str, tmp_path: Path) -> None:
    check(tmp_path / "model", name, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_on_a_gpu(name: str, tmp_path: Path) -> None:
    check(tmp_path / "model", name, "cuda")
