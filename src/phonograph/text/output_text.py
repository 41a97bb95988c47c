"""The text of one sample as it grows: incremental decoding, stop strings, and what may already be shown."""

from __future__ import annotations

from collections.abc import Sequence

from phonograph.core.sampling_params import SamplingParams
from phonograph.text.tokenizer import Tokenizer


class TextBuilder:
    """Follows one sample.

    text:    all of it that is certain, the stop string cut off (or kept, as the parameters say)
    stopped: the stop string that ended it, or None

    `prompt_token_ids` are what the sample goes on with. Text that might still turn out to be the beginning of a stop
    string is held back until the next tokens tell.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._stream = tokenizer.stream(skip_special_tokens=params.skip_special_tokens, after=prompt_token_ids)
        self._params = params
        self._num_tokens = 0
        self._decoded = ""
        self._searched = 0
        self._longest = max((len(stop) for stop in params.stop), default=1) - 1
        self._beginning_with: dict[str, list[str]] = {}
        for stop in params.stop:
            self._beginning_with.setdefault(stop[0], []).append(stop)
        self.text = ""
        self.stopped: str | None = None

    def push(self, token_ids: list[int]) -> None:
        """Takes all output tokens so far, decodes those that are new, and looks for stop strings token by token."""
        if not self._params.stop:
            for token_id in token_ids[self._num_tokens :]:
                self.text += self._stream.push(token_id)
            self._num_tokens = len(token_ids)
            return
        while self._num_tokens < len(token_ids) and self.stopped is None:
            self._decoded += self._stream.push(token_ids[self._num_tokens])
            self._num_tokens += 1
            if self._num_tokens > self._params.min_tokens:
                self._find_stop()
            else:
                self._searched = len(self._decoded)
        if self.stopped is None:
            self.text = self._decoded[: len(self._decoded) - self._held_back()]

    def finish(self) -> None:
        """Take what has been held back, after the last token of a sample that no stop string has ended.

        The bytes of an unfinished character become U+FFFD, which can complete a stop string.
        """
        if self.stopped is not None:
            return
        rest = self._stream.finish()
        if not self._params.stop:
            self.text += rest
            return
        self._decoded += rest
        if rest and self._num_tokens > self._params.min_tokens:
            self._find_stop()
        if self.stopped is None:
            self.text = self._decoded

    def _find_stop(self) -> None:
        """Finds the stop string that is complete first."""
        found: tuple[int, int, str] | None = None
        for stop in self._params.stop:
            start = self._decoded.find(stop, max(0, self._searched - len(stop) + 1))
            if start >= 0 and (found is None or (start + len(stop), start, stop) < found):
                found = (start + len(stop), start, stop)
        self._searched = len(self._decoded)
        if found is not None:
            end, start, self.stopped = found
            self.text = self._decoded[: end if self._params.include_stop_str_in_output else start]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        tail = self._decoded[-self._longest :] if self._longest else ""
        for start, character in enumerate(tail):
            stops = self._beginning_with.get(character)
            if stops and any(stop.startswith(tail[start:]) for stop in stops):
                return len(tail) - start
        return 0
