"""Prompts with audio in vLLM's forms: tokens of transformers' `generate`, resampling, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor
from whisper_checkpoint import SECONDS, START, make_whisper

from phonograph import LLM, SamplingParams
from phonograph.engine.offline.audio_prompts import SAMPLING_RATE, checked_samples, resampled
from phonograph.errors import RequestError

GREEDY = SamplingParams(temperature=0, max_tokens=20)


def tone(frequency: float, seconds: float = 0.7, rate: int = SAMPLING_RATE) -> np.ndarray:
    times = np.arange(round(seconds * rate)) / rate
    return (0.4 * np.sin(2 * np.pi * frequency * times)).astype(np.float32)


def sounds() -> list[np.ndarray]:
    noise = np.random.default_rng(1).standard_normal(SAMPLING_RATE * SECONDS).astype(np.float32)
    return [
        tone(440.0),
        np.zeros(8000, np.float32),
        0.1 * noise,
        tone(3000.0, 0.01),
        np.concatenate([tone(220.0), noise[:3000]]),
    ]


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, LLM]]:
    folder: Path = tmp_path_factory.mktemp("whisper")
    model = make_whisper(folder)
    with LLM(str(folder), max_num_seqs=8, cudagraph_capture_sizes=[1, 8]) as llm:
        yield model, llm


def generated(model: Any, audios: list[np.ndarray]) -> list[list[int]]:
    extract = WhisperFeatureExtractor(chunk_length=SECONDS)
    features = extract(audios, sampling_rate=SAMPLING_RATE, return_tensors="pt")["input_features"]
    rows = model.generate(features, max_new_tokens=GREEDY.max_tokens, do_sample=False).tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in rows]


def prompt_of(audio: np.ndarray, **changes: Any) -> dict[str, Any]:
    data = {"audio": (audio, SAMPLING_RATE)}
    return {"prompt_token_ids": [START], "multi_modal_data": data, **changes}


def test_tokens_of_generate_alone_and_together(whisper: tuple[Any, LLM]) -> None:
    model, llm = whisper
    audios = sounds()
    together = [one.outputs[0].token_ids for one in llm.generate([prompt_of(a) for a in audios], GREEDY)]
    assert together == generated(model, audios)
    assert len(set(map(tuple, together))) > 2, "audio must matter"
    for audio, tokens in zip(audios, together, strict=True):
        (alone,) = llm.generate(prompt_of(audio), GREEDY)
        assert alone.outputs[0].token_ids == tokens == generated(model, [audio])[0]


def test_other_forms_of_a_prompt(whisper: tuple[Any, LLM]) -> None:
    _, llm = whisper
    audio = sounds()[0]
    (wanted,) = llm.generate(prompt_of(audio), GREEDY)
    inner = {"prompt": "", "multi_modal_data": {"audio": [(torch.from_numpy(audio).double(), SAMPLING_RATE)]}}
    (outer,) = llm.generate({"encoder_prompt": inner, "decoder_prompt": [START]}, GREEDY)
    *_, streamed = llm.stream(prompt_of(audio), GREEDY)
    assert wanted.outputs[0].token_ids == outer.outputs[0].token_ids == streamed.outputs[0].token_ids


def test_a_sound_that_cannot_be_used_leaves_others_alone(whisper: tuple[Any, LLM]) -> None:
    _, llm = whisper
    audio = sounds()[0]
    (wanted,) = llm.generate(prompt_of(audio), GREEDY)
    too_long = prompt_of(np.zeros(SAMPLING_RATE * SECONDS + 160, np.float32))
    good, bad, last = llm.generate([prompt_of(audio), too_long, prompt_of(audio)], GREEDY)
    assert bad.error is not None and "1.01 s" in str(bad.error) and "1 s at a time" in str(bad.error)
    assert good.outputs[0].token_ids == last.outputs[0].token_ids == wanted.outputs[0].token_ids


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"multi_modal_data": {"image": 1}}, "multi_modal_data"),
        ({"multi_modal_data": {"audio": np.zeros(9)}}, "audio"),
        ({"multi_modal_data": {"audio": (np.zeros(9, np.int16), 16000)}}, "int16"),
        ({"multi_modal_data": {"audio": (np.zeros((2, 9)), 16000)}}, r"\[2, 9\]"),
        ({"multi_modal_data": {"audio": (np.zeros(0), 16000)}}, "no samples"),
        ({"multi_modal_data": {"audio": (np.full(9, np.nan), 16000)}}, "not finite"),
        ({"multi_modal_data": {"audio": (np.zeros(9), 44101)}}, "sampling_rate=.44101"),
        ({"multi_modal_data": {"audio": (np.zeros(9), 0)}}, "sampling_rate=.0"),
        ({"multi_modal_data": None}, "audio.*is missing"),
        ({"prompt": "a", "prompt_token_ids": None}, "without a tokenizer"),
        ({"encoder_prompt": {"prompt": "a"}}, "encoder_prompt"),
        ({"encoder_prompt": "a", "prompt_token_ids": None, "multi_modal_data": None}, "encoder_prompt"),
    ],
)
def test_prompts_that_are_refused(changes: dict[str, Any], problem: str, whisper: tuple[Any, LLM]) -> None:
    with pytest.raises(RequestError, match=problem):
        whisper[1].generate(prompt_of(tone(440.0), **changes), GREEDY)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 24000, 44100, 48000])
def test_resampled_tones(rate: int) -> None:
    found, wanted = checked_samples((tone(1000.0, 0.5, rate), rate)), tone(1000.0, 0.5)
    assert len(found) == len(wanted)
    # The ends see silence around the tone.
    assert np.abs(found - wanted)[400:-400].max() < 2e-3
    if rate > SAMPLING_RATE:
        above = resampled(tone(9500.0, 0.5, rate), rate)
        assert np.abs(above[400:-400]).max() < 2e-3, "tones above half of the rate are cut"
