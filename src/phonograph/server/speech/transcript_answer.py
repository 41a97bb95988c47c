"""Answers with the text of a recording, at once or as events that clients of OpenAI and of vLLM read."""

from __future__ import annotations

from typing import Any

from pydantic_core import to_json

from phonograph.engine.process.calls import Call, Sample
from phonograph.errors import RequestFailure
from phonograph.server.http.api_errors import ApiError, api_error
from phonograph.server.openai.answers import DONE, usage_of


class TranscriptAnswer:
    """Writes the text of a call whose samples are the parts of a recording; an `AnswerWriter`.

    The engine works on several parts at a time. The text of a part waits until the parts before it have ended. Each
    event has the fields of both protocols: `type` with `delta` or `text`, and the `choices` of a chunk.

    text: what is written so far

    Args:
        call: the call of the engine.
        head: fields with which each event begins, of vLLM's chunks.
        seconds: length of the recording.
        separator: text between two parts.
        ends_without_choices: the last event has no choices, as vLLM's chunk with the usage.
        continuous_usage: each event has the usage so far.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        call: Call,
        head: dict[str, Any],
        *,
        seconds: float,
        separator: str,
        ends_without_choices: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self.name: str = head["id"]
        self._call = call
        self._samples = call.samples
        self._head = head
        self._seconds = seconds
        self._separator = separator
        self._ends_without_choices = ends_without_choices
        self._continuous_usage = continuous_usage
        self._place = 0  # of the part whose text is written
        self._is_blank = True  # that part has no text yet
        self._gap = ""  # space before the next text
        self.text = ""

    def whole(self) -> dict[str, Any]:
        """Return the answer to a request without streaming.

        Raises:
            RequestFailure: the engine ended a part early.
        """
        if (failure := self._failure()) is not None:
            raise failure
        self._take()
        return {"text": self.text, "usage": {"type": "duration", "seconds": round(self._seconds)}}

    def write(self, changed: list[Sample]) -> bytes:
        if all(sample.index != self._place for sample in changed):
            return b""
        text = self._take()
        return self._delta({"delta": {"content": text}}) if text else b""

    def end(self) -> bytes:
        if (failure := self._failure()) is not None:
            return self.error(api_error(failure))
        reason = "length" if any(sample.finish_reason == "length" for sample in self._samples) else "stop"
        last = {"delta": {"content": ""}, "finish_reason": reason}
        before = self._delta(last) if self._ends_without_choices else b""
        done = {
            "type": "transcript.text.done",
            "text": self.text,
            **self._head,
            "choices": [] if self._ends_without_choices else [last],
            "usage": self._usage(),
        }
        return before + _event(done) + DONE

    def error(self, error: ApiError) -> bytes:
        return _event(error.body()) + DONE

    def _take(self) -> str:
        """Return the next text, without space at the beginning and the end of each part."""
        found: list[str] = []
        while self._place < len(self._samples):
            sample = self._samples[self._place]
            text = sample.take().text
            if self._is_blank:
                text = text.lstrip()
            if text:
                self._is_blank = False
                text = self._gap + text
                found.append(text.rstrip())
                self._gap = text[len(found[-1]) :]
            if sample.finish_reason in (None, "abort"):
                break
            self._place += 1
            self._is_blank = True
            self._gap = self._separator if self.text or any(found) else ""
        text = "".join(found)
        self.text += text
        return text

    def _delta(self, choice: dict[str, Any]) -> bytes:
        delta = {"type": "transcript.text.delta", "delta": choice["delta"]["content"], **self._head}
        usage = {"usage": self._usage()} if self._continuous_usage else {}
        return _event({**delta, "choices": [choice], **usage})

    def _usage(self) -> dict[str, Any]:
        """Return the tokens so far, by OpenAI's names for transcripts and by vLLM's."""
        usage = usage_of(self._call)
        names = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
        return {"type": "tokens", **names, **usage}

    def _failure(self) -> RequestFailure | None:
        if any(sample.finish_reason == "abort" for sample in self._samples):
            return RequestFailure("transcription", "engine", "was aborted")
        return None


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + to_json(data) + b"\n\n"
