"""`phonograph chat`: turns from a pipe and from a terminal, history, commands, interruption, and overflow."""

from __future__ import annotations

import io
import re
import signal
import sys
from typing import Any

import pytest

from phonograph.cli.app import main
from phonograph.cli.commands import chat as chat_module

FIRST = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"
SECOND = "Ann has 5 pens and buys 4 more. How many pens does Ann have?"


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put lines on standard input."""
    return lambda *lines: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def test_turns_of_a_pipe_keep_the_history(run_json: Any, demo: list[str], type_lines: Any) -> None:
    type_lines(FIRST, SECOND, "", "/clear", FIRST, "/exit", SECOND)
    first, second, again = run_json("chat", *demo)
    assert first["text"].split()[-1] == "19"
    history = first["num_prompt_tokens"] + len(first["token_ids"])
    assert second["num_prompt_tokens"] > history, "the second turn is told the first and its answer"
    assert second["num_cached_tokens"] >= history // 16 * 16 - 16, "which are in the prefix cache, but for a block"
    assert (again["num_prompt_tokens"], again["token_ids"]) == (first["num_prompt_tokens"], first["token_ids"])
    assert first["steps"] == {"full mixed": 1, "full decode": len(first["token_ids"]) - 1}
    assert sum(again["steps"].values()) == len(again["token_ids"]), "steps are those of the turn"


@pytest.mark.parametrize("end", ["/exit", "/bye"])
def test_a_command_ends_the_conversation(end: str, run_json: Any, demo: list[str], type_lines: Any) -> None:
    type_lines(end, FIRST)
    assert run_json("chat", *demo) == []


@pytest.mark.parametrize(
    ("lines", "turns"),
    [
        (['"""Tom has', "12 apples.", '  """', "Hi"], ["Tom has\n12 apples.", "Hi"]),
        (['"""One line."""', "Hi"], ["One line.", "Hi"]),
        (['"""', "/exit", "", '9"""'], ["/exit\n\n9"]),
        (['""""""', '"""', '"""', "Hi"], ["Hi"]),
        (['"""No end', "/clear"], ["No end\n/clear"]),
    ],
)
def test_a_turn_of_several_lines(
    lines: list[str], turns: list[str], run_json: Any, demo: list[str], type_lines: Any
) -> None:
    type_lines(*lines)
    assert [answer["prompt"] for answer in run_json("chat", *demo, "--max-tokens", "1")] == turns


def test_the_system_message_comes_first_and_survives_clear(run_json: Any, demo: list[str], type_lines: Any) -> None:
    type_lines(FIRST)
    (plain,) = run_json("chat", *demo, "--max-tokens", "1")
    type_lines(FIRST, "/clear", FIRST)
    told, again = run_json("chat", *demo, "--max-tokens", "1", "--system", "Answer in one word.")
    assert told["num_prompt_tokens"] == again["num_prompt_tokens"] > plain["num_prompt_tokens"]


def test_answers_go_to_stdout_and_the_rest_to_stderr(
    demo: list[str], type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    type_lines(FIRST, "/shout", SECOND)
    assert main(["chat", *demo]) == 0
    captured = capsys.readouterr()
    answers = captured.out.splitlines()
    assert len(answers) == 2 and answers[0].endswith("19")
    mode, steps, unknown, _ = captured.err.splitlines()
    assert mode == "mode FULL (default)"
    assert "full decode, 1 full mixed" in steps
    assert unknown.startswith("/shout is not a command; /clear ")


def test_a_terminal_shows_speed_and_context_unless_quiet(
    run_json: Any,
    demo: list[str],
    type_lines: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    type_lines(FIRST)
    (row,) = run_json("chat", *demo)
    count = row["num_prompt_tokens"] + len(row["token_ids"])
    assert 0 < row["ttft_seconds"] < row["seconds"]
    later = (len(row["token_ids"]) - 1) / row["tokens_per_second"]
    assert 0 < later <= row["seconds"] - row["ttft_seconds"] + 1e-3
    # Rich reads a terminal from its environment, and the command from the stream.
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    speed = rf"[\d.]+ tokens/s, first token after [\d.]+ s, context {count} of 8192 tokens"
    for flags, shown in (((), True), (("--quiet",), False)):
        type_lines(FIRST)
        assert main(["chat", *demo, *flags]) == 0
        captured = capsys.readouterr()
        assert captured.out.endswith("19\n")
        assert bool(re.search(speed, captured.err)) == ("full decode" in captured.err) == shown


def test_a_conversation_that_overflows_goes_on_after_clear(
    run_json: Any, demo: list[str], type_lines: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [*demo, "--max-model-len", "64", "--max-tokens", "20"]
    type_lines(FIRST, SECOND, FIRST, "/clear", SECOND)
    rows = run_json("chat", *small)
    refused = [row for row in rows if "error" in row]
    assert refused and len(rows) == 4
    assert "64" in refused[0]["error"]
    assert "error" not in rows[0] and "error" not in rows[-1]
    type_lines(FIRST, SECOND, FIRST, "/clear", SECOND)
    assert main(["chat", *small]) == 0
    assert "refused: " in (error := capsys.readouterr().err) and "/clear starts anew" in error


def test_ctrl_c_ends_the_answer_and_not_the_program(
    demo: list[str], type_lines: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []

    def interrupt(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat_module, "print_piece", interrupt)
    type_lines(FIRST, SECOND)
    assert main(["chat", *demo]) == 0
    _, interrupted, finished = capsys.readouterr().err.splitlines()
    assert interrupted.endswith(" - interrupted") and "interrupted" not in finished
    assert len(pieces) > 4 and "".join(pieces).endswith("9"), "the second answer is whole"


def test_a_terminal_is_prompted_and_survives_ctrl_c(
    demo: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    typed = iter([KeyboardInterrupt, FIRST, EOFError])

    def read(prompt: str) -> str:
        assert prompt == "> "
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", read)
    assert main(["chat", *demo]) == 0
    captured = capsys.readouterr()
    assert captured.out.endswith("19\n")
    assert "/exit ends the conversation" in captured.err


def test_a_model_without_chat_template_is_refused(tiny: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", *tiny]) == 2
    assert "has no chat template; `phonograph generate --raw`" in capsys.readouterr().err
