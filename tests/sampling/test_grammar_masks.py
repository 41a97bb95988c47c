"""Rows with a grammar: masks before sampling, matchers that follow the output, and that other rows are not touched."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from token_grammars import END, VOCAB, InTurn

from phonograph.core.sampling_params import SamplingParams
from phonograph.core.structured_outputs import StructuredOutputs
from phonograph.errors import RequestError
from phonograph.kernels.torch.sampling import mask_tokens
from phonograph.sampling import grammar_masks
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.sampler import Sampler


def make(slots: int = 3) -> Sampler:
    return Sampler(max_num_seqs=slots, vocab_size=VOCAB, device=torch.device("cpu"), seed=0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
def test_only_what_the_grammar_allows_is_sampled(temperature: float, penalty: float) -> None:
    sampler, rng = make(), torch.Generator().manual_seed(1)
    params = SamplingParams(temperature=temperature, presence_penalty=penalty, logit_bias={3: 50.0})
    sampler.load(1, params, [1], [], [END], 0, InTurn([3, 40], [31, 32, 64], [3]))
    sampler.load(0, params, [1], [], [END], 0)
    logits = torch.randn(2, VOCAB, generator=rng)
    found: list[int] = []
    for step in range(4):
        sampled = sampler.sample(logits, [0, 1], [step, step])
        assert sampled.token_ids[0] == 3 or temperature or penalty
        found.append(sampled.token_ids[1])
    assert found[0] in (3, 40) and found[1] in (31, 32, 64) and found[2:] == [3, END]
    assert logits.isfinite().all(), "the logits are only read"
    # A step in flight when the end was sampled: its token means nothing, and nothing fails.
    assert min(sampler.sample(logits, [0, 1], [4, 4]).token_ids) >= 0


def test_a_row_beside_one_with_a_grammar_draws_what_it_draws_alone() -> None:
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(2))
    drawn: list[int] = []
    for grammar in (None, InTurn([5])):
        sampler = make()
        sampler.load(0, SamplingParams(seed=4), [], [], [], 0)
        sampler.load(2, SamplingParams(seed=5), [], [], [], 0, grammar)
        drawn.append(sampler.sample(logits, [0, 2], [0, 0]).token_ids[0])
    assert drawn[0] == drawn[1]


class Slow(InTurn):
    """Takes its time, as long repeats do, and remembers who filled it."""

    def fill(self, bitmask_RW: np.ndarray, row: int) -> None:
        time.sleep(0.002)
        self.by = threading.current_thread()
        super().fill(bitmask_RW, row)

    def matcher(self) -> Slow:
        return Slow(*self.choices[:-1])


@pytest.mark.parametrize("kind", [InTurn, Slow])
def test_masks_that_take_long_are_filled_by_threads(kind: type[InTurn], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_masks, "_THREADS", 3)
    masks = grammar_masks.GrammarMasks(max_num_seqs=9, vocab_size=VOCAB, device=torch.device("cpu"))
    for slot in range(9):
        masks.load(slot, kind([slot], [slot + 20, 60]), [slot] if slot % 2 else [])
    ended = kind()
    masks.load(4, ended, [END])
    slots = [7, 4, 0, 1, 2, 3, 5, 6, 8]
    bitmask = np.zeros((12, 3), np.int32)
    failures = SlotFailures()
    masks.fill(slots, bitmask, failures)
    assert not failures.by_slot
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little").reshape(12, 96)
    assert not bits[9:].any()
    for row, slot in enumerate(slots):
        allowed = list(range(96)) if slot == 4 else [slot + 20, 60] if slot % 2 else [slot]
        assert np.flatnonzero(bits[row]).tolist() == allowed
    fillers = {getattr(masks.matcher(slot), "by", None) for slot in slots if slot != 4}
    assert fillers == {None} if kind is InTurn else 1 < len(fillers) <= 4
    with pytest.raises(IndexError):  # a bitmask that is too small concerns every slot
        masks.fill(slots, bitmask[:5], failures)


def test_a_preempted_request_goes_on_where_it_was_and_a_slot_forgets() -> None:
    sampler, logits = make(), torch.zeros(1, VOCAB)
    sampler.load(1, SamplingParams(temperature=0), [1], [7, 8], [END], 0, InTurn([7], [8], [9], [10]))
    assert sampler.grammars.constrained[:2].tolist() == [False, True] and sampler.grammars.in_use
    assert sampler.sample(logits, [1], [2]).token_ids == [9]
    sampler.clear(1)
    sampler.load(1, SamplingParams(temperature=0), [1], [], [END], 0)
    assert sampler.sample(logits, [1], [0]).token_ids == [0] and not sampler.grammars.in_use


def test_logprobs_are_those_of_the_model() -> None:
    sampler, logits = make(), torch.arange(VOCAB).float()[None]
    sampler.load(0, SamplingParams(temperature=0, logprobs=1), [], [], [END], 0, InTurn([7]))
    (found,) = sampler.sample(logits, [0], [0]).logprobs.values()
    assert found.token_ids == [7, VOCAB - 1] and found.ranks[0] == VOCAB - 7
    assert found.logprobs[0] == pytest.approx(logits[0].log_softmax(-1)[7].item())


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100])
def test_bits_are_tokens(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    allowed = rng.random((3, vocab)) < 0.5
    padded = np.zeros((3, -(-vocab // 32) * 32), np.uint8)
    padded[:, :vocab] = allowed
    words = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
    masked = mask_tokens(torch.zeros(3, vocab), words)
    assert (masked.isfinite().numpy() == allowed).all()


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "json_object": True}, "structured_outputs"),
        ({"json": "{"}, "json"),
        ({"json": "[1]"}, "json"),
        ({"json": {"enum": [float("nan")]}}, "json"),
        ({"json": {"enum": [object()]}}, "json"),
        ({"choice": []}, "choice"),
        ({"choice": "abc"}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"regex": ""}, "regex"),
        ({"grammar": "x" * 300_000}, "grammar"),
        ({"json_object": 1}, "json_object"),
        ({"jsn": {}}, "structured_outputs"),
    ],
)
def test_what_is_no_structured_output_is_refused(fields: dict[str, object], parameter: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(structured_outputs=fields)  # pyright: ignore[reportArgumentType]
    assert caught.value.parameter == parameter


def test_parameters_that_contradict_a_grammar() -> None:
    with pytest.raises(RequestError, match="contradicts structured_outputs") as caught:
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)
    assert caught.value.parameter == "ignore_eos"


def test_equal_schemas_are_equal_however_they_are_written() -> None:
    as_text = StructuredOutputs(json='{ "type":  "object" }')
    assert as_text.source == StructuredOutputs(json={"type": "object"}).source and as_text.kind == "json"
