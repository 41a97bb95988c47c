"""A trained model of three gated delta nets and one layer of attention: wrong states give wrong answers.

`training/demo/train_hybrid.py` made it, and tests/data/hybrid has it. Its tokenizer is that of the demo model.

Prompts end within an answer. The model forgets at the beginning of a turn, as its turns are independent of each other,
and attention finds the question again. So a wrong state matters while it works an answer out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state_faults import another_boundary, not_restored, plant
from transformers import AutoTokenizer, Qwen3_5ForCausalLM

from demo_tasks.tasks import PROBLEM_TOKENS, problems, score_problem
from phonograph import LLM, SamplingParams
from phonograph.demo import MODEL_DIRECTORY

FOLDER = Path(__file__).parents[1] / "data" / "hybrid"
BLOCK = 8
ITEMS = list(problems(20000, 16))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIRECTORY)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Return the tokens of questions and of the first halves of their answers."""
    found: list[list[int]] = []
    for item in ITEMS:
        chat = [{"role": "user", "content": item.question}]
        question = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer = tokenizer(item.worked_answer)["input_ids"]
        found.append(question + answer[: len(answer) // 2])
    return found


def answers(prompts: list[list[int]]) -> list[str]:
    """Return the answers of an engine in which other prompts have the same tokens up to their last blocks' ends.

    These prompts go on otherwise, and the prompts start from their checkpoints.
    """
    llm = LLM(
        model=str(FOLDER), tokenizer=str(MODEL_DIRECTORY), dtype="float32", device="cpu", max_num_seqs=4,
        max_num_batched_tokens=128, block_size=BLOCK, num_kv_blocks=512, state_checkpoint_share=0.5,
        cudagraph_capture_sizes=[4, 128],
    )  # fmt: skip
    others = [prompt[: (len(prompt) - 1) // BLOCK * BLOCK] + prompts[0][: BLOCK - 1] for prompt in prompts]
    llm.generate(others, SamplingParams(temperature=0, max_tokens=1))
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=PROBLEM_TOKENS))
    assert all(
        len(prompt) - (output.num_cached_tokens or 0) <= BLOCK for prompt, output in zip(prompts, outputs, strict=True)
    )
    return [output.outputs[0].text for output in outputs]


def score(texts: list[str]) -> float:
    return sum(map(score_problem, ITEMS, texts)) / len(ITEMS)


def test_the_score_is_that_of_transformers(prompts: list[list[int]], tokenizer: Any) -> None:
    model: Any = Qwen3_5ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    wanted: list[str] = []
    for prompt in prompts:
        output = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=PROBLEM_TOKENS)
        wanted.append(tokenizer.decode(output[0, len(prompt) :], skip_special_tokens=True))
    found = answers(prompts)
    print(f"score {score(found):.3f}")
    assert found == wanted
    assert score(found) >= 0.9


@pytest.mark.parametrize("fault", [another_boundary, not_restored])
def test_wrong_states_give_wrong_answers(
    fault: Callable[[list[Any]], None], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(fault, "qwen3_5", monkeypatch)
    found = score(answers(prompts))
    print(f"score {found:.3f}")
    assert found < 0.6
