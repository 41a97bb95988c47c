"""Whisper next to transformers in float32: the encoder once a request, cross attention in each mode and in chunks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from transformers.models.whisper.generation_whisper import _median_filter
from whisper_checkpoint import START, make_whisper

from phonograph import LLM, SamplingParams
from phonograph.config.engine_config import EngineConfig
from phonograph.core.token_types import EncoderTokens
from phonograph.engine.startup.start import start_engine
from phonograph.errors import ConfigError, ModelError, PhonographError, RequestError, UnsupportedModelError
from phonograph.models.spec import read_model_spec
from phonograph.runner.pools.encoder_keys import EncoderKeys
from phonograph.runner.runner import Runner

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LENGTHS = [1, 3, 2, 33, 17]


def features(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((80, 100)).astype(np.float32)


def inputs() -> list[EncoderTokens]:
    rng = np.random.default_rng(0)
    return [
        EncoderTokens([START, *rng.integers(4, 90, length - 1).tolist()], features(seed))
        for seed, length in enumerate(LENGTHS)
    ]


def greedy(model: Any, prompt: EncoderTokens) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.no_grad():
        states = model.model.encoder(torch.from_numpy(prompt.features)[None])
        for _ in range(GREEDY.max_tokens or 0):
            logits = model(encoder_outputs=states, decoder_input_ids=ids).logits[0, -1]
            ids = torch.cat([ids, logits.argmax()[None, None]], 1)
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ({"enforce_eager": True}, {"eager"}),
        ({"cudagraph_mode": "piecewise", "cudagraph_capture_sizes": [4, 64]}, {"piecewise"}),
        ({"cudagraph_mode": "full", "max_num_batched_tokens": 8}, {"full mixed", "full decode"}),
    ],
)
def test_tokens_equal_those_of_transformers(settings: dict[str, Any], labels: set[str], tmp_path: Path) -> None:
    model, prompts = make_whisper(tmp_path), inputs()
    with LLM(str(tmp_path), device="cpu", max_num_seqs=4, **settings) as llm:
        together = [one.outputs[0].token_ids for one in llm.generate(prompts, GREEDY, use_tqdm=False)]
        (alone,) = llm.generate(prompts[-1], GREEDY, use_tqdm=False)
        assert set(llm.step_counts) == labels
        if labels != {"eager"}:
            report = llm.verify(num_replays=5)
            assert report.ok, report.mismatches
    assert together == [greedy(model, prompt) for prompt in prompts]
    assert alone.outputs[0].token_ids == together[-1]
    assert together[0] != greedy(model, EncoderTokens(prompts[0], features(9))), "the audio must matter"


def test_a_preempted_request_is_encoded_again(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    long, outputs = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True), []
    prompts = [EncoderTokens([START], features(seed)) for seed in range(3)]
    # A request has 4 blocks of the encoder, and 4 of its own at its end.
    for num_kv_blocks in (24, 14):
        with LLM(str(tmp_path), device="cpu", max_num_seqs=3, num_kv_blocks=num_kv_blocks, enforce_eager=True) as llm:
            outputs.append([one.outputs[0].token_ids for one in llm.generate(prompts, long, use_tqdm=False)])
            stats = llm.session.core.scheduler.stats
            assert bool(stats.num_preemptions) == (num_kv_blocks == 14) and stats.blocks_used == 0
    assert outputs[0] == outputs[1]


def test_what_the_second_pass_says_of_tokens_and_positions(tmp_path: Path) -> None:
    model = make_whisper(tmp_path)
    heads = [[2, 0], [1, 2], [2, 1]]
    (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": heads}))
    prompt, written, positions = EncoderTokens([START, 7, 8], features(1)), [9, 30, 31, 9, 40], 41
    runner = start_engine(EngineConfig(model=str(tmp_path), max_num_seqs=1, enforce_eager=True)).core.runner
    assert isinstance(runner, Runner) and runner.encoder_keys is not None
    matrix = runner.encoder_keys.align(prompt, written, positions)
    model.set_attn_implementation("eager")
    ids = torch.tensor([[*prompt, *written]])
    with torch.no_grad():
        found = model(torch.from_numpy(prompt.features)[None], decoder_input_ids=ids, output_attentions=True)
    weights = torch.stack([found.cross_attentions[layer][0, head] for layer, head in heads])[:, 3:, :positions]
    std, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    expected = _median_filter((weights - mean) / std, 7).mean(0)
    assert matrix.shape == (5, 41) and np.abs(matrix - expected.numpy()).max() < 1e-3
    for wrong in ([[3, 0]], [[0, 3]], [[0]], [0], 3):
        (tmp_path / "generation_config.json").write_text(json.dumps({"alignment_heads": wrong}))
        with pytest.raises(ModelError, match=r"alignment_heads=.*below \(3, 3\)"):
            read_model_spec(tmp_path)


def test_samples_and_prompt_scores(tmp_path: Path) -> None:
    model = make_whisper(tmp_path)
    (prompt,) = inputs()[3:4]
    params = SamplingParams(n=2, seed=1, max_tokens=8, prompt_logprobs=0)
    with LLM(str(tmp_path), device="cpu", max_num_seqs=2, enforce_eager=True) as llm:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    with torch.no_grad():
        states = model.model.encoder(torch.from_numpy(prompt.features)[None])
        wanted = model(encoder_outputs=states, decoder_input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
    assert output.prompt_logprobs is not None
    for place in range(1, len(prompt)):
        found = output.prompt_logprobs[place]
        assert found is not None and found[prompt[place]].logprob == pytest.approx(
            float(wanted[place - 1, prompt[place]]), abs=1e-4
        )


def test_an_audio_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By samples of a prompt, by prompts of one step and later ones; prompts of another salt or audio share nothing."""
    model, run, encoded = make_whisper(tmp_path), EncoderKeys.run, list[int]()
    monkeypatch.setattr(EncoderKeys, "run", lambda keys, count: encoded.append(count) or run(keys, count))
    short = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=2, logprobs=0)
    prompts = [
        EncoderTokens([START, *range(4, 4 + length)], features(seed)) for seed, length in ((0, 33), (0, 2), (1, 33))
    ]

    def check(outputs: list[Any]) -> None:
        for prompt, output in zip(prompts, outputs, strict=False):
            for sample in output.outputs:
                assert sample.token_ids == greedy(model, prompt)[:6]

    with LLM(str(tmp_path), device="cpu", max_num_seqs=4, enforce_eager=True) as llm:
        check(llm.generate(prompts, short, use_tqdm=False))
        assert len(encoded) == 2
        check(llm.generate(prompts[:1], short, use_tqdm=False))
        assert len(encoded) == 2 and llm.session.core.scheduler.stats.blocks_used == 0
        salted = {"prompt_token_ids": prompts[0], "cache_salt": "mine"}
        check(llm.generate([salted], short, use_tqdm=False))
        assert len(encoded) == 3
        llm.reset_prefix_cache()
        check(llm.generate(prompts[:1], short, use_tqdm=False))
        assert len(encoded) == 4
    with LLM(str(tmp_path), device="cpu", max_num_seqs=4, enforce_eager=True, enable_prefix_caching=False) as llm:
        check(llm.generate(prompts, short, use_tqdm=False))
    assert len(encoded) == 4 + 2 * len(prompts)


def test_an_encoder_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails the requests with this audio, and no later one finds their blocks."""
    model, load, prompts = make_whisper(tmp_path), EncoderKeys.load, inputs()[:3]
    prompts[2] = EncoderTokens(prompts[2], prompts[1].features)

    def failing(keys: EncoderKeys, frames: Any, blocks: Any) -> None:
        if any(one is prompts[1].features for one in frames):
            raise ValueError("broken frames")
        load(keys, frames, blocks)

    with LLM(str(tmp_path), device="cpu", max_num_seqs=4, enforce_eager=True) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(EncoderKeys, "load", failing)
            first, *others = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert first.outputs[0].token_ids == greedy(model, prompts[0])
        assert all("broken frames" in str(output.error) for output in others)
        (again,) = llm.generate([prompts[1]], GREEDY, use_tqdm=False)
    assert again.outputs[0].token_ids == greedy(model, prompts[1])


def test_prompts_without_audio_and_with_other_frames(tmp_path: Path) -> None:
    make_whisper(tmp_path)
    with LLM(str(tmp_path), device="cpu", max_num_seqs=2, enforce_eager=True) as llm:
        with pytest.raises(RequestError, match="audio.*is missing"):
            llm.generate([[START]], GREEDY)
        with pytest.raises(RequestError, match="other frames"):
            llm.generate([EncoderTokens([START], np.zeros((80, 98), np.float32))], GREEDY)
    with (
        LLM("demo", device="cpu", max_num_seqs=2, enforce_eager=True) as llm,
        pytest.raises(RequestError, match="reads no audio"),
    ):
        llm.generate([EncoderTokens([START], features(0))], GREEDY)


@pytest.mark.parametrize(
    ("settings", "problem", "kind"),
    [
        ({"device": "cpu", "tensor_parallel_size": 2}, "tensor_parallel_size", ConfigError),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config", ConfigError),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", ConfigError),
        ({"enable_sleep_mode": True}, "enable_sleep_mode", ConfigError),
        ({"convert": "embed"}, "convert=embed", UnsupportedModelError),
    ],
)
def test_settings_without_a_rule(
    settings: dict[str, Any], problem: str, kind: type[PhonographError], tmp_path: Path
) -> None:
    make_whisper(tmp_path)
    with pytest.raises(kind, match=problem):
        LLM(str(tmp_path), **settings)


@pytest.mark.parametrize("name", ["preprocessor_config.json", "processor_config.json"])
def test_preprocessors(name: str, tmp_path: Path) -> None:
    make_whisper(tmp_path)
    fields = WhisperFeatureExtractor(chunk_length=1).to_dict()

    def write(changes: dict[str, Any]) -> None:
        found = {**fields, **changes}
        (tmp_path / name).write_text(json.dumps(found if name[:3] == "pre" else {"feature_extractor": found}))

    write({})
    read_model_spec(tmp_path)
    for changes in ({"hop_length": 80}, {"chunk_length": 30}, {"feature_size": 128}, {"dither": 0.1}):
        write(changes)
        with pytest.raises(ModelError, match=f"{next(iter(changes))}=.* of the preprocessor"):
            read_model_spec(tmp_path)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"scale_embedding": True}, "scale_embedding"),
        ({"max_source_positions": 75}, "max_source_positions=75"),
        ({"activation_function": "gelu_fast"}, "hidden_act"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder"),
    ],
)
def test_configurations_that_are_refused(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    make_whisper(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=problem):
        read_model_spec(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"no_timestamps_token_id": 101}, {"no_timestamps_token_id": "79"}, {"max_initial_timestamp_index": -1}]
)
def test_timestamps_that_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    make_whisper(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    with pytest.raises(ModelError, match=f"{next(iter(changes))}=.* below vocab_size=101"):
        read_model_spec(tmp_path)
