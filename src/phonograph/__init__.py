"""Phonograph, an LLM inference engine for attention backends inside CUDA graphs.

Public names are imported at first use, so that `import phonograph` is fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phonograph.config.engine_config import EngineConfig
    from phonograph.config.engine_config import EngineConfig as AsyncEngineArgs
    from phonograph.config.engine_config import EngineConfig as EngineArgs
    from phonograph.core.beam_search_params import BeamSearchParams
    from phonograph.core.pooling_params import PoolingParams
    from phonograph.core.repetition_detection import RepetitionDetectionParams
    from phonograph.core.sampling_params import RequestOutputKind, SamplingParams
    from phonograph.core.structured_outputs import StructuredOutputs
    from phonograph.core.structured_outputs import StructuredOutputs as GuidedDecodingParams
    from phonograph.core.structured_outputs import StructuredOutputs as StructuredOutputsParams
    from phonograph.engine.async_llm import AsyncLLM
    from phonograph.engine.async_llm import AsyncLLM as AsyncLLMEngine
    from phonograph.engine.llm import LLM
    from phonograph.engine.offline.prompts import TextPrompt, TokensPrompt
    from phonograph.engine.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "GuidedDecodingParams",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputs",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "phonograph.engine.async_llm",
    "LLM": "phonograph.engine.llm",
    "BeamSearchParams": "phonograph.core.beam_search_params",
    "CompletionOutput": "phonograph.engine.outputs",
    "EngineConfig": "phonograph.config.engine_config",
    "PoolingOutput": "phonograph.engine.outputs",
    "PoolingParams": "phonograph.core.pooling_params",
    "PoolingRequestOutput": "phonograph.engine.outputs",
    "RepetitionDetectionParams": "phonograph.core.repetition_detection",
    "RequestOutput": "phonograph.engine.outputs",
    "RequestOutputKind": "phonograph.core.sampling_params",
    "SamplingParams": "phonograph.core.sampling_params",
    "StructuredOutputs": "phonograph.core.structured_outputs",
    "TextPrompt": "phonograph.engine.offline.prompts",
    "TokensPrompt": "phonograph.engine.offline.prompts",
}
_VLLM_NAMES = {
    "AsyncEngineArgs": "EngineConfig",
    "AsyncLLMEngine": "AsyncLLM",
    "EngineArgs": "EngineConfig",
    "GuidedDecodingParams": "StructuredOutputs",
    "StructuredOutputsParams": "StructuredOutputs",
}
"""Names of vLLM, present and past, each with the name that means the same here."""
_ABSENT = {
    "LLMEngine": "LLM.enqueue and LLM.wait_for_completion queue requests and answer them; AsyncLLM streams them",
}
"""Names of vLLM that are missing, each with what works or the reason."""


def __getattr__(name: str) -> object:
    ours = _VLLM_NAMES.get(name, name)
    if ours not in _HOMES:
        hint = f"; {_ABSENT[name]}" if name in _ABSENT else ""
        names = f"its names are {', '.join(__all__)}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}; {names}")
    value = getattr(importlib.import_module(_HOMES[ours]), ours)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
