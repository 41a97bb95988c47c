"""The head that `training/demo/train_drafts.py` trains beside a plain head, and the one that ships."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import torch
from gguf_files import write_gguf
from torch.nn import functional

from demo_tasks.tasks import problems
from phonograph.core.sampling_params import SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.engine.llm import LLM
from phonograph.text.tokenizer import Tokenizer

TRAINING = Path(__file__).parents[2] / "training" / "demo"


def test_steps_of_the_loss_are_those_of_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each entry of a later step says what a chain says whose drafts up to there are the tokens of the text."""
    monkeypatch.syspath_prepend(str(TRAINING))
    monkeypatch.setattr(torch.nn.RMSNorm, "reset_parameters", lambda self: torch.nn.init.uniform_(self.weight, 0.5, 2))
    module: Any = importlib.import_module("head")
    torch.manual_seed(4)
    shape = module.Shape(
        vocab_size=90, hidden_size=32, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rope_theta=10000.0, rms_norm_eps=1e-5,
    )  # fmt: skip
    head = module.Head(shape, (1, 2, 4))
    states, embedded = torch.randn(2, 9, 96), torch.randn(2, 9, 32)
    # The plain head multiplies what it says by the matrix of logits.
    tensors = {**head.state_dict(), "lm_head.weight": torch.eye(32)}
    with torch.inference_mode():
        outputs = head(states, embedded, 3)
        for row in range(2):
            for last in range(9):
                own: list[torch.Tensor] = []
                for step in range(min(3, last + 1)):
                    # The chain begins at the entry from which it reaches the last one in the last step.
                    first = last - min(2, last)
                    said, normed = eagle_heads.reference(
                        tensors, "midlayer", {"head_dim": 16, "hidden_size": 32},
                        states[row, : first + 1], embedded[row, : first + 1 + step], own,
                    )  # fmt: skip
                    found = outputs[step][row, first + step]
                    assert (found - normed[-1]).norm() < 1e-5 * normed[-1].norm(), (row, last, step)
                    own.append(said[-1])


def test_states_are_those_that_enter_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TRAINING))
    module: Any = importlib.import_module("head")
    script: Any = importlib.import_module("train_drafts")
    target, config = script.load_target()
    target.float()
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(script.MODEL_DIRECTORY, dtype=torch.float32)
    tokens = torch.randint(5, config["vocab_size"], (2, 23))
    with torch.inference_mode():
        wanted = reference(tokens, output_hidden_states=True)
        states, said = module.states_of(target, tokens, (0, 2, 7))
        logits = functional.linear(said, target.model["embed_tokens"].weight)
    expected = torch.cat([wanted.hidden_states[tap] for tap in (0, 2, 7)], -1)
    assert (states - expected).norm() < 1e-5 * expected.norm()
    assert (logits - wanted.logits).norm() < 1e-5 * wanted.logits.norm()


@pytest.mark.parametrize("kind", [None, "Q8_0"])
def test_the_head_that_ships_is_right_for_most_drafts(kind: str | None, tmp_path: Path) -> None:
    """It has the embedding of its target, also in the blocks of a GGUF file."""
    model = "demo"
    if kind is not None:
        model = str(tmp_path / "demo.gguf")
        write_gguf(tmp_path / "demo.gguf", MODEL_DIRECTORY, lambda name: kind)
    speculation = {"model": "demo-eagle3", "num_speculative_tokens": 4, "adaptive_depth": False}
    llm = LLM(model, device="cpu", max_model_len=256, max_num_seqs=8, speculative_config=speculation)
    encode = Tokenizer.load(MODEL_DIRECTORY).encode_chat
    prompts = [encode([{"role": "user", "content": one.question}]) for one in problems(3, 16)]
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=60, stop_token_ids=[2]), use_tqdm=False)
    counts = llm.engine.core.scheduler.stats.drafts
    assert counts.accepted > 2 * counts.decodes
