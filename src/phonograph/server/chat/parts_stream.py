"""Answers of one sample in protocols that are written from its parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import FinishReason
from phonograph.engine.process.calls import Sample
from phonograph.server.chat.chat_parts import ChatParts, TokenUsage
from phonograph.server.http.api_errors import ApiError, failed
from phonograph.text.formats.answer_parts import Found

Logprobs = list[dict[str, Any]]
"""Log-probabilities of tokens, in OpenAI's form."""


class PartsWriter(Protocol):
    """Writer of one answer in its protocol, from parts alone.

    name:       id of the answer
    media_type: type of its stream
    """

    name: str
    media_type: str

    def begin(self, usage: TokenUsage) -> bytes:
        """Return the events before all parts."""
        ...

    def write(self, found: Found, logprobs: Logprobs) -> bytes:
        """Return the events of new parts."""
        ...

    def end(self, reason: FinishReason, stop: int | str | None, usage: TokenUsage) -> bytes:
        """Return the events after all parts."""
        ...

    def error(self, error: ApiError) -> bytes:
        """Return the events of an answer that ends with an error."""
        ...

    def whole(
        self, found: Found, logprobs: Logprobs, reason: FinishReason, stop: int | str | None, usage: TokenUsage
    ) -> dict[str, Any]:
        """Return the answer at once."""
        ...


class PartsStream:
    """An answer of one sample, an `AnswerWriter`.

    Args:
        parts: parts of the call.
        writer: writes them.
        logprobs: returns log-probabilities in OpenAI's form.
    """

    def __init__(
        self, parts: ChatParts, writer: PartsWriter, logprobs: Callable[[list[TokenLogprobs]], Logprobs] = lambda _: []
    ) -> None:
        self.name = writer.name
        self.media_type = writer.media_type
        self._parts = parts
        self._writer = writer
        self._logprobs = logprobs
        self._begun = False

    def whole(self) -> dict[str, Any]:
        """Return the answer at once.

        Raises:
            ApiError: the request was aborted.
        """
        (sample,) = self._parts.call.samples
        if sample.finish_reason == "abort":
            raise _aborted()
        reason = sample.finish_reason
        assert reason is not None, "the call has ended"
        found, logprobs = self._parts.whole(sample), self._logprobs(sample.positions or [])
        return self._writer.whole(found, logprobs, reason, sample.stop_reason, self._parts.usage())

    def write(self, changed: list[Sample]) -> bytes:
        pieces: list[bytes] = []
        if not self._begun:
            self._begun = True
            pieces.append(self._writer.begin(self._parts.usage()))
        for sample in changed:
            delta = sample.take()
            found = self._parts.found(sample, delta) or Found(delta.text)
            pieces.append(self._writer.write(found, self._logprobs(delta.logprobs)))
        return b"".join(pieces)

    def end(self) -> bytes:
        (sample,) = self._parts.call.samples
        if sample.finish_reason in (None, "abort"):
            return self._writer.error(_aborted())
        return self._writer.end(sample.finish_reason, sample.stop_reason, self._parts.usage())

    def error(self, error: ApiError) -> bytes:
        return self._writer.error(error)


def _aborted() -> ApiError:
    return failed("the request was aborted", code="aborted")
