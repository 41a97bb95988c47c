"""Grammars for requests: compiled in threads, kept by what they say."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from phonograph.core.grammar import Grammar, GrammarError
from phonograph.core.structured_outputs import Strictness, StructuredOutputs
from phonograph.errors import RequestError, shortened
from phonograph.structured.gbnf import lark_from_gbnf
from phonograph.structured.matcher import Library, LibraryGrammar
from phonograph.structured.schema import prepared
from phonograph.structured.vocabulary import Vocabulary

THREADS = 2
"""So that one large schema does not hold up all others. The library lets other threads run while it compiles."""
KEPT = 128
"""Grammars that are kept for requests to come."""


class _Job(NamedTuple):
    """All that a grammar depends on beside the vocabulary."""

    kind: str
    source: str
    any_whitespace: bool
    closes: bool
    strict: bool


class GrammarCompiler:
    """Compiles structured outputs for one vocabulary. Any thread may ask.

    load:       the vocabulary, asked for once, by a thread; None where there is no tokenizer
    eos:        ids that end an output
    strictness: of requests that do not say theirs
    """

    def __init__(
        self, load: Callable[[], Vocabulary | None], eos: tuple[int, ...], strictness: Strictness = "strict"
    ) -> None:
        self._load = load
        self._eos = eos
        self._strictness = strictness
        self._loading = threading.Lock()
        self._library: Library | None = None
        self._keeping = threading.Lock()
        self._kept: OrderedDict[_Job, LibraryGrammar] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "grammar")

    def request(self, structured: StructuredOutputs) -> Future[Grammar]:
        """Returns the grammar, now or later. The future fails with a RequestError where there cannot be one; whoever
        no longer waits for it cancels it.

        Raises:
            RequestError: there can be no grammar for this model at all.
        """
        if not self._eos:
            raise RequestError("structured_outputs", structured.kind, "the model has no end-of-sequence token")
        strict = (structured.strictness or self._strictness) == "strict"
        closes = structured.disable_additional_properties
        job = _Job(structured.kind, structured.source, not structured.disable_any_whitespace, closes, strict)
        with self._keeping:
            kept = self._kept.get(job)
            if kept is not None:
                self._kept.move_to_end(job)
        if kept is None:
            # All of it in a thread, reading a schema too: whoever asks may have a step to run, and others' to lose.
            return self._threads.submit(self._compile, job)
        done: Future[Grammar] = Future()
        done.set_result(kept)
        return done

    def warm(self) -> None:
        """Loads library and vocabulary in a thread, which takes a second, so that the first request need not wait."""
        self._threads.submit(self._loaded)

    def close(self) -> None:
        """Ends the threads; what is not compiled never will be."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, job: _Job) -> Grammar:
        try:
            grammar = self._grammar(self._loaded(), job)
        except (GrammarError, ValueError) as error:  # the conversion of GBNF raises ValueError
            hint = "" if job.kind != "json" or not job.strict else "; strictness='relaxed' may take it, with a warning"
            raise RequestError(job.kind, shortened(job.source), f"cannot be held: {error}{hint}") from None
        except RequestError:
            raise
        except BaseException as error:  # a panic of the library is no Exception, and must not end whoever waits
            raise RequestError(job.kind, shortened(job.source), f"could not be compiled: {error!r}") from None
        with self._keeping:
            self._kept[job] = grammar
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return grammar

    @staticmethod
    def _grammar(library: Library, job: _Job) -> LibraryGrammar:
        if job.kind in ("json", "json_object"):
            leaves_out = None if job.strict else library.refuses_regex
            source = job.source or '{"type": "object"}'
            schema, warnings = prepared(json.loads(source), closes=job.closes, leaves_out=leaves_out)
            # Branches of a oneOf that overlap may look disjoint once they are closed.
            if job.closes and '"oneOf"' in source:
                warnings += library.overlaps(prepared(json.loads(source), closes=False, leaves_out=leaves_out)[0])
            grammar = library.of_json_schema(schema, any_whitespace=job.any_whitespace, lenient=not job.strict)
            grammar.warnings = tuple(dict.fromkeys((*warnings, *grammar.warnings)))
            return grammar
        if job.kind == "regex":
            return library.of_regex(job.source)
        if job.kind == "choice":
            return library.of_regex("|".join(map(_literal, json.loads(job.source))))
        return library.of_lark(lark_from_gbnf(job.source) if "::=" in job.source else job.source)

    def _loaded(self) -> Library:
        with self._loading:
            if self._library is None:
                vocabulary = self._load()
                if vocabulary is None:
                    raise RequestError("structured_outputs", "...", "needs the model's tokenizer")
                self._library = Library(vocabulary)
            return self._library


def _literal(text: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in text)
