"""Settings and graphs that a model which transformers' module runs does not have."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from phonograph.config.engine_config import EngineConfig
from phonograph.errors import CaptureError, ConfigError
from phonograph.graphs.capture_list import CaptureList
from phonograph.graphs.modes import GraphMode, GraphSupport, Support
from phonograph.graphs.resolve import Pieces
from phonograph.models.modules.module_spec import ModuleSpec
from phonograph.models.spec import ModelSpec
from phonograph.runner.runner import CaptureProgress, CaptureReport, Runner

if TYPE_CHECKING:
    from phonograph.engine.plan import EnginePlan

log = logging.getLogger(__name__)


def check_module(config: EngineConfig, model: ModelSpec) -> None:
    """Check that the settings work with transformers' module, if one runs the model.

    Raises:
        ConfigError: one of them does not.
    """
    if not isinstance(model, ModuleSpec):
        if config.model_impl == "transformers":
            raise ConfigError("model_impl", "transformers", "a GGUF file has no module of transformers; auto works")
        return
    unsupported = {
        "tensor_parallel_size": config.tensor_parallel_size > 1,
        "speculative_config": config.speculation is not None and config.speculation.model is not None,
        "quantization": config.quantization is not None,
        "quantize_lm_head": config.quantize_lm_head is not None,
        "convert": config.convert == "embed",
        "enable_sleep_mode": config.enable_sleep_mode,
        "expert_load_metrics": config.expert_load_metrics,
        "batch_invariant": config.batch_invariant,
    }
    for name, is_set in unsupported.items():
        if is_set:
            problem = f"transformers' module runs {model.architecture}, which does not have this; leave it out"
            raise ConfigError(name, getattr(config, name), problem)


def limit_graphs(model: ModelSpec, operation: str, requested: GraphMode | None) -> tuple[Support, Pieces]:
    """Return the graph support and the pieces of a module with an operation that a graph cannot hold.

    Raises:
        ConfigError: a mode with graphs was requested.
    """
    reason = f"{model.architecture} of transformers: {operation}"
    if requested not in (None, GraphMode.NONE):
        raise ConfigError("cudagraph_mode", requested.value, f"{reason}; NONE works, as without this setting")
    return Support(GraphSupport.NEVER, reason), Pieces(False, "they break at attention only")


def capture_graphs(plan: EnginePlan, runner: Runner, progress: CaptureProgress) -> tuple[EnginePlan, CaptureReport]:
    """Capture all graphs. If a module of transformers fails in the default mode, capture pieces, or none.

    Returns:
        The plan with the mode that runs, and the report.

    Raises:
        CaptureError: a capture failed of another model, or in a mode that was requested.
    """
    while True:
        try:
            return plan, runner.capture(progress)
        except CaptureError as error:
            if not isinstance(plan.model, ModuleSpec) or plan.resolution.asked is not None:
                raise
            resolution = plan.resolution.after_failure(f"{plan.model.architecture} of transformers: {error}")
        note = f"graphs {resolution.reasons[-1]}"
        log.warning("%s: %s", plan.config.model, note)
        captures = plan.captures.in_pieces() if resolution.mode is GraphMode.PIECEWISE else CaptureList()
        plan = replace(plan, resolution=resolution, captures=captures, notes=(*plan.notes, note))
        runner.dispatcher = plan.make_dispatcher()
