"""Parts of a step by themselves: attention as the model calls it, and the layers that launch every kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phonograph.attention.backend import AttentionLayer
from phonograph.core.batch import ScheduledBatch, SlotFailure, StepOutput
from phonograph.models.layer_spec import LayerSizes, decoder_layer
from phonograph.models.transformer import Transformer
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_program import StepProgram
from phonograph.runner.steps import take_tokens


class Backend:
    """Records its calls, and fills only the first row of an output."""

    def __init__(self, *, clears_padding: bool, reads_on_host: bool) -> None:
        self.clears_padding, self.reads_on_host = clears_padding, reads_on_host
        self.calls: list[str] = []

    def schedule(self, metadata: Any) -> None:
        self.calls.append(f"schedule {metadata}")

    def write_kv(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor, call: Any) -> None:
        self.calls.append(f"write {call.layer.index} {call.metadata}")

    def kv_places(self, call: Any, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return call.kv_cache, slot_mapping

    def forward(self, q_THD: torch.Tensor, call: Any, out_THD: torch.Tensor) -> None:
        self.calls.append(f"read {call.layer.index} {call.metadata}")
        if self.clears_padding:
            out_THD.zero_()
        out_THD[0] = 1


class Runtime:
    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def eager_call(self, function: Callable[..., None], *tensors: torch.Tensor) -> None:
        self.backend.calls.append("between")
        function(*tensors)


@pytest.mark.parametrize("clears_padding", [False, True])
@pytest.mark.parametrize("reads_on_host", [False, True])
@pytest.mark.parametrize("pieces", [False, True])
def test_calls_of_attention(clears_padding: bool, reads_on_host: bool, pieces: bool) -> None:
    backend = Backend(clears_padding=clears_padding, reads_on_host=reads_on_host)
    layers = [AttentionLayer(index=index, scale=1.0) for index in range(2)]
    caches = [torch.zeros(1), torch.ones(1)]
    slots = torch.arange(9)
    made: Any = ([backend], layers, caches, [slots], Runtime(backend))
    attend = StepAttention(*made)
    attend.pieces = pieces
    attend.metadata = ["m"]  # pyright: ignore[reportAttributeAccessIssue]
    q_THD, k_TKD = torch.full((3, 2, 4), torch.nan), torch.zeros(3, 1, 4)
    attend.schedule()
    out_THD = attend(q_THD, k_TKD, k_TKD, 1)
    assert out_THD.is_contiguous() and out_THD[0].eq(1).all() and not out_THD[1:].any()
    host = ["between"] if pieces and reads_on_host else []
    between = ["between"] if pieces else []
    assert backend.calls == [*host, "schedule m", *host, "write 1 m", *between, "read 1 m"]
    target = attend.kv_target(1, 5)
    assert (target[0] is caches[1], target[1].tolist(), target[-1]) == (True, [0, 1, 2, 3, 4], clears_padding)


@pytest.mark.parametrize(
    ("windows", "expected"),
    [
        ([(-1, -1)], [0]),
        ([(-1, -1)] * 2, [0, 1]),
        ([(-1, -1)] * 5, [0, 1, 4]),
        ([(-1, -1), (3, 0), (3, 0), (7, 0), (3, 0), (7, 0), (3, 0), (3, 0)], [0, 1, 2, 3, 4, 7]),
    ],
)
def test_few_layers_are_the_ends_and_each_kind_with_its_neighbours(
    windows: list[tuple[int, int]], expected: list[int]
) -> None:
    found: list[Sequence[int]] = []

    @contextmanager
    def only_layers(indices: Sequence[int]) -> Iterator[None]:
        found.append(indices)
        yield

    layers = [AttentionLayer(index=index, scale=1.0, window=window) for index, window in enumerate(windows)]
    specs = [decoder_layer(LayerSizes(8, 8, 2, 1, 4), window=window) for window in windows]
    program: Any = SimpleNamespace(
        attention=SimpleNamespace(layers=layers),
        model=SimpleNamespace(only_layers=only_layers, spec=SimpleNamespace(layers=specs)),
        passes=None,
    )
    with StepProgram.few_layers(program):
        assert found == [expected]
    # Scales are told apart by their tensors.
    scales = torch.ones(1), torch.ones(1)
    program.model.spec.layers = [decoder_layer(LayerSizes(8, 8, 2, 1, 4))] * 5
    program.attention.layers = [
        AttentionLayer(index=index, scale=1.0, k_scale=scales[index == 2], v_scale=scales[0]) for index in range(5)
    ]
    with StepProgram.few_layers(program):
        assert found[1] == [0, 1, 2, 4]
    # So are the layers of a draft model.
    program.passes = SimpleNamespace(model=program.model, layers=program.attention.layers[:2])
    with StepProgram.few_layers(program):
        assert found[2:] == [[0, 1, 2, 4], [0, 1, 4]]


def test_all_layers_are_back_after_few() -> None:
    layers = [
        SimpleNamespace(
            mixer=SimpleNamespace(),
            feed_forward=SimpleNamespace(),
            embedding=SimpleNamespace() if index == 4 else None,
            cross=None,
        )
        for index in range(5)
    ]
    model: Any = SimpleNamespace(layers=layers, embedding=SimpleNamespace())
    model._link = lambda some: Transformer._link(model, some)
    with pytest.raises(ValueError), Transformer.only_layers(model, [0, 4]):
        assert model._running == [layers[0], layers[4]]
        assert layers[0].feed_forward.then is layers[4].mixer
        assert layers[4].feed_forward.then is layers[4].embedding and layers[4].embedding.then is None
        raise ValueError
    assert model._running is layers and layers[0].feed_forward.then is layers[1].mixer


@pytest.mark.parametrize("samples", [[True, False, True], [False, True, True], [True] * 3, [False] * 3])
def test_only_rows_that_sample_have_a_token(samples: list[bool]) -> None:
    cuda_sampling = pytest.importorskip("phonograph.runner.cuda.cuda_sampling")
    read = torch.tensor([5, 6, 7, -9])  # the last one of an earlier step
    ring = SimpleNamespace(read=lambda ticket: read, units=lambda ticket: (2, 3))
    batch, output = ScheduledBatch(slots=[4, 2, 0], samples=samples), StepOutput()
    step = cuda_sampling.StepInFlight(output, None, batch, ring, 1, 10, None, None, None, {}, early=False)
    assert step.result() is output
    assert output.slots == list(compress([4, 2, 0], samples)) and output.failures == {}
    assert output.attention_units == (2, 3)
    assert output.token_ids == list(compress([[5], [6], [7]], samples))


@pytest.mark.parametrize("bad", [-1, -2, 10, 11])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tokens_outside_the_vocabulary_fail_their_slots(bad: int, place: int) -> None:
    right = [0, 9, 5]
    output = StepOutput()
    assert take_tokens(output, [4, 2, 7], right, 10) == right
    assert (output.slots, output.token_ids, output.failures) == ([4, 2, 7], [[0], [9], [5]], {})
    tokens = [*right[:place], bad, *right[place + 1 :]]
    slot = output.slots[place]
    take_tokens(output, [4, 2, 7], tokens, 10)
    assert output.token_ids == [[0 if token == bad else token] for token in tokens] and [*output.failures] == [slot]
    assert output.failures[slot].no_token == (bad == -1)
    assert bad == -1 or output.failures[slot].problem == f"the device returned {bad}; token ids are 0 to 9"
    first = SlotFailure("before", "a test")
    output.failures[slot] = first
    take_tokens(output, [4, 2, 7], tokens, 10)
    assert output.failures == {slot: first}
    take_tokens(output, [], [], 10)
    assert output.token_ids == []
