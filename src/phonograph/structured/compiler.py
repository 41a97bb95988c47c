"""Compilation of structured-output constraints in threads, with a cache of compiled grammars."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from phonograph.core.grammar import Grammar, GrammarError
from phonograph.core.structured_outputs import Strictness, StructuredOutputs
from phonograph.errors import RequestError, shortened
from phonograph.structured.call_arguments import ArgumentRules
from phonograph.structured.gbnf import lark_from_gbnf
from phonograph.structured.matcher import LibraryGrammar, LlguidanceLibrary, json_rule
from phonograph.structured.schema import prepared
from phonograph.structured.structural_tags import lark_of_tags
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.formats.call_layouts import escaped

THREADS = 2
"""Several, so that one large schema does not delay the others. The library releases Python's lock while it compiles."""
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
"""A line that begins a rule. Lark's texts may contain the sign too."""
CACHE_SIZE = 128
"""Compiled grammars that are kept, the least recently used dropped first."""


class _Job(NamedTuple):
    """Key of a compiled grammar: all that it depends on apart from the vocabulary."""

    kind: str
    source: str
    any_whitespace: bool
    closes: bool
    strict: bool


class GrammarCompiler:
    """Compiler of structured outputs for one vocabulary. Thread-safe.

    Args:
        load: returns the vocabulary, or None if there is no tokenizer; called once, in a thread.
        eos: token ids that end an output.
        strictness: used for requests that set none.
    """

    def __init__(
        self, load: Callable[[], Vocabulary | None], eos: tuple[int, ...], strictness: Strictness = "strict"
    ) -> None:
        self._load = load
        self._eos = eos
        self._strictness = strictness
        self._loading = threading.Lock()
        self._library: LlguidanceLibrary | None = None
        self._cache_lock = threading.Lock()
        self._cache: OrderedDict[_Job, LibraryGrammar] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "grammar")

    def request(self, structured: StructuredOutputs) -> Future[Grammar]:
        """Return a future of the grammar. The future fails with a RequestError if the grammar cannot be compiled.

        Cancel the future if the grammar is no longer needed.

        Raises:
            RequestError: the model has no end-of-sequence token, so no grammar can end.
        """
        if not self._eos:
            raise RequestError("structured_outputs", structured.kind, "the model has no end-of-sequence token")
        strict = (structured.strictness or self._strictness) == "strict"
        closes = structured.disable_additional_properties
        job = _Job(structured.kind, structured.source, not structured.disable_any_whitespace, closes, strict)
        with self._cache_lock:
            cached = self._cache.get(job)
            if cached is not None:
                self._cache.move_to_end(job)
        if cached is None:
            # In a thread from the parsing of the schema on: the caller may be the thread that runs steps.
            return self._threads.submit(self._compile, job)
        done: Future[Grammar] = Future()
        done.set_result(cached)
        return done

    def warm(self) -> None:
        """Load library and vocabulary in a thread, so that the first request does not wait a second for them."""
        self._threads.submit(self._loaded)

    def close(self) -> None:
        """Shut the threads down and cancel what has not begun."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, job: _Job) -> Grammar:
        try:
            grammar = self._grammar(self._loaded(), job)
        except (GrammarError, ValueError) as error:  # the conversion of GBNF raises ValueError
            hint = "; strictness='relaxed' accepts it, with a warning" if self._is_taken_relaxed(job) else ""
            raise RequestError(job.kind, shortened(job.source), f"cannot be compiled: {error}{hint}") from None
        except RequestError:
            raise
        except BaseException as error:  # a panic of the library is not an Exception
            raise RequestError(job.kind, shortened(job.source), f"could not be compiled: {error!r}") from None
        with self._cache_lock:
            self._cache[job] = grammar
            while len(self._cache) > CACHE_SIZE:
                self._cache.popitem(last=False)
        return grammar

    def _is_taken_relaxed(self, job: _Job) -> bool:
        try:
            return job.kind == "json" and job.strict and bool(self._grammar(self._loaded(), job._replace(strict=False)))
        except BaseException:  # a panic of the library is not an Exception
            return False

    @staticmethod
    def _grammar(library: LlguidanceLibrary, job: _Job) -> LibraryGrammar:
        if job.kind in ("json", "json_object"):
            refuses_regex = None if job.strict else library.refuses_regex
            source = job.source or '{"type": "object"}'
            schema, warnings = prepared(json.loads(source), closes=job.closes, refuses_regex=refuses_regex)
            # Overlapping branches of a oneOf may look disjoint once they are closed.
            if job.closes and '"oneOf"' in source:
                warnings += library.overlaps(prepared(json.loads(source), closes=False, refuses_regex=refuses_regex)[0])
            grammar = library.of_json_schema(schema, any_whitespace=job.any_whitespace, lenient=not job.strict)
            grammar.warnings = tuple(dict.fromkeys((*warnings, *grammar.warnings)))
            return grammar
        if job.kind == "structural_tag":
            warnings: list[str] = []

            def rule(value: Any) -> str:
                schema, said = prepared(
                    value, closes=job.closes, refuses_regex=None if job.strict else library.refuses_regex
                )
                warnings.extend(said)
                return json_rule(schema, any_whitespace=job.any_whitespace, lenient=not job.strict)

            arguments = ArgumentRules(rule, library.lark_regex)
            tags = json.loads(job.source)
            has_grammar = any("grammar" in structure for structure in tags["structures"])
            grammar = library.of_lark(lark_of_tags(tags, arguments), is_users=has_grammar)
            grammar.warnings = tuple(dict.fromkeys((*warnings, *grammar.warnings)))
            return grammar
        if job.kind == "regex":
            return library.of_regex(job.source)
        if job.kind == "choice":
            return library.of_regex("|".join(map(escaped, json.loads(job.source))))
        return library.of_lark(lark_from_gbnf(job.source) if _GBNF_RULE.search(job.source) else job.source)

    def _loaded(self) -> LlguidanceLibrary:
        with self._loading:
            if self._library is None:
                vocabulary = self._load()
                if vocabulary is None:
                    raise RequestError("structured_outputs", "...", "needs the model's tokenizer")
                self._library = LlguidanceLibrary(vocabulary)
            return self._library
