"""The runner on parts that note what it does with them: kernels, captures, second tries, and replays."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_runtime import CallRuntime
from step_rows import rows_of

from phonograph.core.batch import ScheduledBatch
from phonograph.errors import CaptureError, ReplayError
from phonograph.graphs.capture_list import make_capture_list
from phonograph.graphs.dispatch import Dispatcher, StepShape
from phonograph.graphs.modes import GraphKey, GraphMode, GraphSet, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, resolve_mode
from phonograph.runner.runner import Runner, shape_of

KEYS = (
    GraphKey(GraphSet.MIXED, 64, 4),
    GraphKey(GraphSet.PIECEWISE, 32, 4),
    GraphKey(GraphSet.MIXED, 24, 4),
    GraphKey(GraphSet.DECODE, 2, 2, 1),
)
OUTPUTS = (torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(0), torch.zeros(0))

Log = list[tuple[str, int]]


class NotingRuntime(CallRuntime):
    """Refuses each graph as often as `failures` says. It runs nothing that it captures."""

    runs_captured = False

    def __init__(self, done: Log, failures: dict[GraphKey, int]) -> None:
        super().__init__(memory_bytes=7)
        self.done, self.failures = done, dict(failures)
        self.dry, self.prepared = False, KEYS[0]

    def capture(self, function: object) -> Any:
        key = self.prepared
        self.failures[key] = self.failures.get(key, 0) - 1
        if self.failures[key] >= 0:
            self.done.append(("refused", key.num_tokens))
            raise CaptureError("a library loads something")
        self.done.append(("capture", key.num_tokens))
        return SimpleNamespace(outputs=OUTPUTS, replay=lambda: self.done.append(("replay", key.num_tokens)))


class Program:
    """Notes its shapes."""

    model = None
    few_layers = nullcontext

    def __init__(self, runtime: NotingRuntime) -> None:
        self.runtime = runtime

    def build(self, builder: object, commons: object, key: object) -> None:
        """Build nothing."""

    def run(self, *, num_tokens: int, **_: Any) -> tuple[torch.Tensor, ...]:
        self.runtime.done.append(("dry" if self.runtime.dry else "run", num_tokens))
        return OUTPUTS


class Sampling:
    """Has two graphs of its own."""

    lookahead, drafts = 1, None

    def __init__(self, runtime: NotingRuntime) -> None:
        self.runtime = runtime

    def launch(self) -> None:
        assert self.runtime.dry
        self.runtime.done.append(("dry sampling", 0))

    def capture(self, runtime: object) -> int:
        self.runtime.done.append(("capture sampling", 0))
        return 2


def make_runner(failures: dict[GraphKey, int] | None = None, *, runs_captured: bool = False) -> tuple[Runner, Log]:
    done: Log = []
    runtime = NotingRuntime(done, failures or {})
    runtime.runs_captured = runs_captured

    def capture_batch(key: GraphKey) -> GraphKey:
        runtime.prepared = key
        return key

    captures = SimpleNamespace(largest_first=lambda: KEYS)
    parts: dict[str, Any] = {
        "program": Program(runtime),
        "builder": None,
        "inputs": None,
        "sampling": Sampling(runtime),
        "sequences": SimpleNamespace(max_num_seqs=4),
        "dispatcher": SimpleNamespace(captures=captures, max_num_tokens=64),
        "runtime": runtime,
        "synthetic": SimpleNamespace(capture_batch=capture_batch, most_tokens=lambda max_num_seqs: 0),
    }
    return Runner(**parts), done


def capture(failures: dict[GraphKey, int] | None = None, **settings: Any) -> Log:
    runner, done = make_runner(failures, **settings)
    seen: list[int] = []
    runtime: Any = runner.runtime
    runtime.dry = True
    runner.launch_kernels()
    runtime.dry = False
    report = runner.capture(lambda number, total, key: seen.append(key.num_tokens))
    assert (report.num_graphs, report.memory_bytes) == (len(KEYS) + 2, 7)
    assert seen == [key.num_tokens for key in KEYS]
    assert [retry.key for retry in report.retries] == [key for key in KEYS if key in (failures or {})]
    assert done.pop() == ("capture sampling", 0)
    return done


def test_all_kernels_are_launched_and_only_broken_graphs_run_before_their_capture() -> None:
    dry = [("dry", key.num_tokens) for key in KEYS]
    captures = [("capture", 64), ("run", 32), ("capture", 32), ("capture", 24), ("capture", 2)]
    assert capture() == [*dry, ("dry sampling", 0), *captures]
    # Where a captured function has run, its attention between the pieces has had its inputs.
    assert ("run", 32) not in capture(runs_captured=True)


def test_a_refused_capture_is_repeated_once_after_an_eager_run() -> None:
    done = capture({KEYS[2]: 1})
    assert done[-4:] == [("refused", 24), ("run", 24), ("capture", 24), ("capture", 2)]
    with pytest.raises(CaptureError):
        capture({KEYS[2]: 2})


def test_a_replay_needs_inputs_of_its_own() -> None:
    runner, done = make_runner()
    common: Any = None
    key, other = KEYS[3], KEYS[0]
    runner.capture()
    done.clear()
    runner.prepare(common, other)
    with pytest.raises(ReplayError, match="mixed"):
        runner.replay(key)
    runner.prepare(common, key)
    runner.replay(key)
    with pytest.raises(ReplayError, match="None"):
        runner.replay(key)
    runner.prepare(common, None)
    with pytest.raises(ReplayError):
        runner.replay(key)
    assert done == [("replay", 2)]


@pytest.mark.parametrize("leaves_rows_out", [False, True])
@pytest.mark.parametrize("scores_prompts", [False, True])
@pytest.mark.parametrize("num_tokens", [3, 99])
def test_prompts_are_scored_eagerly_only_where_a_graph_lacks_their_rows(
    leaves_rows_out: bool, scores_prompts: bool, num_tokens: int
) -> None:
    captures = make_capture_list(GraphMode.FULL, max_num_seqs=4, max_num_batched_tokens=128, max_capture_tokens=8)
    resolution = resolve_mode(GraphMode.FULL, Support(GraphSupport.ALWAYS, "a test"), Pieces(True, "a test"))
    runner: Any = SimpleNamespace(
        dispatcher=Dispatcher(resolution, captures, max_num_tokens=128),
        counts=Counter[str](),
        _sampling=SimpleNamespace(shared_tiles=0),
        _leaves_rows_out=lambda key: leaves_rows_out,
    )
    lens = [1, num_tokens - 1]
    batch = ScheduledBatch(
        **{"slots": [0, 1], "query_lens": lens, "context_lens": [4, 0], "num_decodes": 1, "num_decode_tokens": 1},
        num_tokens=num_tokens,
    )
    decision = Runner._decide(runner, rows_of(batch), scores_prompts)
    assert (decision.key is None) == (num_tokens == 99 or (scores_prompts and leaves_rows_out))
    assert runner.counts == {decision.label: 1}


@pytest.mark.parametrize(
    ("query_lens", "num_decodes", "longest", "num_logits"),
    [
        ([1, 1], 2, 1, 2),
        ([1, 1], 0, 1, 2),
        ([3, 3], 2, 3, 6),
        ([3, 3], 1, None, 4),
        ([1, 3], 2, 3, 4),
        ([5], 0, None, 1),
        ([5], 1, 5, 5),
    ],
)
def test_shapes_of_batches(query_lens: list[int], num_decodes: int, longest: int | None, num_logits: int) -> None:
    """A prefill as long as a decode with drafts has one row of logits, so that it is not like one."""
    batch = ScheduledBatch(
        slots=[*range(len(query_lens))],
        query_lens=query_lens,
        num_decodes=num_decodes,
        num_decode_tokens=sum(query_lens[:num_decodes]),
        num_tokens=sum(query_lens),
    )
    assert shape_of(batch) == StepShape(
        num_tokens=sum(query_lens), num_reqs=len(query_lens), decode_query_len=longest, num_logits=num_logits
    )


@pytest.mark.parametrize(
    ("key", "every"),
    [
        (GraphKey(GraphSet.DECODE, 8, 8, 1), True),
        (GraphKey(GraphSet.DECODE, 8, 4, 2), False),
        (GraphKey(GraphSet.MIXED, 8, 8), False),
        (GraphKey(GraphSet.PIECEWISE, 8, 8), False),
    ],
)
@pytest.mark.parametrize("leaves_rows_out", [True, False])
def test_graphs_lack_rows_where_not_every_token_is_a_last_one(
    key: GraphKey, every: bool, leaves_rows_out: bool
) -> None:
    model = SimpleNamespace(
        leaves_rows_out=lambda num_tokens, num_kept: (
            leaves_rows_out and (num_tokens, num_kept) == (8, max(key.logits, 4))
        )
    )
    program, sequences = SimpleNamespace(model=model), SimpleNamespace(max_num_seqs=4)
    runner: Any = SimpleNamespace(_program=program, _sequences=sequences)
    assert Runner._leaves_rows_out(runner, key) == (leaves_rows_out and not every)
