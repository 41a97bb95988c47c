"""The training text: chats made of the demo tasks, as tokens and loss weights, one batch from one number.

A batch is a pure function of (seed, step, kind), so the position in the data is the step itself and a resumed run reads
exactly what an uninterrupted one would have read.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from demo_tasks.tasks import problem, recall, recall_question, recall_reply

ANSWER_WEIGHT: Final = 255
"""Loss weight of what the assistant says, out of 255."""
PROMPT_WEIGHT: Final = 12
"""Loss weight of the rest: enough to learn the words, little enough that drawn numbers do not drown the answers."""

Turn = tuple[str, str]
SMALL_TALK: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (
        ("Hello", "Hi", "Hello!", "Hi!", "Hi there", "Hey", "Good morning", "Good evening!", "hello", "hi"),
        "Hello! I solve arithmetic word problems and recall facts that you gave me.",
    ),
    (
        (
            "What can you do?",
            "Who are you?",
            "What are you?",
            "Help",
            "help",
            "What is this?",
            "Can you help me?",
            "Tell me about yourself.",
            "How do you work?",
            "What do you know?",
        ),
        "I am a tiny demo model. I solve arithmetic word problems and recall facts that you gave me.",
    ),
    (("Thanks", "Thank you", "Thanks!", "Thank you!", "thank you", "Great, thanks."), "You are welcome."),
    (("Bye", "Goodbye", "Bye!", "See you.", "Good night"), "Goodbye!"),
    (
        (
            "Tell me a story.",
            "Write a poem.",
            "What is the capital of France?",
            "Who wrote this?",
            "Translate this, please.",
            "What is the weather like?",
            "Why is the sky blue?",
            "Write a program.",
        ),
        "I cannot do that. I solve arithmetic word problems and recall facts that you gave me.",
    ),
)
SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "Answer the question.",
    "You are a careful teacher. Solve the problem step by step.",
    "Be brief.",
)
_WORD = re.compile(r"\d| ?[^\s\d]+|\s")


@dataclass(frozen=True, slots=True)
class Specials:
    """Ids of the tokens that frame a chat."""

    pad: int
    begin: int
    end: int
    system: int
    user: int
    assistant: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Specials":
        return cls(
            *(tokenizer.token_to_id(f"<|{name}|>") for name in ("pad", "begin", "end", "system", "user", "assistant"))
        )


class ChatWriter:
    """Writes rows of chats; one for each worker process, because it caches what words encode to."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.specials = Specials.of(tokenizer)
        self._encode_word = lru_cache(maxsize=1 << 16)(lambda word: tokenizer.encode(word).ids)

    def encode(self, text: str) -> list[int]:
        """Encode by cached words; the tokenizer splits at the same places, as tests/demo/test_tasks.py checks."""
        ids: list[int] = []
        for word in _WORD.findall(text):
            ids += self._encode_word(word)
        return ids

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def row(self, rng: Random, width: int, kind: str) -> tuple[list[int], list[int]]:
        """Tokens and loss weights of one chat of at most `width` + 1 tokens."""
        ids, weights = [self.specials.begin], [PROMPT_WEIGHT]
        if rng.random() < 0.04:
            self._say(ids, weights, self.specials.system, rng.choice(SYSTEM_PROMPTS), PROMPT_WEIGHT)
        turns = self._problem_turns(rng) if kind == "problems" else self._recall_turns(rng, width)
        for question, answer in turns:
            mark = len(ids)
            self._say(ids, weights, self.specials.user, question, PROMPT_WEIGHT)
            self._say(ids, weights, self.specials.assistant, answer, ANSWER_WEIGHT)
            if len(ids) > width + 1:
                del ids[mark:], weights[mark:]
                break
        return ids, weights

    def _say(self, ids: list[int], weights: list[int], role: int, text: str, weight: int) -> None:
        said = self.encode(text)
        ids.append(role)
        ids.extend(said)
        ids.append(self.specials.end)
        weights.append(PROMPT_WEIGHT)
        weights.extend([weight] * (len(said) + 1))

    def _problem_turns(self, rng: Random):
        while True:
            yield _problem_turn(rng)

    def _recall_turns(self, rng: Random, width: int):
        item = recall(rng, rng.randint(width // 6, width - min(400, width // 4)), self.count, "train")
        yield item.prompt, recall_reply(item.key, item.answer)
        keys = list(item.facts)
        rng.shuffle(keys)
        for key in keys:
            if rng.random() < 0.05:
                yield _problem_turn(rng)
            yield recall_question(key), recall_reply(key, item.facts[key])


def _problem_turn(rng: Random) -> Turn:
    if rng.random() < 0.02:
        questions, answer = rng.choice(SMALL_TALK)
        return rng.choice(questions), answer
    if rng.random() < 0.04:
        return _plain_turn(rng)
    item = problem(rng, "train")
    question = item.question.lower() if rng.random() < 0.03 else item.question
    return question, item.worked_answer


def _plain_turn(rng: Random) -> Turn:
    """Bare arithmetic: no part of the evaluation, but the first thing that people try."""
    a, b = rng.randint(2, rng.choice((20, 100, 400))), rng.randint(2, rng.choice((20, 100, 400)))
    factor, other = rng.randint(2, 12), rng.randint(2, 60)
    left, operator, right, result = rng.choice(
        (
            (a, "+", b, a + b),
            (a + b, "-", b, a),
            (factor, "*", other, factor * other),
            (factor * other, "/", factor, other),
        )
    )
    question = rng.choice(("What is {}?", "{}", "{} =", "{} = ?", "How much is {}?", "Compute {}.", "Calculate {}"))
    return question.format(f"{left} {operator} {right}"), f"{left} {operator} {right} = {result}. #### {result}"


def batch(writer: ChatWriter, seed: int, step: int, kind: str, rows: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens uint16 [rows, width + 1] and loss weights uint8 [rows, width + 1] of one micro-batch; padding weighs 0."""
    rng = Random(f"{seed} {step} {kind}")
    tokens = np.full((rows, width + 1), writer.specials.pad, dtype=np.uint16)
    weights = np.zeros((rows, width + 1), dtype=np.uint8)
    for index in range(rows):
        ids, row_weights = writer.row(rng, width, kind)
        tokens[index, : len(ids)] = ids
        weights[index, : len(ids)] = row_weights
    return tokens, weights
