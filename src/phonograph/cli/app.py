"""The `phonograph` command: its subcommands and its error messages.

A subcommand is registered by its import path and imported when it runs, so that `phonograph --help` needs no torch.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, RepeatArgumentError, UnknownOptionError

from phonograph import __version__
from phonograph.cli.examples import epilogue
from phonograph.cli.other_programs import our_words
from phonograph.config.vllm_flags import explain_flag, no_meaning, sampling_hint, without_neutral
from phonograph.engine.startup.early_start import resume_collector, start_early
from phonograph.errors import PhonographError, help_section

COMMANDS = {
    "generate": "Continue or answer prompts, and say which graphs ran.",
    "chat": "Talk with the model, each answer streamed.",
    "explain": "Print what would run and why, for any device, without weights.",
    "serve": "Serve a model to OpenAI's clients over HTTP.",
    "deploy": "Serve a model by replicas on a Ray cluster.",
    "run-batch": "Answer the requests of a file in OpenAI's batch format.",
    "verify": "Replay every captured graph on random batches and compare with eager.",
    "eval": "Score a model on tasks of lm-evaluation-harness.",
    "simulate": "Simulate a fleet of engines on a trace of requests, without a GPU.",
    "bench": "Measure latency and throughput of an engine, or load a server.",
    "pull": "Download a model, so that a later start needs no network.",
    "list": "List downloaded models.",
    "models": "List known models, their sizes, and which of them fit the memory here.",
    "config": "Print the effective configuration and where each value comes from.",
    "collect-env": "Print versions, hardware and settings of this machine, for a report of a problem.",
}
"""Subcommands by name, each with its line in the help."""
MODULES = {"deploy": "serve"}
"""Modules of commands that share one."""
FUNCTIONS = {"list": "list_models"}
"""Functions of commands whose name is a name of Python."""
WITH_ENGINE = ("generate", "chat", "verify", "eval", "bench")
"""Commands that start an engine in this process."""
INSTALL = "--install-completion"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

app = App(
    name="phonograph",
    help="An LLM inference engine that says which attention kernels run your batch, in which CUDA graph, and why.",
    version=__version__,
    help_format="plaintext",
    help_epilogue=epilogue(""),
)
for _name, _summary in COMMANDS.items():
    _function = _name.replace("-", "_")
    _module = MODULES.get(_name, _function)
    _function, _end = ("app", {}) if _name == "bench" else (_function, {"help_epilogue": epilogue(_name)})
    _function = FUNCTIONS.get(_name, _function)
    app.command(f"phonograph.cli.commands.{_module}:{_function}", name=_name, help=_summary, **_end)
app.register_install_completion_command(
    name=INSTALL,
    help="Install completion of commands and flags for the shell: bash, zsh, fish or PowerShell.",
    help_epilogue="Examples:\n  phonograph --install-completion\n  phonograph --install-completion --shell zsh",
)


def main(tokens: Sequence[str] | None = None) -> int:
    """Run a command, by default the process's arguments.

    Returns:
        The exit code: 2 for a user error, 128 + SIGPIPE if the reader of the output is gone.
    """
    ours = our_words(sys.argv[1:] if tokens is None else tokens)
    words = ours.words
    if ours.problem is not None:
        return _user_error(ours.problem)
    for said in ours.notes:
        print(f"phonograph: {said}", file=sys.stderr)
    if _starts_engine(words):
        start_early()
    try:
        result = app(words, exit_on_error=False, print_error=False, result_action="return_value")
        print(end="", flush=True)
    except UnknownOptionError as error:
        flag = error.token.keyword or error.token.value
        rest = without_neutral(words, flag)
        if rest is not None:
            said = no_meaning(flag)
            if said is not None:
                print(f"phonograph: {said}", file=sys.stderr)
            return main(rest)
        known = {name for argument in error.argument_collection for name in argument.names}
        hint = sampling_hint(flag, known)
        return _user_error(explain_flag(flag, known) or (f"Unknown option: {flag}. {hint}" if hint else error))
    except RepeatArgumentError as error:
        rest = _without_first(words, error)
        return _user_error(error) if rest is None else main(rest)
    except (PhonographError, CycloptsError) as error:
        return _user_error(error)
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as end:
        # Rich turns a closed pipe into SystemExit.
        if isinstance(end.__context__, BrokenPipeError):
            return _broken_pipe()
        raise
    except OSError as error:
        if error.errno not in _DISK_FULL and INSTALL not in words:
            raise
        _discard_output()
        name = error.filename or "the output"
        return _user_error(f"{name} cannot be written: {error.strerror}; make room, or write elsewhere")
    finally:
        resume_collector()
    return result if isinstance(result, int) else 0


def _without_first(words: Sequence[str], error: RepeatArgumentError) -> list[str] | None:
    """Return a command line without the first use of a flag that it has several times: the last one counts."""
    command = app.parse_commands(words)[1][-1]
    arguments = command.assemble_argument_collection()
    repeated = (error.token.keyword or "").replace("_", "-")
    found = next((one for one in arguments if repeated in one.names), None)
    for place, word in enumerate(words):
        flag, equals, _ = word.partition("=")
        if found is not None and flag.replace("_", "-") in found.names:
            takes_word = not equals and not found.is_flag()
            return [*words[:place], *words[place + 1 + takes_word :]]
    return None


def _user_error(error: object) -> int:
    section = help_section(error)
    see = f" (see {section})" if section else ""
    print(f"phonograph: error: {' '.join(str(error).split())}{see}", file=sys.stderr)
    return 2


def _broken_pipe() -> int:
    _discard_output()
    return 128 + signal.SIGPIPE


def _discard_output() -> None:
    """Discard buffered output that cannot be written. Python would try again at exit and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", flush=True, file=stream)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _starts_engine(words: Sequence[str]) -> bool:
    """Return True if this process is likely to start an engine on a GPU."""
    # `bench serve` measures an engine of another process.
    return (
        bool(words)
        and words[0] in WITH_ENGINE
        and "serve" not in words[1:2]
        and not {"cpu", "--device=cpu"} & set(words)
    )
