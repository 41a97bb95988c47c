"""Which kernels a build of FlashAttention holds: builds for a few head sizes and dtypes import and declare all of them.

Nothing but a launch tells, so a launch is tried, of one query on one page.
"""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest
import torch

from phonograph.attention.attention_spec import UNBOUNDED, AttentionSpec
from phonograph.attention.backend import AttentionCall, AttentionLayer
from phonograph.attention.flash_attn.libraries import FlashAttentionMetadata, Launch, Plan
from phonograph.attention.flash_attn.providers import make_library, missing, provider_of
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.selection import BUILT_IN
from phonograph.core.device import DeviceSpec

_ABSENT = re.compile(
    # Of a kernel whose PTX is not there, the driver knows no more than the last.
    r"no kernel image is available|invalid device function|device kernel image is invalid|CUDA error: unknown error",
    re.IGNORECASE,
)


def skip_unless_runnable(version: str, spec: AttentionSpec) -> DeviceSpec:
    """Return this GPU. Skip the test if `version` has no provider, refuses the spec, or lacks its kernels."""
    absent = missing(version)
    if absent is not None:
        pytest.skip(absent)
    here = DeviceSpec(name="here", kind="cuda", capability=torch.cuda.get_device_capability())
    registered = next(one for one in BUILT_IN if one.capabilities.label == f"flash_attn {version}")
    refusals = registered.refusals(spec, here)
    if refusals:
        pytest.skip("; ".join(refusals))
    absent = kernel_missing(version, spec.head_size, spec.kv_cache_dtype, torch.device("cuda"))
    if absent is not None:
        pytest.skip(absent)
    return here


@functools.cache
def kernel_missing(version: str, head_size: int, dtype: str, device: torch.device) -> str | None:
    """Return the reason why the provider of `version` lacks a kernel for this head size, dtype and device, or None.

    Raises:
        RuntimeError: any other failure of the launch, which is no reason to leave a test out.
        BackendError: no library provides the version, or not as the adapter needs it.
    """
    try:
        _launch(version, head_size, dtype, device)
    except RuntimeError as error:
        found = _ABSENT.search(str(error))
        if found is None:
            raise
        provider = provider_of(version)
        module = provider.module if provider is not None else "no library"
        return (
            f"the build of FlashAttention {version} here ({module}) has no kernel of head size {head_size} in {dtype}: "
            f"{found[0].lower()}"
        )
    return None


def _launch(version: str, head_size: int, dtype: str, device: torch.device) -> None:
    provider = provider_of(version)
    block_size = max(64, provider.block_size_multiple if provider is not None else 0)
    spec = AttentionSpec(
        num_query_heads=2,
        num_kv_heads=1,
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=dtype,
        block_size=block_size,
    )
    library = make_library(version, spec)
    query_THD = torch.zeros(2, 2, head_size, dtype=getattr(torch, dtype), device=device)
    pages_BSKD = query_THD.new_zeros(1, block_size, 1, head_size)
    common = CommonMetadata(
        num_reqs=1,
        num_decodes=0,
        num_tokens=2,
        num_decode_tokens=0,
        max_query_len=2,
        max_seq_len=2,
        query_start_loc=torch.tensor([0, 2], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([2], dtype=torch.int32, device=device),
        block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
        slot_mapping=torch.arange(2, device=device),
        query_start_loc_cpu=np.array([0, 2], np.int32),
        seq_lens_cpu=np.array([2], np.int32),
    )
    launch = Launch(max_query_len=2, max_seq_len=2, num_splits=1)
    metadata = FlashAttentionMetadata(common=common, launch=launch, plan=Plan(), whole=True)
    window = (UNBOUNDED, UNBOUNDED)
    layer = AttentionLayer(index=0, scale=head_size**-0.5, window=window)
    with torch.inference_mode():
        plan = library.schedule(metadata, window)
        # Of FP8 it makes bfloat16.
        out_THD = torch.empty_like(query_THD, dtype=torch.bfloat16 if dtype.startswith("float8") else None)
        call = AttentionCall(layer, torch.stack([pages_BSKD, pages_BSKD]), metadata)
        library.attend(query_THD, pages_BSKD, pages_BSKD.clone(), call, plan, out_THD)
        if device.type == "cuda":
            # An error of the launch may come with the next call only.
            torch.cuda.synchronize()
