"""Sampling parameters of one request, validated at construction."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from numbers import Integral, Real
from typing import Any, NamedTuple

from phonograph.core.checked_arguments import checks_arguments
from phonograph.core.repetition_detection import RepetitionDetectionParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError

MAX_LOGPROBS = 1024
MAX_LOGPROB_TOKEN_IDS = 128
MAX_N = 1024
MAX_BIASES = 1023
"""Different biases of a request, which have numbers of 10 bits on a GPU."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("best_of", "logits_processors", "extra_args"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "guided_decoding", "trace_decode_token_ids"), ()),
    **dict.fromkeys(("use_beam_search", "early_stopping", "watermarking"), (False,)),
    **dict.fromkeys(("flat_logprobs", "skip_clone"), (False, True)),
    **{"spaces_between_special_tokens": (True,), "length_penalty": (1.0,)},
    "routed_experts_prompt_start": (0,),
}
_HINTS = {
    "guided_decoding": "is vLLM's old name; structured_outputs takes the same value",
    "best_of": "is not here; n samples are returned, and cumulative_logprob ranks them",
    "use_beam_search": "is vLLM's old name; LLM.beam_search does it",
    "length_penalty": "belongs to BeamSearchParams of LLM.beam_search",
    "early_stopping": "is not here; LLM.beam_search has BeamSearchParams",
    "logits_processors": "is not here yet; logit_bias, allowed_token_ids and bad_words change logits",
}


class RequestOutputKind(IntEnum):
    """Outputs that `AsyncLLM.generate` yields."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class BeamStep(NamedTuple):
    """Place of a request for one token in a beam search whose output has a constraint.

    Attributes:
        prefix_len: last tokens of the prompt that belong to the output.
        num_tokens: likeliest allowed tokens to report.
    """

    prefix_len: int
    num_tokens: int


@checks_arguments("sampling parameter", neutral=_NEUTRAL, hints=_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters that choose the next tokens of a request and end it.

    Equally likely tokens rank by id, the lower one first: in greedy choice, top_k and top_p. Numbers of other libraries
    (numpy) become Python's. Collections are copied, so that they cannot change after validation.

    Attributes:
        n: samples of the prompt.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        repetition_penalty: > 1 divides positive (multiplies negative) logits of tokens in prompt or output.
        presence_penalty: subtracted once from logits of tokens in the output.
        frequency_penalty: subtracted from logits of tokens in the output for each occurrence.
        logit_bias: added to the logits of these token ids; -inf bans a token. At most 1,023 biases may differ.
        allowed_token_ids: tokens that the output may have; None for all. The end-of-sequence token is one of them only
            if it is listed.
        bad_words: texts that the output must not have, as their tokens with and without a space before. Other tokens
            may spell them. A list of token ids is taken as it stands.
        seed: makes the draws of this request repeatable, independent of the rest of the batch.
        logprobs: most likely tokens to report beside each sampled one, at most 1024; 0 is only the sampled one, -1 is
            the whole vocabulary, None is none.
        logprob_token_ids: tokens to report beside each sampled one in place of the most likely ones, at most 128. Their
            number becomes `logprobs`.
        prompt_logprobs: most likely tokens to report beside each token of the prompt; -1 is the whole vocabulary.
        prompt_logprob_token_ids: for each token of the prompt but the first, tokens that are scored in its place: the
            output's `prompt_token_id_logprobs`. An array, or rows of at most 1024 tokens; -1 fills a row up.
        prompt_logprob_start: number of rows that are left out at the beginning.
        max_tokens: maximum tokens to generate; None is up to the model's context.
        min_tokens: tokens before which neither end-of-sequence nor stop conditions apply; structured outputs that are
            complete end before.
        stop: strings that end the output; cut from it unless include_stop_str_in_output.
        stop_token_ids: token ids that end the output.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        skip_special_tokens: omit special tokens from the text.
        shown_token_ids: special tokens that the text has nevertheless, such as markers of tool calls.
        structured_outputs: constraint on the output, such as a JSON schema; also a mapping of its fields.
        reasoning_end_token_ids: tokens that end the model's reasoning. The constraint begins after them; before them
            any token is allowed that does not end the output.
        reasoning_start_token_id: token that begins the reasoning. An output with another first token has none. None is
            an output that begins in its reasoning.
        thinking_token_budget: maximum tokens of reasoning; then `reasoning_end_token_ids` are forced.
        detokenize: produce text; False gives token ids only and allows no stop strings.
        output_kind: outputs of `AsyncLLM.generate`: CUMULATIVE yields the whole output so far, DELTA only what is new,
            FINAL_ONLY the complete output. `LLM` returns complete outputs with each of them.
        repetition_detection: pattern whose repetition ends the output after `min_tokens`; also a mapping of its fields.
        stream_interval: tokens of a sample after which `AsyncLLM` yields; and at the first and the last one.
        skip_reading_prefix_cache: compute the whole prompt. Its blocks are cached nevertheless.
        beam_step: set by a beam search with a constraint. Log-probabilities are those of the likeliest allowed tokens.
        speculate: verify drafts, where the engine speculates (`speculative_config`). The tokens are the same without.

    Raises:
        RequestError: a value is out of range; the message names it and what would work.

    Example:
        ```python
        greedy = SamplingParams(temperature=0.0, max_tokens=32, stop=["END"])
        assert greedy.greedy and greedy.stop == ("END",)
        ```
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str | Sequence[int]] = ()
    seed: int | None = None
    logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    prompt_logprob_start: int = 0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_token_ids: Sequence[int] = ()
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int = 1
    skip_reading_prefix_cache: bool = False
    beam_step: BeamStep | None = None
    speculate: bool = True
    repetition_detection: RepetitionDetectionParams | None = None
    structured_outputs: StructuredOutputs | None = None
    reasoning_end_token_ids: Sequence[int] = ()
    reasoning_start_token_id: int | None = None
    thinking_token_budget: int | None = None

    def __post_init__(self) -> None:
        for name, empty in _NULLABLE.items():
            if getattr(self, name) is None:  # vLLM's default
                self._set(name, empty)
        self._set("n", _integer("n", self.n, 1, MAX_N))
        self._set("temperature", _number("temperature", self.temperature, 0.0, math.inf))
        self._set("top_k", max(_integer("top_k", self.top_k, -1, None), 0))  # -1 means "no limit" in other engines
        # At 2^-32 one token is kept of any vocabulary; kernels compute in float32, which represents that number.
        self._set("top_p", max(_number("top_p", self.top_p, 0.0, 1.0, low_open=True), 2.0**-32))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        # Beyond these bounds float32 logits overflow.
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6))
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("logit_bias", _biases(self.logit_bias))
        for name, (low, high) in _OPTIONAL_RANGES.items():
            value = getattr(self, name)
            self._set(name, None if value is None else _integer(name, value, low, high))
        self._set("stream_interval", _integer("stream_interval", self.stream_interval, 1, None))
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, None))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError("min_tokens", self.min_tokens, f"must be at most max_tokens ({self.max_tokens})")
        stops = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop, "non-empty strings")
        for text in stops:
            if not isinstance(text, str) or not text:
                raise RequestError("stop", text, "each stop must be a non-empty string")
        self._set("stop", stops)
        for name in _TOKEN_LISTS:
            token_ids = _items(name, getattr(self, name), "token ids")
            self._set(name, tuple(_integer(name, token_id, 0, None) for token_id in token_ids))
        if self.logprob_token_ids is not None:
            self._set_logprob_token_ids(self.logprob_token_ids)
        if self.prompt_logprob_token_ids is not None:
            self._set(
                "prompt_logprob_token_ids", _token_rows("prompt_logprob_token_ids", self.prompt_logprob_token_ids)
            )
            self._set("prompt_logprobs", self.prompt_logprobs or 0)
        elif self.prompt_logprob_start:
            raise RequestError("prompt_logprob_start", self.prompt_logprob_start, "needs prompt_logprob_token_ids")
        if self.allowed_token_ids is not None:
            token_ids = _items("allowed_token_ids", self.allowed_token_ids, "token ids")
            if not token_ids:
                raise RequestError("allowed_token_ids", [], "is empty; give at least one token id, or None for all")
            allowed = (_integer("allowed_token_ids", token_id, 0, None) for token_id in token_ids)
            self._set("allowed_token_ids", tuple(allowed))
        self._set("bad_words", tuple(_bad_word(word) for word in _items("bad_words", self.bad_words, "texts")))
        for name in _FLAGS:
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise RequestError(name, value, "must be True or False")
        self._set("output_kind", _output_kind(self.output_kind))
        if stops and not self.detokenize:
            raise RequestError("detokenize", False, "stop strings need text; use stop_token_ids")
        if self.thinking_token_budget is not None and not self.reasoning_end_token_ids:
            problem = "needs reasoning_end_token_ids, which are forced after it"
            raise RequestError("thinking_token_budget", self.thinking_token_budget, problem)
        for name, kind in _NESTED.items():
            self._set(name, _nested(name, getattr(self, name), kind))
        if self.structured_outputs is not None:
            # After a complete grammar only the end can follow.
            problem = "contradicts structured_outputs, which determines the end of the output"
            if self.ignore_eos:
                raise RequestError("ignore_eos", True, problem)

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """True if tokens of the prompt or the output change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def with_checked(self, **values: object) -> SamplingParams:
        """Return a copy with these values, which are valid already: `replace` would validate all others again.

        Args:
            values: fields to replace.
        """
        copied, put = object.__new__(SamplingParams), object.__setattr__
        for name in SamplingParams.__slots__:
            put(copied, name, values[name] if name in values else getattr(self, name))
        return copied

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check token ids against the vocabulary. To be called before the request is admitted.

        Args:
            vocab_size: token ids of the model are below it.

        Raises:
            RequestError: a token id of a parameter is not below `vocab_size`.
        """
        words = [token_id for word in self.bad_words if not isinstance(word, str) for token_id in word]
        listed: list[tuple[str, Iterable[int]]] = [
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logprob_token_ids", self.logprob_token_ids or ()),
            ("prompt_logprob_token_ids", map(max, self.prompt_logprob_token_ids or ())),
            ("bad_words", words),
        ]
        for name, token_ids in (*((name, getattr(self, name)) for name in ("logit_bias", *_TOKEN_LISTS)), *listed):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise RequestError(name, token_id, f"the model's token ids are 0 to {vocab_size - 1}")
        start = self.reasoning_start_token_id
        if start is not None and start >= vocab_size:
            raise RequestError("reasoning_start_token_id", start, f"the model's token ids are 0 to {vocab_size - 1}")

    def _set_logprob_token_ids(self, given: Sequence[int]) -> None:
        ids = (_integer("logprob_token_ids", one, 0, None) for one in _items("logprob_token_ids", given, "token ids"))
        token_ids = tuple(dict.fromkeys(ids))
        if not 0 < len(token_ids) <= MAX_LOGPROB_TOKEN_IDS:
            problem = f"must have 1 to {MAX_LOGPROB_TOKEN_IDS} token ids, or be None"
            raise RequestError("logprob_token_ids", f"{len(token_ids)} token ids", problem)
        if self.logprobs not in (None, len(token_ids)):
            problem = f"contradicts logprob_token_ids, which lists {len(token_ids)} tokens; leave logprobs out"
            raise RequestError("logprobs", self.logprobs, problem)
        self._set("logprob_token_ids", token_ids)
        self._set("logprobs", len(token_ids))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_OPTIONAL_RANGES: dict[str, tuple[int, int | None]] = {
    "seed": (-(2**63), 2**63 - 1),
    "logprobs": (-1, MAX_LOGPROBS),
    "prompt_logprobs": (-1, MAX_LOGPROBS),
    "prompt_logprob_start": (0, None),
    "max_tokens": (1, None),
    "reasoning_start_token_id": (0, None),
    "thinking_token_budget": (0, None),
}
_NULLABLE: dict[str, object] = {
    **{"stop": (), "stop_token_ids": (), "bad_words": (), "logit_bias": {}},
    **{"skip_reading_prefix_cache": False, "stream_interval": 1, "prompt_logprob_start": 0},
}
_FLAGS = (
    *("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"),
    *("skip_reading_prefix_cache", "speculate"),
)
_NESTED: dict[str, type[Any]] = {
    "structured_outputs": StructuredOutputs,
    "repetition_detection": RepetitionDetectionParams,
}
_TOKEN_LISTS = ("stop_token_ids", "shown_token_ids", "reasoning_end_token_ids")


def _integer(name: str, value: object, low: int, high: int | None) -> int:
    integer = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if integer is None or integer < low or (high is not None and integer > high):
        limit = f"must be an integer >= {low}" + (f" and <= {high}" if high is not None else "")
        raise RequestError(name, value, limit)
    return integer


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> float:
    number = _as_float(value)
    if not math.isfinite(number) or number < low or (low_open and number == low) or number > high:
        relation = ">" if low_open else ">="
        limit = f"must be a finite number {relation} {low:g}" + (f" and <= {high:g}" if high != math.inf else "")
        raise RequestError(name, value, limit)
    return number


def _output_kind(value: object) -> RequestOutputKind:
    kinds = {kind.value: kind for kind in RequestOutputKind}
    kind = kinds.get(value) if isinstance(value, int) and not isinstance(value, bool) else None
    if kind is None:
        shown = ", ".join(f"RequestOutputKind.{one.name}" for one in RequestOutputKind)
        raise RequestError("output_kind", value, f"must be one of {shown}")
    return kind


def _biases(biases: object) -> dict[int, float]:
    if not isinstance(biases, Mapping):
        raise RequestError("logit_bias", biases, "must map token ids to biases")
    checked: dict[int, float] = {}
    for token_id, bias in biases.items():
        number = _as_float(bias)
        # 1e30 leaves room in float32 for the penalties.
        if math.isnan(number) or number > 1e30:
            problem = f"the bias of token {token_id!r} must be a number <= 1e30 (-inf bans the token)"
            raise RequestError("logit_bias", bias, problem)
        # Values below the range of float32 are bans too.
        checked[_integer("logit_bias key", token_id, 0, None)] = number if number > -3.4e38 else -math.inf
    num_biases = len({*checked.values()})
    if num_biases > MAX_BIASES:
        raise RequestError("logit_bias", "...", f"has {num_biases} different biases; at most {MAX_BIASES} work")
    return checked


def _bad_word(word: object) -> str | tuple[int, ...]:
    """Return a text, or token ids."""
    if isinstance(word, str):
        if not word.strip():
            raise RequestError("bad_words", word, "each word must have a character that is not white space")
        return word
    token_ids = tuple(_integer("bad_words", token_id, 0, None) for token_id in _items("bad_words", word, "token ids"))
    if not token_ids:
        raise RequestError("bad_words", [], "each word must have a token")
    return token_ids


def _token_rows(name: str, rows: object) -> tuple[tuple[int, ...], ...]:
    """Return rows of token ids, each with at least one, which is -1 if there is none."""
    found = [_items(name, row, "token ids") for row in _items(name, rows, "lists of token ids")]
    if not 0 < max(map(len, found), default=0) <= MAX_LOGPROBS:
        raise RequestError(name, f"{len(found)} rows", f"must have rows of 1 to {MAX_LOGPROBS} token ids")
    return tuple(tuple(_integer(name, one, -1, None) for one in row) or (-1,) for row in found)


def _nested(name: str, value: object, kind: type[Any]) -> Any:
    if value is None or isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise RequestError(name, value, f"must be {kind.__name__} or a mapping of its fields")
    known = [one.name for one in fields(kind)]
    for key in value:
        if key not in known:
            raise RequestError(name, key, f"is not a field; fields are {', '.join(known)}")
    return kind(**value)


def _items(name: str, value: object, expected: str) -> tuple[object, ...]:
    if not isinstance(value, Iterable) or isinstance(value, (str, bytes, Mapping)):
        raise RequestError(name, value, f"must be a list of {expected}")
    return tuple(value)


def _as_float(value: object) -> float:
    """Return a float; NaN for what is not a number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64, of either sign
        return math.nan
