"""Evaluate the shipped weights with transformers, apart from this project's own engine.

python training/demo/evaluate.py --out training/demo/evaluation.json
"""

import hashlib
import json
import platform
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_tasks.tasks import (
    EVALUATION_CONTEXT,
    EVALUATION_PROBLEMS,
    EVALUATION_RECALLS,
    EVALUATION_SEED,
    PROBLEM_TOKENS,
    RECALL_TOKENS,
    problems,
    recalls,
    score_problem,
    score_recall,
)
from phonograph.demo import MODEL_DIRECTORY

EXAMPLE = "Tom has 12 apples and buys 7 more. How many apples does Tom have?"


class Chat:
    """One greedy answer for each one-turn chat, in batches."""

    def __init__(self, model: Path, device: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(device).eval()
        self.prompt_tokens: list[int] = []

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    @torch.inference_mode()
    def answer(self, questions: list[str], *, new_tokens: int, rows: int) -> list[str]:
        answers: list[str] = []
        self.prompt_tokens = []
        for start in range(0, len(questions), rows):
            chats = [[{"role": "user", "content": question}] for question in questions[start : start + rows]]
            inputs = self.tokenizer.apply_chat_template(
                chats, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
            ).to(self.model.device)
            self.prompt_tokens += inputs["attention_mask"].sum(dim=1).tolist()
            output = self.model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
            answers += self.tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return answers


def evaluate_problems(chat: Chat, seed: int, count: int, rows: int) -> dict[str, Any]:
    items = list(problems(seed, count))
    answers = chat.answer([item.question for item in items], new_tokens=PROBLEM_TOKENS, rows=rows)
    right = [score_problem(item, answer) for item, answer in zip(items, answers, strict=True)]
    misses = [(item, answer) for item, answer, ok in zip(items, answers, right, strict=True) if not ok]
    return {
        "seed": seed,
        "count": count,
        "exact_match": sum(right) / count,
        "misses_by_family": dict(Counter(item.family for item, _ in misses)),
        "misses": [{"question": i.question, "expected": i.worked_answer, "generated": a} for i, a in misses[:10]],
    }


def evaluate_recalls(chat: Chat, seed: int, count: int, tokens: int, rows: int) -> dict[str, Any]:
    items = list(recalls(seed, count, tokens, count_tokens=chat.count))
    answers = chat.answer([item.prompt for item in items], new_tokens=RECALL_TOKENS, rows=rows)
    right = [score_recall(item, answer) for item, answer in zip(items, answers, strict=True)]
    misses = [(item, answer) for item, answer, ok in zip(items, answers, right, strict=True) if not ok]
    return {
        "seed": seed,
        "count": count,
        "tokens": tokens,
        "prompt_tokens": [min(chat.prompt_tokens), max(chat.prompt_tokens)],
        "exact_match": sum(right) / count,
        "misses": [{"key": i.key, "expected": i.answer, "generated": a} for i, a in misses[:10]],
    }


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIRECTORY)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=EVALUATION_SEED)
    parser.add_argument("--problems", type=int, default=EVALUATION_PROBLEMS)
    parser.add_argument("--recalls", type=int, default=EVALUATION_RECALLS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[EVALUATION_CONTEXT])
    parser.add_argument("--rows", type=int, default=250)
    parser.add_argument("--recall-rows", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", default=None, help="the commit whose scripts and model these are")
    arguments = parser.parse_args()
    started = time.monotonic()
    chat = Chat(arguments.model, arguments.device)
    report: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor(),
        "versions": {
            "python": platform.python_version(),
            **{module.__name__: module.__version__ for module in (torch, transformers, tokenizers)},
        },
        "model_sha256": hashlib.sha256((arguments.model / "model.safetensors").read_bytes()).hexdigest(),
        "parameters": sum(parameter.numel() for parameter in chat.model.parameters()),
        "example": {"question": EXAMPLE, "answer": chat.answer([EXAMPLE], new_tokens=PROBLEM_TOKENS, rows=1)[0]},
        "small_talk": chat.answer(["Hello!", "What can you do?"], new_tokens=PROBLEM_TOKENS, rows=2),
        "problems": evaluate_problems(chat, arguments.seed, arguments.problems, arguments.rows),
        "recalls": [
            evaluate_recalls(chat, arguments.seed, arguments.recalls, tokens, arguments.recall_rows)
            for tokens in arguments.tokens
        ],
    }
    report["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(report, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
