"""Cascade attention in the engine: the settings that refuse it, and the same answers with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkpoints import VOCAB_SIZE, make_checkpoint

from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import known_device
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.llm import LLM
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.errors import BackendError, ConfigError
from phonograph.graphs.modes import GraphMode
from phonograph.models.spec import read_model_spec

# -- settings ----------------------------------------------------------------------------------------------------------


def plan(device: str = "cpu", **settings: Any) -> EnginePlan:
    config = EngineConfig(model="demo", cascade_attention=True, **settings)
    return make_plan(config, read_model_spec("demo"), known_device(device))


@pytest.mark.parametrize(
    ("given_settings", "words"),
    [
        ({"max_num_seqs": 7}, "batches of 8 requests or more; max_num_seqs=7 has none"),
        ({"max_model_len": 256}, "prefixes of 256 tokens or more; max_model_len=256 has none"),
        ({"cudagraph_mode": "PIECEWISE"}, "the mode is PIECEWISE"),
        ({"enable_prefix_caching": False}, "contradicts enable_prefix_caching=False"),
    ],
)
def test_settings_that_never_cascade_are_errors(given_settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"cascade_attention=True: .*{words}"):
        plan(**given_settings)


def test_backends_that_cannot_are_refused_and_the_others_named() -> None:
    with pytest.raises(
        BackendError, match="triton refuses: cascade attention.*Would serve: flash_attn 3, flash_attn 4, flash_attn 2"
    ):
        plan("h200", attention_backend="triton")
    assert plan("h200").selection.capabilities.label == "flash_attn 3"
    with pytest.raises(ConfigError, match="the mode is PIECEWISE"):
        plan("h200", attention_backend="reference")


def test_its_graphs_count_in_the_memory() -> None:
    without = make_plan(
        EngineConfig(model="demo", attention_backend="flash_attn"), read_model_spec("demo"), known_device("h200")
    )
    extra = plan("h200").memory.graphs - without.memory.graphs
    cascades = len(plan("h200").captures.cascade)
    assert cascades == 32 and extra % cascades == 0 and extra > 0


# -- the engine --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama3")
    make_checkpoint("llama3", path)
    return str(path)


def make_llm(folder: str, **settings: Any) -> LLM:
    defaults = {
        "device": "cpu",
        "max_num_seqs": 12,
        "max_num_batched_tokens": 320,
        "block_size": 16,
        "num_kv_blocks": 160,
        "cudagraph_capture_sizes": [1, 4, 8, 12, 64],
    }
    return LLM(model=folder, **{**defaults, **settings})


def prompts(common: int, *own: int) -> list[list[int]]:
    rng = np.random.default_rng(common)
    prefix = rng.integers(3, VOCAB_SIZE, common).tolist()
    return [prefix + rng.integers(3, VOCAB_SIZE, length).tolist() for length in own]


GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
LABELS = {
    GraphMode.FULL: "full cascade decode",
    GraphMode.FULL_AND_PIECEWISE: "full cascade decode",
    GraphMode.FULL_DECODE_ONLY: "full cascade decode",
    GraphMode.NONE: "eager cascade",
}


@pytest.mark.parametrize("mode", LABELS)
def test_answers_are_the_same_with_it_and_without(mode: GraphMode, folder: str) -> None:
    """The first request computes the prefix; those behind it find its blocks, and all decode together."""
    asked = prompts(280, 5, 1, 30, 17, 9, 2, 44, 3, 12, 25)
    params = [
        SamplingParams(temperature=0.8, seed=7, max_tokens=20 + index, ignore_eos=True) if index % 3 else GREEDY
        for index in range(len(asked))
    ]
    counts, answers = {}, {}
    for cascade in (True, False):
        llm = make_llm(folder, cudagraph_mode=mode, cascade_attention=cascade)
        llm.generate(asked[:1], SamplingParams(max_tokens=1))
        outputs = llm.generate(asked, params)
        answers[cascade] = [completion.token_ids for output in outputs for completion in output.outputs]
        counts[cascade] = llm.step_counts
    assert answers[True] == answers[False]
    assert counts[True][LABELS[mode]] >= 15
    assert not any("cascade" in label for label in counts[False])
    # As many steps in all; those at the end, of few requests, are ordinary ones.
    assert sum(counts[True].values()) == sum(counts[False].values())
    assert counts[True][LABELS[mode].replace("cascade ", "").replace(" cascade", "")]


def test_no_prefix_no_cascade(folder: str) -> None:
    llm = make_llm(folder, cascade_attention=True)
    llm.generate(prompts(0, *[20] * 9), GREEDY)
    assert llm.step_counts["full decode"] >= 15 and not llm.step_counts["full cascade decode"]
    # 240 tokens are common to all, fewer than it takes.
    asked = prompts(240, *[20] * 9)
    llm.generate(asked[:1], SamplingParams(max_tokens=1))
    llm.generate(asked, GREEDY)
    assert not llm.step_counts["full cascade decode"]


def test_every_cascade_graph_equals_eager(folder: str) -> None:
    llm = make_llm(folder, cascade_attention=True)
    report = llm.verify(num_replays=60, seed=3)
    assert report.ok, [str(mismatch) for mismatch in report.mismatches[:5]]
    assert {key for key in report.replays if key.cascade} == set(llm.plan.captures.cascade)
    assert [key.num_tokens for key in llm.plan.captures.cascade] == [8, 12]


@pytest.mark.parametrize("fault", ["prefix", "suffix"])
def test_verification_finds_a_frozen_cut(fault: str, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut made of the captured batch's host numbers, instead of what lies on the device."""
    from phonograph.kernels.torch.attention import cascade

    cut_prefix = cascade.cut_prefix

    def frozen(cut: Any, prefix_len: Any, *tensors: Any, block_size: int) -> None:
        cut_prefix(cut, prefix_len, *tensors, block_size=block_size)
        if fault == "prefix":
            cut.prefix_lens.fill_(16)
        else:
            cut.suffix_table.copy_(tensors[2][:1, 1:2].expand_as(cut.suffix_table))

    monkeypatch.setattr(cascade, "cut_prefix", frozen)
    llm = make_llm(folder, cascade_attention=True, cudagraph_mode="FULL_DECODE_ONLY")
    monkeypatch.setattr(cascade, "cut_prefix", cut_prefix)
    report = llm.verify(num_replays=30)
    assert {mismatch.key.cascade for mismatch in report.mismatches} == {True}
    assert "+ 0 prefills" in (text := str(report.mismatches[0])) and "attended once" in text and report.num_mixed == 0


def test_a_cache_without_room_for_a_prefix_is_captured_all_the_same(folder: str) -> None:
    llm = make_llm(
        folder,
        cascade_attention=True,
        max_num_seqs=20,
        num_kv_blocks=20,
        max_model_len=300,
        cudagraph_capture_sizes=[20],
    )
    assert llm.plan.captures.cascade
    assert llm.verify(num_replays=10).ok
