"""Transcripts: segments of the tokens between timestamps, and the formats of answers."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SECONDS_PER_STEP = 0.02
"""Distance of two timestamps of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Text between two times in seconds of the recording, with its tokens and their mean log-probability.

    places: of the tokens among those that the model wrote
    """

    start: float
    end: float
    text: str
    token_ids: list[int]
    avg_logprob: float
    places: list[int]


def segments_of(
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    offset: float,
    seconds: float,
    first_timestamp: int,
    end: int,
    decode: Callable[[list[int]], str],
) -> list[Segment]:
    """Return the segments of a part of a recording.

    Args:
        token_ids: tokens that the model wrote.
        logprobs: of each of them.
        offset: time of the part's first sample.
        seconds: length of the part.
        first_timestamp: token of 0 s; those after it are `SECONDS_PER_STEP` apart.
        end: token id from which on tokens are no text; timestamps are above.
        decode: returns the text of tokens.
    """
    found: list[Segment] = []
    start, places = 0.0, list[int]()

    def close(stop: float) -> None:
        if places:
            tokens, mean = [token_ids[at] for at in places], sum(logprobs[at] for at in places) / len(places)
            times = {"start": round(offset + start, 2), "end": round(offset + max(start, min(stop, seconds)), 2)}
            found.append(Segment(**times, text=decode(tokens), token_ids=tokens, avg_logprob=mean, places=[*places]))
            places.clear()

    for at, token in enumerate(token_ids):
        if token >= first_timestamp:
            time = (token - first_timestamp) * SECONDS_PER_STEP
            close(time)
            start = time
        elif token < end:
            places.append(at)
    close(seconds)
    return found


def verbose(segments: Sequence[Segment], temperature: float) -> list[dict[str, Any]]:
    """Return segments in OpenAI's form. The probability of silence is not computed."""
    return [
        {
            "id": number,
            "seek": 0,
            "start": one.start,
            "end": one.end,
            "text": one.text,
            "tokens": one.token_ids,
            "temperature": temperature,
            "avg_logprob": one.avg_logprob,
            "compression_ratio": len(one.text.encode()) / max(len(zlib.compress(one.text.encode())), 1),
            "no_speech_prob": None,
        }
        for number, one in enumerate(segments)
    ]


def srt(segments: Sequence[Segment]) -> str:
    """Return subtitles in SubRip's format."""
    return "".join(
        f"{number}\n{_clock(one.start, ',')} --> {_clock(one.end, ',')}\n{one.text.strip()}\n\n"
        for number, one in enumerate(segments, 1)
    )


def vtt(segments: Sequence[Segment]) -> str:
    """Return subtitles in WebVTT's format."""
    cues = (
        f"{_clock(one.start, '.')} --> {_clock(one.end, '.')}\n{one.text.strip().replace('-->', '->')}\n\n"
        for one in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _clock(seconds: float, point: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
