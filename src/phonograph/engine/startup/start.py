"""Start of an engine from a configuration, for the offline API and for servers."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext

import torch

from phonograph.config.engine_config import EngineConfig
from phonograph.engine.build import Engine, build_engine, this_device
from phonograph.engine.plan import EnginePlan, make_plan
from phonograph.engine.process.client import StartProgress, no_progress
from phonograph.engine.process.ranks.rank_processes import RankProcesses
from phonograph.engine.startup.configured_model import read_configured_model
from phonograph.engine.startup.early_start import pause_collector, resume_collector
from phonograph.errors import CaptureError, ConfigError, PhonographError, counted
from phonograph.files.model_files import model_path
from phonograph.graphs.modes import GraphMode
from phonograph.graphs.verification import VerifyReport, verify
from phonograph.models.weights.loading import weight_files
from phonograph.models.weights.tensor_parallel import SETTING
from phonograph.models.weights.tied_embeddings import match_tied_embeddings


def start_engine(
    config: EngineConfig,
    progress: StartProgress = no_progress,
    *,
    on_rank_failure: Callable[[str], None] | None = None,
    rank_processes: RankProcesses | None = None,
) -> Engine:
    """Load the model and capture its graphs. With `verify_graphs`, compare each graph with eager.

    With `verify_graphs`, a graph that was captured at the second attempt is an error too.

    Args:
        config: of the engine.
        progress: called with the progress of the start.
        on_rank_failure: see `RankGroup`.
        rank_processes: processes of the other ranks, if they have started.

    Raises:
        PhonographError: the configuration, the model or the machine does not allow it; the message says what would
            work.
    """
    pause_collector()
    try:
        plan = _plan(config)
        if config.tensor_parallel_size == 1:
            engine = build_engine(plan, progress)
        else:
            engine = _start_ranks(plan, progress, on_rank_failure, rank_processes)
    finally:
        resume_collector()
    if config.verify_graphs:
        try:
            _check_graphs(engine)
        except BaseException:
            engine.close()
            raise
    return engine


def _check_graphs(engine: Engine) -> None:
    """Compare each graph with eager."""
    if engine.captured.retries:
        raise CaptureError(f"verify_graphs: {'; '.join(map(str, engine.captured.retries))}")
    report = verify_engine(engine, num_replays=1)
    if not report.ok:
        raise PhonographError(f"verify_graphs found a graph unlike eager: {report.mismatches[0]}")


def _start_ranks(
    plan: EnginePlan,
    progress: StartProgress,
    on_failure: Callable[[str], None] | None,
    processes: RankProcesses | None,
) -> Engine:
    if plan.device.kind != "cpu":
        _check_devices(plan.config.tensor_parallel_size)
    # Imports torch.distributed, which installations may lack.
    from phonograph.engine.process.ranks.rank_group import RankGroup

    if getattr(multiprocessing.current_process(), "_inheriting", False):
        problem = "ranks are processes that import the main file: guard it by `if __name__ == '__main__':`"
        raise ConfigError(SETTING, plan.config.tensor_parallel_size, problem)
    group = RankGroup(plan, processes, on_failure=on_failure)
    try:
        return build_engine(plan, progress, group=group)
    except BaseException:
        group.close()
        raise


def _check_devices(num_ranks: int) -> None:
    """Check that there are equal GPUs for all ranks, and that the first one is the current device.

    Raises:
        ConfigError: it is not so.
    """
    count = torch.cuda.device_count()
    if count < num_ranks:
        problem = f"needs {num_ranks} GPUs, found {counted(count, 'GPU')} here; {count} or fewer works"
        raise ConfigError(SETTING, num_ranks, problem)
    names = {torch.cuda.get_device_name(index) for index in range(num_ranks)}
    if len(names) > 1:
        problem = f"needs equal GPUs, and the first ones here are {' and '.join(sorted(names))}; CUDA_VISIBLE_DEVICES"
        raise ConfigError(SETTING, num_ranks, f"{problem} selects others")
    if torch.cuda.current_device():
        problem = f"starts on device 0, and the current device is {torch.cuda.current_device()}; CUDA_VISIBLE_DEVICES"
        raise ConfigError(SETTING, num_ranks, f"{problem} selects other GPUs")


def _plan(config: EngineConfig) -> EnginePlan:
    """Plan from config.json, and again if the weights need more memory than it says."""
    model = read_configured_model(config, config_only=config.load_format == "dummy")
    device = this_device(config.device)
    plan = make_plan(config, model, device)
    if not model.tie_word_embeddings or config.load_format == "dummy":
        return plan
    folder = model_path(config.model, weights=True, revision=config.revision, download_dir=config.download_dir)
    files = weight_files(folder)
    loaded, _ = match_tied_embeddings(model, files)
    return plan if loaded is model else make_plan(config, loaded, device)


def verify_engine(
    engine: Engine, *, num_replays: int, seed: int = 0, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Compare replays of every captured graph on random batches with eager runs. No request may be in flight.

    Raises:
        ConfigError: the mode has no graphs, or no capture size is left.
        EngineUnavailable: the engine sleeps.
    """
    engine.core.check_awake()
    plan = engine.plan
    if plan.resolution.mode is not GraphMode.NONE and not plan.captures.largest_first():
        problem = f"leaves no graph to verify: {'; '.join(plan.captures.notes)}"
        raise ConfigError("cudagraph_capture_sizes", list(plan.config.cudagraph_capture_sizes or ()), problem)
    try:
        with nullcontext() if engine.group is None else engine.group.verifying(num_replays, seed) as others:
            report = verify(engine.make_subject(), num_replays=num_replays, seed=seed, progress=progress)
        report.mismatches += [] if others is None else others
        return report
    finally:  # also after a refusal or Ctrl-C: the subject has overwritten cached blocks
        engine.core.scheduler.reset_prefix_cache()
