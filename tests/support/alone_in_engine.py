"""Are a request's logits and tokens the same bits alone and in batches, through the whole engine?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from demo_tasks.tasks import problems
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM

Logits = dict[tuple[tuple[int, ...], int], torch.Tensor]
"""By prompt and position, the row of logits that chose the next token."""
# What makes the batch show elsewhere: steps of few tokens cut prompts anywhere, few blocks preempt.
TIGHT = {"max_num_batched_tokens": 80, "max_cudagraph_capture_size": 64, "num_kv_blocks": 110}
ROOMY = {"max_num_batched_tokens": 8192, "max_cudagraph_capture_size": 512, "enable_prefix_caching": False}
GREEDY = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=20, temperature=0.9, top_p=0.8, seed=5, ignore_eos=True)
HOST = SamplingParams(max_tokens=12, temperature=0.9, top_k=30, seed=5, repetition_penalty=1.1, logprobs=2)

LIMITS = {"whole prompts": ROOMY, "any chunks": TIGHT}
PARAMS = {"greedy": GREEDY, "sampled": SAMPLED, "on the host": HOST}


def make_llm(**settings: Any) -> LLM:
    settings = {
        "model": "demo",
        "device": "cuda",
        "max_num_seqs": 64,
        "block_size": 16,
        "max_model_len": 512,
        **settings,
    }
    return LLM(**{"batch_invariant": True, "num_kv_blocks": 4096, **settings})


def prompts(llm: LLM, count: int) -> list[list[int]]:
    return [llm.encode_chat([{"role": "user", "content": problem.question}]) for problem in problems(3, count)]


def logits_of(
    llm: LLM, asked: Sequence[list[int]], params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> tuple[Logits, list[Any]]:
    """All logits that chose a token, and the completions."""
    runner = llm.engine.core.runner
    found: Logits = {}
    last: list[torch.Tensor] = []
    in_slot: dict[int, tuple[int, ...]] = {}
    with monkeypatch.context() as patched:
        for name in ("replay", "_run_eager"):
            run = getattr(runner, name)

            def kept(*arguments: Any, run: Any = run, **keywords: Any) -> Any:
                outputs = run(*arguments, **keywords)
                last[:] = [outputs[1].clone()]
                return outputs

            patched.setattr(runner, name, kept)
        submit = runner.submit

        def submitted(batch: Any) -> Any:
            for new in batch.new:
                in_slot[new.slot] = tuple(new.token_ids[: new.prompt_len])
            step = submit(batch)
            if last[0].is_cuda:  # the step has a stream of its own
                torch.cuda.synchronize()
            rows = zip(batch.slots, batch.context_lens, batch.query_lens, batch.samples, strict=True)
            for row, (slot, context_len, query_len, samples) in enumerate(rows):
                if samples:
                    found[in_slot[slot], context_len + query_len] = last[0][row].clone()
            return step

        patched.setattr(runner, "submit", submitted)
        outputs = llm.generate(list(asked), params)
    return found, [output.outputs[0] for output in outputs]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def differing(llm: LLM, params: SamplingParams, counts: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return where logits or tokens of the first prompts in a batch differ from those of each prompt alone."""
    asked = prompts(llm, max(counts))
    alone = [logits_of(llm, [prompt], params, monkeypatch) for prompt in asked[:3]]
    problems_found: list[str] = []
    for count in counts:
        among, completions = logits_of(llm, asked[:count], params, monkeypatch)
        for index, (single, (completion,)) in enumerate(alone[:count]):
            if completions[index].token_ids != completion.token_ids:
                problems_found.append(f"tokens of prompt {index} among {count}")
            else:
                assert len(single) == len(completion.token_ids) and single.keys() <= among.keys()
            for (prompt, position), row in single.items():
                # Where a token differs, what follows is another text.
                if (prompt, position) in among and not torch.equal(bits(row), bits(among[prompt, position])):
                    problems_found.append(f"logits of prompt {index} at {position} among {count}")
                    break
            if params.logprobs is not None:
                ours = [each.logprobs for each in completion.logprobs]
                if ours != [each.logprobs for each in completions[index].logprobs]:
                    problems_found.append(f"log-probabilities of prompt {index} among {count}")
    return problems_found
