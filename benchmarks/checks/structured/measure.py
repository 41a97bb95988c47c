"""Measurement of structured output over real schemas: what is accepted, how fast, and whether the texts are valid.

The times are CPU times of the process or the thread, unless they are named wall times: a shared machine disturbs them
least.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from checks.structured.judge import Judge
from checks.structured.walk import Walker
from phonograph.core.grammar import Grammar
from phonograph.core.structured_outputs import Strictness, StructuredOutputs
from phonograph.errors import RequestError
from phonograph.structured.compiler import GrammarCompiler
from phonograph.structured.vocabulary import Vocabulary
from phonograph.text.tokenizer import Tokenizer

Record = dict[str, Any]
_PHRASES = {
    "the reference ": ("$ref",),
    "the pattern ": ("pattern", "patternProperties"),
    "min/maxProperties ": ("minProperties", "maxProperties"),
}
"""Beginnings of warnings that stand for keywords. Other warnings name theirs."""
_KEYWORDS = frozenset({*Draft202012Validator.VALIDATORS, "dependencies"})


def load_vocabulary(folder: Path) -> Vocabulary:
    """Load a tokenizer's vocabulary, with rows of logits for its tokens alone."""
    tokenizer = Tokenizer.load(folder)
    eos = tokenizer.eos_token_id
    assert eos is not None
    return Vocabulary.of_tokenizer(tokenizer, tokenizer.vocab_size, (eos,))


class SchemaMeasurement:
    """Measurement of one schema after the other, with one vocabulary.

    texts, max_tokens: random walks a schema, and tokens of each at most
    """

    def __init__(self, vocabulary: Vocabulary, *, texts: int, max_tokens: int, seed: int) -> None:
        self._compiler = GrammarCompiler(lambda: vocabulary, vocabulary.eos)
        self._compiler.request(StructuredOutputs(json_object=True)).result()
        self._walker = Walker(vocabulary.tokens, vocabulary.eos, vocabulary.size)
        self._mask_RW = np.zeros((1, -(-vocabulary.size // 32)), np.int32)
        self._texts = texts
        self._max_tokens = max_tokens
        self._seed = seed
        self.fill_us: list[float] = []

    def close(self) -> None:
        """End the compiler's threads."""
        self._compiler.close()

    def measure(self, number: int, schema: object) -> Record:
        """Compile strictly and relaxed, and judge texts of the strictest that is accepted.

        number: place in the set, which the random numbers depend on
        """
        try:
            text = StructuredOutputs(json=schema).source  # type: ignore[arg-type]
        except RequestError as error:
            refusal = {"accepted": False, "refusal": error.problem}
            return {"strict": refusal, "relaxed": refusal}
        strict, grammar = self._compiled(text, "strict")
        relaxed, lenient = self._compiled(text, "relaxed")
        grammar = grammar or lenient
        result: Record = {"characters": len(text), "strict": strict, "relaxed": relaxed}
        if grammar is not None:
            result["walks"] = self._walks(number, schema, grammar)
        return result

    def _compiled(self, schema: str, strictness: Strictness) -> tuple[Record, Grammar | None]:
        request = StructuredOutputs(json=schema, strictness=strictness)
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            grammar = self._compiler.request(request).result()
            grammar.matcher().fill(self._mask_RW, 0)
        except RequestError as error:
            ms = (time.process_time() - cpu) * 1000
            return {"accepted": False, "refusal": error.problem, "compile_ms": round(ms, 3)}, None
        times = {
            "compile_ms": round((time.process_time() - cpu) * 1000, 3),
            "compile_wall_ms": round((time.perf_counter() - wall) * 1000, 3),
        }
        return {"accepted": True, **times, "warnings": list(grammar.warnings)}, grammar

    def _walks(self, number: int, schema: object, grammar: Grammar) -> Record:
        warned = keywords_in(grammar.warnings)
        ended, problems, faults = 0, list[str](), list[Record]()
        for turn in range(self._texts):
            walk = self._walker.walk(
                grammar.matcher(), np.random.default_rng((self._seed, number, turn)), self._max_tokens
            )
            self.fill_us += walk.fill_us
            ended += walk.ended
            if walk.problem:
                problems.append(walk.problem)
            if walk.ended:
                faults += judged(schema, walk.text, warned)
        unjudged = [fault["unjudged"] for fault in faults if "unjudged" in fault]
        result: Record = {"texts": self._texts, "ended": ended, "problems": sorted({*problems})}
        if unjudged:
            return {**result, "unjudged": unjudged[0], "ended": 0}
        return {**result, "invalid": faults}


def judged(schema: object, text: bytes, warned: frozenset[str]) -> list[Record]:
    """Return nothing for a valid text, else its fault, and whether warnings name what is wrong with it.

    A fault is explained by `warned` keywords if the text is valid without them, `oneOf` being `anyOf`.
    """
    key = json.dumps(schema)
    try:
        fault = _judge(key, frozenset()).fault(text)
        if fault is None:
            return []
        explained = bool(warned) and _judge(key, warned).fault(text) is None
        overlap = explained and "oneOf" in warned and _judge(key, frozenset({"oneOf"})).fault(text) is None
    except Exception as error:  # a schema that the validator cannot read: a reference to elsewhere, an unknown pattern
        return [{"unjudged": f"{type(error).__name__}: {error}"[:200]}]
    shown = text.decode("utf-8", "replace")[:2000]
    return [{"text": shown, **fault._asdict(), "explained": explained, "one_of_overlap": overlap}]


@cache
def _judge(schema: str, without: frozenset[str]) -> Judge:
    return Judge(json.loads(schema), without)


def keywords_in(texts: Collection[str]) -> frozenset[str]:
    """Return the keywords of JSON Schema that warnings name."""
    found: set[str] = set()
    for text in texts:
        phrase = next(filter(text.startswith, _PHRASES), None)
        words = re.findall(r"[$\w]+", text.removesuffix(" cannot be enforced").removesuffix(" is treated as anyOf"))
        found |= _KEYWORDS.intersection(words if phrase is None else _PHRASES[phrase])
    return frozenset(found)
