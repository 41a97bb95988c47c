"""Text of one sample: incremental decoding, stop strings, and the prefix that is final."""

from __future__ import annotations

from collections.abc import Sequence
from io import SEEK_END, StringIO

from phonograph.core.sampling_params import SamplingParams
from phonograph.text.logprob_views import TokenText, no_text
from phonograph.text.tokenizer import Tokenizer


class TextBuilder:
    """Text of one sample, in constant time a token.

    Text that may be the beginning of a stop string is withheld.

    Args:
        tokenizer: decodes the tokens.
        params: stop strings and their rules.
        prompt_token_ids: tokens that the sample continues.

    Attributes:
        stopped: stop string that ended the sample, or None.
        num_tokens: number of decoded tokens. The token that completes the stop string is the last one.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._stream = tokenizer.stream(
            skip_special_tokens=params.skip_special_tokens, shown=params.shown_token_ids, after=prompt_token_ids
        )
        self._params = params
        self.num_tokens = 0
        self._final = StringIO()  # its position stays at the end
        self._withheld = ""
        self._longest = max((len(stop) for stop in params.stop), default=1) - 1
        self._beginning_with: dict[str, list[str]] = {}
        for stop in params.stop:
            self._beginning_with.setdefault(stop[0], []).append(stop)
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """All final text, without the stop string unless the parameters keep it. Joined at each read."""
        return self._final.getvalue()

    def text_from(self, start: int) -> str:
        """Return the characters of `text` from `start` on, without reading those before."""
        self._final.seek(start)
        rest = self._final.read()
        self._final.seek(0, SEEK_END)  # `start` may lie beyond the end
        return rest

    def push(self, token_ids: list[int]) -> None:
        """Take all output tokens so far, decode the new ones, and search for stop strings after each token."""
        if not self._params.stop:
            for token_id in token_ids[self.num_tokens :]:
                self._final.write(self._stream.push(token_id))
            self.num_tokens = len(token_ids)
            return
        while self.num_tokens < len(token_ids) and self.stopped is None:
            searched = len(self._withheld)
            self._withheld += self._stream.push(token_ids[self.num_tokens])
            self.num_tokens += 1
            if self.num_tokens > self._params.min_tokens:
                self._find_stop(searched)
        if self.stopped is None:
            self._release(len(self._withheld) - self._stop_prefix_length())

    def finish(self) -> None:
        """Release withheld text after the last token, if no stop string has ended the sample.

        The bytes of an unfinished character become U+FFFD, which can complete a stop string.
        """
        if self.stopped is not None:
            return
        searched = len(self._withheld)
        rest = self._stream.finish()
        self._withheld += rest
        if rest and self.num_tokens > self._params.min_tokens:
            self._find_stop(searched)
        if self.stopped is None:
            self._release(len(self._withheld))

    def _find_stop(self, searched: int) -> None:
        """Find the stop string that is complete first and ends after the first `searched` withheld characters."""
        found: tuple[int, int, str] | None = None
        for stop in self._params.stop:
            start = self._withheld.find(stop, max(0, searched - len(stop) + 1))
            if start >= 0 and (found is None or (start + len(stop), start, stop) < found):
                found = (start + len(stop), start, stop)
        if found is not None:
            end, start, self.stopped = found
            self._release(end if self._params.include_stop_str_in_output else start)

    def _release(self, length: int) -> None:
        """Make the first withheld characters final."""
        self._final.write(self._withheld[:length])
        self._withheld = self._withheld[length:]

    def _stop_prefix_length(self) -> int:
        """Return the length of the longest suffix of the text that begins a stop string."""
        tail = self._withheld[-self._longest :] if self._longest else ""
        for start, character in enumerate(tail):
            stops = self._beginning_with.get(character)
            if stops and any(stop.startswith(tail[start:]) for stop in stops):
                return len(tail) - start
        return 0


def text_builder(
    tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int]
) -> TextBuilder | None:
    """Return a builder, or None if the request gets no text: without a tokenizer, or with `detokenize` False."""
    return TextBuilder(tokenizer, params, prompt_token_ids) if tokenizer is not None and params.detokenize else None


def token_text(tokenizer: Tokenizer | None) -> TokenText:
    """Return the function that returns the text of a token."""
    return no_text if tokenizer is None else tokenizer.texts.text
