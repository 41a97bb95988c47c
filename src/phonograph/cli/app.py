"""The `phonograph` command: its commands by name, and what an error looks like.

Commands are named by where they are and imported when they are run, so that `phonograph --help` needs no torch.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError, UnknownOptionError

from phonograph import __version__
from phonograph.cli.vllm_flags import explain_flag
from phonograph.engine.startup.early_start import resume_collector, start_early
from phonograph.errors import PhonographError

COMMANDS = {
    "generate": ("phonograph.cli.commands.generate:generate", "Continue or answer prompts, and say which graphs ran."),
    "chat": ("phonograph.cli.commands.chat:chat", "Talk with the model, each answer streamed."),
    "explain": (
        "phonograph.cli.commands.explain:explain",
        "Print what would run and why, for any device, without weights.",
    ),
    "serve": ("phonograph.cli.commands.serve:serve", "Serve a model to OpenAI's clients over HTTP."),
    "verify": (
        "phonograph.cli.commands.verify:verify",
        "Replay every captured graph on random batches and compare with eager.",
    ),
    "eval": (
        "phonograph.cli.commands.eval:app",
        "Score the demo model on held-out tasks, and compare such evaluations.",
    ),
    "bench": (
        "phonograph.cli.commands.bench:app",
        "Measure published workloads, attention kernels, start-up, idle time.",
    ),
    "config": (
        "phonograph.cli.commands.config:config",
        "Print the effective configuration and where each value comes from.",
    ),
}
"""What each command is: the function that runs it, and one line for the help."""
WITH_ENGINE = ("generate", "chat", "verify", "eval", "bench")
"""Commands that start an engine in this process."""
OF_OTHER_PROCESSES = (("bench", "serve"), ("bench", "startup"))
"""What measures engines that are not here."""
_FULL = (errno.ENOSPC, errno.EDQUOT)

app = App(
    name="phonograph",
    help="An LLM inference engine that says which attention kernels run your batch, in which CUDA graph, and why.",
    version=__version__,
    help_format="plaintext",
)
for _name, (_function, _summary) in COMMANDS.items():
    app.command(_function, name=_name, help=_summary)


def main(tokens: Sequence[str] | None = None) -> int:
    """Runs the command that `tokens` (or the process's arguments) name; returns the exit code: 2 for a user error, and
    what a shell has for the signal where the reader of the output is gone."""
    words = sys.argv[1:] if tokens is None else tokens
    if _starts_engine(words):
        start_early()
    try:
        result = app(tokens, exit_on_error=False, print_error=False, result_action="return_value")
        print(end="", flush=True)
    except UnknownOptionError as error:
        known = {name for argument in error.argument_collection for name in argument.names}
        _say(explain_flag(error.token.keyword or error.token.value, known) or " ".join(str(error).split()))
        return 2
    except (PhonographError, CycloptsError) as error:
        _say(" ".join(str(error).split()))
        return 2
    except BrokenPipeError:
        return _reader_gone()
    except SystemExit as end:
        # Rich makes this of a closed pipe.
        if isinstance(end.__context__, BrokenPipeError):
            return _reader_gone()
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _say(f"{error.filename or 'the output'} cannot be written: {error.strerror}; make room, or write elsewhere")
        _drop_unwritten()
        return 2
    finally:
        resume_collector()
    return result if isinstance(result, int) else 0


def _say(text: str) -> None:
    print(f"phonograph: error: {text}", file=sys.stderr)


def _reader_gone() -> int:
    _drop_unwritten()
    return 128 + signal.SIGPIPE


def _drop_unwritten() -> None:
    """Lets go of output that nobody takes, or Python would try again at its end and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            print(end="", flush=True, file=stream)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _starts_engine(words: Sequence[str]) -> bool:
    """Whether this process is likely to start one on a GPU."""
    if tuple(words[:2]) in OF_OTHER_PROCESSES and "--once" not in words:
        return False
    return bool(words) and words[0] in WITH_ENGINE and not {"cpu", "--device=cpu"} & set(words)
