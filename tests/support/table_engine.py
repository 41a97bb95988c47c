"""The runner on a GPU's parts around a model of one table, on a GPU or in Triton's interpreter.

Without a GPU graphs are calls, and buffers are not pinned; everything else is what runs on one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_runtime import CallRuntime, HostRing
from ladders import Ladder
from scheduling import make_scheduler, request

from phonograph.config.speculative_config import SpeculativeConfig
from phonograph.core.batch import TokenLogprobs
from phonograph.core.request import Request
from phonograph.engine.core import EngineCore
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.graphs.capture_list import make_capture_list
from phonograph.graphs.dispatch import Dispatcher
from phonograph.graphs.modes import GraphMode, GraphSupport, Support
from phonograph.graphs.resolve import Pieces, resolve_mode
from phonograph.sampling.logprobs import RAW_LOGPROBS, ScoreKind
from phonograph.sampling.sampler import Sampler
from phonograph.scheduling.draft_budget import DraftBudget
from phonograph.speculation.device_drafts import DeviceDrafts
from phonograph.speculation.suffix_drafts import SuffixDrafts

pytest.importorskip("phonograph.runner.cuda.cuda_inputs")

from phonograph.runner.cuda.cuda_inputs import CudaInputs
from phonograph.runner.cuda.cuda_sampling import RING_DEPTH, CudaSampling
from phonograph.runner.cuda.device_sampler import DeviceSampler
from phonograph.runner.cuda.masked_sampling import MaskedSampling
from phonograph.runner.runner import Runner
from phonograph.runner.sequences import Sequences
from phonograph.runner.step_attention import StepAttention
from phonograph.runner.step_program import StepProgram
from phonograph.runner.synthetic_batches import SyntheticBatches

VOCAB, EOS, SLOTS, TOKENS = 100, 99, 5, 16


def row_of(token: Any, position: Any) -> Any:
    """Return the row of the table that has the logits behind a token at a position."""
    return (token + 7 * position) % VOCAB


class TableModel:
    """Logits of the next token are a row of a table, by the token before and its position."""

    def __init__(self, device: torch.device, num_logits: int) -> None:
        self.table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)).to(device)
        self.table[:, EOS] = -5.0
        self.device = device
        self.logits_NV = torch.zeros(num_logits, VOCAB, device=device)
        self.spec = SimpleNamespace(layers=(SimpleNamespace(kind=None),), pooler=None)
        self._hidden = torch.zeros(TOKENS, VOCAB, device=device)
        self._rows = torch.zeros(num_logits, VOCAB, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()  # the engine has a stream of its own

    def leaves_rows_out(self, num_tokens: int, num_kept: int) -> bool:
        return num_tokens >= 2 * num_kept

    def only_layers(self, indices: object) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        attend: object,
        rows: torch.Tensor | None = None,
        num_rows: torch.Tensor | None = None,
        num_kept: torch.Tensor | None = None,
        features_TE: torch.Tensor | None = None,
        states: object = None,
    ) -> torch.Tensor:
        index = row_of(input_ids, positions)
        hidden = torch.index_select(self.table, 0, index, out=self._hidden[: len(input_ids)])
        return hidden if rows is None else torch.index_select(hidden, 0, rows, out=self._rows[: len(rows)])

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        out = self.logits_NV[: len(hidden if rows is None else rows)]
        return out.copy_(hidden) if rows is None else torch.index_select(hidden, 0, rows, out=out)


class Backend:
    def schedule(self, metadata: object) -> None:
        """Do nothing: a table needs no attention."""

    def build(self, common: object, key: object) -> object:
        return common


class Passes:
    """Stands for the passes of a draft model: `propose` writes the drafts at the end of a step, and behind masks."""

    def __init__(self, propose: Callable[[], None], model: Any) -> None:
        self._propose, self.model, self.layers = propose, model, []
        self.num_built = 0

    def build(self, commons: object, key: object) -> None:
        self.num_built += 1

    def run(self, tokens: object, **shape: object) -> None:
        self._propose()

    def draft(self, numbers: object) -> None:
        self._propose()

    def launch(self) -> None:
        """Launch nothing."""

    def capture(self, runtime: object) -> int:
        return 0


@dataclass
class Engine:
    core: EngineCore
    model: TableModel
    records: list[StepRecord]
    log: list[str]
    num_graphs: int
    ring: Any

    def run(self, *requests: Request, steps: int | None = None) -> None:
        for one in requests:
            self.core.scheduler.add(one)
        while self.core.has_work and steps != 0:
            self.core.step()
            steps = None if steps is None else steps - 1


MakeEngine = Callable[..., Engine]


def engine_maker() -> MakeEngine:
    """Engines around a table, with graphs where there is a GPU and stand-ins of one elsewhere.

    Without a GPU only the first engine launches all kernels and runs what it captures: there is nothing to compile.
    """
    on_gpu = torch.cuda.is_available()
    whole = iter([True])
    device = torch.device("cuda" if on_gpu else "cpu")

    def made(
        mode: GraphMode = GraphMode.FULL,
        speculation: SpeculativeConfig | None = None,
        propose: Callable[..., None] | None = None,
        in_steps: bool = False,
        scores: ScoreKind = RAW_LOGPROBS,
        **changes: Any,
    ) -> Engine:
        """Make an engine; `propose` takes the inputs and the table, and writes drafts in the place of prompt lookup.

        With `in_steps` it stands for a draft model, which a step may leave out.
        """
        most = 0 if speculation is None else speculation.num_speculative_tokens
        num_logits = min(SLOTS * (1 + most), TOKENS)
        drafts = None
        sampler = Sampler(max_num_seqs=SLOTS, vocab_size=VOCAB, device=device, seed=0, scores=scores)
        if speculation is not None:
            limits, adaptive = speculation.most_drafts(SLOTS), speculation.adaptive_depth
            budget = DraftBudget(limits, max_num_seqs=SLOTS, adaptive=adaptive, in_steps=in_steps)
            slow = sampler.grammars.slow
            drafts = DeviceDrafts(budget, max_num_logits=num_logits, slow_masks=slow, in_steps=in_steps)
            if speculation.on_host:
                sizes: dict[str, Any] = {"max_num_seqs": SLOTS, "max_num_logits": num_logits, "slow_masks": slow}
                drafts = SuffixDrafts(speculation.suffix, budget, **sizes)
        model = TableModel(device, num_logits)
        scheduler = make_scheduler(max_num_seqs=SLOTS, max_num_batched_tokens=TOKENS, drafts=drafts, **changes)
        captures = make_capture_list(
            mode,
            max_num_seqs=SLOTS,
            max_num_batched_tokens=TOKENS,
            max_capture_tokens=8,
            speculative_tokens=most,
            most_logits=num_logits,
            draft_passes=in_steps,
        )
        resolution = resolve_mode(mode, Support(GraphSupport.ALWAYS, "test"), Pieces(True, "test"))
        inputs = CudaInputs(
            max_num_seqs=SLOTS,
            max_num_tokens=TOKENS,
            max_model_len=scheduler.limits.max_model_len,
            block_sizes=(scheduler.groups[0].block_size,),
            vocab_size=VOCAB,
            device=device,
            draft_tokens=most,
            max_num_logits=num_logits,
            keeps_tokens=speculation is not None and not speculation.on_host,
        )
        passes: Any = None
        if in_steps:
            assert propose is not None
            passes = Passes(partial(propose, inputs, model.table), model)
        elif propose is not None:
            patched: Any = inputs
            patched.propose_ngrams = lambda *_, **__: propose(inputs, model.table)
        log: list[str] = []
        is_whole = next(whole, on_gpu)
        runtime: Any = CallRuntime(lazily=not is_whole)
        sizes = {"depth": RING_DEPTH, "max_rows": len(inputs.results)}
        sizes["early_words"] = len(inputs.tokens) + len(inputs.counts)
        ring: Any = HostRing(**sizes)
        if on_gpu:
            from phonograph.graphs.cuda import CudaRuntime
            from phonograph.runner.cuda.token_ring import TokenRing

            runtime, ring = CudaRuntime(device), TokenRing(**sizes)
        sampler.edits = inputs.edits
        device_sampler = DeviceSampler(inputs, model.logits_NV, speculation=speculation)
        backend: Any = Backend()
        table: Any = model
        pages = torch.zeros(2, scheduler.num_blocks, 1, device=device)
        program = StepProgram(
            model=table,
            attention=StepAttention([backend], [], [pages], inputs.slot_mappings, runtime),
            inputs=inputs,
            sample=device_sampler.sample,
            passes=passes,
            send_early=partial(ring.send_early, inputs.staging, inputs.results),
        )
        synthetic: dict[str, Any] = {
            "max_model_len": scheduler.limits.max_model_len,
            "groups": scheduler.groups,
            "draft_tokens": most,
        }
        builder: Any = Backend()
        masked = MaskedSampling(
            device_sampler.sample_masked,
            masks=sampler.grammars,
            max_rows=scheduler.limits.max_masked_rows,
            vocab_size=VOCAB,
            device=device,
        )
        runner = Runner(
            program=program,
            builder=builder,
            inputs=inputs,
            sampling=CudaSampling(sampler, inputs, masked, ring, drafts, passes),
            sequences=Sequences(sampler, max_num_seqs=SLOTS),
            dispatcher=Dispatcher(resolution, captures, max_num_tokens=TOKENS),
            runtime=runtime,
            synthetic=SyntheticBatches(inputs.load, num_blocks=scheduler.num_blocks, vocab_size=VOCAB, **synthetic),
        )
        if on_gpu:
            from phonograph.engine.startup.cuda_platform import CudaPlatform

            CudaPlatform(device).compile(runner.launch_kernels)
        elif is_whole:
            runner.launch_kernels()
        report = runner.capture()
        if not on_gpu:
            runtime.log = ring.log = log
        core = EngineCore(scheduler, runner)
        records: list[StepRecord] = []
        core.on_step = records.append
        return Engine(core, model, records, log, report.num_graphs, ring)

    return made


def check_outputs(engine: Engine, requests: Sequence[Request]) -> None:
    """Check that tokens and log-probabilities are those of each request alone."""
    for one in requests:
        tokens, scores = wanted_scores(engine.model, one)
        assert one.output_token_ids == tokens, one.request_id
        assert [(found.token_ids, found.ranks) for found in one.logprobs] == [(s.token_ids, s.ranks) for s in scores]
        for found, score in zip(one.logprobs, scores, strict=True):
            assert found.logprobs == pytest.approx(score.logprobs, abs=1e-5)


def ruled(name: str, length: int, **params: Any) -> Request:
    one = request(name, [3, 5, ord(name[0]) % VOCAB], **({"seed": ord(name[0]), "max_tokens": 40} | params))
    one.grammar = Ladder(length, VOCAB, EOS)
    return one


def free(name: str, **params: Any) -> Request:
    return request(name, [2, ord(name[0]) % VOCAB], **({"seed": ord(name[0]), "max_tokens": 9} | params))


def wanted(model: TableModel, one: Request) -> list[int]:
    """Return the whole output of a request alone, by the host's sampler."""
    return wanted_scores(model, one)[0]


def wanted_scores(model: TableModel, one: Request) -> tuple[list[int], list[TokenLogprobs]]:
    """Return the whole output of a request alone, and its log-probabilities, by the host's sampler."""
    scores: list[TokenLogprobs] = []
    sampler = Sampler(max_num_seqs=1, vocab_size=VOCAB, device=torch.device("cpu"), seed=0)
    sampler.load(0, one.params, one.prompt_token_ids, [], [EOS], 0, one.grammar)
    table, last, output = model.table.cpu(), one.prompt_token_ids[-1], list[int]()
    while len(output) < (one.params.max_tokens or 100):
        row = row_of(last, len(one.prompt_token_ids) + len(output) - 1)
        sampled = sampler.sample(table[row][None], [0], [len(output)])
        (last,) = sampled.token_ids
        output.append(last)
        scores += sampled.logprobs.values()
        if last == EOS:
            break
    return output, scores
