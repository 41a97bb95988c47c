"""Weights on their way to a device, a piece at a time, by several threads."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint

from phonograph.errors import WeightError
from phonograph.models.spec import read_model_spec
from phonograph.models.transformer import Transformer
from phonograph.models.weights import loading as load
from phonograph.models.weights import staging
from phonograph.models.weights.staging import Copies, Staging

SHAPES = [(), (1,), (7,), (33, 5), (5, 1000), (3, 40, 9), (0, 4), (1, 2049)]


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, strided: bool) -> torch.Tensor:
    """Strided: as a slice of a fused matrix, or a transposed one."""
    if strided and len(shape) == 2:
        found = torch.full((shape[1], shape[0] + 3), float("nan"), dtype=dtype, device=device).t()[1:-2]
    else:
        found = torch.full(shape, float("nan"), dtype=dtype, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()  # Copies have a stream of their own, which waits for none of this.
    return found


def check(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 256)
    one = Staging(device)
    for seed, shape in enumerate(SHAPES):
        for source_type, type_there in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
            for strided in (False, True):
                source = noise(shape, source_type, seed)
                there = poisoned(shape, type_there, device, strided)
                one.copy(there, source)
                assert torch.equal(there.cpu(), source.to(type_there)), (shape, source_type, strided)


def test_pieces_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    check(torch.device("cpu"), monkeypatch)


@pytest.mark.gpu
def test_pieces_of_any_shape_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    check(torch.device("cuda"), monkeypatch)


class Elsewhere:
    """A device that copies go to by threads, whose memory is this machine's."""

    type = "cuda"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(staging, "Staging", lambda _: Staging(torch.device("cpu")))
    return Elsewhere()  # pyright: ignore[reportReturnType]


def check_many(to: torch.device, memory: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(3)
    shapes = [(rng.randint(1, 60), rng.randint(1, 300)) for _ in range(60)]
    for num_bytes, source_type, type_there in (
        (4096, torch.bfloat16, torch.bfloat16),
        (512, torch.float16, torch.float32),
    ):
        monkeypatch.setattr(staging, "STAGING_BYTES", num_bytes)
        sources = [noise(shape, source_type, seed) for seed, shape in enumerate(shapes)]
        there = [poisoned(shape, type_there, memory, strided=False) for shape in shapes]
        told: list[int] = []
        with Copies(to, told.append) as copies:
            for destination, source in zip(there, sources, strict=True):
                copies.add("w", destination, source)
            copies.finish()
        assert told == list(range(1, 61))
        assert all(torch.equal(one.cpu(), source.to(type_there)) for one, source in zip(there, sources, strict=True))


def test_all_are_there_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    check_many(torch.device("cpu"), torch.device("cpu"), monkeypatch)


@pytest.mark.gpu
def test_threads_bring_all_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    check_many(torch.device("cuda"), torch.device("cuda"), monkeypatch)


def test_threads_bring_all(elsewhere: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    check_many(elsewhere, torch.device("cpu"), monkeypatch)


def test_a_copy_that_fails_fails_all(elsewhere: torch.device) -> None:
    told: list[int] = []
    source = torch.ones(4, 3)
    with pytest.raises(RuntimeError), Copies(elsewhere, told.append) as copies:
        copies.add("w", torch.zeros(4, 3), source)
        copies.add("w", torch.zeros(4, 5), source)
        copies.finish()
    assert len(told) <= 1


def check_infinite(to: torch.device, memory: torch.device) -> None:
    """Find a number beyond float16 in any piece and by any thread; one that was infinite before is allowed."""
    for value, fails in ((7e4, True), (-1e30, True), (65519.0, False), (float("inf"), False), (float("nan"), False)):
        source = noise((50, 300), torch.float32, 5)
        source[random.randrange(50), random.randrange(300)] = value
        with Copies(to, [].append) as copies:
            for name in ("a", "b"):
                there = poisoned((50, 300), torch.float16, memory, strided=name == "b")
                copies.add(name, there, source if name == "b" else source.clamp(-1, 1).nan_to_num(0))
            if fails:
                with pytest.raises(WeightError, match="tensor b has numbers up to .* largest float16 is 65504"):
                    copies.finish()
            else:
                copies.finish()


def test_casts_that_overflow_are_named(elsewhere: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STAGING_BYTES", 4096)
    check_infinite(elsewhere, torch.device("cpu"))


@pytest.mark.gpu
def test_casts_that_overflow_are_named_on_the_device() -> None:
    check_infinite(torch.device("cuda"), torch.device("cuda"))


@pytest.fixture
def gate(elsewhere: torch.device, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set, it lets copies begin; they are made by threads, though to this machine's memory."""
    gate = threading.Event()

    class Gated(Staging):
        def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
            gate.wait(20)
            super().copy(destination, source)

    monkeypatch.setattr(staging, "Staging", lambda _: Gated(torch.device("cpu")))
    monkeypatch.setattr(load, "Copies", lambda _, done: Copies(elsewhere, done))
    return gate


@torch.inference_mode()
def poison(model: Transformer) -> None:
    for parameter in model.parameters:
        parameter.fill_(torch.nan)


def test_weights_arrive_while_other_things_go_on(tmp_path: Path, gate: threading.Event) -> None:
    reference = make_checkpoint("qwen3", tmp_path)
    told: list[int] = []
    cpu, spec = torch.device("cpu"), read_model_spec(tmp_path)
    with load.begin_loading(
        spec, tmp_path, dtype=torch.float32, device=cpu, progress=lambda done, _: told.append(done)
    ) as loading:
        assert not torch.is_inference_mode_enabled()
        poison(loading.model)
        gate.set()
        loading.finish()
    weights = dict(reference.named_parameters())
    assert told == list(range(1, len(weights) + 1))
    for name, view in loading.model.destinations().items():
        torch.testing.assert_close(view, weights[name].float().expand(view.shape), rtol=0, atol=0)


def test_a_failure_does_not_wait_for_weights(tmp_path: Path, gate: threading.Event) -> None:
    make_checkpoint("qwen3", tmp_path)
    cpu, spec = torch.device("cpu"), read_model_spec(tmp_path)
    with (
        pytest.raises(KeyError),
        load.begin_loading(spec, tmp_path, dtype=torch.float32, device=cpu) as loading,
    ):
        poison(loading.model)
        threading.Timer(0.3, gate.set).start()
        raise KeyError
    left = [name for name, view in loading.model.destinations().items() if view.isnan().any()]
    assert len(left) > len(loading.model.destinations()) // 2
