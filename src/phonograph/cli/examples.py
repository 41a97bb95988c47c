"""End of each command's help: examples, and the page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

DOCS = "docs/"
"""Place of the documentation: a folder of the repository."""
_BENCH = "guides/benchmarking.md"
_EVAL = "guides/evaluating.md"


class Usage(NamedTuple):
    """Page of the documentation, and examples without the name of the program."""

    page: str
    examples: tuple[str, ...]


USAGE: Mapping[str, Usage] = {
    "": Usage("start.md", ("chat demo", "models", "explain llama-3.1-8b --device-name h200", "--install-completion")),
    "generate": Usage(
        "start.md",
        (
            "generate demo 'Ann has 5 pens and buys 4. How many has Ann?'",
            "generate demo --raw 'Tom has' --temperature 0.8",
            "generate demo - --json < prompts.txt",
            "generate --url http://127.0.0.1:8000 'Name a prime.'",
        ),
    ),
    "chat": Usage(
        "start.md",
        (
            "chat demo",
            "chat demo 'Add 12 and 7.'",
            "chat Qwen/Qwen3-0.6B --system 'Be brief.'",
            "chat --url http://127.0.0.1:8000",
        ),
    ),
    "explain": Usage(
        "guides/explain.md",
        (
            "explain demo",
            "explain llama-3.1-8b --device-name h200 --batch 1@65536,5@5",
            "explain qwen3-8b --device-name a100-80gb --matrix",
        ),
    ),
    "serve": Usage("guides/server.md", ("serve demo", "serve Qwen/Qwen3-0.6B --port 8001 --max-num-seqs 64")),
    "deploy": Usage("guides/ray.md", ("deploy demo --replicas 1-3 --device cpu", "deploy Qwen/Qwen3-0.6B -tp 2")),
    "run-batch": Usage("guides/server.md", ("run-batch demo -i requests.jsonl -o answers.jsonl",)),
    "verify": Usage("guides/verify.md", ("verify demo", "verify demo --replays 1000 --verify-seed 1 --json")),
    "pull": Usage("guides/weights.md", ("pull Qwen/Qwen3-0.6B", "pull Qwen/Qwen2.5-7B-Instruct-GGUF:Q4_K_M --json")),
    "list": Usage("guides/weights.md", ("list", "list --json")),
    "models": Usage("guides/weights.md", ("models", "models --device-name rtx4090")),
    "config": Usage("start.md", ("config demo --max-num-seqs 64", "config --config settings.yaml --json")),
    "collect-env": Usage("guides/troubleshooting.md", ("collect-env", "collect-env --json")),
    "eval": Usage(
        _EVAL,
        (
            "eval run --model_args model=demo --tasks gsm8k --limit 20",
            "eval run --model_args model=FOLDER,max_num_seqs=64 --tasks arc_easy",
            "eval ls tasks",
        ),
    ),
    "bench": Usage(_BENCH, ("bench latency demo --input-len 500", "bench serve --port 8000")),
    "bench serve": Usage(
        _BENCH,
        (
            "bench serve --host 127.0.0.1 --port 8000 --request-rate 10",
            "bench serve --endpoint /v1/chat/completions --max-concurrency 8",
            "bench serve --base-url https://example.com/api --num-prompts 9",
        ),
    ),
    "bench latency": Usage(_BENCH, ("bench latency demo --input-len 500,2000 --output-len 64",)),
    "bench steps": Usage("guides/simulating.md", ("bench steps demo --table steps.json",)),
    "simulate": Usage(
        "guides/simulating.md",
        (
            "simulate llama-3.1-8b --device-name h100 --request-rate 20 -dp 4",
            "simulate demo --step-times steps.json --trace trace.jsonl",
        ),
    ),
    "bench throughput": Usage(
        _BENCH,
        ("bench throughput demo --num-prompts 64 --input-len 100-500",),
    ),
}
"""Usage of the program and of each command, by its words."""


def epilogue(command: str) -> str:
    """Return the text below the help of a command."""
    page, examples = USAGE[command]
    lines = ["Examples:", *(f"  phonograph {example}" for example in examples), "", f"Documentation: {DOCS}{page}"]
    return "\n".join(lines)
