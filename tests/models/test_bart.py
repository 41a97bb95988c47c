"""BART next to transformers in float32: lengths of both sides, together, in each mode, and forms of prompts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bart_checkpoint import POSITIONS, START, VOCAB_SIZE, make_bart
from safetensors.torch import load_file, save_file

from phonograph import LLM, AsyncLLM, SamplingParams
from phonograph.core.token_types import EncoderTokens
from phonograph.errors import ConfigError, ModelError, RequestError, WeightError
from phonograph.models.spec import read_model_spec

FORCED = 0
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 4, "num_kv_blocks": 200}


def texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(4, VOCAB_SIZE, length).tolist() for length in (1, POSITIONS, 2, 16, 17, 33)]


def greedy(model: Any, text: list[int], start: list[int]) -> list[int]:
    ids = torch.tensor([start])
    with torch.no_grad():
        states = model.model.encoder(torch.tensor([text]))
        for _ in range(GREEDY.max_tokens or 0):
            logits = model(encoder_outputs=states, decoder_input_ids=ids).logits[0, -1]
            ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    return ids[0, len(start) :].tolist()


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"enforce_eager": True}, {"eager"}),
        ({"cudagraph_mode": "piecewise", "cudagraph_capture_sizes": [4, 64]}, {"piecewise"}),
        ({"cudagraph_mode": "full", "cudagraph_capture_sizes": [4, 8], "max_num_batched_tokens": 8}, {"full"}),
    ],
)
def test_tokens_equal_those_of_transformers(settings: dict[str, Any], labels: set[str], tmp_path: Path) -> None:
    model = make_bart(tmp_path)
    long = {"encoder_prompt": texts()[3], "decoder_prompt": [7] * 11}
    with LLM(str(tmp_path), **SETTINGS, **settings) as llm:
        outputs = llm.generate([*texts(), long], GREEDY, use_tqdm=False)
        (alone,) = llm.generate(texts()[1], GREEDY, use_tqdm=False)
        assert {label.split()[0] for label in llm.step_counts} == labels
        if "full" in labels:
            assert llm.verify(num_replays=3).ok
    found = [one.outputs[0].token_ids for one in outputs]
    assert found[:-1] == [greedy(model, text, [START]) for text in texts()]
    assert found[-1] == greedy(model, texts()[3], [START] + [7] * 11)
    assert alone.outputs[0].token_ids == found[1]


def test_short_texts_take_few_blocks(tmp_path: Path) -> None:
    """Four of them run together where two long ones do not, and a long one after them."""
    model, params = make_bart(tmp_path), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [text[:16] for text in texts()[3:]] + [texts()[2]]
    with LLM(str(tmp_path), block_size=16, enforce_eager=True, **{**SETTINGS, "num_kv_blocks": 12}) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert sum(llm.step_counts.values()) <= 9
        outputs += llm.generate(texts()[1], params, use_tqdm=False)
    for text, output in zip([*prompts, texts()[1]], outputs, strict=True):
        assert output.outputs[0].token_ids == greedy(model, text, [START])[:8]


def test_an_asynchronous_engine_and_drawn_weights(tmp_path: Path) -> None:
    model, text = make_bart(tmp_path), texts()[5]

    async def written(prompt: Any) -> list[int]:
        async with AsyncLLM(str(tmp_path), load_format="auto", **SETTINGS) as llm:
            call = llm.open([text], GREEDY)
            await call.wait()
            *_, output = [one async for one in llm.generate(prompt, GREEDY)]
            assert call.samples[0].token_ids == output.outputs[0].token_ids
            return output.outputs[0].token_ids

    assert asyncio.run(written({"prompt_token_ids": text})) == greedy(model, text, [START])
    with LLM(str(tmp_path), load_format="dummy", **SETTINGS) as llm:
        assert len(llm.generate(text, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == GREEDY.max_tokens


def test_log_probabilities_and_the_prefix_cache(tmp_path: Path) -> None:
    model, text = make_bart(tmp_path), texts()[4]
    (tmp_path / "generation_config.json").write_text(json.dumps({"forced_bos_token_id": FORCED}))
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=VOCAB_SIZE, ignore_eos=True)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        first, again = (llm.generate(text, params, use_tqdm=False)[0] for _ in range(2))
    assert first.prompt_token_ids == [START, FORCED] and first.outputs[0].logprobs is not None
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    with torch.no_grad():
        ids = torch.tensor([[START, FORCED, *first.outputs[0].token_ids]])
        rows = model(torch.tensor([text]), decoder_input_ids=ids).logits[0].log_softmax(-1)[1:]
    for found, expected in zip(first.outputs[0].logprobs, rows, strict=False):
        assert (torch.tensor(found.logprobs) - expected[found.token_ids]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ({"prompt_token_ids": []}, "the model reads 1 to 70 tokens"),
        ([5] * (POSITIONS + 1), "71 tokens': the model reads 1 to 70"),
        ([VOCAB_SIZE], str(VOCAB_SIZE)),
        ([1 << 40], "text or token ids"),
        ("text", "without a tokenizer"),
        ({"encoder_prompt": [5], "decoder": [5]}, "has keys other than"),
        (EncoderTokens([START], np.zeros((80, 100), np.float32)), "8000 tokens"),
    ],
)
def test_prompts_that_are_refused(prompt: Any, problem: str, tmp_path: Path) -> None:
    make_bart(tmp_path)
    with LLM(str(tmp_path), enforce_eager=True, **SETTINGS) as llm, pytest.raises(RequestError, match=problem):
        llm.generate(prompt, GREEDY, use_tqdm=False)


def test_files_and_settings_that_are_refused(tmp_path: Path) -> None:
    make_bart(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "final_logits_bias" in tensors
    save_file({**tensors, "final_logits_bias": torch.ones(1, VOCAB_SIZE)}, file, {"format": "pt"})
    with pytest.raises(WeightError, match="final_logits_bias"):
        LLM(str(tmp_path), **SETTINGS)
    with pytest.raises(ConfigError, match="quantization"):
        LLM(str(tmp_path), quantization="fp8", **SETTINGS)
    config = tmp_path / "config.json"
    for changes in ({"scale_embedding": True}, {"decoder_start_token_id": VOCAB_SIZE}):
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
        with pytest.raises(ModelError, match=next(iter(changes))):
            read_model_spec(tmp_path)
        config.write_text(json.dumps({**json.loads(config.read_text()), "scale_embedding": False}))
