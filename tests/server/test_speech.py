"""/v1/audio/transcriptions and translations: prompts of several languages, forms of answers, and wrong bodies."""

from __future__ import annotations

import io
import json
import re
import wave
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from openai import APIError
from openai.types.audio import TranscriptionTextDeltaEvent, TranscriptionTextDoneEvent
from servers import EngineThread, Server, serving
from transformers import WhisperFeatureExtractor
from transformers.models.whisper import generation_whisper, tokenization_whisper
from whisper_checkpoint import MULTILINGUAL, SECONDS, make_multilingual

from phonograph.bench.serving.serving_bench import bench_serving
from phonograph.bench.serving.settings import TRANSCRIPTIONS, ServingBench
from phonograph.config.server_config import ServerConfig
from phonograph.engine.process.client import REPORTS_AT_ONCE
from phonograph.errors import ConfigError
from phonograph.server.http.api_errors import ApiError
from phonograph.server.speech.audio_file import parts_of, read_samples
from phonograph.server.speech.form import read_form
from phonograph.server.speech.transcript import Segment, segments_of, srt, vtt
from phonograph.server.speech.word_times import token_times, words_of

RATE = 16000
PATH = "/v1/audio/transcriptions"
WORDS = {"timestamp_granularities[]": ["word"]}


def wav(samples: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, 2, rate, 0, "NONE", ""))
        writer.writeframes((samples * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    return 0.2 * np.random.default_rng(seed).standard_normal(round(seconds * RATE)).astype(np.float32).clip(-4, 4)


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, EngineThread]]:
    folder = tmp_path_factory.mktemp("multilingual")
    model = make_multilingual(folder)
    settings = {"max_model_len": None, "max_num_seqs": 4, "cudagraph_capture_sizes": "1,4"}
    with EngineThread(model=str(folder), **settings) as thread:
        yield model, thread


@pytest.fixture(scope="module")
def spoken(hearing: tuple[Any, EngineThread]) -> Iterator[tuple[Any, Server]]:
    model, thread = hearing
    with serving(thread, ServerConfig()) as server:
        yield model, server


def post(server: Server, content: bytes | None, path: str = PATH, **fields: Any) -> httpx.Response:
    files = {"language": (None, b"en")} if content is None else {"file": ("a.wav", content)}
    return httpx.post(f"{server.url}{path}", data=fields, files=files, timeout=30)


def written(model: Any, content: bytes, prompt: list[int], count: int = 99, allowed: range | None = None) -> list[int]:
    """Return the greedy tokens behind a prompt, by transformers."""
    (samples,) = [read_samples(content)]
    features = WhisperFeatureExtractor(chunk_length=SECONDS)(samples, sampling_rate=RATE, return_tensors="pt")
    ids, found = torch.tensor([prompt]), list[int]()
    with torch.no_grad():
        states = model.model.encoder(features["input_features"])
        while len(found) < count and ids.shape[1] < 36:
            logits = model(encoder_outputs=states, decoder_input_ids=ids).logits[0, -1]
            if allowed is not None:
                logits = torch.where(
                    torch.isin(torch.arange(len(logits)), torch.tensor([*allowed])), logits, -torch.inf
                )
            found.append(int(logits.argmax()))
            ids = torch.cat([ids, torch.tensor([[found[-1]]])], 1)
            if found[-1] == MULTILINGUAL["endoftext"]:
                break
    return found


def words(tokens: list[int]) -> str:
    return "".join(f"w{token}" for token in tokens if token not in MULTILINGUAL.values())


def prompt_of(language: int, task: str = "transcribe", *, timed: bool = False) -> list[int]:
    named = [MULTILINGUAL["startoftranscript"], language, MULTILINGUAL[task]]
    return named if timed else [*named, MULTILINGUAL["notimestamps"]]


def test_text_in_a_language_that_is_given_or_found(spoken: tuple[Any, Server]) -> None:
    model, server = spoken
    content = wav(sound(0.8))
    german = post(server, content, language="de").json()
    assert german["text"] == words(written(model, content, prompt_of(MULTILINGUAL["de"])))
    assert german["usage"] == {"type": "duration", "seconds": 1}
    start = [MULTILINGUAL["startoftranscript"]]
    (language,) = written(model, content, start, 1, range(50259, 50358))
    assert post(server, content).json()["text"] == words(written(model, content, prompt_of(language)))
    english = post(server, content, "/v1/audio/translations", language="de", response_format="text")
    wanted = words(written(model, content, prompt_of(MULTILINGUAL["de"], "translate")))
    assert english.text == wanted + "\n" and english.headers["content-type"].startswith("text/plain")
    server.wait_until_idle()


def test_parts_of_a_long_recording_and_the_prompt(spoken: tuple[Any, Server]) -> None:
    model, server = spoken
    samples = sound(2.3)
    parts = parts_of(read_samples(wav(samples)), RATE * SECONDS)
    before = [MULTILINGUAL["startofprev"], 7, 9]
    wanted = [written(model, wav(p * 32768 / 32767), [*before, *prompt_of(MULTILINGUAL["en"])]) for p in parts]
    found = post(server, wav(samples), language="en", prompt="w7 w9").json()["text"]
    assert found == " ".join(map(words, wanted)) and len(parts) >= 3


@pytest.mark.parametrize("seconds", [0.8, 3.3])
def test_a_stream_for_the_client_of_openai(seconds: float, spoken: tuple[Any, Server]) -> None:
    """A recording that fits and one of several parts, in a language that is found."""
    server = spoken[1]
    content = wav(sound(seconds, 5))
    num_parts = len(parts_of(read_samples(content), RATE * SECONDS))
    whole = post(server, content).json()["text"]
    events = [*server.client().audio.transcriptions.create(model="demo", file=("a.wav", content), stream=True)]
    *deltas, done = events
    assert {type(one) for one in deltas} == {TranscriptionTextDeltaEvent}
    # A loop that is late joins tokens, but of no more reports than it takes at once. Later parts wait for the first.
    assert len(deltas) > num_parts and len(deltas) * REPORTS_AT_ONCE >= whole.count("w") / num_parts
    assert "".join(one.delta for one in deltas) == whole and whole.count(" ") == num_parts - 1
    assert isinstance(done, TranscriptionTextDoneEvent) and done.text == whole and done.usage is not None
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens
    # Tokens of words, and an end of each part that did not reach the limit.
    assert whole.count("w") <= done.usage.output_tokens <= whole.count("w") + num_parts
    assert done.usage.input_tokens == 4 * num_parts and (num_parts > 3) == (seconds > 1)
    server.wait_until_idle()


def test_a_stream_of_several_tokens_an_event(hearing: tuple[Any, EngineThread], spoken: tuple[Any, Server]) -> None:
    form: dict[str, Any] = {"model": "demo", "file": ("a.wav", wav(sound(0.8))), "language": "en", "stream": True}
    *deltas, done = list(spoken[1].client().audio.transcriptions.create(**form))
    with serving(hearing[1], ServerConfig(stream_interval=8)) as server:
        *fewer, same = list(server.client().audio.transcriptions.create(**form))
    assert same == done.model_copy(update={"id": getattr(same, "id", None), "created": getattr(same, "created", None)})
    # The first token, the last and every eighth: fewer events when the loop was late, as with one event a token.
    num_tokens = done.usage.output_tokens
    assert len(fewer) <= 2 + num_tokens // 8 < num_tokens / 2
    assert num_tokens / REPORTS_AT_ONCE <= len(deltas) <= num_tokens
    # An event has at most 7 tokens that waited and those of the reports taken at once.
    assert len(fewer) >= num_tokens / (7 + REPORTS_AT_ONCE)
    assert "".join(one.delta for one in fewer) == done.text


def test_a_stream_for_a_client_of_vllm(spoken: tuple[Any, Server]) -> None:
    server = spoken[1]
    content = wav(sound(2.3))
    most = 3 * len(parts_of(read_samples(content), RATE * SECONDS))
    path = "/v1/audio/translations"
    whole = post(server, content, path, language="de").json()["text"]

    def events(**fields: Any) -> list[Any]:
        lines = post(server, content, path, language="de", stream="True", **fields).text.split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    plain = events(response_format="text")
    assert "".join(one["choices"][0]["delta"]["content"] for one in plain) == whole
    assert {(one["object"], one["model"], one["id"]) for one in plain} == {
        ("translation.chunk", "demo", plain[0]["id"])
    }
    reasons = [one["choices"][0].get("finish_reason") for one in plain]
    assert reasons == [None] * (len(plain) - 1) + ["length"]
    assert "usage" not in plain[0]
    *chunks, last = events(stream_include_usage="True", stream_continuous_usage_stats="True", max_completion_tokens=3)
    counts = [one["usage"]["completion_tokens"] for one in chunks]
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == most == counts[-1]
    assert counts == sorted(counts)
    assert [one["choices"][0].get("finish_reason") for one in chunks][-2:] == [None, "length"]
    assert last["text"] == "".join(one["choices"][0]["delta"]["content"] for one in chunks)


def test_a_stream_whose_client_goes_away_or_that_is_aborted(
    hearing: tuple[Any, EngineThread], spoken: tuple[Any, Server]
) -> None:
    """A recording of more than 40 parts, of which 4 run at a time."""
    thread, server = hearing[1], spoken[1]
    form: dict[str, Any] = {"model": "demo", "file": ("a.wav", wav(sound(40))), "language": "en", "stream": True}
    speech = server.client().audio.transcriptions
    before = server.engine.num_steps
    with speech.create(**form) as stream:
        next(stream)
        assert server.engine.num_open > 30
    server.wait_until_idle()
    assert server.engine.num_steps - before < 150, "it did not run to its end"
    with speech.create(**form) as stream, pytest.raises(APIError, match="was aborted"):
        first: Any = next(stream)
        assert thread.submit(server.engine.abort(first.id)).result(10) == 1
        list(stream)
    server.wait_until_idle()


def test_segments_by_the_client_of_openai(spoken: tuple[Any, Server]) -> None:
    model, server = spoken
    content = wav(sound(0.9, 3))
    client = server.client()
    made = client.audio.transcriptions.create(
        model="demo", file=("a.wav", content), language="en", response_format="verbose_json", temperature=0
    )
    tokens = written(model, content, prompt_of(MULTILINGUAL["en"], timed=True))
    texts = [token for token in tokens if token < MULTILINGUAL["endoftext"]]
    assert made.segments and [token for one in made.segments for token in one.tokens] == texts
    assert made.duration == 0.9 and all(0 <= one.start <= one.end <= 0.9 for one in made.segments)
    assert all(one.avg_logprob < 0 for one in made.segments)
    subtitles = client.audio.transcriptions.create(
        model="demo", file=("a.wav", content), language="en", response_format="vtt"
    )
    assert str(subtitles).startswith("WEBVTT\n\n00:00:0")


@pytest.mark.parametrize(
    ("content", "fields", "field", "problem"),
    [
        (b"", {}, "file", "empty"),
        (b"RIFF no recording", {}, "file", "no WAV file"),
        (wav(np.zeros(0)), {}, "file", "no samples"),
        (wav(np.zeros(9), rate=8001), {}, "file", "multiple of 25"),
        (wav(np.zeros(1000 * 1801), rate=1000), {}, "file", "1801 s"),
        (None, {}, "file", "missing"),
        (wav(np.zeros(99)), {"language": "tlh"}, "language", "the model lacks it; codes such as en, de"),
        (wav(np.zeros(99)), {"response_format": "xml"}, "response_format", "json"),
        (wav(np.zeros(99)), {"stream": "true", "response_format": "verbose_json"}, "response_format", "not streamed"),
        (wav(np.zeros(99)), {"stream": "true", "response_format": "srt"}, "response_format", "not streamed"),
        (wav(np.zeros(99)), {"stream": "True", "response_format": "vtt"}, "response_format", "not streamed"),
        (wav(np.zeros(99)), {"stream": "soon"}, "stream", "boolean"),
        (wav(np.zeros(99)), {"stream_include_usage": "true"}, "stream_include_usage", "stream=true"),
        (b"RIFF no recording", {"stream": "true"}, "file", "no WAV file"),
        (wav(np.zeros(99)), {"temperature": "hot"}, "temperature", "number"),
        (wav(np.zeros(99)), {"temperature": "-1"}, "temperature", "temperature"),
        (wav(np.zeros(99)), {"timestamp_granularities[]": ["word"]}, "timestamp_granularities", "verbose_json"),
        (wav(np.zeros(99)), {**WORDS, "response_format": "verbose_json"}, "timestamp_granularities", "alignment_heads"),
        (wav(np.zeros(99)), {"sped": "2"}, "sped", "unknown field"),
    ],
)
def test_what_is_refused(
    content: bytes | None, fields: dict[str, Any], field: str, problem: str, spoken: tuple[Any, Server]
) -> None:
    answer = post(spoken[1], content, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and problem in error["message"], error


def test_bodies_that_are_no_form_and_a_model_that_hears_nothing(spoken: tuple[Any, Server], server: Server) -> None:
    answer = spoken[1].post(PATH, {"file": "a"})
    assert answer.status_code == 400 and "multipart/form-data" in answer.json()["error"]["message"]
    answer = post(server, wav(np.zeros(99)))
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_task"
    answer = spoken[1].post("/v1/completions", {"prompt": "w1"})
    assert answer.status_code == 400 and "audio" in answer.json()["error"]["message"]


def test_forms() -> None:
    kind = 'multipart/form-data; boundary="a b"'
    file = b"\x00\r\n--a\r\n\r\n\xff"
    body = b'--a b\r\nContent-Disposition: form-data; name="x[]"\r\n\r\n1\r\n'
    body += b'--a b\r\nContent-Disposition: form-data; name="x[]"\r\n\r\n\r\n'
    body += b'--a b\r\ncontent-disposition: form-data; filename="f"; name="file"\r\nContent-Type: a/b\r\n\r\n' + file
    assert read_form(kind, body + b"\r\n--a b--\r\n") == ({"x": ["1", ""]}, file)
    for wrong in (b"", b"--a b", body, b"x" + body + b"\r\n--a b--", b"--a b\r\n\r\nno name\r\n--a b--"):
        with pytest.raises(ApiError):
            read_form(kind, wrong)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_each_width_and_channels(width: int) -> None:
    values = np.array([[0.5, -0.25], [-1.0, 0.0], [0.0, 0.5]])
    if width == 1:
        data = (values * 128 + 128).astype(np.uint8).tobytes()
    else:
        whole = (values * 2 ** (8 * width - 1)).astype("<i8")
        data = b"".join(int(one).to_bytes(width, "little", signed=True) for one in whole.flat)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((2, width, RATE, 0, "NONE", ""))
        writer.writeframes(data)
    assert np.allclose(read_samples(file.getvalue()), [0.125, -0.5, 0.25])


def test_parts_are_cut_in_pauses() -> None:
    samples = np.ones(RATE * 5, np.float32)
    samples[RATE * 3 // 2 : RATE * 3 // 2 + 3200] = 0
    parts = parts_of(samples, RATE * 2)
    assert np.array_equal(np.concatenate(parts), samples) and max(map(len, parts)) <= 2 * RATE
    assert RATE * 3 // 2 <= len(parts[0]) <= RATE * 3 // 2 + 3200


def test_segments_between_timestamps() -> None:
    settings: dict[str, Any] = {"offset": 30.0, "seconds": 8.0, "first_timestamp": 100, "end": 50}
    tokens = [100, 1, 2, 200, 200, 3, 60, 350, 4]
    found = segments_of(tokens, [-1.0] * len(tokens), **settings, decode=lambda ids: f" t{ids}")
    assert [(one.start, one.end, one.token_ids) for one in found] == [
        (30.0, 32.0, [1, 2]),
        (32.0, 35.0, [3]),
        (35.0, 38.0, [4]),
    ]
    late = [Segment(start=3661.5, end=3662.0, text=" a --> b", token_ids=[1], avg_logprob=-1.0, places=[0])]
    assert srt(late) == "1\n01:01:01,500 --> 01:01:02,000\na --> b\n\n"
    assert re.fullmatch(r"WEBVTT\n\n01:01:01\.500 --> 01:01:02\.000\na -> b\n\n", vtt(late))


@pytest.mark.parametrize(("tokens", "positions"), [(1, 1), (1, 9), (7, 3), (13, 60)])
def test_token_times_are_those_of_transformers(tokens: int, positions: int) -> None:
    rng = np.random.default_rng(tokens)
    # Few different numbers have ties.
    for matrix in (rng.standard_normal((tokens, positions)), rng.integers(0, 3, (tokens, positions)).astype(float)):
        text, time = generation_whisper._dynamic_time_warping(-matrix)
        begins = np.pad(np.diff(text), (1, 0), constant_values=1).astype(bool)
        assert token_times(matrix) == (time[begins] * 0.02).tolist()


@pytest.mark.parametrize(
    ("pieces", "language", "name"),
    [
        ([" Well", ",", " I", "'", "m", ' "', "O", "K", '"', "!", " (", "a", ")"], "en", "english"),
        (["wor", "ds", " -", "x", " ¿", "Qué", "?"], "es", "spanish"),
        (["今", "\ufffd", "\ufffd日", "。", "は"], "ja", "japanese"),
    ],
)
def test_words_are_those_of_transformers(pieces: list[str], language: str, name: str) -> None:
    class Decoder:
        eos_token_id = 100

        @staticmethod
        def decode(token_ids: list[int], **_: Any) -> str:
            # Two tokens of one character.
            return "".join(pieces[token] for token in token_ids).replace("\ufffd\ufffd日", "日")

    tokens = [*range(len(pieces))]
    words, _, places = tokenization_whisper._combine_tokens_into_words(Decoder, tokens, name)
    segment = Segment(start=0, end=9, text="", token_ids=tokens, avg_logprob=0, places=tokens)
    found = words_of(segment, [(token, token + 1) for token in tokens], language, Decoder.decode)
    assert found == [
        {"word": word.strip(), "start": at[0], "end": at[-1] + 1} for word, at in zip(words, places, strict=True)
    ]


def test_bench_serve(spoken: tuple[Any, Server], tmp_path: Path) -> None:
    _, server = spoken
    for name, seconds in (("a.wav", 0.5), ("b.wav", 1.75)):
        (tmp_path / name).write_bytes(wav(sound(seconds)))
    settings: dict[str, Any] = {"base_url": server.url, "endpoint": TRANSCRIPTIONS, "num_warmups": 1}
    # More than a loop that is late joins, so that the first token comes before the last.
    most = REPORTS_AT_ONCE + 1
    extra = f'{{"language": "en", "max_completion_tokens": {most}}}'
    recordings = ServingBench(dataset_name="audio", dataset_path=tmp_path, extra_body=extra, **settings)
    found = bench_serving(replace(recordings, save_detailed=True), lambda *_: None)
    assert (found["completed"], found["failed"], found["backend"]) == (2, 0, "openai-audio")
    assert found["total_audio_seconds"] == 2.25 and found["rtfx"] == pytest.approx(2.25 / found["duration"])
    assert found["output_throughput"] == pytest.approx(found["total_output_tokens"] / found["duration"])
    assert 0 < found["mean_ttft_ms"] < found["mean_e2el_ms"] and found["mean_tpot_ms"] > 0
    at_once = bench_serving(replace(recordings, extra_body=extra[:-1] + ', "stream": false}'), lambda *_: None)
    assert at_once["mean_ttft_ms"] == at_once["mean_e2el_ms"] > 0 and at_once["mean_tpot_ms"] is None
    # Each recording of more than a second has two parts.
    texts = [
        post(server, wav(sound(seconds)), language="en", max_completion_tokens=most).json() for seconds in (0.5, 1.75)
    ]
    assert found["generated_texts"] == [text["text"] for text in texts]
    assert found["total_output_tokens"] == 3 * most and at_once["total_output_tokens"] > 0
    assert texts[1]["text"].count("w") <= 2 * most
    noise = bench_serving(ServingBench(audio_seconds="1-2", num_prompts=3, **settings), lambda *_: None)
    assert noise["completed"] == 3 and 3 <= noise["total_audio_seconds"] <= 6
    for wrong in ({"dataset_name": "jsonl", "dataset_path": tmp_path}, {"audio_seconds": "0"}):
        with pytest.raises(ConfigError, match="dataset_name.*random or audio work|audio_seconds"):
            ServingBench(**settings, **wrong)
    (tmp_path / "c.txt").write_text("no audio")
    with pytest.raises(ConfigError, match=r"dataset_path.*(is no WAV file|is not audio)"):
        bench_serving(recordings, lambda *_: None)
