"""Table of the part of a step that each kernel belongs to, by the kernel's name in a profiler's trace.

Our kernels are declared by name. Those of libraries have long, generated names, so that each library has a pattern.
"""

from __future__ import annotations

import re

KERNEL_PARTS = {
    "_attention_kernel": "attention",
    "_compare_kernel": "attention",
    "_conv_kernel": "attention",
    "_gated_norm_kernel": "attention",
    "_history_kernel": "attention",
    "_indices_kernel": "attention",
    "_merge_heads_kernel": "attention",
    "_merge_kernel": "attention",
    "_plan_kernel": "attention",
    "_prefill_kernel": "attention",
    "_quantize_kernel": "attention",
    "_share_rows_kernel": "attention",
    "_split_kernel": "attention",
    "delta_chunk_kernel": "attention",
    "delta_decode_kernel": "attention",
    "delta_norm_kernel": "attention",
    "delta_scan_kernel": "attention",
    "delta_step_kernel": "attention",
    "mamba_chunk_kernel": "attention",
    "mamba_pass_kernel": "attention",
    "mamba_segment_kernel": "attention",
    "mamba_step_kernel": "attention",
    "_dequantize_kernel": "products",
    "_expert_kernel": "products",
    "expert_few_rows_kernel": "products",
    "_gate_up_row_kernel": "products",
    "_gate_up_fp4_row_kernel": "products",
    "_down_row_kernel": "products",
    "_down_fp4_row_kernel": "products",
    "_gemm_small_m_kernel": "products",
    "_gemm_ring_small_m_kernel": "products",
    "_gather_columns_kernel": "products",
    "_gemv_kernel": "products",
    "_gemm_grouped_small_m_kernel": "products",
    "_gemv_integer_kernel": "products",
    "_gemm_ring_kernel": "products",
    "_gemm_tiled_kernel": "products",
    "_add_kernel": "rest",
    "_join_kernel": "rest",
    "_add_table_kernel": "rest",
    "_append_kernel": "rest",
    "_copy_kernel": "rest",
    "_count_kernel": "rest",
    "_gate_heads_kernel": "rest",
    "_gate_kernel": "rest",
    "_embed_kernel": "rest",
    "_first_rows_kernel": "rest",
    "_gather_kernel": "rest",
    "_layer_norm_kernel": "rest",
    "_chosen_kernel": "rest",
    "_list_kernel": "rest",
    "_listed_rows_kernel": "rest",
    "_mask_kernel": "rest",
    "_mean_kernel": "rest",
    "_ngram_kernel": "rest",
    "_next_row_kernel": "rest",
    "_norm_kernel": "rest",
    "_prepare_kernel": "rest",
    "_quantize_rows_kernel": "rest",
    "_rope_kernel": "rest",
    "_send_kernel": "rest",
    "_accept_kernel": "rest",
    "_activate_kernel": "rest",
    "_activation_kernel": "rest",
    "_joint_norm_kernel": "rest",
    "_route_kernel": "rest",
    "_sum_rows_kernel": "rest",
    "_route_row_kernel": "rest",
    "_write_kernel": "rest",
    "filter_kernel": "rest",
    "scan_kernel": "rest",
}
"""Entry points of `phonograph.kernels.triton`."""

# The first pattern found in a name counts: FlashAttention's kernels contain "cutlass" too.
LIBRARY_PARTS = (
    # FlashAttention and FlashInfer.
    ("attention", re.compile(r"flash|fmha|Batch(Prefill|Decode|Paged)|MergeStates", re.IGNORECASE)),
    # cuBLAS and CUTLASS.
    ("products", re.compile(r"nvjet|cublas|cutlass|gemm|gemv|splitK", re.IGNORECASE)),
    # torch's own kernels, copies, and NCCL.
    ("rest", re.compile(r"at::|cub::|thrust::|memcpy|memset|nccl", re.IGNORECASE)),
)


def kernel_part(name: str) -> str | None:
    """Return the part of a kernel or copy, or None if neither table knows it."""
    return KERNEL_PARTS.get(name) or next((part for part, pattern in LIBRARY_PARTS if pattern.search(name)), None)
