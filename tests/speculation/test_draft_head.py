"""Draft heads on a CPU: the drafts of a plain chain in float32, and the tokens of decoding without drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import torch
from checkpoints import make_checkpoint
from drafted_requests import (
    KINDS,
    PROMPTS,
    UNFINISHED,
    PlainDecoding,
    make_llm,
    plain_decoding,
    shallow_demo,
    texts,
)

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.build import build_engine
from phonograph.engine.llm import LLM
from phonograph.engine.plan import make_plan
from phonograph.engine.session import Session
from phonograph.models.spec import read_model_spec
from phonograph.sampling.sampler import Sampler
from phonograph.scheduling import prompt_tails
from phonograph.structured.compiler import GrammarCompiler

K = 3
CHUNKS = {"max_num_batched_tokens": 16, "block_size": 16}
GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 0.8, "seed": 11}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_key_value_heads": 4, "num_hidden_layers": 1}


def speculation(head: Path, method: str = "eagle3") -> dict[str, Any]:
    return {"method": method, "model": str(head), "num_speculative_tokens": K, "adaptive_depth": False}


@pytest.fixture(scope="module")
def plain() -> PlainDecoding:
    return plain_decoding()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of random weights for the demo model."""
    torch.manual_seed(2)
    demo, folder = read_model_spec(shallow_demo()), tmp_path_factory.mktemp("head")
    sizes = SIZES | {"hidden_size": demo.hidden_size, "vocab_size": demo.vocab_size, "head_dim": 64}
    eagle_heads.make_head(folder, "eagle3", sizes, {"draft_vocab_size": 500})
    return folder


@pytest.fixture(scope="module")
def drafting(head: Path) -> LLM:
    return make_llm(speculative_config=speculation(head))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_plain_decoding(kind: str, plain: PlainDecoding, drafting: LLM) -> None:
    params = SamplingParams(**(UNFINISHED | KINDS[kind]))
    before = drafting.engine.core.scheduler.stats.drafts
    assert texts(drafting.generate(PROMPTS, params)) == texts(plain.generate(PROMPTS, params))
    verified = drafting.engine.core.scheduler.stats.drafts.verified - before.verified
    assert verified > 50 or (verified == 0) == (kind in ("one", "switched off"))


@pytest.mark.parametrize(("mode", "num_blocks"), [("FULL", 8), ("NONE", 64)])
def test_prompts_in_chunks(mode: str, num_blocks: int, plain: PlainDecoding, head: Path) -> None:
    """With preemption where there are few blocks, and prefixes that are found again where there are many."""
    settings = CHUNKS | {"cudagraph_mode": mode, "num_kv_blocks": num_blocks}
    llm = make_llm(**settings, speculative_config=speculation(head))
    several = [prompt * 3 for prompt in PROMPTS]
    for kind in ("greedy", "sampled"):
        params = SamplingParams(**(UNFINISHED | {"max_tokens": 40} | KINDS[kind]))
        assert texts(llm.generate(several, params)) == texts(plain.generate(several, params))
    stats = llm.engine.core.scheduler.stats
    assert bool(stats.num_preemptions) == (num_blocks == 8) and stats.drafts.verified > 100
    assert bool(stats.prefix_hits) == (num_blocks == 64)


def test_drafts_end_with_the_context(drafting: LLM, plain: PlainDecoding) -> None:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    prompts = [[5 + token % 50 for token in range(length)] for length in (100, 118, 126, 127)]
    assert texts(drafting.generate(prompts, params)) == texts(plain.generate(prompts, params))


def test_graphs_are_eager_steps(drafting: LLM) -> None:
    report = drafting.verify(num_replays=20)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("eagle3", {}),
        ("eagle3", {"norm_before_fc": True, "norm_output": True}),
        ("eagle3", {"fc_norm": True, "norm_before_residual": True}),
        ("eagle", {}),
    ],
    ids=["states", "norms", "norms of states", "first version"],
)
def test_drafts_are_those_of_a_plain_head(
    method: str, changes: dict[str, Any], params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After prompts in chunks, after decodes, in slots whose requests were aborted, and after prefixes that were found.

    The last two prompts of all copy the end of an equal one.

    The interpreter's drafts are compared with the same chain (tests/engine/test_gpu_path.py).
    """
    monkeypatch.setattr(prompt_tails, "WORTH_A_STEP", 1)
    torch.manual_seed(3)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
    reference = make_checkpoint("llama_bias", tmp_path / "target", **sizes, num_key_value_heads=2)
    sizes = SIZES | {"vocab_size": reference.config.vocab_size, "rms_norm_eps": reference.config.rms_norm_eps}
    config, tensors = eagle_heads.make_head(tmp_path / "head", method, sizes, changes)
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 3}
    settings |= CHUNKS | {"num_kv_blocks": 40, "speculative_config": speculation(tmp_path / "head", method)}
    target = tmp_path / "target"
    plan = make_plan(EngineConfig(model=str(target), **settings), read_model_spec(target), known_device("cpu"))
    core = build_engine(plan).core
    session = Session(core, plan.model, None, 0, GrammarCompiler(lambda: None, ()))
    inputs: Any = core.runner._inputs
    sampling: Any = core.runner._sampling
    wanted = SamplingParams(**({"max_tokens": 40, "ignore_eos": True} | params))
    sampler = Sampler(max_num_seqs=1, vocab_size=reference.config.vocab_size, device=torch.device("cpu"), seed=None)
    sampler.load(0, wanted, [], [], [], 0)
    prompts = {
        first: [first, *torch.randint(5, 100, (length,)).tolist()] for first, length in ((1, 57), (2, 9), (3, 34))
    }

    def check(slot: int) -> None:
        known = inputs.tokens_of(slot).tolist()
        count = sampling.drafts._num_found[slot]
        assert count == K
        drafts = inputs.token_ids[slot, len(known) : len(known) + count].tolist()
        chain = eagle_heads.plain_chain(reference, config, tensors, known, drafts)
        draw = len(known) - len(prompts[known[0]])
        sampled = [sampler.sample(one[None], [0], [draw + index]) for index, one in enumerate(chain.logits)]
        assert drafts == [one.token_ids[0] for one in sampled]
        said = sampling._draft_runner._head._said_RE[slot]
        assert (said - chain.feature).norm() < 1e-3 * chain.feature.norm()

    for order in ((1, 2, 3), (3, 1, 2), (1, 1, 1)):
        outputs = [session.add(prompts[first], wanted) for first in order]
        while not all(output.outputs[0].token_ids for output in outputs):
            session.step()
        for _ in range(3):
            session.step()
            for slot in range(3):
                check(slot)
        for output in outputs:
            session.abort(output)
    assert [output.num_cached_tokens for output in outputs] == [48, 57, 57]
    assert core.scheduler.stats.prefix_hits
