"""`phonograph chat`: a conversation on a terminal, or line by line from a pipe, with streamed answers."""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from phonograph.cli.answer import StreamedAnswer, print_piece, show_nothing, stream_answer
from phonograph.cli.lines import check_text, read_line
from phonograph.cli.options import takes_engine_or_url
from phonograph.cli.remote import RemoteModel
from phonograph.cli.sampling_flags import GREEDY, SamplingFlags
from phonograph.cli.show import Json, completion_facts, engine_facts, note, print_json, start, steps_text
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ModelError, RequestError

if TYPE_CHECKING:
    from phonograph.core.sampling_params import SamplingParams
    from phonograph.engine.llm import LLM

_HELP = (
    '/clear forgets the conversation, /exit ends; Ctrl-C ends an answer; """ opens and closes a turn of several lines'
)
_QUOTES = '"""'
_QUIET = "Print answers only: no steps, speed and context. Without a terminal there are no speed and context."
_CUT = {"length": " - cut where max_tokens or the context ended", "abort": " - interrupted"}


@takes_engine_or_url
def chat(
    config: EngineConfig | RemoteModel,
    *words: Annotated[str, Parameter(help="One turn to answer, instead of the lines of standard input.")],
    system: Annotated[str | None, Parameter(help="System message of the conversation.")] = None,
    sampling: SamplingFlags = GREEDY,
    quiet: Annotated[bool, Parameter(negative="", show_default=False, help=_QUIET)] = False,
    as_json: Json = False,
) -> int:
    """Talk with the model: each line of standard input is a turn. /clear forgets the conversation, /exit ends it."""
    params = sampling.params()
    turn = check_text("words", " ".join(words)) if words else None
    if isinstance(config, RemoteModel):
        if not as_json and not quiet:
            note(f"{config.name} at {config.url}")
        return _talk(_RemoteConversation(config, params, system, as_json=as_json, quiet=quiet), turn)
    llm = start(config)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ModelError(f"{config.model} has no chat template; `phonograph generate --raw` continues plain text")
    conversation = _Conversation(llm, params, system, as_json=as_json, quiet=quiet)
    if not as_json and not quiet:
        note(llm.plan.resolution.label)
    return _talk(conversation, turn)


def _talk(conversation: _Turns, turn: str | None) -> int:
    """Answer one turn, or else each line of standard input until the end or /exit. Returns the exit code."""
    if turn is not None:
        return 0 if conversation.answer(turn) else 2
    if sys.stdin.isatty():
        note(_HELP)
    while (line := _read_line()) is not None:
        if line in ("/exit", "/bye"):
            break
        if line == "/clear":
            conversation.clear()
        elif line.startswith(_QUOTES):
            if (turn := _read_turn(line.removeprefix(_QUOTES))) != "":
                conversation.answer(turn)
        elif line.startswith("/"):
            note(f"{line.split()[0]} is not a command; {_HELP}")
        elif line:
            conversation.answer(line)
    return 0


class _Turns(ABC):
    """Turns so far, and the output format of answers."""

    def __init__(self, params: SamplingParams, system: str | None, *, as_json: bool, quiet: bool) -> None:
        self._params = params
        self._start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._as_json = as_json
        self._quiet = quiet

    def clear(self) -> None:
        self._messages = list(self._start)

    @abstractmethod
    def answer(self, text: str) -> bool:
        """Answer one turn. Returns False for a refused turn, which leaves the conversation unchanged."""

    def _refuse(self, text: str, error: Exception) -> None:
        if self._as_json:
            print_json({"prompt": text, "error": str(error)})
        else:
            note(f"refused: {error}; /clear starts anew", style="red")


class _RemoteConversation(_Turns):
    """Turns with the model of a server."""

    def __init__(self, model: RemoteModel, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._model = model

    def answer(self, text: str) -> bool:
        turn = {"role": "user", "content": text}
        try:
            answer = self._model.chat(
                [*self._messages, turn], self._params, show_nothing if self._as_json else print_piece
            )
        except RequestError as error:
            self._refuse(text, error)
            return False
        reply = "".join(answer.texts[:1])
        reason = "abort" if answer.interrupted else answer.reasons.get(0)
        self._messages += [turn, {"role": "assistant", "content": reply}]
        if self._as_json:
            facts = {"url": self._model.url, "model": self._model.name, "prompt": text, "text": reply}
            print_json({**facts, "finish_reason": reason, **answer.facts()})
            return True
        print(flush=True)
        if not self._quiet:
            speed = answer.tokens_per_second
            rate = "" if speed is None else f"{speed:.1f} tokens/s, "
            note(f"{rate}first token after {answer.ttft:.2f} s{_CUT.get(reason or '', '')}")
        return True


class _Conversation(_Turns):
    """Turns with an engine of this process."""

    def __init__(self, llm: LLM, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._llm = llm

    def answer(self, text: str) -> bool:
        before = Counter(self._llm.step_counts)
        began = time.perf_counter()
        turn = {"role": "user", "content": text}
        pieces: list[str] = []
        try:
            prompt = self._llm.encode_chat([*self._messages, turn])
            answer = stream_answer(self._llm, prompt, self._params, pieces.append if self._as_json else print_piece)
        except RequestError as error:
            self._refuse(text, error)
            return False
        if not self._as_json:
            print(flush=True)
        output = answer.output
        if output is None:
            return True
        completion = output.outputs[0]
        self._messages += [turn, {"role": "assistant", "content": completion.text}]
        steps = self._llm.step_counts - before
        if self._as_json:
            facts = {
                **engine_facts(self._llm),
                "prompt": text,
                "num_prompt_tokens": len(output.prompt_token_ids),
                **completion_facts(completion),
                "num_cached_tokens": output.num_cached_tokens,
                "steps": dict(steps),
                "seconds": round(time.perf_counter() - began, 4),
                "ttft_seconds": round(answer.ttft, 4),
                "tokens_per_second": None if (speed := answer.tokens_per_second) is None else round(speed, 2),
            }
            print_json(facts)
            return True
        if self._quiet:
            return True
        note(steps_text(steps) + _CUT.get("abort" if answer.interrupted else completion.finish_reason or "", ""))
        if sys.stderr.isatty():
            note(self._speed(answer, len(output.prompt_token_ids) + len(completion.token_ids)))
        return True

    def _speed(self, answer: StreamedAnswer, context: int) -> str:
        """Return the speed of an answer and the context that the conversation takes."""
        speed = answer.tokens_per_second
        rate = "" if speed is None else f"{speed:.1f} tokens/s, "
        most = self._llm.plan.limits.max_model_len
        return f"{rate}first token after {answer.ttft:.2f} s, context {context} of {most} tokens"


def _read_turn(line: str) -> str:
    """Return a turn of several lines, from the rest of its first one to closing quotes, or to the end of the input."""
    lines = [line]
    while not lines[-1].endswith(_QUOTES) and (more := _read_line(". ")) is not None:
        lines.append(more)
    return "\n".join(lines).removesuffix(_QUOTES).strip()


def _read_line(prompt: str = "> ") -> str | None:
    """Return the next line, or None at the end. Ctrl-C clears the line being typed."""
    if not sys.stdin.isatty():
        line = read_line()
        return None if line is None else line.strip()
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            note("\n/exit ends the conversation")
