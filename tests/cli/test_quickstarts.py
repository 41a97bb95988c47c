"""A newcomer types what the quickstarts of vLLM, llama.cpp and Ollama have, with the name of the command changed.

Names of the hub stand for the demo model: a repository that ends in -GGUF has it as a GGUF file, another as a folder.
Commands that serve start their engine, and a request is answered by it; one server answers the requests over HTTP.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from commands import run
from gguf_files import tokenizer_header, write_gguf
from servers import EngineThread, Server, serving

from phonograph import LLM, SamplingParams
from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.config.server_config import ServerConfig
from phonograph.demo import MODEL_DIRECTORY

SERVED = "Qwen/Qwen2.5-1.5B-Instruct"
HOST = "http://localhost:8000"
VLLM = {
    "a server": f"phonograph serve {SERVED}",
    "its models": f"curl {HOST}/v1/models",
    "a completion": f"""curl {HOST}/v1/completions -H "Content-Type: application/json" \
        -d '{{"model": "{SERVED}", "prompt": "San Francisco is a", "max_tokens": 7, "temperature": 0}}'""",
    "a chat": f"""curl {HOST}/v1/chat/completions -H "Content-Type: application/json" -d '{{"model": "{SERVED}",
        "messages": [{{"role": "system", "content": "You are a helpful assistant."}},
                     {{"role": "user", "content": "Who won the world series in 2020?"}}]}}'""",
    "a context by suffix": "phonograph serve meta-llama/Llama-2-7b-hf --port 8100 --max-model-len 1k",
    "a socket": "phonograph serve meta-llama/Llama-2-7b-hf --uds vllm.sock",
    "help of a flag": "phonograph serve --help=max-num-seqs",
    "a chat with a server": f"phonograph chat --url {HOST}/v1",
    "one question": 'phonograph chat --quick "hi"',
    "one completion": 'phonograph complete --quick "The future of AI is"',
    "latency": "phonograph bench latency --model meta-llama/Llama-3.2-1B-Instruct --input-len 32 --output-len 1 "
    "--enforce-eager --load-format dummy",
    "load": "phonograph bench serve --model meta-llama/Llama-3.2-1B-Instruct --host localhost --port 8000 "
    "--random-input-len 32 --random-output-len 4 --num-prompts 5",
    "a batch": "phonograph run-batch -i batch.jsonl -o results.jsonl --model meta-llama/Meta-Llama-3-8B-Instruct",
}
LLAMA_CPP = {
    "a chat with a file of the hub": "phonograph cli -hf ggml-org/Qwen3.5-0.8B-GGUF",
    "a server of a file of the hub": "phonograph serve -hf ggml-org/Qwen3.5-0.8B-GGUF",
    "slots": "phonograph serve -m model.gguf --port 8080 -c 16384 -np 4",
    "a conversation": "phonograph cli -m model.gguf -cnv -ngl 99 -p 'You are a helpful assistant'",
    "a grammar": "phonograph cli -m model.gguf -n 256 --grammar-file grammars/json.gbnf "
    "-p 'Request: schedule a call at 8pm; Command:'",
    "speed": "phonograph bench -m model.gguf -p 512 -n 16 -r 1",
    "a draft model": "phonograph serve -m model.gguf -md draft.gguf",
}
OLLAMA = {
    "a model of the hub": 'phonograph run hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M "Why is the sky blue?"',
    "a download": "phonograph pull hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q8_0",
    "downloads": "phonograph ls",
    "running models": "phonograph ps",
    "a model of its library": "phonograph run gemma3",
}
ABSENT = {
    "a draft model": "drafts with a second model",
    "running models": "which /v1/models and /server_info of the server show",
    "a model of its library": "a GGUF file of the hub has a name such as owner/name-GGUF:Q4_K_M",
}
"""Tasks that do not work, each with the end of the message, which names what works."""
TASKS = {**VLLM, **LLAMA_CPP, **OLLAMA}
JSON_GRAMMAR = r"""
root ::= "{" ws string ":" ws string "}"
string ::= "\"" [a-zA-Z0-9 ]{1,9} "\""
ws ::= " "?
"""
"""Short, so that the demo model ends it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the demo model as GGUF."""
    folder = tmp_path_factory.mktemp("models")
    header = tokenizer_header(MODEL_DIRECTORY, "llama-bpe")
    write_gguf(folder / "model.gguf", MODEL_DIRECTORY, lambda _: "Q8_0", header=header)
    return folder


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineThread]:
    with EngineThread() as thread:
        yield thread


@pytest.fixture(scope="module")
def server(engine: EngineThread) -> Iterator[Server]:
    with serving(engine, ServerConfig(served_model_name=f"{SERVED},meta-llama/Llama-3.2-1B-Instruct")) as server:
        yield server


@pytest.fixture
def place(models: Path, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the newcomer's folder, with a hub of the demo model, and the server where quickstarts expect one."""
    hub = tmp_path / "hub"

    def files(repo: str) -> dict[str, Path]:
        if repo.endswith("-GGUF"):
            return {f"model-{kind}.gguf": models / "model.gguf" for kind in ("Q4_K_M", "Q8_0")}
        if "/" not in repo:
            raise ConnectionError("no such repository")
        return {path.name: path for path in MODEL_DIRECTORY.iterdir() if path.is_file()}

    def download(repo: str, *, local_files_only: bool, **_: Any) -> str:
        folder = hub / repo
        if local_files_only and not folder.exists():
            raise FileNotFoundError(folder)
        for name, path in files(repo).items():
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / name).exists():
                (folder / name).symlink_to(path)
        return str(folder)

    def info(_: Any, repo: str, **__: Any) -> SimpleNamespace:
        return SimpleNamespace(siblings=[SimpleNamespace(rfilename=name, size=9) for name in files(repo)])

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", info)
    # Else transformers asks the hub for the tokenizer.
    monkeypatch.setattr("phonograph.text.tokenizer.uses_modelscope", lambda: True)
    monkeypatch.setattr("phonograph.cli.options.LOCAL_URL", server.url)
    monkeypatch.setattr("phonograph.cli.other_programs.LOCAL_URL", server.url)
    monkeypatch.setattr("phonograph.server.http.run.serve", answer_one_request)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False, buffer=None, readline=lambda: ""))
    monkeypatch.setenv("PHONOGRAPH_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("PHONOGRAPH_CUDAGRAPH_CAPTURE_SIZES", "1,2,4")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").symlink_to(models / "model.gguf")
    (tmp_path / "grammars").mkdir()
    (tmp_path / "grammars/json.gbnf").write_text(JSON_GRAMMAR)
    # The engine of a batch is in another process, which has the hub's client as it is.
    (tmp_path / "meta-llama").mkdir()
    (tmp_path / "meta-llama/Meta-Llama-3-8B-Instruct").symlink_to(MODEL_DIRECTORY)
    body = {"model": "meta-llama/Meta-Llama-3-8B-Instruct", "messages": [{"role": "user", "content": "Hi"}]}
    request = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {**body, "max_tokens": 5}}
    (tmp_path / "batch.jsonl").write_text(json.dumps(request) + "\n")
    return tmp_path


def answer_one_request(config: EngineConfig, server: ServerConfig, *_: Any) -> int:
    """Start the engine of a server, answer a request, and print the most important settings."""
    with LLM(config=config) as llm:
        (output,) = llm.generate("Tom has", SamplingParams(max_tokens=3, temperature=0))
        facts = {"context": llm.plan.limits.max_model_len, "seqs": llm.plan.limits.max_num_seqs}
        print(json.dumps({**facts, "model": config.model, "port": server.port, "uds": server.uds}))
    return 0 if len(output.outputs[0].token_ids) == 3 else 1


def curl(words: list[str], server: Server) -> Any:
    """Send a request as curl does, and return the JSON of the answer."""
    url, *options = words
    values = dict(itertools.pairwise(options))
    headers = [values["-H"].split(": ")] if options else []
    method = "POST" if options else "GET"
    answer = httpx.request(method, url.replace(HOST, server.url), content=values.get("-d"), headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def served(**expected: Any) -> Callable[[str], bool]:
    return lambda out: json.loads(out.splitlines()[-1]).items() >= expected.items()


GGUF = "ggml-org/Qwen3.5-0.8B-GGUF:Q4_K_M"
WORKS: dict[str, Callable[[str], object]] = {
    "a server": served(model=SERVED, port=8000),
    "a context by suffix": served(port=8100, context=1000),
    "a socket": served(uds="vllm.sock"),
    "help of a flag": lambda out: "--max-num-seqs" in out,
    "a chat with a server": lambda out: out == "",
    "one question": lambda out: out.strip(),
    "one completion": lambda out: out.strip(),
    "latency": lambda out: re.search(r"\beager\b", out),
    "load": lambda out: "5" in out,
    "a batch": lambda _: json.loads(Path("results.jsonl").read_text())["response"]["status_code"] == 200,
    "a chat with a file of the hub": lambda out: out == "",
    "a server of a file of the hub": served(model=GGUF),
    "slots": served(port=8080, seqs=4, context=4096),
    "a conversation": lambda out: out.strip(),
    "a grammar": lambda out: json.loads(out),
    "speed": lambda out: "512" in out,
    "a model of the hub": lambda out: out.strip(),
    "a download": lambda out: "model-Q8_0.gguf" in out,
    "downloads": lambda out: out == "",
}
"""Output of each task that works."""


def test_there_are_25_tasks_of_which_22_work() -> None:
    assert len(VLLM) + len(LLAMA_CPP) + len(OLLAMA) == len(TASKS) == 25
    commands = {task for task, line in TASKS.items() if line.startswith("phonograph")}
    assert len(ABSENT) == 3 and commands == {*WORKS, *ABSENT} and not {*WORKS} & {*ABSENT}


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ABSENT])
def test_a_task_that_works(task: str, place: Path, server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    program, *words = shlex.split(TASKS[task])
    if program == "curl":
        answer = curl(words, server)
        assert answer["object"] == "list" or answer["choices"][0]["finish_reason"]
        return
    port = server.url.rpartition(":")[2]
    if task in ("a chat with a server", "load"):
        words = [
            word.replace(HOST, server.url).replace("8000", port).replace("localhost", "127.0.0.1") for word in words
        ]
    assert WORKS[task](run(capsys, *words))


@pytest.mark.parametrize("task", ABSENT)
def test_a_task_that_does_not_work_names_what_does(task: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(TASKS[task])[1:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("phonograph: error: ") and line.endswith(ABSENT[task])
