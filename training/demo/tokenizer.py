"""Train the demo model's tokenizer (byte-level BPE, digits apart) and write its two files.

python training/demo/tokenizer.py
"""

import json
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

from text import SMALL_TALK, SYSTEM_PROMPTS
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_tasks.tasks import problems, recall_reply, recalls
from phonograph.demo import MODEL_DIRECTORY

SPECIALS = ("<|pad|>", "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|spare|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] | trim) + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def corpus(seed: int) -> Iterator[str]:
    """Text with the words of both tasks; only the training split's."""
    for item in problems(f"tokenizer {seed}", 60_000, split="train"):
        yield item.question
        yield item.worked_answer
    for fact in recalls(f"tokenizer {seed}", 3_000, 1_000, count_tokens=lambda text: len(text) // 3, split="train"):
        yield fact.prompt
        yield recall_reply(fact.key, fact.answer)
    for _ in range(50):
        for questions, answer in SMALL_TALK:
            yield from (*questions, answer)
        yield from SYSTEM_PROMPTS


def train(seed: int, vocabulary: int) -> Tokenizer:
    """Return a tokenizer of exactly `vocabulary` tokens, the special ones first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus(seed),
        trainers.BpeTrainer(
            vocab_size=vocabulary,
            special_tokens=[AddedToken(token, special=True) for token in SPECIALS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=MODEL_DIRECTORY)
    arguments = parser.parse_args()
    tokenizer = train(arguments.seed, arguments.vocabulary)
    assert tokenizer.get_vocab_size() == arguments.vocabulary, tokenizer.get_vocab_size()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out / "tokenizer.json"))
    configuration = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|pad|>",
        "additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": arguments.context,
        "chat_template": CHAT_TEMPLATE,
    }
    (arguments.out / "tokenizer_config.json").write_text(json.dumps(configuration, indent=2) + "\n")


if __name__ == "__main__":
    main()
