"""Grammars for requests: compiled by processes that can be stopped, waited for by threads, kept by what they say."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from importlib.util import find_spec
from queue import LifoQueue
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from phonograph.engine.grammars.patterns import PatternError, rewritten
from phonograph.engine.grammars.schema import narrow, refusal
from phonograph.engine.grammars.worker import Done, Job, receive, send
from phonograph.engine.tokenizer import Tokenizer
from phonograph.errors import PhonographError, RequestError, shortened
from phonograph.models.spec import ModelSpec
from phonograph.structured.protocol import Grammar
from phonograph.structured_outputs import StructuredOutputs

WORKERS = 2
"""Processes, started when they are needed: one that is busy with a hard grammar does not hold up the others."""
SECONDS = 10.0
"""How long a grammar may take to compile."""
START_SECONDS = 120.0
KEPT_BYTES = 512 * 2**20
KEPT_COUNT = 1024
"""Grammars and refusals that are kept for requests to come."""

_CONTROL = frozenset(range(0x20)) - {ord("\n"), ord("\r")}


class GrammarCompiler:
    """Compiles structured outputs for one vocabulary. Any thread may ask.

    load:    the tokenizer, asked for once, by a thread
    model:   its vocabulary may be larger than the tokenizer's; its end-of-sequence tokens end what is complete
    seconds: how long a grammar may take
    """

    def __init__(self, load: Callable[[], Tokenizer | None], model: ModelSpec, *, seconds: float = SECONDS) -> None:
        self._load = load
        self._vocab_size = model.vocab_size
        self._eos_token_ids = tuple(model.eos_token_ids)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._vocabulary: Any = None
        self._kept: OrderedDict[Job, _Answer] = OrderedDict()
        self._sizes: dict[Job, int] = {}
        self._askers: WeakKeyDictionary[Future[Grammar], int] = WeakKeyDictionary()
        self._threads = ThreadPoolExecutor(WORKERS, "grammar")
        self._workers: LifoQueue[_Worker] = LifoQueue()
        for _ in range(WORKERS):
            self._workers.put(_Worker())

    def request(self, structured: StructuredOutputs) -> Future[Grammar]:
        """The grammar, now or later. The future fails with a RequestError where there cannot be one.

        Whoever no longer waits for it says so with `leave`.

        Raises:
            RequestError: there can be no grammar for this model at all, or not with what is installed.
        """
        if find_spec("xgrammar") is None:
            raise RequestError(
                "structured_outputs", structured.kind, "needs xgrammar; pip install 'phonograph[structured]'"
            )
        if not self._eos_token_ids:
            raise RequestError("structured_outputs", structured.kind, "the model has no end-of-sequence token")
        job = Job(structured.kind, structured.source, not structured.disable_any_whitespace)
        with self._lock:
            answer = self._kept.get(job)
            if answer is None:
                answer = _Answer()
                # All of it in a thread, reading a schema too: whoever asks may have a step to run, and others' to lose.
                self._threads.submit(self._answer, job, answer)
                self._kept[job] = answer
                while len(self._kept) > KEPT_COUNT:
                    self._drop_oldest()
            self._kept.move_to_end(job)
            self._askers[answer] = self._askers.get(answer, 0) + 1
        return answer

    def leave(self, future: Future[Grammar]) -> None:
        """One of those who asked for it has gone. What nobody waits for is not begun: it would hold up others."""
        with self._lock:
            others = self._askers.get(future, 0) - 1
            if others > 0:
                self._askers[future] = others
            elif self._askers.pop(future, None) and future.cancel():
                self._forget(future)

    def warm(self) -> None:
        """Loads the library in a thread, which takes a second or two, so that the first request need not wait."""
        if find_spec("xgrammar") is not None:
            self._threads.submit(self._known_vocabulary)

    def close(self) -> None:
        """Ends threads and processes; what is not compiled never will be."""
        with self._lock:
            for future in list(self._askers):
                future.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)
        while not self._workers.empty():
            self._workers.get().stop()

    def _answer(self, job: Job, answer: _Answer) -> None:
        if not answer.set_running_or_notify_cancel():
            return
        try:
            answer.set_result(self._compile(job))
        except _Stopped as error:  # which says as much of the machine as of the grammar
            self._fail(answer, RequestError(job.kind, shortened(job.source), str(error)))
        except RequestError as error:
            answer.set_exception(copy(error))  # without the frames, which hold all that was read
        except Exception as error:  # a library's, or a machine's: others must go on, and it may work the next time
            refused = RequestError(job.kind, shortened(job.source), f"could not be compiled: {error!r}")
            refused.__cause__ = error
            self._fail(answer, refused)

    def _fail(self, answer: _Answer, error: RequestError) -> None:
        """An error of this time: whoever asks again has it compiled again."""
        with self._lock:
            self._forget(answer)
        answer.set_exception(error)

    def _compile(self, job: Job) -> Grammar:
        source = _for_the_library(job)
        vocabulary = self._known_vocabulary()
        worker = self._workers.get()
        try:
            done = worker.run(job._replace(source=source), vocabulary.text, self._seconds)
        finally:
            self._workers.put(worker)
        if done.problem is not None:
            raise RequestError(job.kind, shortened(job.source), done.problem)
        grammar = vocabulary.grammar(done.compiled, is_json=job.kind in ("json", "json_object"))
        with self._lock:
            if job in self._kept:
                self._sizes[job] = grammar.num_bytes
            while sum(self._sizes.values()) > KEPT_BYTES and len(self._kept) > 1:
                self._drop_oldest()
        return grammar

    def _known_vocabulary(self) -> _Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                tokenizer = self._load()
                if tokenizer is None:
                    raise RequestError("structured_outputs", "...", "needs the model's tokenizer")
                self._vocabulary = _Vocabulary(tokenizer, self._vocab_size, self._eos_token_ids)
            return self._vocabulary

    def _drop_oldest(self) -> None:
        job, _ = self._kept.popitem(last=False)
        self._sizes.pop(job, None)

    def _forget(self, future: Future[Grammar]) -> None:
        """Keeps it no longer, where it is kept; the lock is held."""
        for job in [job for job, answer in self._kept.items() if answer is future]:
            del self._kept[job]


class _Answer(Future[Grammar]):
    """A grammar to come. Each `result` raises an error of its own: one that is raised keeps the frames it came through,
    and requests with them, for as long as it is kept.
    """

    def result(self, timeout: float | None = None) -> Grammar:
        error = self.exception(timeout)
        if error is not None:
            raise copy(error) from error.__cause__
        return super().result()


class _Stopped(Exception):
    """A compile came to no end."""


def _for_the_library(job: Job) -> str:
    """A job's source as the library should read it.

    Raises:
        RequestError: no grammar can hold it.
    """
    if job.kind == "regex":
        try:
            return rewritten(job.source, in_json=False)
        except PatternError as error:
            raise RequestError("regex", shortened(job.source), str(error)) from None
    if job.kind != "json":
        return job.source
    value = json.loads(job.source)
    problem = refusal(value)
    if problem is not None:
        raise RequestError("json", shortened(job.source), problem)
    narrow(value)
    return json.dumps(value, ensure_ascii=False)


class _Worker:
    """One process, started when there is something to do, and again after it was stopped. For one thread at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, job: Job, vocabulary: str, seconds: float) -> Done:
        if self._process is None or self._process.poll() is not None:
            self._start(vocabulary)
        done = self._ask(job, seconds)
        if done is None:
            raise _Stopped(
                f"takes more than {seconds:g} s or too much memory to compile; make it smaller, or ask again"
            )
        return done

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()

    def _start(self, vocabulary: str) -> None:
        self.stop()
        # What the library warns of is refused before, or does not matter; nobody reads the rest.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "phonograph.engine.grammars.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._ask(vocabulary, START_SECONDS) is None:
            raise PhonographError("the process that compiles grammars could not start")

    def _ask(self, message: object, seconds: float) -> Done | None:
        """The answer to a message, or None where there is none in time; then the process is gone."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        timer = threading.Timer(seconds, process.kill)
        timer.start()
        try:
            send(process.stdin, message)
            return Done(*receive(process.stdout))
        except (EOFError, OSError):
            self.stop()
            return None
        finally:
            timer.cancel()


class _Vocabulary:
    """The tokenizer's tokens as the library wants them; `text` is the same for the other process."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        import xgrammar

        self._library: Any = xgrammar
        self._info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer.hugging_face, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)
        )
        self.text: str = self._info.serialize_json()
        # The library lets control characters into strings of bounded length, where JSON has none.
        printable = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
        printable[:vocab_size] = [_CONTROL.isdisjoint(token) for token in self._info.decoded_vocab]
        self._printable_W = np.packbits(printable, bitorder="little").view(np.int32)

    def grammar(self, compiled: str, *, is_json: bool) -> _XGrammar:
        restored = self._library.CompiledGrammar.deserialize_json(compiled, self._info)
        return _XGrammar(self._library, restored, self._printable_W if is_json else None)


class _XGrammar:
    """A compiled grammar of the library; `num_bytes` of memory. `within_W` are the tokens that it may have at all."""

    def __init__(self, library: Any, compiled: Any, within_W: np.ndarray | None) -> None:
        self._within_W = within_W
        self._library = library
        self._compiled = compiled
        self.num_bytes: int = compiled.memory_size_bytes

    def matcher(self) -> _XMatcher:
        return _XMatcher(self._library.GrammarMatcher(self._compiled), self._within_W)


class _XMatcher:
    def __init__(self, matcher: Any, within_W: np.ndarray | None) -> None:
        self._matcher = matcher
        self._within_W = within_W

    @property
    def ended(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        return self._matcher.accept_token(token_id)

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        self._matcher.fill_next_token_bitmask(bitmask_RW, row)
        if self._within_W is not None:
            bitmask_RW[row] &= self._within_W
