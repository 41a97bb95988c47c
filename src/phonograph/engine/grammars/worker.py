"""The process that compiles: reads jobs from its standard input, writes what came of them to its standard output.

Started as a program, not by `multiprocessing`: that would run the user's own script again. Messages are JSON behind its
length.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import sys
from typing import IO, Any, NamedTuple

from phonograph.engine.grammars.names import told_apart
from phonograph.frames import framed, read_frame

MEMORY_BYTES = 2 * 2**30
"""What a grammar may take while it is compiled, beside the process itself."""
CPU_SECONDS = 60
"""What a grammar may take if nobody is left to stop it."""
MAX_WHITESPACE = 40
"""Characters of whitespace in a row in JSON: enough for any indentation. Weak models go on with it for ever."""
_WHERE = re.compile(r"\A\[[0-9:]+\] \S+:\d+: ")
"""Time and place that the library puts before its messages."""


class Job(NamedTuple):
    """A structured output to compile; `kind` and `source` are those of `StructuredOutputs`."""

    kind: str
    source: str
    any_whitespace: bool


class Done(NamedTuple):
    """What came of a job: the grammar in the library's own text, or a problem."""

    compiled: str
    problem: str | None


def send(stream: IO[bytes], message: object) -> None:
    stream.write(framed(json.dumps(message).encode()))
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message.

    Raises:
        EOFError: the other end is gone.
    """
    return json.loads(read_frame(stream))


def main() -> None:
    """Compiles until its input ends. The first message is the vocabulary."""
    # Ctrl-C is for the process that started this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import xgrammar

    source, target = sys.stdin.buffer, sys.stdout.buffer
    vocabulary = xgrammar.TokenizerInfo.deserialize_json(receive(source))
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1)
    _limit_memory()
    send(target, Done("", None))
    while True:
        try:
            job = Job(*receive(source))
        except EOFError:
            return
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        send(target, _compiled(compiler, job))
        # Kept for what comes again within a job, as five e-mail addresses; for longer the library's memory would grow.
        compiler.clear_cache()


def _compiled(compiler: Any, job: Job) -> Done:
    try:
        return Done(_compile(compiler, job).serialize_json(), None)
    except MemoryError:
        return Done("", f"takes more than {MEMORY_BYTES >> 20} MiB to compile")
    except (RuntimeError, ValueError, TypeError, RecursionError) as error:
        problem = _WHERE.sub("", str(error)).strip()
        if "bad_alloc" in problem:
            problem = f"takes more than {MEMORY_BYTES >> 20} MiB to compile"
        return Done("", f"cannot be compiled: {problem[:500]}")


def _compile(compiler: Any, job: Job) -> Any:
    if job.kind in ("json", "json_object"):
        source = job.source or '{"type": "object"}'
        whitespace: dict[str, Any] = {
            "any_whitespace": job.any_whitespace,
            "max_whitespace_cnt": MAX_WHITESPACE if job.any_whitespace else None,
        }
        if "additionalProperties" in source:
            from xgrammar import Grammar

            apart = told_apart(str(Grammar.from_json_schema(source, **whitespace)))
            if apart is not None:
                return compiler.compile_grammar(apart)
        return compiler.compile_json_schema(source, **whitespace)
    if job.kind == "regex":
        return compiler.compile_regex(job.source)
    if job.kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(job.source))
        return compiler.compile_grammar(f"root ::= {choices}")
    return compiler.compile_grammar(job.source)


def _limit_memory() -> None:
    """From here on: importing has taken address space that is not used."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, size + MEMORY_BYTES))
    except OSError:  # no /proc: the limit of time is left
        return


if __name__ == "__main__":
    main()
