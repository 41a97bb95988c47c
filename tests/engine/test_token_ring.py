"""Tokens on their way to the host: early rows, which the step itself writes, and rows behind an event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

token_ring = pytest.importorskip("phonograph.runner.cuda.token_ring")
cuda_sampling = pytest.importorskip("phonograph.runner.cuda.cuda_sampling")
step_layout = pytest.importorskip("phonograph.kernels.triton.step.step_layout")

LOOKAHEAD, RING_DEPTH, EARLY_ROW = cuda_sampling.LOOKAHEAD, cuda_sampling.RING_DEPTH, step_layout.EARLY_ROW
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
WORDS, MAX_ROWS = 5, 9


class Event:
    """Answers queries by `answers`, then with True. An exception is raised."""

    answers: Iterator[bool | Exception]

    def record(self) -> None:
        """Record nothing."""

    def query(self) -> bool:
        answer = next(self.answers, True)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def synchronize(self) -> None:
        assert next(self.answers, None) is None, "the event is waited for before it is known to be done"


class Steps:
    """Steps that send random results; `units` are counts of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, depth: int = RING_DEPTH) -> None:
        self.units = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        self.upload = torch.zeros(8, dtype=torch.int32, device=DEVICE)
        self.results = torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE)
        zeros = torch.zeros
        with monkeypatch.context() as patch:
            if not ON_GPU:
                patch.setattr(torch, "zeros", lambda *sizes, pin_memory, **keywords: zeros(*sizes, **keywords))
                patch.setattr(torch.cuda, "Event", Event)
            self.ring: Any = token_ring.TokenRing(depth=depth, max_rows=MAX_ROWS, units=self.units, early_words=WORDS)

    def send(self, *, early: bool = True, changes: bool = True) -> tuple[int, list[int], list[int]]:
        """Send a step; return its ticket, its early words and its counts. The late copy has others if it `changes`."""
        words = torch.randint(0, 1 << 30, (MAX_ROWS + 3,), dtype=torch.int32)
        self.results.copy_(words[:MAX_ROWS])
        self.units.copy_(words[MAX_ROWS:])
        self.upload[EARLY_ROW : EARLY_ROW + 2] = torch.tensor(self.ring.early_row, dtype=torch.int32)
        if early:
            self.ring.send_early(self.upload, self.results)
        if changes:
            self.results += 1
            self.units += 1
        ticket = self.ring.send(self.results)
        return ticket, words[:WORDS].tolist(), words[MAX_ROWS:].tolist()

    def answer(self, *answers: bool | Exception) -> None:
        Event.answers = iter(answers)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def check_early(steps: Steps, sent: tuple[int, list[int], list[int]]) -> None:
    ticket, words, units = sent
    assert steps.ring.read_early(ticket)[:WORDS].tolist() == words
    assert [*steps.ring.units(ticket), steps.ring.shared_tiles] == units


@pytest.mark.skipif(ON_GPU, reason="events are answered by the test")
def test_early_rows_hold_until_they_are_read(steps: Steps) -> None:
    """Each is read when the steps that may be in flight have been sent and have written theirs."""
    sent = [steps.send() for _ in range(LOOKAHEAD)]
    for _ in range(4 * RING_DEPTH):
        sent.append(steps.send())
        steps.answer(AssertionError("a row that is there needs no event"))
        check_early(steps, sent.pop(0))


@pytest.mark.skipif(ON_GPU, reason="events are answered by the test")
def test_a_row_without_its_tag_is_waited_for_and_read_late(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tag of a step before in the same row is another one. Between two looks other threads run."""
    for _ in range(RING_DEPTH):
        steps.send()
    ticket, words, units = steps.send(early=False)
    slept: list[float] = []
    monkeypatch.setattr(token_ring.time, "sleep", slept.append)
    steps.answer(False, False, True)
    assert steps.ring.read_early(ticket)[:WORDS].tolist() == [word + 1 for word in words]
    assert slept == [0, 0]
    assert [*steps.ring.units(ticket), steps.ring.shared_tiles] == [unit + 1 for unit in units]


@pytest.mark.skipif(ON_GPU, reason="events are answered by the test")
def test_a_row_that_comes_while_the_host_waits(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = steps.send(early=False)
    row, (_, words, units) = steps.ring._early[sent[0] % RING_DEPTH], sent

    def arrive(_: float) -> None:
        row.copy_(torch.tensor([*words, *units, sent[0] + 1]))

    monkeypatch.setattr(token_ring.time, "sleep", arrive)
    steps.answer(False, AssertionError("the row is there"))
    check_early(steps, sent)


@pytest.mark.skipif(ON_GPU, reason="events are answered by the test")
def test_errors_of_the_device_end_the_wait(steps: Steps) -> None:
    ticket, _, _ = steps.send(early=False)
    steps.answer(False, RuntimeError("an illegal memory access"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        steps.ring.read_early(ticket)


@pytest.mark.skipif(ON_GPU, reason="events are answered by the test")
def test_tags_fit_a_word_and_are_never_zero(steps: Steps) -> None:
    steps.ring._sent = (1 << 31) - 2
    for _ in range(4):
        steps.answer()
        check_early(steps, steps.send())
        assert steps.ring.early_row[1] > 0


@pytest.mark.gpu
def test_tokens_arrive_before_the_step_ends(steps: Steps) -> None:
    steps.ring.read(steps.send()[0])  # compiles the kernels
    for _ in range(3 * RING_DEPTH):
        send_late, events = steps.ring.send, steps.ring._events

        def after_passes(results: torch.Tensor, send_late: Any = send_late) -> int:
            torch.cuda._sleep(200_000_000)
            return send_late(results)

        steps.ring.send = after_passes
        sent = steps.send(changes=False)
        steps.ring.send = send_late
        check_early(steps, sent)
        assert not events[sent[0] % RING_DEPTH].query(), "the step has ended"
        late = steps.ring.read(sent[0])
        assert late[:WORDS].tolist() == sent[1] and late[-3:].tolist() == sent[2]
