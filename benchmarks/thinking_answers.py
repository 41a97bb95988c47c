"""Answers of a thinking model with a JSON schema: are they valid, and do they think first?

    python benchmarks/thinking_answers.py --answers 500 --output RESULT.json
    python benchmarks/thinking_answers.py --url http://127.0.0.1:8000 --answers 500

Without a server it starts one of the demo model, two of whose tokens become <think> and </think>, under a template that
begins an answer with reasoning. That model does not end its reasoning by itself, so each request has a budget of it.
Half of the answers are streamed. Prints one line of JSON. Exit code 1 where an answer is invalid or has no reasoning.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jsonschema
from openai import OpenAI

from bench.result_files import output_file, write_result
from checks.processes import ServerProcess, leave_at_sigterm
from phonograph.bench.records.record import provenance
from phonograph.demo import MODEL_DIRECTORY

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from schemas import random_schema

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
MARKERS = {"<|pad|>": "<think>", "<|system|>": "</think>"}
"""Tokens of the demo model that conversations without a system message do not have."""
QUESTION = "Tom has 12 apples and buys 7 more. How many apples does Tom have? Answer as JSON."


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", help="server to ask; default: one of the demo model")
    parser.add_argument("--answers", type=int, default=500, help="finished answers to judge")
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--output", type=output_file)
    options = parser.parse_args()
    origin, start = provenance(), time.perf_counter()
    with ExitStack() as stack:
        url, largest = options.url, None
        if url is None:
            folder, largest = Path(stack.enter_context(tempfile.TemporaryDirectory())), 40
            served = [str(thinking_demo(folder)), "--reasoning-parser", "qwen3"]
            server = ServerProcess.of_checkout(served, folder / "log")
            stack.callback(server.stop)
            server.wait_until_ready(120, print)
            url = server.url
        client = OpenAI(base_url=f"{url}/v1", api_key="none", timeout=600, max_retries=0)
        model = client.models.list().data[0].id
        pool = stack.enter_context(ThreadPoolExecutor(options.concurrency))
        found: Counter[str] = Counter()
        asked = 0
        while found["finished"] < options.answers:
            numbers = range(asked, asked + options.answers - found["finished"])
            asked = numbers.stop
            for kinds in pool.map(lambda one: judged(client, model, one, options.max_tokens, largest), numbers):
                found.update(kinds)
    result = {"asked": asked, **{name: found[name] for name in ("finished", "valid", "with reasoning", "streamed")}}
    result["seconds"] = round(time.perf_counter() - start, 1)
    if options.output is not None:
        write_result(options.output, origin, result)
    print(json.dumps(result))
    return 0 if found["valid"] == found["with reasoning"] == found["finished"] else 1


def thinking_demo(folder: Path) -> Path:
    """Write the demo model with tokens and a template of reasoning to a folder; return it."""
    for file in MODEL_DIRECTORY.iterdir():
        text = file.read_text() if file.name.startswith("tokenizer") else None
        if text is None:
            (folder / file.name).symlink_to(file)
            continue
        for token, marker in MARKERS.items():
            text = text.replace(token, marker)
        if file.name == "tokenizer_config.json":
            text = json.dumps(json.loads(text) | {"chat_template": TEMPLATE})
        (folder / file.name).write_text(text)
    return folder


def judged(client: OpenAI, model: str, number: int, max_tokens: int, largest: int | None) -> list[str]:
    """Ask for one answer; return what is true of it."""
    rng = random.Random(number)
    schema = random_schema(rng)
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": max_tokens,
        "seed": number,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        "extra_body": {} if largest is None else {"thinking_token_budget": rng.randint(1, largest)},
    }
    streamed = number % 2 == 1
    if streamed:
        content, reasoning, reason = "", "", None
        for chunk in client.chat.completions.create(stream=True, **body):
            (choice,) = chunk.choices
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            reason = choice.finish_reason or reason
    else:
        (choice,) = client.chat.completions.create(**body).choices
        content, reasoning = choice.message.content or "", getattr(choice.message, "reasoning", None) or ""
        reason = choice.finish_reason
    if reason != "stop":
        return []
    kinds = ["finished", *["streamed"] * streamed, *["with reasoning"] * bool(reasoning.strip())]
    try:
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(content))
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"invalid: {content[:200]!r} of {json.dumps(schema)[:200]}: {error}", file=sys.stderr)
    else:
        kinds.append("valid")
    if not reasoning.strip():
        print(f"no reasoning: request {number}, answer {content[:200]!r}", file=sys.stderr)
    return kinds


if __name__ == "__main__":
    leave_at_sigterm()
    sys.exit(main())
