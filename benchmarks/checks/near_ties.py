"""Gaps between the logits of the first tokens that differ in greedy answers of two evaluations, from one engine.

Rounding decides between tokens whose logits are as good as equal, so answers that part there say nothing against
either side. Answers that part at tokens far from each other do.
"""

from __future__ import annotations

from collections.abc import Sequence

from demo_evaluation.compare import Divergence
from demo_evaluation.evaluate import Item
from demo_tasks.tasks import problems, recalls
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.errors import UNSET, ConfigError


def logit_gaps(
    llm: LLM, items: Sequence[Item], divergences: Sequence[Divergence], *, seed: int, recall_tokens: int
) -> list[float]:
    """|logit of the first token - logit of the second| at each divergence, as `llm` has them.

    Args:
        llm: the engine that judges; float32 on a CPU is the most exact.
        items: of the evaluation that was compared first.
        divergences: none behind the end of an answer.
        seed, recall_tokens: of the evaluations.

    Raises:
        ConfigError: the items are not those of this seed and length.
    """
    if not divergences:
        return []
    asked = {(item.task, item.index): item for item in items}
    prompts = _prompts(llm, items, seed, recall_tokens)
    tried: list[list[int]] = []
    for found in divergences:
        assert found.first is not None and found.second is not None
        item, prompt = asked[found.task, found.index], prompts[found.task, found.index]
        if len(prompt) != item.num_prompt_tokens:
            problem = f"asks {found.task} {found.index} in {len(prompt)} tokens, not in {item.num_prompt_tokens}"
            raise ConfigError("eval_seed", seed, problem)
        before = prompt + item.token_ids[: found.position]
        tried += [[*before, found.first], [*before, found.second]]
    outputs = llm.generate(tried, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False))
    scores: list[float] = []
    for output in outputs:
        known = output.prompt_logprobs
        last = None if known is None else known[-1]
        assert last is not None
        scores.append(last.logprobs[0])
    # Log-probabilities of one position differ as the logits do.
    return [abs(first - second) for first, second in zip(scores[::2], scores[1::2], strict=True)]


def _prompts(llm: LLM, items: Sequence[Item], seed: int, recall_tokens: int) -> dict[tuple[str, int], list[int]]:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise ConfigError("tokenizer", UNSET, "is required, since the evaluation asks in text; the model has none")
    count = {task: sum(item.task == task for item in items) for task in ("problems", "recalls")}
    texts = {("problems", index): one.question for index, one in enumerate(problems(seed, count["problems"]))}
    drawn = recalls(seed, count["recalls"], recall_tokens, count_tokens=lambda text: len(tokenizer.encode(text)))
    texts |= {("recalls", index): one.prompt for index, one in enumerate(drawn)}
    return {key: llm.encode_chat([{"role": "user", "content": text}]) for key, text in texts.items()}
