"""Import of FlashInfer, with a check of the interface that the adapter needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module, metadata
from typing import Any, NamedTuple

from phonograph.errors import BackendError, ConfigError

PACKAGE = "flashinfer-python"

# Arguments that the adapter passes by name or in this order.
_DECODE = "BatchDecodeWithPagedKVCacheWrapper"
_PREFILL = "BatchPrefillWithPagedKVCacheWrapper"
_COMMON_PLAN = "window_left logits_soft_cap q_data_type kv_data_type sm_scale seq_lens"
_RUN = "q paged_kv_cache q_scale k_scale v_scale out lse return_lse enable_pdl"
_USED = {
    (_DECODE, "__init__"): "float_workspace_buffer kv_layout use_cuda_graph use_tensor_cores paged_kv_indptr_buffer "
    "paged_kv_indices_buffer paged_kv_last_page_len_buffer backend",
    (_DECODE, "plan"): "indptr indices last_page_len num_qo_heads num_kv_heads head_dim page_size " + _COMMON_PLAN,
    (_DECODE, "run"): _RUN,
    (_DECODE, "reset_workspace_buffer"): "float_workspace_buffer int_workspace_buffer",
    (_PREFILL, "__init__"): "float_workspace_buffer kv_layout use_cuda_graph qo_indptr_buf paged_kv_indptr_buf "
    "paged_kv_indices_buf paged_kv_last_page_len_buf backend",
    (_PREFILL, "plan"): "qo_indptr paged_kv_indptr paged_kv_indices paged_kv_last_page_len num_qo_heads num_kv_heads "
    "head_dim_qk page_size causal max_token_per_sequence " + _COMMON_PLAN,
    (_PREFILL, "run"): _RUN,
    (_PREFILL, "reset_workspace_buffer"): "float_workspace_buffer int_workspace_buffer",
}


Wrapper = Any
"""Decode or prefill wrapper, with `plan`, `run` and `reset_workspace_buffer` as in `_USED`."""


class FlashInferLibrary(NamedTuple):
    """The installed version and the classes of its wrappers."""

    version: str
    decode: Callable[..., Wrapper]
    prefill: Callable[..., Wrapper]


def load_library() -> FlashInferLibrary:
    """Import the library. That compiles nothing yet.

    Raises:
        ConfigError: the library, or a package that it needs, is not installed.
        BackendError: it cannot be imported, or lacks an argument that the adapter passes.
    """
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    try:
        module = import_module("flashinfer")
    except ModuleNotFoundError as error:
        problem = f"{PACKAGE} {version} cannot be imported: {error}; pip install {PACKAGE}"
        raise ConfigError("attention_backend", "flashinfer", problem) from error
    except Exception as error:  # whatever an import of native code raises
        raise BackendError(f"{PACKAGE} {version} cannot be imported: {error}") from error
    for (name, method), used in _USED.items():
        wrapper = getattr(module, name, None)
        function = getattr(wrapper, method, None)
        if wrapper is None or function is None:
            raise BackendError(f"{PACKAGE} {version} has no {name}.{method}; the adapter was written for 0.6.14")
        lacking = [argument for argument in used.split() if argument not in inspect.signature(function).parameters]
        if lacking:
            raise BackendError(
                f"{PACKAGE} {version}: {name}.{method} does not take {', '.join(lacking)}; the adapter was written for "
                "0.6.14"
            )
    return FlashInferLibrary(version=version, decode=getattr(module, _DECODE), prefill=getattr(module, _PREFILL))
