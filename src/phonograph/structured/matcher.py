"""Grammars and matchers of llguidance. No other module names the library.

A matcher of the library never raises: after an error its mask allows the end of the output and nothing else, which
would cut answers off in silence. So its error is asked for after each call. A token that it refuses is an error for
good too, so tokens are validated before it takes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from phonograph.core.grammar import GrammarError
from phonograph.structured.vocabulary import Vocabulary

MAX_ITEMS = 20_000
"""Ways in which a grammar may go on at one point. The library's own 2,000 end an object of 2,000 optional names."""
GRAMMAR_ITEMS = 500
"""The same of a user's grammar. An ambiguous one takes 60 ms a mask at 500 of 49,152 tokens, and 400 ms at 1,000."""
GRAMMAR_STEP_ITEMS = 200_000
"""Those of all tokens together. Many terminals of one character need more than the library's 50,000."""
MAX_LEXER_STATES = 50_000
"""States of the automaton of a grammar's lexemes, 1 to 2 KiB each, which all matchers of a grammar share."""
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'
"""Else the library asks the tokenizer for the tokens of a text that must follow, and allows no others: at each mask,
with Python's lock held, wrongly where the tokenizer puts a space before a text, and without an end for `/a+/ "a"`."""
_PLACE = re.compile(r"\Aat \d+\(\d+\): (failed to compile JSON schema: )?")
_UNKNOWN = "Unimplemented keys: "
_ONE_OF = "oneOf is taken as anyOf"
_ESCAPES = r"nrbtf\""
r"""Characters after a backslash in a string, without `\u`: spelled with it, a listed name passes for another one."""
WHITESPACE = r"[ \n\r\t]{1,40}"
"""White space between JSON tokens. Any indentation needs no more, and weak models would go on with it for ever."""


class Library:
    """The library, for one vocabulary."""

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
        """Compiles a schema. A `oneOf` that the library cannot prove disjoint is taken as `anyOf`, with a warning.

        lenient: leaves out, with warnings, keywords that the library does not have

        Raises:
            GrammarError: the schema cannot be held.
        """
        options: dict[str, Any] = {"lenient": lenient, "json_allowed_escapes": _ESCAPES}
        if any_whitespace:
            options["whitespace_pattern"] = WHITESPACE
        else:
            options |= {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        try:
            return self._compile(_json_lark(schema, options), self._limits)
        except GrammarError as error:
            if str(error) != _ONE_OF:
                raise
        return self._compile(_json_lark(schema, {**options, "coerce_one_of": True}), self._limits)

    def of_regex(self, regex: str) -> LibraryGrammar:
        r"""Compiles a regular expression that a whole output matches; `\d` and `\w` are ASCII's.

        Raises:
            GrammarError: the library does not take it.
        """
        return self._compile(f"start: /{self._for_lark(regex, use_ascii='dw')}/", self._limits)

    def of_lark(self, lark: str) -> LibraryGrammar:
        """Compiles a grammar in the library's dialect of Lark.

        Raises:
            GrammarError: the library does not take it.
        """
        return self._compile(lark, self._grammar_limits)

    def overlaps(self, schema: Mapping[str, Any]) -> list[str]:
        """Returns the warning of a schema with a `oneOf` that cannot be proved disjoint, if there is one."""
        # Not within Lark, which takes 1 ms more: nothing is forced where there is no matcher.
        grammar = self._make.grammar_from_json_schema({**schema, "x-guidance": {"lenient": True}})
        _, said = self._make.validate_grammar_with_warnings(grammar, limits=self._limits)
        return [_ONE_OF] if _ONE_OF in map(_told, said) else []

    def refuses_regex(self, regex: str) -> bool:
        """Returns True if the library cannot take it as the pattern of a schema."""
        return bool(self._make.validate_grammar(self._make.grammar_from_regex(regex), limits=self._limits))

    def _compile(self, lark: str, limits: Any) -> LibraryGrammar:
        grammar = self._make.grammar_from_lark(lark + _NO_FORCING)
        matcher = self._make(self._tokenizer, grammar, log_level=0, limits=limits)
        _check(matcher)
        # Faults such as a rule that only refers to itself show at the first mask.
        first = matcher.deep_copy()
        words_W = np.zeros(self._num_words, np.int32)
        _fill(first, words_W)
        return LibraryGrammar(matcher, words_W, self._eos)


class LibraryGrammar:
    """A compiled grammar: a matcher at the beginning, which is copied for each request, and its mask."""

    def __init__(self, matcher: Any, first_W: np.ndarray, eos: tuple[int, ...]) -> None:
        self._matcher = matcher
        self.first_W = first_W
        self.eos = eos
        self.warnings: tuple[str, ...] = tuple(map(_told, matcher.get_grammar_warnings()))

    def matcher(self) -> LibraryMatcher:
        return LibraryMatcher(self, self._matcher.deep_copy())


class LibraryMatcher:
    """Position of one output in a grammar."""

    def __init__(self, grammar: LibraryGrammar, matcher: Any) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._begun = False
        self.ended = False

    def accept(self, token_id: int) -> None:
        is_end = token_id in self._grammar.eos
        if self.ended or not (self._matcher.is_accepting() if is_end else self._matcher.try_consume_tokens([token_id])):
            _check(self._matcher)
            raise GrammarError(f"the token {token_id} is not allowed here")
        _check(self._matcher)
        self._begun = True
        self.ended = is_end

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        words_W = bitmask_RW[row]
        if not self._begun:  # the most expensive mask of many grammars, and the same for all requests
            words_W[:] = self._grammar.first_W
            return
        _fill(self._matcher, words_W)


def _fill(matcher: Any, words_W: np.ndarray) -> None:
    assert words_W.flags.c_contiguous and words_W.dtype == np.int32
    # The library's own helper for arrays takes three times as long for 64 rows.
    matcher.unsafe_compute_mask_ptr(words_W.ctypes.data, words_W.nbytes)
    _check(matcher)


def _check(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(_told(matcher.get_error()))


def _told(text: str) -> str:
    """Returns a message of the library on one line, in the words of this room."""
    text = _PLACE.sub("", text).partition("\n   1 | ")[0]
    text = re.sub(r" \(\d+ times\)$", "", text)
    if text.startswith(_UNKNOWN):
        return f"{', '.join(json.loads(text.removeprefix(_UNKNOWN)))} is not held"
    if text.startswith("oneOf"):
        return _ONE_OF
    if text.startswith("NoExtension"):
        return "nothing can come next: a rule that never ends, or fits no token?"
    return " ".join(text.replace("<non-verbose/>", "").split())[:300]


class _Tokens:
    """Tokenizer with the attributes that the library reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos[0]
        self.bos_token_id = None
        self.tokens = vocabulary.tokens
        self.special_token_ids = sorted(vocabulary.special | {*vocabulary.eos})

    def __call__(self, _: object) -> list[int]:
        raise NotImplementedError("nothing is forced")


def _json_lark(schema: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"
