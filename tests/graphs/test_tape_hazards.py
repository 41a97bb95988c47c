"""Each hazard of a CUDA graph as a test that fails if the tape forgives it.

On a device these fail silently; here they are documentation of what a captured graph does.
"""

from __future__ import annotations

import pytest
import torch

from phonograph.errors import CaptureError
from phonograph.graphs.tape.tape import TapeRuntime

REPEATS = torch.ones(5, dtype=torch.int64)
START = torch.tensor(1)
library = torch.library.Library("phonograph_test", "FRAGMENT")
library.define("scaled_sum(Tensor x, Tensor count, float scale, Tensor(a!) out) -> ()")


def _scaled_sum(x: torch.Tensor, count: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    rows = int(count[0])  # reads contents when it runs, as a kernel does
    out.fill_(0)
    out[:rows] = x[:rows] * scale


library.impl("scaled_sum", _scaled_sum, "CPU")


@pytest.fixture
def runtime() -> TapeRuntime:
    return TapeRuntime()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(5, 7)


def test_replay_computes_with_new_contents(runtime: TapeRuntime, x: torch.Tensor) -> None:
    weight, bias = torch.randn(3, 7), torch.randn(3)

    def step() -> tuple[torch.Tensor, ...]:
        hidden = torch.nn.functional.linear(x, weight, bias)
        left, right = torch.nn.functional.silu(hidden), hidden.exp()
        return torch.cat([left, right], dim=1).softmax(-1), left.mul(2).add_(right)

    graph = runtime.capture(step)
    for _ in range(3):
        x.copy_(torch.randn(5, 7))
        runtime.poison()
        graph.replay()
        with torch.inference_mode():
            expected = step()
        assert all(torch.equal(got, want) for got, want in zip(graph.outputs, expected, strict=True))


def test_stale_python_scalar(runtime: TapeRuntime, x: torch.Tensor) -> None:
    scale = {"value": 2.0}
    graph = runtime.capture(lambda: (x * scale["value"],))
    scale["value"] = 3.0
    graph.replay()
    assert torch.equal(graph.outputs[0], x * 2.0), "a replay must use the scalar of the capture"


def test_stale_scalar_of_an_opaque_operator_beside_live_contents(runtime: TapeRuntime, x: torch.Tensor) -> None:
    count, out, scale = torch.tensor([2]), torch.empty(5, 7), {"value": 2.0}

    def step() -> tuple[torch.Tensor, ...]:
        torch.ops.phonograph_test.scaled_sum(x, count, scale["value"], out)
        return (out,)

    graph = runtime.capture(step)
    scale["value"] = 3.0
    count.fill_(4)
    graph.replay()
    expected = torch.zeros(5, 7)
    expected[:4] = x[:4] * 2.0
    assert torch.equal(out, expected), "the scalar is frozen, the tensor's contents are read at replay"


def test_stale_python_branch_and_list(runtime: TapeRuntime, x: torch.Tensor) -> None:
    dims = [0]
    graph = runtime.capture(lambda: (x.sum(dims),))
    dims[0] = 1
    graph.replay()
    assert graph.outputs[0].shape == (7,)
    assert torch.equal(graph.outputs[0], x.sum(0))


def test_moved_address(runtime: TapeRuntime, x: torch.Tensor) -> None:
    held = {"x": x}
    graph = runtime.capture(lambda: (held["x"] + 1,))
    held["x"] = torch.randn(5, 7)
    graph.replay()
    assert torch.equal(graph.outputs[0], x + 1), "a replay reads the address of the capture"


def test_moved_address_behind_the_same_tensor(runtime: TapeRuntime, x: torch.Tensor) -> None:
    old = x.clone()
    alias = x.view_as(x)
    graph = runtime.capture(lambda: (x + 1,))
    x.set_(torch.randn(5, 7))
    graph.replay()
    assert torch.equal(graph.outputs[0], old + 1)
    alias.copy_(torch.randn(5, 7))
    graph.replay()
    assert torch.equal(graph.outputs[0], alias + 1), "the old memory is still what the graph reads"


def test_changed_stride(runtime: TapeRuntime) -> None:
    square = torch.randn(6, 6)
    graph = runtime.capture(lambda: (square * 2,))
    before = square.clone()
    square.t_()
    graph.replay()
    assert torch.equal(graph.outputs[0], before * 2), "a replay reads memory with the strides of the capture"


def test_output_overwritten_by_the_next_replay(runtime: TapeRuntime, x: torch.Tensor) -> None:
    graph = runtime.capture(lambda: (x * 2,))
    graph.replay()
    first = graph.outputs[0]
    kept = first.clone()
    x.copy_(torch.randn(5, 7))
    graph.replay()
    assert not torch.equal(first, kept), "outputs live in the graph's memory, not in the caller's"


def test_output_overwritten_by_another_graph(runtime: TapeRuntime, x: torch.Tensor) -> None:
    one = runtime.capture(lambda: (x * 2,))
    other = runtime.capture(lambda: (x * 3,))
    one.replay()
    kept = one.outputs[0].clone()
    other.replay()
    assert not torch.equal(one.outputs[0], kept), "graphs share one memory pool"


def test_intermediates_share_memory_and_outputs_do_not(runtime: TapeRuntime, x: torch.Tensor) -> None:
    def chain() -> tuple[torch.Tensor, ...]:
        early = x + 1
        value = early
        for _ in range(50):
            value = value * 1.01
        return value, early

    graph = runtime.capture(chain)
    assert runtime.memory_bytes <= 5 * 192, "50 intermediates must not take 50 buffers"
    runtime.poison()
    graph.replay()
    with torch.inference_mode():
        assert all(torch.equal(got, want) for got, want in zip(graph.outputs, chain(), strict=True))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: __import__("numpy").asarray(x),
        lambda x: float(x[0, 0]),
        lambda x: int(x[0, 0]),
        lambda x: bool(x[0, 0] > 0),
        lambda x: 1 if (x > 0).any() else 0,
        lambda x: torch.equal(x, x),
        lambda x: torch.allclose(x, x),
        lambda x: torch.is_nonzero(x[0, 0]),
        lambda x: torch.narrow(x, 0, START, 1),
        lambda x: x.narrow(0, START, 1),
        lambda x: __import__("numpy").from_dlpack(x),
        lambda x: torch.utils.dlpack.from_dlpack(x),
    ],
    ids=[
        *("item", "tolist", "numpy", "asarray", "float", "int", "bool", "if", "equal", "allclose", "is_nonzero"),
        *("narrow", "narrow of a tensor", "numpy.from_dlpack", "from_dlpack"),
    ],
)
def test_host_read_inside_a_capture(runtime: TapeRuntime, x: torch.Tensor, read) -> None:
    with pytest.raises(CaptureError, match="host read.*reads_on_host"):
        runtime.capture(lambda: (read(x), x)[1:])


def test_refused_reads_name_the_operation(runtime: TapeRuntime, x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match=r"aten\.narrow\.Tensor brings"):
        runtime.capture(lambda: (torch.narrow(x, 0, START, 1),))
    with pytest.raises(CaptureError, match=r"__dlpack__\(\), as of numpy\.from_dlpack\(\), would freeze"):
        runtime.capture(lambda: (torch.utils.dlpack.from_dlpack(x),))
    assert runtime.capture(lambda: (torch.narrow(x, 0, 1, 1),)).outputs[0].equal(x[1:2])


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.unique(x),
        lambda x: torch.repeat_interleave(x, REPEATS, dim=0),
        lambda x: torch.where(x > 0)[0],
    ],
    ids=["mask", "nonzero", "masked_select", "unique", "repeat_interleave", "where"],
)
def test_data_dependent_shape(runtime: TapeRuntime, x: torch.Tensor, shape) -> None:
    with pytest.raises(CaptureError, match="data-dependent shape.*reads_on_host"):
        runtime.capture(lambda: (shape(x),))


def test_a_mask_beside_other_indices(runtime: TapeRuntime) -> None:
    x, rows, mask = torch.randn(3, 3), torch.tensor([0, 2, 1]), torch.tensor([True, False, True])
    with pytest.raises(CaptureError, match="with a mask"):
        runtime.capture(lambda: (x[rows[:2], mask],))
    runtime.capture(lambda: (x[rows, rows],))


def test_host_data_and_random_numbers_inside_a_capture(runtime: TapeRuntime, x: torch.Tensor) -> None:
    with pytest.raises(CaptureError, match="host data"):
        runtime.capture(lambda: (x + torch.tensor(1.0),))
    with pytest.raises(CaptureError, match="random numbers"):
        runtime.capture(lambda: (x + torch.rand(7),))
    with pytest.raises(CaptureError, match="random numbers"):
        runtime.capture(lambda: (torch.dropout(x, 0.5, True),))
    graph = runtime.capture(lambda: (torch.dropout(x, 0.5, False) + 1,))
    graph.replay()
    assert torch.equal(graph.outputs[0], x + 1)


def test_a_failed_or_nested_capture_leaves_the_runtime_usable(runtime: TapeRuntime, x: torch.Tensor) -> None:
    with pytest.raises(CaptureError):
        runtime.capture(lambda: (x[x > 0],))
    with pytest.raises(CaptureError, match="inside another capture"):
        runtime.capture(lambda: runtime.capture(lambda: (x + 1,)).outputs)
    assert x.tolist() and bool(x[0, 0] == x[0, 0]), "guards end with the capture"
    graph = runtime.capture(lambda: (x + 1,))
    graph.replay()
    assert torch.equal(graph.outputs[0], x + 1)


def test_eager_call_breaks_the_capture_and_runs_at_each_replay(runtime: TapeRuntime, x: torch.Tensor) -> None:
    factor = {"value": 2.0}

    def between(source: torch.Tensor, target: torch.Tensor) -> None:
        assert source.tolist(), "host reads are allowed between the pieces"
        target.copy_(source * factor["value"])

    def step() -> tuple[torch.Tensor, ...]:
        hidden = x + 1
        target = torch.empty_like(hidden)
        runtime.eager_call(between, hidden, target)
        return (target * 10,)

    graph = runtime.capture(step)
    factor["value"] = 3.0
    x.copy_(torch.randn(5, 7))
    runtime.poison()
    graph.replay()
    assert torch.equal(graph.outputs[0], (x + 1) * 3.0 * 10), "what runs between pieces is not frozen"


def test_pool_gives_memory_back_after_the_last_reader() -> None:
    runtime = TapeRuntime()
    x = torch.randn(1000)
    runtime.capture(lambda: ((x + 1) * 2 - 3,))
    first = runtime.memory_bytes
    assert first <= 3 * 4096
    runtime.capture(lambda: (x[:10] + 1,))
    assert runtime.memory_bytes == first, "a smaller graph fits what the larger one claimed"


def test_replay_calls_the_function_that_an_operator_names(
    runtime: TapeRuntime, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's dispatch to an operator in Python takes longer than a small operator."""
    operator, calls = torch.ops.phonograph_test.scaled_sum.default, []

    def function(*args: object) -> None:
        calls.append(args)
        _scaled_sum(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(operator, "python_function", function, raising=False)
    out, count = torch.empty_like(x), torch.tensor([3])

    def step() -> tuple[torch.Tensor, ...]:
        operator(x, count, 2.0, out)
        return (out,)

    graph = runtime.capture(step)
    assert not calls
    count[0] = 2
    graph.replay()
    assert len(calls) == 1 and torch.equal(out[:2], 2 * x[:2]) and not out[2:].any()
