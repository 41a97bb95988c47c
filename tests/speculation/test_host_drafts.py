"""Drafts that a host makes: none for a request that rests."""

from __future__ import annotations

import numpy as np
from speculating import Simulation, adaptive, decoding, fixed

from phonograph.core.sampling_params import SamplingParams
from phonograph.speculation.device_drafts import DeviceDrafts
from phonograph.speculation.host_drafts import HostDrafts


class Proposer:
    """Drafts the last tokens again, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def propose(self, token_ids: np.ndarray, most: int) -> np.ndarray:
        self.calls += 1
        return token_ids[-most:]


def test_no_drafts_are_made_for_a_request_that_rests() -> None:
    budget, proposer = adaptive(3, 2), Proposer()
    drafts, known = HostDrafts(proposer, budget, max_num_seqs=2), np.arange(9, dtype=np.int32)
    assert drafts.draft(1, known, len).tolist() == [6, 7, 8] and proposer.calls == 1
    simulation = Simulation(lambda slot, step: 0.0, lambda tokens, requests: tokens, number=2, most=3)
    while budget.wants_drafts(1):
        simulation.run(budget, 10)
    assert drafts.draft(1, known, len).tolist() == [] and proposer.calls == 1
    assert drafts.choose(decoding(2)) == [0, 0]


def test_drafts_end_where_a_grammar_forbids_one() -> None:
    drafts, known = HostDrafts(Proposer(), adaptive(3, 2), max_num_seqs=2), np.arange(9, dtype=np.int32)
    assert drafts.draft(1, known, lambda token_ids: token_ids.index(8)).tolist() == [6, 7]


def test_a_device_with_exact_lengths_waits_for_steps_with_drafts() -> None:
    slow, requests = np.zeros(2, np.int64), decoding(2)
    drafts = DeviceDrafts(fixed(3, 2), max_num_logits=8, slow_masks=slow, waits_for_lengths=True)
    assert not drafts.waits
    assert drafts.choose(requests) == [3, 3] and drafts.waits
    for one in requests:
        one.params = SamplingParams(speculate=False)
    assert drafts.choose(requests) == [0, 0] and not drafts.waits
