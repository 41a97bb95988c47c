"""Phonograph, an LLM inference engine for attention backends inside CUDA graphs.

Public names are imported at first use, so that `import phonograph` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phonograph.config.engine_config import EngineConfig
    from phonograph.core.sampling_params import SamplingParams
    from phonograph.core.structured_outputs import StructuredOutputs
    from phonograph.engine.async_llm import AsyncLLM
    from phonograph.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "EngineConfig", "SamplingParams", "StructuredOutputs", "__version__"]

_HOMES = {
    "AsyncLLM": "phonograph.engine.async_llm",
    "LLM": "phonograph.engine.llm",
    "EngineConfig": "phonograph.config.engine_config",
    "SamplingParams": "phonograph.core.sampling_params",
    "StructuredOutputs": "phonograph.core.structured_outputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
