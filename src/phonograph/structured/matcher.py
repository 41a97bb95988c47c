"""Grammars and matchers of llguidance. No other module imports the library.

A matcher of the library never raises. After an error its mask allows only the end of the output, which would truncate
answers silently, so each call is followed by a check for an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

from phonograph.core.grammar import GrammarError
from phonograph.structured.vocabulary import Vocabulary

MAX_ITEMS = 20_000
"""Parser items at one position of a JSON schema. The library's default of 2,000 fails on 2,000 optional properties."""
GRAMMAR_ITEMS = 500
"""Parser items at one position of a user's grammar: a bound on the time of a mask of an ambiguous grammar."""
GRAMMAR_STEP_ITEMS = 200_000
"""Parser items of one mask. Grammars of single-character terminals need more than the library's default of 50,000."""
MAX_LEXER_STATES = 50_000
"""States of a grammar's lexer, 1 to 2 KiB each. All matchers of a grammar share them."""
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Disable forced tokens: they call the tokenizer at each mask, with Python's lock held. They are wrong if the tokenizer
puts a space before a text, and do not terminate for `/a+/ "a"`.
"""
_PLACE = re.compile(r"\Aat \d+\(\d+\): (failed to compile JSON schema: )?")
_EXCERPT = re.compile(r"\n +\d+ \| ")
_UNKNOWN = "Unimplemented keys: "
_ONE_OF = "oneOf is treated as anyOf"
_ESCAPES = r"nrbtf\""
r"""Characters after a backslash in a JSON string. Without `u`: a \u escape could spell the name of another property."""
WHITESPACE = r"[ \n\r\t]{1,40}"
"""White space between JSON tokens, bounded because weak models would otherwise generate it without end."""


class LlguidanceLibrary:
    """llguidance, bound to one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import llguidance

        self._make: Any = llguidance.LLMatcher
        self._for_lark: Any = llguidance.regex_to_lark
        self._eos = vocabulary.eos
        self._num_words = -(-vocabulary.size // 32)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)), n_vocab=vocabulary.size, eos_token=list(vocabulary.eos)
        )
        limits: dict[str, Any] = {"max_lexer_states": MAX_LEXER_STATES, "verbose_errors": False}
        self._limits = llguidance.LLParserLimits(max_items_in_row=MAX_ITEMS, **limits)
        self._grammar_limits = llguidance.LLParserLimits(
            max_items_in_row=GRAMMAR_ITEMS, step_max_items=GRAMMAR_STEP_ITEMS, **limits
        )

    def of_json_schema(self, schema: Mapping[str, Any], *, any_whitespace: bool, lenient: bool) -> LibraryGrammar:
        """Compile a schema. A `oneOf` that the library cannot prove disjoint becomes `anyOf`, with a warning.

        Args:
            schema: JSON Schema.
            any_whitespace: allow indentation; else a space may follow each comma and colon, and nothing else.
            lenient: ignore keywords that the library does not support, with warnings.

        Raises:
            GrammarError: the library cannot compile the schema.
        """
        lark = f"start: {json_rule(schema, any_whitespace=any_whitespace, lenient=lenient)}"
        return self._compile(lark, self._limits)

    def of_regex(self, regex: str) -> LibraryGrammar:
        r"""Compile a regular expression that the whole output matches; `\d` and `\w` are ASCII.

        Raises:
            GrammarError: the library cannot compile it.
        """
        return self._compile(f"start: /{self.lark_regex(regex)}/", self._limits)

    def lark_regex(self, regex: str) -> str:
        """Return a regular expression in the library's dialect of Lark, without its slashes."""
        return self._for_lark(regex, use_ascii="dw")

    def of_lark(self, lark: str, *, is_users: bool = True) -> LibraryGrammar:
        """Compile a grammar in the library's dialect of Lark.

        Args:
            lark: the grammar.
            is_users: False for a grammar that was made of schemas, whose limits it has.

        Raises:
            GrammarError: the library cannot compile it.
        """
        return self._compile(lark, self._grammar_limits if is_users else self._limits)

    def overlaps(self, schema: Mapping[str, Any]) -> list[str]:
        """Return a warning if the schema has a `oneOf` that cannot be proved disjoint."""
        # Directly instead of within Lark, which is slower; no tokens are forced without a matcher.
        grammar = self._make.grammar_from_json_schema({**schema, "x-guidance": {"lenient": True}})
        _, said = self._make.validate_grammar_with_warnings(grammar, limits=self._limits)
        return [_ONE_OF] if _ONE_OF in map(_message, said) else []

    def refuses_regex(self, regex: str) -> bool:
        """Return True if the library cannot compile the pattern of a schema."""
        return bool(self._make.validate_grammar(self._make.grammar_from_regex(regex), limits=self._limits))

    def _compile(self, lark: str, limits: Any) -> LibraryGrammar:
        grammar = self._make.grammar_from_lark(lark + _NO_FORCING)
        matcher = self._make(self._tokenizer, grammar, log_level=0, limits=limits)
        _check(matcher)
        # Faults such as a rule that only refers to itself appear at the first mask.
        first = matcher.deep_copy()
        words_W = np.zeros(self._num_words, np.int32)
        _fill(first, words_W)
        return LibraryGrammar(matcher, words_W, self._eos)


class LibraryGrammar:
    """A compiled grammar: a matcher at the start, copied for each request, and its mask `first_W`."""

    def __init__(self, matcher: Any, first_W: np.ndarray, eos: tuple[int, ...]) -> None:
        self._matcher = matcher
        self.first_W = first_W
        self.eos = eos
        self.warnings: tuple[str, ...] = tuple(map(_message, matcher.get_grammar_warnings()))

    def matcher(self) -> LibraryMatcher:
        return LibraryMatcher(self, self._matcher.deep_copy())


class LibraryMatcher:
    """A position in a grammar, behind `num_taken` tokens."""

    def __init__(self, grammar: LibraryGrammar, matcher: Any, num_taken: int = 0, *, ended: bool = False) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._num_taken = num_taken
        self.ended = ended

    def accept(self, token_id: int) -> None:
        # The end is not passed on: where nothing else can follow, the library would not count it in a rollback.
        is_end = token_id in self._grammar.eos
        if self.ended or not (self._matcher.is_accepting() if is_end else self._matcher.try_consume_tokens([token_id])):
            _check(self._matcher)
            raise GrammarError(f"the token {token_id} is not allowed here")
        _check(self._matcher)
        self._num_taken += 1
        self.ended = is_end

    def validate(self, token_ids: Sequence[int]) -> int:
        if self.ended:
            return 0
        text = list(takewhile(lambda token_id: token_id not in self._grammar.eos, token_ids))
        num_allowed: int = self._matcher.validate_tokens(text)
        if num_allowed == len(text) < len(token_ids):
            there = self._matcher.deep_copy()
            there.consume_tokens(text)
            num_allowed += there.is_accepting()
        return num_allowed

    def rollback(self, num_tokens: int) -> None:
        if not num_tokens:
            return
        self._matcher.rollback(num_tokens - self.ended)
        _check(self._matcher)
        self._num_taken -= num_tokens
        self.ended = False

    def copy(self) -> LibraryMatcher:
        return LibraryMatcher(self._grammar, self._matcher.deep_copy(), self._num_taken, ended=self.ended)

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        words_W = bitmask_RW[row]
        if not self._num_taken:  # the most expensive mask of many grammars, and the same for all requests
            words_W[:] = self._grammar.first_W
            return
        _fill(self._matcher, words_W)


def _fill(matcher: Any, words_W: np.ndarray) -> None:
    assert words_W.flags.c_contiguous and words_W.dtype == np.int32
    # Faster than the library's helper for arrays.
    matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
    _check(matcher)


def json_rule(schema: Mapping[str, Any], *, any_whitespace: bool, lenient: bool) -> str:
    """Return a schema as a part of a rule in the library's dialect of Lark; see `LlguidanceLibrary.of_json_schema`."""
    options: dict[str, Any] = {"lenient": lenient, "coerce_one_of": True, "json_allowed_escapes": _ESCAPES}
    if any_whitespace:
        options["whitespace_pattern"] = WHITESPACE
    else:
        options |= {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(_message(matcher.get_error()))


def _message(text: str) -> str:
    """Return a message of the library on one line, in this package's words."""
    text = _EXCERPT.split(_PLACE.sub("", text), maxsplit=1)[0]
    text = re.sub(r" \(\d+ times\)$", "", text)
    if text.startswith(_UNKNOWN):
        return f"{', '.join(json.loads(text.removeprefix(_UNKNOWN)))} cannot be enforced"
    if text.startswith("oneOf"):
        return _ONE_OF
    if text.startswith("NoExtension"):
        return "no token can follow; check for rules that never end or match no token"
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


class _Tokens:
    """Tokenizer with the attributes that the library reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special | {*vocabulary.eos})

    def __call__(self, _: object) -> list[int]:
        raise NotImplementedError("forced tokens are disabled")
