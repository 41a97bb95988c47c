"""Draft models and heads beside a target on several ranks: tokens, drafts and acceptance are those of one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle_heads
import pytest
import torch
from checkpoints import VOCAB_SIZE, make_checkpoint
from drafted_requests import KINDS, UNFINISHED, shallow_demo, shallow_head, texts
from invariants import check_scheduler
from rank_sessions import GREEDY, PARAMS, PROMPTS, generate, plan_of, random_prompts, session_of
from thread_ranks import ThreadRanks, engine_on_threads, on_ranks

from phonograph.core.batch import DraftCounts
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.startup.start import verify_engine
from phonograph.models.heads.eagle import read_eagle
from phonograph.models.heads.shared_weights import gather_shared, num_copied, share
from phonograph.models.layers.linear import WeightAllocator
from phonograph.models.quantization.float8 import Fp8Head
from phonograph.models.quantization.scheme import Scheme
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import begin_loading
from phonograph.runner.synthetic_batches import SyntheticBatches

HEAD = {"method": "eagle3", "model": str(shallow_head()), "num_speculative_tokens": 3, "adaptive_depth": False}
MODEL = HEAD | {"method": "draft_model", "model": str(shallow_demo()), "draft_tensor_parallel_size": 1}
QUESTIONS = ["Tom has 12 apples. He buys 3 more.", "Anna has 8 books and buys 30 more."]
ANSWERS = [replace(GREEDY, max_tokens=24), SamplingParams(temperature=0.6, seed=5, max_tokens=24, ignore_eos=True)]


def run(size: int, speculation: dict[str, Any] | None, **settings: Any) -> tuple[list[list[int]], DraftCounts]:
    """Return the tokens of some requests on a number of ranks, and the counts of drafts."""
    with session_of(size, speculative_config=speculation, **settings) as session:
        outputs = generate(session, [*PROMPTS, *QUESTIONS], [*PARAMS, *ANSWERS])
        return [output.outputs[0].token_ids for output in outputs], session.core.scheduler.stats.drafts


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return run(1, None)[0]


@pytest.mark.parametrize("speculation", [HEAD, MODEL], ids=["head", "model"])
def test_tokens_and_acceptance_are_those_of_one_rank(speculation: dict[str, Any], plain: list[list[int]]) -> None:
    one, *others = (run(size, speculation) for size in (1, 2, 4))
    assert one[0] == plain and others == [one, one]
    counts = one[1]
    assert 0 < counts.accepted <= counts.verified >= 100
    assert speculation is HEAD or counts.accepted == counts.verified, "the draft model is the model"


@pytest.mark.parametrize("speculation", [HEAD, MODEL], ids=["head", "model"])
def test_a_draft_model_has_whole_blocks_where_ranks_share_tokens(
    speculation: dict[str, Any], plain: list[list[int]]
) -> None:
    one, *others = (
        run(size, speculation, decode_context_parallel_size=divided, block_size=8 // divided)
        for size, divided in ((1, 1), (4, 2))
    )
    assert one[0] == plain and others == [one]


@pytest.mark.parametrize("speculation", [HEAD, MODEL], ids=["head", "model"])
def test_whatever_requests_ask_for(speculation: dict[str, Any]) -> None:
    """Preemption, prefixes that are found again, grammars, penalties, samples and scores, with every graph mode."""
    prompts: list[Any] = [*random_prompts(7, 60, 30, 25), *QUESTIONS, random_prompts(7, 60)[0] + [9, 10]]
    kinds = "samples", "penalized", "prompt scored", "ruled", "counted", "switched off"
    params = [SamplingParams(**(UNFINISHED | {"max_tokens": 40} | KINDS[kind])) for kind in kinds]
    results: list[Any] = []
    for size, mode in ((1, "FULL"), (2, "FULL"), (2, "NONE"), (2, "FULL_AND_PIECEWISE")):
        settings = {"num_kv_blocks": 24, "max_model_len": 150, "cudagraph_mode": mode}
        with session_of(size, speculative_config=speculation, **settings) as session:
            outputs = generate(session, prompts, params)
            outputs += generate(session, prompts[:2], [GREEDY] * 2)
            check_scheduler(session.core.scheduler)
            stats = session.core.scheduler.stats
            assert stats.num_preemptions and stats.prefix_hits
            results.append((texts(outputs), stats.drafts))
    assert results[1:] == results[:1] * 3


@pytest.mark.parametrize("speculation", [HEAD, MODEL], ids=["head", "model"])
def test_graphs_are_eager_steps_on_every_rank(speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks verify by the same batches."""
    drawn: dict[int, list[Any]] = {}

    def noted(self: SyntheticBatches, *arguments: Any) -> Any:
        found = random_batch(self, *arguments)
        drawn.setdefault(id(self), []).append((self.latest.query_lens, self.latest.context_lens))
        return found

    random_batch = SyntheticBatches.random_batch
    monkeypatch.setattr(SyntheticBatches, "random_batch", noted)
    with engine_on_threads(plan_of(2, speculative_config=speculation)) as engine:
        report = verify_engine(engine, num_replays=100)
        assert report.ok, report.mismatches[:3]
    lead, following = drawn.values()
    assert lead == following and len(lead) == 100


@pytest.mark.parametrize(("speculation", "copies"), [(HEAD, 2048 * 256), (MODEL, 0)], ids=["head", "model"])
def test_the_plan_has_room_for_a_whole_draft_model(speculation: dict[str, Any], copies: int) -> None:
    one, two = (plan_of(size, speculative_config=speculation) for size in (1, 2))
    assert one.draft is not None and two.draft is not None
    assert two.draft.model == one.draft.model and two.draft.page_bytes == one.draft.page_bytes
    assert two.draft.weight_bytes == one.draft.weight_bytes + 4 * copies
    plain = plan_of(2)
    assert two.memory.weights == plain.memory.weights + two.draft.weight_bytes
    assert two.memory.block == plain.memory.block + two.draft.page_bytes
    (note,) = (note for note in two.notes if note.startswith("draft "))
    assert "it is on rank 0" in note and ("2.0 MiB of copies" in note) == (speculation is HEAD)


@pytest.mark.parametrize("by_outputs", [False, True], ids=["cpu", "gpu"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("tied", "owned", "scheme", "copies"),
    [
        (False, (), None, 2),
        (False, ("embed_tokens",), None, 1),
        (False, ("lm_head",), None, 1),
        (True, (), None, 1),
        (True, ("embed_tokens",), None, 1),
        (True, ("lm_head",), None, 1),
        (True, ("embed_tokens", "lm_head"), None, 0),
        (True, (), Fp8Head(origin="a test", scales="channel"), 2),
        (False, (), Fp8Head(origin="a test", scales="channel"), 2),
    ],
)
def test_copies_are_the_matrices_of_the_target(
    tied: bool, owned: tuple[str, ...], scheme: Scheme | None, copies: int, size: int, by_outputs: bool,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The vocabulary is one that no number of ranks divides."""
    monkeypatch.setattr(WeightAllocator, "by_outputs", by_outputs)
    make_checkpoint("llama3", tmp_path, num_hidden_layers=1, tie_word_embeddings=tied)
    target = read_model_spec(tmp_path)
    target = target if scheme is None else target.with_head_scheme(scheme)
    settings: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    sizes = {"vocab_size": VOCAB_SIZE, "rms_norm_eps": target.rms_norm_eps}
    (tmp_path / "config.json").write_text(json.dumps(eagle_heads.FIRST | sizes))
    spec = read_eagle(tmp_path, target, method="eagle", tensors={f"{name}.weight" for name in owned}).model
    features = spec.features
    assert features is not None and num_copied(features, target) == copies * VOCAB_SIZE * 64

    def loaded(rank: tuple[int, int]) -> Transformer:
        with begin_loading(target, tmp_path, **settings, rank=rank) as loading:
            loading.finish()
            return loading.model

    def on_rank(ranks: ThreadRanks) -> Transformer | None:
        part, head = loaded((ranks.rank, size)), None
        if ranks.rank == 0:
            head = Transformer(spec, **settings)
            share(head, part)
            assert head.features is not None and isinstance(head.features.embedding_VE, torch.Tensor)
            with torch.inference_mode():
                for matrix in (head.features.embedding_VE, head.lm_head.matrix):
                    matrix.fill_(torch.nan)
        gather_shared(features, part, ranks, head)
        return head

    head, whole = on_ranks(size, on_rank)[0], loaded((0, 1))
    assert head is not None and head.features is not None
    embedding_VE, head_EV = head.features.embedding_VE, head.lm_head.product(torch.eye(64))
    assert isinstance(embedding_VE, torch.Tensor) and isinstance(whole.embedding_VE, torch.Tensor)
    assert head.lm_head.spec.scheme is None and head.lm_head.matrix.t().is_contiguous() is by_outputs
    if "embed_tokens" in owned:
        assert embedding_VE.isnan().all()
    else:
        assert torch.equal(embedding_VE, whole.embedding_VE)
    if "lm_head" in owned:
        assert head_EV.isnan().all()
    else:
        assert torch.equal(head_EV, whole.lm_head.product(torch.eye(64)))
    one = embedding_VE.untyped_storage().data_ptr() == head.lm_head.matrix.untyped_storage().data_ptr()
    assert one == (copies == 1 and not owned)
