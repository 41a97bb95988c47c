"""POST /v1/audio/transcriptions and /v1/audio/translations: text of a recording, in OpenAI's forms.

A recording that is longer than what the model hears at a time is cut in pauses; its parts are prompts of one call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from starlette.responses import JSONResponse, PlainTextResponse, Response

from phonograph.core.sampling_params import SamplingParams
from phonograph.core.token_types import EncoderTokens
from phonograph.engine.admission import refuse_logits
from phonograph.engine.offline.audio_prompts import SAMPLES_PER_POSITION, SAMPLING_RATE, log_mel
from phonograph.engine.process.calls import Sample
from phonograph.errors import PhonographError, RequestFailure
from phonograph.server.chat.fields import UNSUPPORTED, Body
from phonograph.server.chat.respond import respond
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import api_error, invalid, queue_full
from phonograph.server.http.json_route import JsonRequest
from phonograph.server.openai.answers import ANSWERS, answer_head
from phonograph.server.speech.audio_file import parts_of, read_samples
from phonograph.server.speech.form import read_form
from phonograph.server.speech.transcript import Segment, segments_of, srt, verbose, vtt
from phonograph.server.speech.transcript_answer import TranscriptAnswer
from phonograph.server.speech.word_times import WITHOUT_SPACES, token_times, words_of

router = APIRouter()
Task = Literal["transcribe", "translate"]
_CHUNKS: Mapping[Task, str] = {"transcribe": "transcription.chunk", "translate": "translation.chunk"}
"""vLLM's names of the events of a stream."""
_MULTILINGUAL = 51865
"""Vocabulary of the smallest model of several languages; those of English alone have one token less."""
_MOST_BEFORE = 223
"""Tokens of `prompt` that the decoder reads, as many as it was trained with."""


class SpeechBody(Body):
    """Fields of a form next to its file. All are texts, which become numbers and flags here."""

    model_config = ConfigDict(strict=False)
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED,
        "chunking_strategy": ("auto",),
        **dict.fromkeys(("include", "known_speaker_names", "known_speaker_references", "hotwords", "to_language"), ()),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "chunking_strategy": "recordings are cut in pauses, as auto does",
    }

    language: Annotated[str, Field(max_length=20)] | None = None
    prompt: str | None = None
    response_format: Literal["json", "text", "srt", "vtt", "verbose_json"] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    timestamp_granularities: list[Literal["segment", "word"]] | None = None
    stream: bool | None = None
    stream_include_usage: bool | None = None
    stream_continuous_usage_stats: bool | None = None

    @property
    def timed(self) -> bool:
        """True if the answer has times."""
        return self.response_format in ("srt", "vtt", "verbose_json")

    def times_of(self, part: Literal["segment", "word"]) -> bool:
        """Return True if the answer has times of these parts."""
        return self.response_format == "verbose_json" and part in (self.timestamp_granularities or ["segment"])

    def check(self) -> list[str]:
        if self.timestamp_granularities and self.response_format != "verbose_json":
            problem = f"timestamp_granularities={self.timestamp_granularities}: goes with response_format=verbose_json"
            raise invalid("timestamp_granularities", problem)
        if self.stream and self.timed:
            problem = f"response_format={self.response_format}: times are not streamed; json and text work with stream"
            raise invalid("response_format", problem, code="unsupported_parameter")
        for name in ("stream_include_usage", "stream_continuous_usage_stats"):
            if getattr(self, name) and not self.stream:
                raise invalid(name, f"{name} needs stream=true")
        return super().check()


_SCHEMA = SpeechBody.model_json_schema()
_SCHEMA["properties"]["file"] = {"type": "string", "format": "binary"}
_FORM = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _SCHEMA}}}}


class _Vocabulary(NamedTuple):
    """Tokens of the prompts; `languages` is empty for a model of English alone."""

    start: int
    before: int
    no_timestamps: int
    end: int
    tasks: Mapping[Task, int]
    languages: range

    @classmethod
    def of(cls, serving: Serving) -> _Vocabulary:
        """Return the tokens of a server's model.

        Raises:
            ApiError: it hears nothing.
        """
        facts, token_id = serving.engine.facts, serving.tokenizer.token_id
        names = ("startoftranscript", "startofprev", "notimestamps", "endoftext", "transcribe", "translate")
        found = [token_id(f"<|{name}|>") for name in names]
        if facts.encoder is None or None in found:
            problem = "model: the model reads no audio; one with an encoder of audio, such as Whisper, works"
            raise invalid("model", problem, code="unsupported_task")
        start, before, no_timestamps, end, transcribe, translate = (token for token in found if token is not None)
        several = facts.vocab_size >= _MULTILINGUAL
        languages = range(start + 1, min(transcribe, translate)) if several else range(0)
        return cls(start, before, no_timestamps, end, {"transcribe": transcribe, "translate": translate}, languages)


@router.post("/v1/audio/transcriptions", responses=ANSWERS, openapi_extra=_FORM)
async def create_transcription(request: Request) -> Response:
    """Return the text of a recording in its language."""
    return await _answer(request, "transcribe")


@router.post("/v1/audio/translations", responses=ANSWERS, openapi_extra=_FORM)
async def create_translation(request: Request) -> Response:
    """Return the text of a recording in English."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: Task) -> Response:
    serving: Serving = request.app.state.serving
    content = await request.body()
    fields, file = read_form(request.headers.get("content-type", ""), content)
    try:
        body = SpeechBody.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError(error.errors(), body=fields) from None
    headers = serving.admit(body)
    vocabulary = _Vocabulary.of(serving)
    language = _language(serving, vocabulary, body, task)
    encoder = serving.engine.facts.encoder
    if body.times_of("word") and (encoder is None or not encoder.alignment_heads):
        problem = (
            "timestamp_granularities=word: generation_config.json of the model has no alignment_heads; segment works"
        )
        raise invalid("timestamp_granularities", problem, code="unsupported_parameter")
    if file is None:
        raise invalid("file", "file: is missing; a recording works")
    parsed = JsonRequest(request.scope, request.receive)
    parsed.num_bytes = len(content)
    speech = _Speech(serving, parsed, body, vocabulary)
    try:
        if body.timed:
            refuse_logits(serving.engine.config.logprobs_mode, "a transcript with times")
        parts = await serving.prepare(parsed, lambda gone: _parts(serving, file, gone))
        heard = await speech.prompts(parts, task, language)
        if body.timed:
            return await _timed_answer(speech, heard, parts, task, headers)
    except PhonographError as error:
        raise api_error(error) from None
    call = serving.open(parsed, [*heard.prompts], heard.params, streams=bool(body.stream))
    answer = TranscriptAnswer(
        call,
        answer_head(task, _CHUNKS[task], serving.names[0], None),
        seconds=sum(part.seconds for part in parts),
        separator="" if heard.language in WITHOUT_SPACES else " ",
        ends_without_choices=bool(body.stream_include_usage),
        continuous_usage=bool(body.stream_include_usage is not False and body.stream_continuous_usage_stats),
    )
    response = await respond(call, answer, headers, {}, streams=bool(body.stream))
    if body.response_format == "text" and not body.stream:
        return PlainTextResponse(answer.text + "\n", headers=headers)
    return response


async def _timed_answer(
    speech: _Speech, heard: _Heard, parts: Sequence[_Part], task: Task, headers: dict[str, str]
) -> Response:
    body, seconds = speech.body, sum(part.seconds for part in parts)
    segments, words = await speech.transcribe(heard, parts)
    if body.response_format != "verbose_json":
        return PlainTextResponse((srt if body.response_format == "srt" else vtt)(segments), headers=headers)
    answer: dict[str, Any] = {
        "text": "".join(segment.text for segment in segments).strip(),
        "usage": {"type": "duration", "seconds": round(seconds)},
        "task": task,
        "language": heard.language,
        "duration": round(seconds, 2),
    }
    if body.times_of("word"):
        answer["words"] = words
    if body.times_of("segment"):
        answer["segments"] = verbose(segments, body.temperature or 0.0)
    return JSONResponse(answer, headers=headers)


class _Heard(NamedTuple):
    """Prompts of the parts of a recording, their parameters, and its language."""

    prompts: list[EncoderTokens]
    params: SamplingParams
    language: str | None


class _Part(NamedTuple):
    """Part of a recording: its log-mel frames and its length."""

    features: np.ndarray
    seconds: float


def _parts(serving: Serving, content: bytes, gone: threading.Event) -> list[_Part]:
    """Return the parts of a recording; fewer when the client has disconnected."""
    encoder = serving.engine.facts.encoder
    assert encoder is not None
    parts = parts_of(read_samples(content), encoder.num_positions * SAMPLES_PER_POSITION)
    facts, open_now = serving.engine.facts, serving.engine.num_open
    if open_now + len(parts) > facts.max_num_seqs + serving.config.max_queued_requests:
        raise queue_full(f"the recording has {len(parts)} parts, for which the queue has no room now")
    return [_Part(log_mel(part, encoder), len(part) / SAMPLING_RATE) for part in parts if not gone.is_set()]


def _language(serving: Serving, vocabulary: _Vocabulary, body: SpeechBody, task: Task) -> str | None:
    """Return the language of a recording, or None if the model finds it.

    Raises:
        ApiError: the model lacks it, or cannot translate.
    """
    if not vocabulary.languages:
        if task == "translate":
            raise invalid(
                "model", "model: hears English alone, so there is nothing to translate", code="unsupported_task"
            )
        if body.language not in (None, "", "en"):
            raise invalid("language", f"language={body.language!r}: the model hears English alone; en works")
        return "en"
    if not body.language:
        return None
    if serving.tokenizer.token_id(f"<|{body.language.lower()}|>") not in vocabulary.languages:
        known = [_code(serving, token) for token in vocabulary.languages[:10]]
        problem = f"language={body.language!r}: the model lacks it; codes such as {', '.join(known)} work"
        raise invalid("language", problem)
    return body.language.lower()


def _code(serving: Serving, token_id: int) -> str:
    return (serving.tokenizer.piece(token_id) or "").strip("<|>")


class _Speech(NamedTuple):
    """A request in progress."""

    serving: Serving
    request: JsonRequest
    body: SpeechBody
    vocabulary: _Vocabulary

    async def prompts(self, parts: Sequence[_Part], task: Task, language: str | None) -> _Heard:
        """Return the prompts of a recording, whose language the first part decides if it is None."""
        serving, body, vocabulary = self.serving, self.body, self.vocabulary
        if language is None:
            params = SamplingParams(temperature=0, max_tokens=1, allowed_token_ids=[*vocabulary.languages])
            (sample,) = await self._written([EncoderTokens([vocabulary.start], parts[0].features)], params)
            language = _code(serving, sample.token_ids[0])
        prompt = [vocabulary.start]
        if vocabulary.languages:
            spoken = serving.tokenizer.token_id(f"<|{language}|>")
            assert spoken is not None
            prompt += [spoken, vocabulary.tasks[task]]
        prompt += [] if body.timed else [vocabulary.no_timestamps]
        if body.prompt:
            before = serving.encode_text(f" {body.prompt.strip()}", whole_context=False)
            prompt = [vocabulary.before, *before[-_MOST_BEFORE:], *prompt]
        most = serving.engine.facts.context_len - len(prompt)
        params = SamplingParams(
            temperature=body.temperature or 0.0,
            top_p=1.0 if body.top_p is None else body.top_p,
            seed=body.seed,
            max_tokens=min(body.max_completion_tokens or most, most),
            logprobs=0 if body.timed else None,
            stream_interval=serving.config.stream_interval,
        )
        return _Heard([EncoderTokens(prompt, part.features) for part in parts], params, language)

    async def transcribe(self, heard: _Heard, parts: Sequence[_Part]) -> tuple[list[Segment], list[dict[str, object]]]:
        """Return the segments of a recording, and its words if the request asks for their times."""
        serving, body, vocabulary = self.serving, self.body, self.vocabulary
        samples = await self._written(heard.prompts, heard.params)
        segments, words = list[Segment](), list[dict[str, object]]()
        offset = 0.0
        for audio, part, sample in zip(heard.prompts, parts, samples, strict=True):
            found = segments_of(
                sample.token_ids,
                [position.logprobs[0] for position in sample.positions or ()],
                offset=offset,
                seconds=part.seconds,
                first_timestamp=vocabulary.no_timestamps + 1,
                end=vocabulary.end,
                decode=serving.tokenizer.decode,
            )
            if body.times_of("word") and found:
                times = await self._token_times(audio, part, sample.token_ids, offset)
                for one in found:
                    words += words_of(one, [times[at] for at in one.places], heard.language, serving.tokenizer.decode)
            segments += found
            offset += part.seconds
        return segments, words

    async def _token_times(
        self, prompt: EncoderTokens, part: _Part, token_ids: list[int], offset: float
    ) -> list[tuple[float, float]]:
        """Return begin and end of each token that the model wrote, in seconds of the recording."""
        num_positions = max(1, int(part.seconds * SAMPLING_RATE) // SAMPLES_PER_POSITION)
        written = [token for token in token_ids if token != self.vocabulary.end]
        matrix_NP = await self.serving.engine.align(prompt, written, num_positions)
        ends = [offset + time for time in await asyncio.to_thread(token_times, matrix_NP)]
        return list(zip([offset, *ends], ends, strict=False))

    async def _written(self, prompts: list[EncoderTokens], params: SamplingParams) -> list[Sample]:
        """Return what the model writes for each prompt.

        Raises:
            RequestFailure: the engine ended it early.
        """
        call = self.serving.open(self.request, [*prompts], params)
        try:
            await call.wait()
        finally:
            call.close()
        if any(sample.finish_reason == "abort" for sample in call.samples):
            raise RequestFailure("transcription", "engine", "was aborted")
        return call.samples
