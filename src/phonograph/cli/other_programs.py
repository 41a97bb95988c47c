"""Command lines of llama.cpp, Ollama and vLLM's clients in the words of this program.

`llama-server`, `llama-cli` and `llama-bench` are the commands `serve`, `chat` (or `cli`) and `bench`. Words are
replaced before the command line is parsed: flags of one dash with several letters, such as `-hf`, would be read as one
flag for each letter. vLLM's flags of a server are in `config.vllm_flag_table`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LOCAL_URL = "http://127.0.0.1:8000"
"""Server that clients without a model and a URL use, as vLLM's do."""
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "cli": ("chat",),
    "complete": ("generate", "--raw"),
    "help": ("--help",),
    "ls": ("list",),
    "run": ("chat",),
    "version": ("--version",),
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
    "-b": "--max-num-batched-tokens",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-ngl": "--device",
    "--gpu-layers": "--device",
    "--n-gpu-layers": "--device",
    "--chat-template-file": "--chat-template",
    "-to": "--request-timeout",
    "--timeout": "--request-timeout",
}
"""Flags of llama.cpp, each with ours. Their values follow as the next word."""
CLIENT_FLAGS: Mapping[str, str] = {
    "-n": "--max-tokens",
    "--predict": "--max-tokens",
    "--n-predict": "--max-tokens",
    "-s": "--sampling-seed",
    "-j": "--json-schema",
    "-jf": "--json-schema-file",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "-r": "--stop",
    "--reverse-prompt": "--stop",
    "-sys": "--system",
    "--system-prompt": "--system",
}
"""The same of commands that print answers; `-n` of a server is vLLM's."""
BENCH_FLAGS: Mapping[str, str] = {
    "-p": "--input-len",
    "--n-prompt": "--input-len",
    "-n": "--output-len",
    "--n-gen": "--output-len",
    "-r": "--num-iters",
    "--repetitions": "--num-iters",
}
"""The same of llama-bench, which is `bench latency`."""
LOAD_FLAGS: Mapping[str, str] = {"--random-input-len": "--input-len", "--random-output-len": "--output-len"}
"""Flags of vLLM's `bench serve`, each with ours."""
CLIENTS = ("chat", "generate")
COMMANDS_WITH_FLAGS = (*CLIENTS, "serve", "explain", "config", "verify", "pull")
"""Commands whose flags are replaced, besides some of `bench`; `eval` has those of its harness."""
HUB_FLAGS = ("-hf", "-hfr", "--hf-repo")
LAYER_FLAGS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
PROMPTS = ("-p", "--prompt", "--quick")
"""Flags of a prompt, which is a word of its own here. --quick is vLLM's, whose clients always ask a server."""
NO_EFFECT: Mapping[str, str] = {
    "-cb": "requests always share steps",
    "--cont-batching": "requests always share steps",
    "-cnv": "chat always has the chat template",
    "--conversation": "chat always has the chat template",
    "--jinja": "the model's chat template is always used",
    "--metrics": "a server always has /metrics",
    "--mlock": "weights stay in memory",
    "--no-display-prompt": "the prompt is not printed",
    "--no-mmap": "weights are read into memory",
    "--nowordwrap": "lines are not wrapped",
    "-st": "chat answers a turn of its command line alone",
    "--single-turn": "chat answers a turn of its command line alone",
    "--stats": "chat shows its speed on a terminal",
    "--verbose": "chat shows its speed on a terminal",
}
"""Flags of llama.cpp, Ollama and vLLM's clients for what is always so."""
VALUES_WITHOUT_EFFECT: Mapping[str, str] = {
    "-fa": "attention kernels are always fused, and --attention-backend chooses one",
    "--flash-attn": "attention kernels are always fused, and --attention-backend chooses one",
    "--keepalive": "a model stays in memory while its command runs",
    "-ub": "--max-num-batched-tokens bounds a step",
}
"""The same with a value; llama.cpp's older -fa has none."""
SWITCHES, SWITCH_VALUES = ("-fa", "--flash-attn"), ("on", "off", "auto", "0", "1")
"""Flags among them that have a value only if it is one of these."""
_DRAFT = '--speculative-config {"model": "DRAFT", "num_speculative_tokens": 4} drafts with a second model'
_EMBEDDINGS = "LLM.embed and LLM.score are there in Python, and endpoints are not yet"
_THREADS = "the variable OMP_NUM_THREADS sets the threads of a CPU"
_TEMPLATE = "`phonograph generate --raw` continues a text without a chat template"
_FILE = "the file's name goes after the repository's: --model OWNER/NAME:FILE.gguf"
_THINK = (
    "--default-chat-template-kwargs of serve and chat_template_kwargs of a request set variables of a chat template"
)
_CACHE = "--kv-cache-dtype sets the type of the KV cache"
ABSENT_FLAGS: Mapping[str, str] = {
    "--api-key-file": "the variable PHONOGRAPH_API_KEY keeps a key out of the command line",
    "-ctk": _CACHE,
    "-ctv": _CACHE,
    "--cache-type-k": _CACHE,
    "--cache-type-v": _CACHE,
    "--embedding": _EMBEDDINGS,
    "--embeddings": _EMBEDDINGS,
    "--rerank": _EMBEDDINGS,
    "--reranking": _EMBEDDINGS,
    "-f": "`phonograph generate - < FILE` reads a prompt from each line of a file",
    "--file": "`phonograph generate - < FILE` reads a prompt from each line of a file",
    "--grammar": "--grammar-file of chat and generate reads a grammar from a file",
    "-hff": _FILE,
    "--hf-file": _FILE,
    "-hft": "the variable HF_TOKEN is the token of the hub",
    "--in-prefix": _TEMPLATE,
    "--in-suffix": _TEMPLATE,
    "--lora": "LoRA adapters are not here yet; merge the adapter into the weights",
    "-md": _DRAFT,
    "--model-draft": _DRAFT,
    "-mu": "download the file and give its path",
    "--model-url": "download the file and give its path",
    "-t": _THREADS,
    "--threads": _THREADS,
    "--think": _THINK,
}
"""Flags of llama.cpp and Ollama that are not here, each with what works."""
SERVER_ABSENT_FLAGS: Mapping[str, str] = {
    "--grammar-file": "each request has a grammar of its own, in structured_outputs",
    **dict.fromkeys(
        ("-j", "--json-schema", "-jf", "--json-schema-file", "--format"),
        "response_format of a request takes a JSON schema",
    ),
}
"""The same of a server."""
HELP = ("-h", "--help")
LISTS = ("--api-key", "--admin-api-key", "--served-model-name")
"""Flags of a server with several values."""
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
    command, rest = words[0], deque(words[1:])
    if command in ABSENT:
        found.problem = f"there is no command {command}; {ABSENT[command]}"
    found.words += COMMANDS.get(command, (command,))
    if command == "bench" and words[1:2] and words[1].startswith("-") and words[1] not in HELP:
        found.words.append("latency")
    tables = _tables([*found.words, *words[1:2]])
    if tables is None:
        found.words += rest
        return found
    flags, absent = tables
    client = found.words[0] in CLIENTS
    while rest:
        word = rest.popleft()
        name = word.partition("=")[0]
        if word == "--":
            found.words += [word, *rest]
            break
        if name == "--help" != word:
            found.words.append(name)  # vLLM's help has parts.
        elif word in flags:
            found.words += _flag(word, flags[word], rest, found.notes)
        elif name in LISTS and found.words[0] == "serve":
            _add_values(found, word, rest, several=not words[1].startswith("-"))
        elif word in NO_EFFECT:
            found.notes.append(f"{word} has no effect here: {NO_EFFECT[word]}")
        elif name in VALUES_WITHOUT_EFFECT:
            found.notes.append(f"{name} has no effect here: {VALUES_WITHOUT_EFFECT[name]}")
            if "=" not in word and (name not in SWITCHES or (rest and rest[0] in SWITCH_VALUES)):
                _value(rest)
        elif name in absent:
            found.problem = found.problem or f"{name} is not here; {absent[name]}"
        elif word in PROMPTS and client:
            found.words += _value(rest)
            if word == "--quick" and "--url" not in words:
                found.words += ["--url", LOCAL_URL]
        else:
            found.words.append(word)
    _share_context(found, words)
    return found


def _tables(words: Sequence[str]) -> tuple[Mapping[str, str], Mapping[str, str]] | None:
    """Return the flags of a command that have another name here, and those that are not here; or None."""
    if words[0] in CLIENTS:
        return {**FLAGS, **CLIENT_FLAGS}, ABSENT_FLAGS
    if words[:2] == ["bench", "latency"]:
        return {**FLAGS, **BENCH_FLAGS}, ABSENT_FLAGS
    if words[:2] == ["bench", "serve"]:
        return LOAD_FLAGS, {}
    if words[0] == "serve":
        return FLAGS, {**ABSENT_FLAGS, **SERVER_ABSENT_FLAGS}
    return (FLAGS, ABSENT_FLAGS) if words[0] in COMMANDS_WITH_FLAGS else None


def _add_values(found: OurWords, word: str, rest: deque[str], *, several: bool) -> None:
    """Join the values of a flag, which may be there several times.

    With `several`, it has each word up to the next flag. Without a model before it, the next word may be the model.
    """
    flag, equals, value = word.partition("=")
    values = [value] if equals else _value(rest)
    while several and rest and not rest[0].startswith("-"):
        values += _value(rest)
    if values and flag in found.words:
        found.words[found.words.index(flag) + 1] += f",{','.join(values)}"
    else:
        found.words += [flag, *([",".join(values)] if values else ())]


def _share_context(found: OurWords, typed: Sequence[str]) -> None:
    """Divide llama.cpp's size of the context by its number of slots, which share it."""
    slots = {"-np", "--parallel"}.intersection(typed)
    if not slots or not {"-c", "--ctx-size"}.intersection(typed):
        return
    try:
        context = found.words.index("--max-model-len") + 1
        total, count = int(found.words[context]), int(found.words[found.words.index("--max-num-seqs") + 1])
    except (ValueError, IndexError):
        return
    if count > 1:
        found.words[context] = str(total // count)
        found.notes.append(f"{count} requests share {total} tokens: each has a context of {total // count}")


def _flag(word: str, ours: str, rest: deque[str], notes: list[str]) -> list[str]:
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
        notes.append(f"{word} {value} has no effect here: a model is on one device as a whole")
        return []
    return [ours, value]


def _value(words: deque[str]) -> list[str]:
    """Remove and return the next word, or no word at the end."""
    return [words.popleft()] if words else []
