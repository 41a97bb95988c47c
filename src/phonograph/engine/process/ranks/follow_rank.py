"""The model and the runner of another rank than 0."""

from __future__ import annotations

import pickle
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from phonograph.engine.build import (
    make_backends_of,
    make_model_parts,
    make_platform,
    make_runner,
    weights_load,
    zeroes_cache,
)
from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.ranks.lead_sleeper import try_verb
from phonograph.engine.process.ranks.rank_step import (
    Capture,
    Command,
    RankSleep,
    RankStep,
    RankWakeUp,
    Score,
    TimeDrafting,
)
from phonograph.engine.startup.early_start import resume_collector
from phonograph.engine.startup.platform import gather_draft_weights
from phonograph.engine.startup.sleeper import make_sleeper
from phonograph.engine.startup.subject import make_subject
from phonograph.graphs.verification import verify
from phonograph.kernels.ranks import Ranks
from phonograph.runner.runner import Runner
from phonograph.runner.step_inputs import RankInputs


class FollowingRunner(Runner):
    """Runner of another rank than 0."""

    def __init__(self, *, inputs: RankInputs, **parts: Any) -> None:
        super().__init__(inputs=inputs, **parts)
        self._writes = inputs
        self._hidden_TE: torch.Tensor | None = None

    def follow(self, step: RankStep) -> None:
        """Run a step of rank 0."""
        with torch.inference_mode(), self.runtime.scope():
            rows = step.rows()
            if rows.batch.copies:
                self._program.attention.copy_pages(rows.batch.copies)
            commons = self._writes.write_tokens(rows, step.token_ids, step.starts, step.key)
            self.prepare(commons, step.key)
            if step.key is None:
                outputs = self._run_eager(
                    commons[0], rows.num_logits, all_hidden=step.all_hidden, makes_drafts=step.makes_drafts
                )
            else:
                outputs = self.replay(step.key)
            self._hidden_TE = outputs.hidden

    def step_drafts(self) -> torch.Tensor:
        """Return no drafts: those of rank 0 come at the head of a step."""
        return self._inputs.drafts[:0]

    def score(self, rows: Score) -> None:
        """Take part in the logits of some rows of the latest step."""
        assert self._hidden_TE is not None
        with torch.inference_mode(), self.runtime.scope():
            self._scorer(self._hidden_TE)(self._hidden_TE[rows.first : rows.first + rows.num_rows])


def serve_rank(plan: EnginePlan, ranks: Ranks, commands: Connection, answers: Connection) -> None:
    """Load the model of a rank and execute the commands of rank 0, until it closes the connection.

    Args:
        plan: the plan of rank 0, which has equal sizes.
        ranks: connection with the others.
        commands: pickled commands.
        answers: takes the number of the rank when it is ready, and the answers of commands that have one.

    Raises:
        WeightError: the weights cannot be read.
        RankError: another rank has ended.
    """
    platform = make_platform(plan.device.kind, ranks)
    load = weights_load(plan, platform.device, ranks.rank)
    sleeper, empty_weights, empty_cache = make_sleeper(plan, platform, [load])
    with platform.starting(), load(make_empty=empty_weights) as loading:
        if sleeper is not None:
            sleeper.prepare()
        backends = make_backends_of(plan, platform.device, ranks)
        parts = make_model_parts(plan, backends, loading.model, make_empty=empty_cache)
        runner = make_runner(plan, parts, platform, partial(FollowingRunner, ranks=ranks))
        platform.compile(runner.launch_kernels)
        loading.finish()
    if sleeper is not None:
        sleeper.start(parts, None, zeroes=zeroes_cache(plan))
    resume_collector()
    answers.send(ranks.rank)
    while (command := _received(commands)) is not None:
        if isinstance(command, RankStep):
            runner.follow(command)
        elif isinstance(command, Score):
            runner.score(command)
        elif isinstance(command, Capture):
            gather_draft_weights(plan, parts, ranks)
            runner.capture()
        elif isinstance(command, RankSleep | RankWakeUp):
            assert sleeper is not None, "rank 0 has the same settings"
            answers.send(try_verb(sleeper, command, ranks.rank))
        elif isinstance(command, TimeDrafting):
            runner.time_drafting(lambda requests, drafts, seconds: None)
        else:
            with ranks.checking():
                report = verify(make_subject(plan, parts, runner), num_replays=command.num_replays, seed=command.seed)
            answers.send([mismatch.on_rank(ranks.rank) for mismatch in report.mismatches])


def _received(commands: Connection) -> Command | None:
    """Return the next command; None if rank 0 has closed the connection."""
    try:
        return pickle.loads(commands.recv_bytes())
    except EOFError:
        return None
