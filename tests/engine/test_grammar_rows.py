"""CudaRunner with rows that have a grammar, around a model of one table, on a GPU or in Triton's interpreter.

Without a GPU graphs are calls, and buffers are not pinned; everything else is what runs on one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from host_runtime import CallRuntime, HostRing, nothing_compiled
from ladders import Ladder
from scheduling import limits, request

from phonograph.engine.core import EngineCore
from phonograph.engine.step_record import StepRecord
from phonograph.graphs.capture_list import make_capture_list
from phonograph.graphs.dispatch import Decision, Dispatcher
from phonograph.graphs.modes import GraphMode, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, resolve_mode
from phonograph.request import Request
from phonograph.runner.grammar_masks import GrammarMasks
from phonograph.runner.sampler import Sampler
from phonograph.sampling_params import SamplingParams
from phonograph.scheduler import Scheduler

cuda_runner = pytest.importorskip("phonograph.runner.cuda_runner")

from phonograph.runner import device_inputs  # noqa: E402
from phonograph.runner.cuda_program import CudaStepProgram  # noqa: E402
from phonograph.runner.masked_sampling import MaskedSampling  # noqa: E402
from phonograph.runner.synthetic import SyntheticBatches  # noqa: E402

VOCAB, EOS, SLOTS, TOKENS = 100, 99, 5, 16


class TableModel:
    """Logits of the next token are a row of a table, that of the token before."""

    def __init__(self, device: torch.device) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
        self.table[:, EOS] = -5.0
        self.workspace = SimpleNamespace(logits_NV=torch.zeros(SLOTS, VOCAB, device=device))
        self._hidden = torch.zeros(TOKENS, VOCAB, device=device)
        self._rows = torch.zeros(SLOTS, VOCAB, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()  # the engine has a stream of its own

    def leaves_rows_out(self, num_tokens: int) -> bool:
        return num_tokens >= 2 * SLOTS

    def only_layers(self, indices: object) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, input_ids: torch.Tensor, attention: object, rows: torch.Tensor | None = None) -> torch.Tensor:
        hidden = torch.index_select(self.table, 0, input_ids, out=self._hidden[: len(input_ids)])
        return hidden if rows is None else torch.index_select(hidden, 0, rows, out=self._rows)

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None, num_logits: int) -> torch.Tensor:
        out = self.workspace.logits_NV[:num_logits]
        return out.copy_(hidden) if rows is None else torch.index_select(hidden, 0, rows, out=out)


class Backend:
    def schedule(self, metadata: object) -> None:
        """A table needs no attention."""

    def build(self, common: object, key: object) -> object:
        return common


@dataclass
class Engine:
    core: EngineCore
    model: TableModel
    records: list[StepRecord]
    log: list[str]
    num_graphs: int

    def run(self, *requests: Request, steps: int | None = None) -> None:
        for one in requests:
            self.core.scheduler.add(one)
        while self.core.has_work and steps != 0:
            self.core.step()
            steps = None if steps is None else steps - 1


MakeEngine = Callable[..., Engine]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if not on_gpu:
        monkeypatch.setattr(cuda_runner, "TokenRing", HostRing)
        monkeypatch.setattr(cuda_runner, "compile_only", nothing_compiled)
        monkeypatch.setattr(cuda_runner, "load_kernels", lambda kernels: None)

    def made(mode: GraphMode = GraphMode.FULL, **changes: Any) -> Engine:
        model = TableModel(device)
        bounds = limits(max_num_seqs=SLOTS, max_num_batched_tokens=TOKENS, **changes)
        captures = make_capture_list(mode, max_num_seqs=SLOTS, max_num_batched_tokens=TOKENS, max_capture_tokens=8)
        resolution = resolve_mode(mode, Support(GraphSupport.ALWAYS, "test"), Pieces(True, "test"))
        inputs = device_inputs.DeviceInputs(
            max_num_seqs=SLOTS,
            max_num_tokens=TOKENS,
            max_model_len=bounds.max_model_len,
            block_size=bounds.block_size,
            vocab_size=VOCAB,
            device=device,
        )
        runtime: Any = CallRuntime()
        if on_gpu:
            from phonograph.graphs.cuda import CudaRuntime

            runtime = CudaRuntime(device)
        sampler = Sampler(max_num_seqs=SLOTS, vocab_size=VOCAB, device=device, seed=0)
        parts: dict[str, Any] = {"model": model, "backend": Backend(), "layers": [], "kv_caches": []}
        program = CudaStepProgram(**parts, inputs=inputs, runtime=runtime)
        synthetic: dict[str, Any] = {"max_model_len": bounds.max_model_len, "block_size": bounds.block_size}
        builder: Any = Backend()
        runner = cuda_runner.CudaRunner(
            program=program,
            builder=builder,
            inputs=inputs,
            sampler=sampler,
            masked=MaskedSampling(
                program.sample_masked, masks=sampler.grammars, max_rows=SLOTS, vocab_size=VOCAB, device=device
            ),
            dispatcher=Dispatcher(resolution, captures, max_num_tokens=TOKENS),
            runtime=runtime,
            synthetic=SyntheticBatches(inputs.load, num_blocks=bounds.num_blocks, vocab_size=VOCAB, **synthetic),
            max_num_seqs=SLOTS,
            max_num_tokens=TOKENS,
        )
        runner.load_kernels()
        report = runner.capture()
        log: list[str] = []
        if not on_gpu:
            runtime.log = runner._ring.log = log
        core = EngineCore(Scheduler(bounds), runner)
        records: list[StepRecord] = []
        core.on_step = records.append
        return Engine(core, model, records, log, report.num_graphs)

    return made


def ruled(name: str, length: int, **params: Any) -> Request:
    one = request(name, [3, 5, ord(name[0]) % VOCAB], **({"seed": ord(name[0]), "max_tokens": 40} | params))
    one.grammar = Ladder(length, VOCAB, EOS)
    return one


def free(name: str, **params: Any) -> Request:
    return request(name, [2, ord(name[0]) % VOCAB], **({"seed": ord(name[0]), "max_tokens": 9} | params))


def wanted(model: TableModel, one: Request) -> list[int]:
    """The whole output, by the host's sampler, alone."""
    sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB, device=torch.device("cpu"), seed=0)
    sampler.load(0, one.params, one.prompt_token_ids, [], [EOS], 0, one.grammar)
    table, last, output = model.table.cpu(), one.prompt_token_ids[-1], list[int]()
    while len(output) < (one.params.max_tokens or 100):
        (last,) = sampler.sample(table[last][None], [0], [len(output)]).token_ids
        output.append(last)
        if last == EOS:
            break
    return output


SETTINGS = ({"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7})


def mixture() -> list[Request]:
    """More than there are slots, with and without a grammar, sampled by the graph, behind it and by the host."""
    requests = [ruled(name, 3 + index, **SETTINGS[index % 3]) for index, name in enumerate("abdef")]
    requests += [free(name, **SETTINGS[index % 3]) for index, name in enumerate("ghi")]
    return [
        *requests,
        ruled("j", 3, temperature=1.2, top_k=9, top_p=0.9),
        ruled("k", 6, temperature=1.0, logprobs=2),
        ruled("l", 5, temperature=0.0, presence_penalty=1.5),
        free("m", temperature=0.9, logprobs=1),
        ruled("n", 30, temperature=1.0, max_tokens=5),
    ]


@pytest.mark.parametrize("mode", [GraphMode.FULL, GraphMode.NONE])
def test_outputs_are_those_of_the_host(make: MakeEngine, mode: GraphMode) -> None:
    engine, requests = make(mode), mixture()
    engine.run(*requests)
    for one in requests:
        assert one.output_token_ids == wanted(engine.model, one), one.request_id
        ends = "length" if one.request_id == "n" or one.grammar is None else "stop"
        assert one.finish_reason == ends or one.output_token_ids[-1] == EOS, one.request_id
    masked = [record for record in engine.records if record.cause.endswith("; masked sampling")]
    assert masked and len(masked) < len(engine.records), "both kinds of steps"
    where = "eagerly" if mode is GraphMode.NONE else "in a graph of"
    assert all(f"with a grammar {where}" in record.reason for record in masked)


def test_requests_that_come_and_go_leave_nothing_to_others(make: MakeEngine) -> None:
    """Aborts with tokens in flight; their slots go to requests with other grammars in the very next step."""
    engine, requests = make(), mixture()
    engine.run(*requests[:5], steps=4)
    for late, name in enumerate("bde"):
        assert engine.core.scheduler.abort(name)
        engine.core.scheduler.add(requests[5 + late])
        engine.core.step()
    engine.run(*requests[8:])
    for one in requests:
        whole = wanted(engine.model, one)
        if one.request_id in "bde":
            assert one.finish_reason == "abort" and one.output_token_ids == whole[: len(one.output_token_ids)]
        else:
            assert one.output_token_ids == whole, one.request_id


def test_a_preempted_output_goes_on_where_it_was(make: MakeEngine) -> None:
    engine = make(num_blocks=8, enable_prefix_caching=False)
    requests = [ruled(name, 12, temperature=1.0) for name in "abc"]
    engine.run(*requests)
    assert engine.core.scheduler.stats.num_preemptions > 0
    assert [one.output_token_ids for one in requests] == [wanted(engine.model, one) for one in requests]


def test_rows_of_one_bad_model_end_alone(make: MakeEngine) -> None:
    engine = make()
    bad, good = ruled("a", 9), ruled("b", 9)
    engine.model.table[wanted(engine.model, bad)[2]] = float("nan")
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    engine.run(bad, good)
    expected = wanted(engine.model, good)
    assert bad.finish_reason == "abort" and len(bad.output_token_ids) == 3
    assert good.output_token_ids == expected and good.finish_reason == "stop"


def test_graphs_are_few_and_chosen_by_rows(make: MakeEngine) -> None:
    engine, without = make(), make(GraphMode.NONE)
    captures = engine.core.runner.dispatcher.captures.largest_first()
    assert engine.num_graphs == len(captures) + 4 and without.num_graphs == 0
    engine.run(*(ruled(name, 4, temperature=0.0) for name in "abc"), free("z", temperature=0.0, max_tokens=12))
    sizes = Counter(record.reason.rpartition(" ")[2] for record in engine.records if "masked" in record.reason)
    assert set(sizes) == {"4"}
    alone = [ruled("d", 4, temperature=0.0)]
    engine.run(*alone)
    assert engine.records[-1].reason.endswith("masked sampling of 1 row with a grammar in a graph of 1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks into the stand-ins of a GPU")
def test_the_device_has_its_step_before_the_host_waits_and_other_steps_do_not_wait(make: MakeEngine) -> None:
    engine = make()
    engine.run(free("a", temperature=0.0, max_tokens=4))
    # Only results are read, each when the next step has been sent.
    assert engine.log == ["step", "send", *["step", "send", "read 1"] * 3, "read 0"]
    engine.log.clear()
    engine.run(ruled("b", 3, temperature=0.0, max_tokens=4))
    one = ["step", "read 0", "masks", "send", "read 1"]
    assert engine.log == ["step", "masks", "send", *one, *one, *one, "read 0"]
    engine.log.clear()
    # A request that has left its slot is not waited for, though its token is still on its way.
    engine.run(ruled("c", 3, temperature=0.0, max_tokens=1), free("a", temperature=0.0, max_tokens=2))
    assert engine.log == ["step", "masks", "send", "step", "send", "read 1", "read 0"]


def test_rows_of_a_smaller_step_are_listed_without_those_of_a_larger() -> None:
    masks = GrammarMasks(max_num_seqs=SLOTS, vocab_size=VOCAB, device=torch.device("cpu"))
    for slot in range(SLOTS):
        masks.load(slot, Ladder(9, VOCAB, EOS), [8] if slot == 0 else [])
    seen: list[tuple[list[int], list[list[int]]]] = []

    def sample_masked(rows_G: torch.Tensor, bitmask_GW: torch.Tensor) -> None:
        seen.append((rows_G.tolist(), bitmask_GW.tolist()))

    masked = MaskedSampling(sample_masked, masks=masks, max_rows=SLOTS, vocab_size=VOCAB, device=torch.device("cpu"))
    decision = Decision(mode=GraphMode.NONE, key=None, num_tokens=5, cause="a test", reason="a test of 5 tokens")
    told = [
        masked.sample(rows, slots, decision).reason.rpartition("; ")[2]
        for rows, slots in (([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]), ([4, 1, 3], [0, 1, 2]), ([2], [3]))
    ]
    assert [rows for rows, _ in seen] == [[0, 1, 2, 3, 4], [4, 1, 3, -1], [2]] and masked.sizes == (1, 2, 4, 5)
    moved, begun = seen[0][1][4], seen[0][1][0]
    assert moved != begun and seen[0][1] == [begun] * 4 + [moved]
    assert seen[1][1][:3] == [moved, begun, begun] and seen[2][1] == [begun]
    ends = ["5 rows with a grammar eagerly", "3 rows with a grammar eagerly", "1 row with a grammar eagerly"]
    assert told == [f"masked sampling of {end}" for end in ends]


def test_one_grammar_shared_by_samples(make: MakeEngine) -> None:
    engine, grammar = make(), Ladder(8, VOCAB, EOS)
    requests = [ruled("a", 0, temperature=1.0, seed=seed) for seed in range(4)]
    for index, one in enumerate(requests):
        one.request_id, one.grammar = f"a{index}", grammar
    engine.run(*requests)
    assert [one.output_token_ids for one in requests] == [wanted(engine.model, one) for one in requests]
    assert len({tuple(one.output_token_ids) for one in requests}) == 4 and grammar.taken == 0


def test_parameters_need_no_host() -> None:
    """What the tests above take for sampling behind the step is not the host's, and the other way round."""
    sampler = Sampler(max_num_seqs=3, vocab_size=VOCAB, device=torch.device("cpu"), seed=0)
    settings: list[dict[str, Any]] = [{}, {"logprobs": 1}, {"presence_penalty": 1.0}]
    for slot, each in enumerate(settings):
        sampler.load(slot, SamplingParams(**each), [1], [], [EOS], 0, Ladder(3, VOCAB, EOS))
    assert sampler.needs_logits(np.arange(3), np.zeros(3, np.int64)).tolist() == [False, True, True]
