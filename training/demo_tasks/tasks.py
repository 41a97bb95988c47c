"""The demo model's two tasks, generated from a seed: worked word problems, and recall of facts from a long context.

The same module writes the training text and the evaluation, so it also keeps the two apart. Every problem belongs to
one split, decided by a hash of its family and its numbers: a held-out problem's family never meets its numbers in
training, whatever the names and the wording. A recall's facts are split alike, by a hash of key and code.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Final, Literal

from demo_tasks.families import FAMILIES, Family
from demo_tasks.words import COLORS, CONTAINERS, DAYS, FEMALE, MALE, OBJECTS, PLACES, THINGS, filler, pseudo_word

Split = Literal["train", "held-out"]

EVALUATION_SEED: Final = 20_000
"""Seed of the held-out evaluation; the training text has another one, and another split."""
EVALUATION_PROBLEMS: Final = 1_000
EVALUATION_RECALLS: Final = 300
EVALUATION_CONTEXT: Final = 3_500
"""Tokens that a recall's chat has at least."""

PROBLEM_TOKENS: Final = 200
"""Generated tokens that are enough for any worked answer."""
RECALL_TOKENS: Final = 48
"""Generated tokens that are enough for any recall's answer."""

_HELD_OUT_ONE_IN: Final = 16
_PSEUDO_WORD_SHARE: Final = 0.06
_FILLER_SHARE: Final = 0.08
_FINAL = re.compile(r"####\s*(-?\d+)\s*$")
_NUMBER = re.compile(r"\d+")
_FACTS: Final = (
    "The code of the {key} is {code}.",
    "The code of the {key} is {code}.",
    "Note that the code of the {key} is {code}.",
    "The {key} has the code {code}.",
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A word problem, its worked answer as an assistant writes it, and the number that decides."""

    question: str
    worked_answer: str
    answer: int
    family: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """A long prompt that ends in a question; `answer` is the code asked for, `facts` all codes by key, in order."""

    prompt: str
    answer: str
    key: str
    facts: dict[str, str]


def split_of(identity: str) -> Split:
    """Return the split of a problem or a fact from the text that identifies it; one in sixteen is held out."""
    digest = blake2b(identity.encode(), digest_size=4).digest()
    return "held-out" if int.from_bytes(digest, "little") % _HELD_OUT_ONE_IN == 0 else "train"


def problem_split(family: str, numbers: tuple[int, ...]) -> Split:
    """Return the split of every problem of this family over these numbers."""
    return split_of(f"{family} {' '.join(map(str, numbers))}")


def fact_split(key: str, code: str) -> Split:
    """Return the split of the fact that `key` has this code."""
    return split_of(f"{key}={code}")


def problems(seed: int | str, count: int, *, split: Split = "held-out") -> Iterator[Problem]:
    """Yield `count` problems of one split; the same seed gives the same problems."""
    rng = Random(f"problems {seed}")
    for _ in range(count):
        yield problem(rng, split)


def recalls(
    seed: int | str, count: int, tokens: int, *, count_tokens: Callable[[str], int], split: Split = "held-out"
) -> Iterator[Recall]:
    """Yield `count` recalls of one split, each prompt a sentence or less above `tokens` by `count_tokens`."""
    rng = Random(f"recalls {seed}")
    for _ in range(count):
        yield recall(rng, tokens, count_tokens, split)


def problem(rng: Random, split: Split) -> Problem:
    """Draw one problem of this split."""
    family = rng.choice(FAMILIES)
    numbers = family.draw(rng)
    while problem_split(family.name, numbers) != split:
        numbers = family.draw(rng)
    scene = _scene(rng) | dict(zip("abcde", map(str, numbers), strict=False))
    sentences = [rng.choice(family.setups).format_map(scene), rng.choice(family.questions).format_map(scene)]
    if rng.random() < _FILLER_SHARE:
        sentences.insert(0, _numberless_filler(rng))
    worked, answer = _work(family, numbers)
    return Problem(" ".join(sentences), worked, answer, family.name, numbers)


def recall(rng: Random, tokens: int, count_tokens: Callable[[str], int], split: Split) -> Recall:
    """Draw one recall: facts among fillers up to the budget, then the question for one of them."""
    fact_share = rng.uniform(0.2, 0.6)
    facts: dict[str, str] = {}
    sentences = ["Read these notes and remember the codes."]
    question = count_tokens(recall_question("red fox"))
    left = tokens - count_tokens(sentences[0]) - question - 5  # 5: the line feed and the chat's own tokens
    while left > 0 or not facts:
        key = f"{rng.choice(COLORS)} {rng.choice(THINGS)}" if not facts or rng.random() < fact_share else None
        if key in facts:
            continue
        code = "" if key is None else _code(rng, key, split)
        sentence = filler(rng) if key is None else rng.choice(_FACTS).format(key=key, code=code)
        left -= count_tokens(" " + sentence)
        sentences.append(sentence)
        if key is not None:
            facts[key] = code
    asked = rng.choice(tuple(facts))
    return Recall(f"{' '.join(sentences)}\n{recall_question(asked)}", facts[asked], asked, facts)


def recall_question(key: str) -> str:
    """Return the question for the code of `key`."""
    return f"What is the code of the {key}?"


def recall_reply(key: str, code: str) -> str:
    """Return the assistant's answer to `recall_question`."""
    return f"The code of the {key} is {code}."


def extract_answer(text: str) -> int | None:
    """Return the number after the final `####`, or None if the text does not end in one."""
    match = _FINAL.search(text)
    return int(match.group(1)) if match else None


def extract_code(text: str) -> str | None:
    """Return the last run of digits in a recall's answer, or None."""
    codes = _NUMBER.findall(text)
    return codes[-1] if codes else None


def score_problem(item: Problem, text: str) -> bool:
    """Return True if the generated text ends in the right number."""
    return extract_answer(text) == item.answer


def score_recall(item: Recall, text: str) -> bool:
    """Return True if the generated text names exactly the right code."""
    return extract_code(text) == item.answer


def _code(rng: Random, key: str, split: Split) -> str:
    """Draw a code of four digits that makes a fact of this split."""
    code = str(rng.randint(1000, 9999))
    while fact_split(key, code) != split:
        code = str(rng.randint(1000, 9999))
    return code


def _scene(rng: Random) -> dict[str, str]:
    """Draw the names, objects and places of one problem."""
    female = rng.random() < 0.5
    name, other = rng.choice(FEMALE if female else MALE), rng.choice(MALE if female else FEMALE)
    objects = rng.choice(OBJECTS)
    if rng.random() < _PSEUDO_WORD_SHARE:
        name = pseudo_word(rng).capitalize()
    if rng.random() < _PSEUDO_WORD_SHARE:
        objects = pseudo_word(rng) + "s"
    things = rng.choice(OBJECTS)
    while things == objects:
        things = rng.choice(OBJECTS)
    containers = rng.choice(CONTAINERS)
    while containers == objects:
        containers = rng.choice(CONTAINERS)
    he = "she" if female else "he"
    return {
        "name": name,
        "other": other,
        "he": he,
        "He": he.capitalize(),
        "his": "her" if female else "his",
        "objects": objects,
        "things": things,
        "containers": containers,
        "place": rng.choice(PLACES),
        "day": rng.choice(DAYS),
    }


def _numberless_filler(rng: Random) -> str:
    """Draw a filler without numbers, since an extra number would make some questions ambiguous."""
    while _NUMBER.search(sentence := filler(rng)):
        pass
    return sentence


def _work(family: Family, numbers: tuple[int, ...]) -> tuple[str, int]:
    """Solve a problem; return the worked answer (one equation a sentence, the result after `####`) and the result."""
    known = dict(zip("abcde", numbers, strict=False))
    lines: list[str] = []
    result = 0
    for index, step in enumerate(family.steps, start=1):
        left_name, operator, right_name = step.split()
        left, right = (known[word] if word in known else int(word) for word in (left_name, right_name))
        match operator:
            case "+":
                result = left + right
            case "-":
                result = left - right
            case "*":
                result = left * right
            case _:
                result, remainder = divmod(left, right)
                assert remainder == 0, f"{family.name}: {left} is not a multiple of {right}"
        known[f"#{index}"] = result
        lines.append(f"{left} {operator} {right} = {result}.")
    return f"{' '.join(lines)} #### {result}", result
