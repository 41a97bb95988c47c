"""Outputs end at the union of the tokens that the model's files and its tokenizer name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from phonograph import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from phonograph.demo import MODEL_DIRECTORY
from phonograph.engine.process.process_client import ProcessClient

MESSAGES = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does Tom have?"}]
GREEDY = SamplingParams(max_tokens=200, temperature=0)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(model="demo", max_model_len=512, max_num_seqs=2, enforce_eager=True)


def copy_demo(folder: Path, **eos: Any) -> Path:
    """Copy the demo model with another `eos_token_id` in its files; its tokenizer names <|end|>."""
    for file in MODEL_DIRECTORY.iterdir():
        if file.name in ("config.json", "generation_config.json"):
            content = json.loads(file.read_text()) | {"eos_token_id": None} | eos
            (folder / file.name).write_text(json.dumps(content))
        else:
            (folder / file.name).symlink_to(file)
    return folder


def test_a_turn_ends_where_the_tokenizer_alone_names_its_end(tmp_path: Path, demo: LLM) -> None:
    model = str(copy_demo(tmp_path, eos_token_id=[300_000, -1]))
    llm = LLM(model=model, max_model_len=512, max_num_seqs=2, enforce_eager=True)
    (expected,) = demo.chat(MESSAGES, GREEDY)
    (output,) = llm.chat(MESSAGES, GREEDY)
    assert expected.outputs[0].finish_reason == "stop"
    assert output.outputs == expected.outputs
    assert "eos_token_id 300000, -1 ignored" in " ".join(llm.plan.notes)
    # min_tokens bans the ends of sequence until then, and the model has no logits for ids outside its vocabulary.
    (later,) = llm.chat(MESSAGES, SamplingParams(max_tokens=200, temperature=0, min_tokens=1))
    assert later.outputs == expected.outputs
    grammar = StructuredOutputs(regex="[ab]{3}")
    (structured,) = llm.generate(["x"], SamplingParams(max_tokens=9, structured_outputs=grammar))
    assert structured.outputs[0].finish_reason == "stop"


def test_the_engine_of_a_server_ends_turns_there_too(tmp_path: Path, demo: LLM) -> None:
    (expected,) = demo.chat(MESSAGES, GREEDY)
    settings = {"max_model_len": 512, "max_num_seqs": 2, "enforce_eager": True, "device": "cpu"}

    async def ask() -> Any:
        async with AsyncLLM(copy_demo(tmp_path), client=ProcessClient, **settings) as engine:
            assert engine.tokenizer is not None
            call = engine.open([engine.tokenizer.encode_chat(MESSAGES)], GREEDY)
            await call.wait()
            (sample,) = call.samples
            call.close()
            return sample

    sample = asyncio.run(ask())
    assert (sample.text, sample.finish_reason) == (expected.outputs[0].text, "stop")
