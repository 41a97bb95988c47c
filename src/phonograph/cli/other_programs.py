"""Command lines of llama.cpp, Ollama and vLLM's clients in the words of this program.

Words are replaced before the command line is parsed: flags of one dash with several letters, such as `-hf`, would be
read as one flag for each letter. vLLM's flags of a server are in `config.vllm_flag_table`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LOCAL_URL = "http://127.0.0.1:8000"
"""Server that clients without a model and a URL use, as vLLM's do."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "cli": ("chat",),
    "complete": ("generate", "--raw"),
    "ls": ("list",),
    "run": ("chat",),
}
"""Commands with another name here."""
ABSENT: Mapping[str, str] = {
    "completion": "--install-completion completes commands and flags in the shell",
    "cp": "--served-model-name gives a model further names",
    "create": "--system of chat, --override-generation-config and --chat-template of serve set what a Modelfile sets",
    "launch": "give the program the address of `phonograph serve`, such as http://127.0.0.1:8000/v1",
    "perplexity": "`phonograph eval` scores a model on tasks",
    "ps": "a server serves one model, which /v1/models and /server_info of the server show",
    "push": "`hf upload` sends a model to the hub",
    "quantize": "--quantization fp8 converts weights while they are loaded, and llama.cpp writes GGUF files",
    "rm": "`hf cache rm model/OWNER/NAME` removes a model that was downloaded",
    "show": "`phonograph explain MODEL` shows sizes and the plan, and /server_info of a server its settings",
    "signin": "`hf auth login` stores the token of the hub",
    "signout": "`hf auth logout` removes the token of the hub",
    "stop": "Ctrl-C or SIGTERM ends `phonograph serve`",
}
"""Commands of the other programs that are not here, each with what works."""
FLAGS: Mapping[str, str] = {
    "-m": "--model",
    "-hf": "--model",
    "-hfr": "--model",
    "--hf-repo": "--model",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-ngl": "--device",
    "--gpu-layers": "--device",
    "--n-gpu-layers": "--device",
}
"""Flags of llama.cpp, each with ours. Their values follow as the next word."""
CLIENT_FLAGS: Mapping[str, str] = {
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-sys": "--system",
    "--system-prompt": "--system",
}
"""The same of commands that print answers; `-n` of a server is vLLM's."""
CLIENTS = ("chat", "generate")
HUB_FLAGS = ("-hf", "-hfr", "--hf-repo")
LAYER_FLAGS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
PROMPTS = ("-p", "--prompt", "--quick")
"""Flags of a prompt, which is a word of its own here. --quick is vLLM's, whose clients always ask a server."""
NO_EFFECT: Mapping[str, str] = {
    "-cnv": "chat always has the chat template",
    "--conversation": "chat always has the chat template",
    "--jinja": "the model's chat template is always used",
    "--mlock": "weights stay in memory",
    "--no-mmap": "weights are read into memory",
}
"""Flags of llama.cpp for what is always so."""
TYPE = "Q4_K_M"
"""Type of a GGUF file of the hub that llama.cpp takes by default."""


@dataclass(slots=True)
class OurWords:
    """A command line in our words.

    Attributes:
        words: the words.
        notes: sentences about words without effect.
        problem: reason why there is no such command, with what works, or None.
    """

    words: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    problem: str | None = None


def our_words(words: Sequence[str]) -> OurWords:
    """Return a command line with the commands and flags of other programs replaced. Words after `--` stay."""
    found = OurWords()
    if not words:
        return found
    command, rest = words[0], iter(words[1:])
    if command in ABSENT:
        found.problem = f"there is no command {command}; {ABSENT[command]}"
    found.words += COMMANDS.get(command, (command,))
    client = found.words[0] in CLIENTS
    flags = {**FLAGS, **CLIENT_FLAGS} if client else FLAGS
    for word in rest:
        if word == "--":
            found.words += [word, *rest]
        elif word in flags:
            found.words += _flag(word, flags[word], rest, found.notes)
        elif word in NO_EFFECT:
            found.notes.append(f"{word} is llama.cpp's and has no effect here: {NO_EFFECT[word]}")
        elif word in PROMPTS and client:
            found.words += _value(rest)
            if word == "--quick" and "--url" not in words:
                found.words += ["--url", LOCAL_URL]
        else:
            found.words.append(word)
    return found


def _flag(word: str, ours: str, rest: Iterator[str], notes: list[str]) -> list[str]:
    """Return a flag with the value that follows, in our words."""
    values = _value(rest)
    if not values:
        return [ours]
    (value,) = values
    if word in HUB_FLAGS and ":" not in value:
        value = f"{value}:{TYPE}"
    elif ours == "--max-model-len" and value == "0":
        value = "auto"
    elif word in LAYER_FLAGS and value == "0":
        value = "cpu"
    elif word in LAYER_FLAGS:
        notes.append(f"{word} {value} is llama.cpp's and has no effect here: a model is on one device as a whole")
        return []
    return [ours, value]


def _value(words: Iterator[str]) -> list[str]:
    """Return the next word, or no word at the end."""
    return [word for word in (next(words, None),) if word is not None]
