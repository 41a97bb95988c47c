"""Dispatch, capture lists, reasons and the comparison of verify, at their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError
from phonograph.graphs.capture_list import make_capture_list
from phonograph.graphs.dispatch import Dispatcher, StepShape
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, resolve_mode
from phonograph.graphs.verification import Drawn, verify


def dispatcher(mode, *, seqs=16, tokens=64, **more):
    captures = make_capture_list(mode, max_num_seqs=seqs, max_num_batched_tokens=tokens, max_capture_tokens=32, **more)
    resolution = resolve_mode(mode, Support(GraphSupport.ALWAYS, "test"), Pieces(True, "test"))
    return captures, resolution


@pytest.mark.parametrize("mode", list(GraphMode))
def test_a_step_as_large_as_they_come_has_a_decision(mode: GraphMode) -> None:
    captures, resolution = dispatcher(mode)
    made = Dispatcher(resolution, captures, max_num_tokens=64)
    for longest in (None, 64):
        assert made.decide(StepShape(num_tokens=64, num_reqs=1, decode_query_len=longest)).num_tokens == 64
    captures, resolution = dispatcher(mode, seqs=64)
    made = Dispatcher(resolution, captures, max_num_tokens=64)
    assert made.decide(StepShape(num_tokens=64, num_reqs=64, decode_query_len=1)).num_tokens == 64


def test_a_size_of_the_user_has_the_slots_that_its_tokens_fill() -> None:
    captures, _ = dispatcher(GraphMode.FULL, speculative_tokens=2, sizes=(3, 4, 6, 8))
    assert [(key.num_tokens, key.num_reqs) for key in captures.drafting] == [(3, 1), (4, 2), (6, 2), (8, 3)]
    assert [key.num_tokens for key in captures.decode] == [key.num_tokens for key in captures.mixed] == [3, 4, 6, 8]
    captures, _ = dispatcher(GraphMode.FULL, speculative_tokens=2, sizes=(3, 4, 6, 8), ragged=False)
    assert captures.drafting == tuple(GraphKey(GraphSet.DECODE, n, n // 3, 3, num_logits=n) for n in (3, 6))


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE])
@pytest.mark.parametrize("speculative_tokens", [0, 1, 3, 70])
@pytest.mark.parametrize("sizes", [None, (1, 4, 48, 64, 96, 400)])
def test_no_graph_is_larger_than_a_step(
    mode: GraphMode, speculative_tokens: int, sizes: tuple[int, ...] | None
) -> None:
    """With drafts, a step of max_num_seqs decodes may have more tokens than max_num_batched_tokens allows."""
    captures, _ = dispatcher(mode, seqs=64, tokens=64, speculative_tokens=speculative_tokens, sizes=sizes)
    keys = captures.largest_first()
    assert all(key.num_tokens <= 64 and key.logits <= key.num_tokens for key in keys) and len({*keys}) == len(keys)
    assert all(key.num_tokens == key.num_reqs for key in captures.decode)
    assert bool(captures.drafting) == (speculative_tokens > 0)
    if sizes is None:
        assert max(key.num_tokens for key in captures.decode) == 64
        notes = " ".join(captures.notes)
        assert ("no graph of decodes with drafts of more than" in notes) == (speculative_tokens > 0)


def test_full_without_any_graph_or_pieces_suggests_valid_settings() -> None:
    with pytest.raises(ConfigError, match="; NONE works"):
        resolve_mode(GraphMode.FULL, Support(GraphSupport.NEVER, "a test"), Pieces(False, "a test"))


class Subject:
    """One graph whose replay gives `got` where eager gives `expected`."""

    def __init__(self, got: list[float], expected: list[float]) -> None:
        self.got, self.expected = got, expected

    def graph_keys(self) -> tuple[GraphKey, ...]:
        return (GraphKey(GraphSet.DECODE, 4, 4, 1),)

    def prepare(self, key: GraphKey, rng: np.random.Generator) -> Drawn:
        return Drawn(num_tokens=4, num_decodes=4, num_prefills=0, longest=9, median=9)

    def replay(self, key: GraphKey) -> dict[str, torch.Tensor]:
        return {"hidden": torch.tensor(self.got)}

    def eager(self, key: GraphKey) -> dict[str, torch.Tensor]:
        return {"hidden": torch.tensor(self.expected)}


@pytest.mark.parametrize(
    ("got", "expected", "different", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0, 0.0),
        ([1.0, 2.0], [1.0, 2.5], 1, 0.5),
        ([1.0, 1.0000001], [1.0, 1.0], 1, 1.2e-7),
        ([1.0, math.nan], [1.0, math.nan], 1, math.nan),
        ([math.inf, 1.0], [math.inf, 1.0], 0, 0.0),
        ([1.0, math.nan], [1.0, 2.0], 1, math.nan),
    ],
)
def test_one_bit_of_one_element_is_a_mismatch(got, expected, different, error) -> None:
    seen: list[tuple[int, int]] = []
    report = verify(Subject(got, expected), num_replays=1, seed=0, progress=lambda *done: seen.append(done))
    assert seen == [(1, 1)]
    assert report.ok == (not different) and len(report.mismatches) == bool(different)
    for mismatch in report.mismatches:
        assert (mismatch.num_different, mismatch.num_elements) == (different, 2)
        assert mismatch.max_abs_error == pytest.approx(error, rel=0.1, nan_ok=True)


def test_the_version_may_stand_beside_the_backend_auto() -> None:
    assert EngineConfig(model="demo", flash_attn_version=3, attention_backend="auto").flash_attn_version == 3


def test_null_in_compilation_config_is_as_if_absent() -> None:
    config = EngineConfig(model="demo", cudagraph_mode="FULL", compilation_config={"cudagraph_mode": None})
    assert config.cudagraph_mode is GraphMode.FULL


def test_each_size_that_is_left_out_is_named_once() -> None:
    """With the limit that leaves it out, and without sizes that a graph has."""
    captures, _ = dispatcher(GraphMode.FULL, sizes=(4, 6, 64, 96), seqs=64, tokens=64, speculative_tokens=3)
    assert captures.notes == (
        "no graph of decodes with drafts of more than 64 tokens: a step has at most 64 of them",
        "no mixed graph of 96 tokens: a step has at most max_num_batched_tokens=64 tokens",
    )
    captures, _ = dispatcher(GraphMode.FULL, sizes=(4, 64), seqs=96, tokens=64)
    assert [note.partition(":")[0] for note in captures.notes] == ["no decode graph of more than 64 tokens"]
    captures, _ = dispatcher(GraphMode.FULL, sizes=(2, 16, 17), most_step_tokens=16)
    assert captures.notes == (
        "no decode graph of 17 tokens: a decode batch has at most max_num_seqs=16 sequences of 1 token",
        "no mixed graph of 17 tokens: a step has at most 16 tokens where requests have full length",
    )
    captures, _ = dispatcher(GraphMode.FULL, sizes=(2, 16), most_step_tokens=64)
    assert captures.notes == ()


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ((), "=\\[\\]: name at least one size"),
        ((0, 4), "=0: a size must be from 1 to 64"),
        ((65, 99), "=65: a size must be from 1 to 64"),
    ],
)
def test_sizes_without_a_graph_are_refused(sizes: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"cudagraph_capture_sizes{problem}"):
        dispatcher(GraphMode.FULL, sizes=sizes)
    assert dispatcher(GraphMode.FULL, sizes=(64, 65))[0].mixed[-1].num_tokens == 64
