"""`phonograph chat`: a conversation, each answer streamed, on a terminal or line by line from a pipe."""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from phonograph.cli.answer import print_piece, stream_answer
from phonograph.cli.lines import read_line
from phonograph.cli.options import takes_engine_config
from phonograph.cli.sampling_flags import GREEDY, SamplingFlags
from phonograph.cli.show import (
    Json,
    completion_facts,
    engine_facts,
    note,
    print_json,
    start,
    steps_text,
)
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ModelError, RequestError

if TYPE_CHECKING:
    from phonograph.core.sampling_params import SamplingParams
    from phonograph.engine.llm import LLM

_HELP = "/clear forgets the conversation, /exit ends; Ctrl-C ends an answer"


@takes_engine_config
def chat(
    config: EngineConfig,
    *,
    system: Annotated[str | None, Parameter(help="What the model is told before the conversation.")] = None,
    sampling: SamplingFlags = GREEDY,
    as_json: Json = False,
) -> int:
    """Talk with the model: each line of standard input is a turn. /clear forgets the conversation, /exit ends it."""
    params = sampling.params()
    llm = start(config)
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ModelError(f"{config.model} has no chat template; `phonograph generate --raw` continues plain text")
    conversation = _Conversation(llm, params, system, as_json)
    if not as_json:
        note(llm.plan.resolution.label)
    if sys.stdin.isatty():
        note(_HELP)
    while (line := _read_line()) is not None:
        if line == "/exit":
            break
        if line == "/clear":
            conversation.clear()
        elif line.startswith("/"):
            note(f"{line.split()[0]} is no command; {_HELP}")
        elif line:
            conversation.answer(line)
    return 0


class _Conversation:
    """The turns so far, and how the next answer is printed."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, as_json: bool) -> None:
        self._llm = llm
        self._params = params
        self._start: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._as_json = as_json

    def clear(self) -> None:
        self._messages = list(self._start)

    def answer(self, text: str) -> None:
        """Answers one turn. One that cannot be answered leaves the conversation as it was."""
        before = Counter(self._llm.step_counts)
        began = time.perf_counter()
        turn = {"role": "user", "content": text}
        try:
            output, interrupted = stream_answer(
                self._llm,
                self._llm.encode_chat([*self._messages, turn]),
                self._params,
                (lambda piece: None) if self._as_json else print_piece,
            )
        except RequestError as error:
            self._report_refusal(text, error)
            return
        if not self._as_json:
            print(flush=True)
        if output is None:
            return
        completion = output.outputs[0]
        self._messages += [turn, {"role": "assistant", "content": completion.text}]
        steps = self._llm.step_counts - before
        if self._as_json:
            print_json(
                {
                    **engine_facts(self._llm),
                    "prompt": text,
                    "num_prompt_tokens": len(output.prompt_token_ids),
                    **completion_facts(completion),
                    "num_cached_tokens": output.num_cached_tokens,
                    "steps": dict(steps),
                    "seconds": round(time.perf_counter() - began, 4),
                }
            )
            return
        cut = {"length": " - cut where max_tokens or the context ended", "abort": " - interrupted"}
        note(steps_text(steps) + cut.get("abort" if interrupted else completion.finish_reason or "", ""))

    def _report_refusal(self, text: str, error: RequestError) -> None:
        if self._as_json:
            print_json({"prompt": text, "error": str(error)})
        else:
            note(f"refused: {error}; /clear starts anew", style="red")


def _read_line() -> str | None:
    """The next line, or None at the end. Ctrl-C empties the line that is being typed."""
    if not sys.stdin.isatty():
        line = read_line()
        return None if line is None else line.strip()
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            note("\n/exit ends the conversation")
