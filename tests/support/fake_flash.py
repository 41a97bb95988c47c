"""Stand-ins for the FlashAttention libraries: their signatures, their habits, and the oracle's numbers.

Of FP8 queries, keys and values they compute with what the factors make of them, and write bfloat16.

They leave rows of no request unwritten (NaN, to show), drop windows beyond the maxima, and read a plan only if it was
made for exactly this launch: its entries are hashes of all that went into it. Version 2 folds query heads at query
length 1, and may not get queries without keys, whose log-sum-exp it writes beyond its tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from phonograph.attention.backend import AttentionLayer
from phonograph.testing.oracle import dense_attention

CALLS: list[dict[str, Any]] = []
"""Arguments of the calls of `attend` functions; tests clear the list."""
LARGEST_BATCH_WITH_SPLITS = 992


def _normal(window: Any, causal: bool, max_q: int, max_k: int) -> tuple[int, int]:
    left, right = (-1 if bound is None else bound for bound in window or (-1, -1))
    left = -1 if left >= max_k - 1 else left
    right = -1 if right >= max_q - 1 else right
    return left, 0 if causal else right


def _entries(starts: Any, lens: Any, *rest: Any) -> list[int]:
    queries = np.diff(starts.cpu().numpy())
    pairs = zip(queries.tolist(), lens.tolist(), strict=True)
    return [hash((query, length, *rest)) % 2**31 for query, length in pairs]


def _plan(starts: Any, lens: Any, max_q: int, max_k: int, window: Any, causal: bool, *rest: Any) -> torch.Tensor:
    """Version 3's schedule: vectors of a number for each slot, then the semaphore."""
    slots = lens.shape[0]
    num_splits = rest[0]
    vectors = 1 + (num_splits > 1 and slots <= LARGEST_BATCH_WITH_SPLITS)
    vectors += _normal(window, causal, max_q, max_k) != (-1, -1)
    plan = torch.full((1 + -(-slots // 4) * 4 * vectors,), 77, dtype=torch.int32)
    plan[:slots] = torch.tensor(_entries(starts, lens, max_q, max_k, tuple(window), causal, *rest), dtype=torch.int32)
    plan[-1] = 0
    return plan.to(lens.device)


def _attend(
    q: Any,
    k: Any,
    v: Any,
    starts: Any,
    lens: Any,
    table: Any,
    *,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: Any,
    softcap: float,
    slopes: Any = None,
    sinks: Any = None,
    folds: bool = False,
    descales: tuple[Any, Any, Any] = (None, None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    slots, (num_tokens, heads, _) = lens.shape[0], q.shape
    fp8 = q.dtype == torch.float8_e4m3fn
    assert q.dtype == k.dtype == v.dtype and (not fp8 or q.shape[2] % 16 == 0)
    for factor in descales:
        assert factor is None or (fp8 and factor.shape == (slots, k.shape[2]) and factor.dtype == torch.float32)
    assert q.stride(-1) == 1 and q.stride(1) == q.shape[2] and table.shape[0] == slots and k.shape == v.shape
    assert starts.shape == (slots + 1,) and all(t.dtype == torch.int32 for t in (starts, lens, table))
    assert max_q >= 1 and max_k >= int(lens.max())
    window = _normal(window, causal, max_q, max_k)
    lengths = np.diff(starts.cpu().numpy())
    assert lengths.max() <= max_q
    out, lse = torch.full(q.shape, torch.nan), torch.full((heads, num_tokens), torch.nan)
    first = starts.tolist()
    folded = folds and max_q == 1 and heads > k.shape[2] and window in ((-1, -1), (-1, 0)) and slopes is None
    if folded:
        assert num_tokens == slots, "q is viewed as one token a slot"
        first, lengths = list(range(slots + 1)), np.ones(slots, np.int64)
    layer = AttentionLayer(
        index=0,
        scale=scale,
        window=window,
        softcap=softcap,
        alibi_slopes=slopes,
        sinks=None if sinks is None else sinks,
    )
    for slot in range(slots):
        length, count = int(lens[slot]), int(lengths[slot])
        if not count:
            continue
        assert length or folded or not folds, "the log-sum-exp of queries without keys would lie beyond the tensor"
        blocks = table[slot, : -(-length // k.shape[1])].long()
        keys, values = (
            _factored(_chosen(pages, blocks).flatten(0, 1)[:length], factor, slot)
            for pages, factor in ((k, descales[1]), (v, descales[2]))
        )
        rows = slice(first[slot], first[slot] + count)
        query = _factored(q[rows], descales[0], slot)
        some, some_lse = dense_attention(query, keys, values, layer, causal=causal and not folded)
        out[rows], lse[:, rows] = torch.from_numpy(some).float(), torch.from_numpy(some_lse).float()
    return out.to(q.device, torch.bfloat16 if fp8 else q.dtype), lse.to(q.device)


def _chosen(pages: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    return pages.view(torch.uint8)[blocks].view(pages.dtype) if pages.dtype.itemsize == 1 else pages[blocks]


def _factored(rows: torch.Tensor, factor: Any, slot: int) -> np.ndarray:
    """Rows [n, heads, D], each head times what its KV head has in this slot."""
    numbers = rows.double().cpu().numpy()
    if factor is None:
        return numbers
    of_heads = np.repeat(factor[slot].double().cpu().numpy(), numbers.shape[1] // factor.shape[1])
    return numbers * of_heads[:, None]


def _written(out: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    real = ~out.flatten(1).isnan().all(1)
    into[real] = out[real]
    return into


def _check_plan(plan: Any, starts: Any, lens: Any, *facts: Any) -> None:
    num_splits = facts[4]
    if plan is None:
        assert num_splits in (0, 1), "without a plan the keys are split to this number"
        return
    expected = _plan(starts, lens, *facts)
    assert plan.is_contiguous() and plan.dtype == torch.int32 and torch.equal(plan, expected), "another launch's plan"


def vllm_varlen(
    q: Any,
    k: Any,
    v: Any,
    max_seqlen_q: Any,
    cu_seqlens_q: Any,
    max_seqlen_k: Any,
    cu_seqlens_k: Any = None,
    seqused_k: Any = None,
    q_v: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
    return_softmax_lse: bool = False,
    out: Any = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    output_scale: Any = None,
    fa_version: int = 2,
    s_aux: Any = None,
) -> Any:
    CALLS.append(dict(locals()))
    assert fa_version in (2, 3, 4), "the library has no other version"
    if fa_version == 2:
        assert s_aux is None and num_splits == 0 and scheduler_metadata is None
    else:
        assert alibi_slopes is None and (s_aux is None or s_aux.dtype == torch.bfloat16)
    if fa_version == 3:
        facts = (max_seqlen_q, max_seqlen_k, tuple(window_size or ()), causal, num_splits, softcap > 0, k.shape[1])
        facts += (str(k.dtype),)
        _check_plan(scheduler_metadata, cu_seqlens_q, seqused_k, *facts)
    numbers, lse = _attend(
        q,
        k,
        v,
        cu_seqlens_q,
        seqused_k,
        block_table,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        slopes=alibi_slopes,
        sinks=s_aux,
        folds=fa_version == 2,
        descales=(q_descale, k_descale, v_descale),
    )
    assert out.dtype == numbers.dtype
    _written(numbers, out)
    return (out, lse) if return_softmax_lse else out


def scheduler_metadata(
    batch_size: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    num_heads_q: Any,
    num_heads_kv: Any,
    headdim: Any,
    cache_seqlens: Any,
    qkv_dtype: Any = torch.bfloat16,
    headdim_v: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    cache_leftpad: Any = None,
    page_size: Any = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Any = (-1, -1),
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    assert cache_seqlens.shape == (batch_size,) and num_heads_q % num_heads_kv == 0 and headdim
    facts = (max_seqlen_q, max_seqlen_k, window_size, causal, num_splits, has_softcap, page_size, str(qkv_dtype))
    return _plan(cu_seqlens_q, cache_seqlens, *facts)


def package_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dropout_p: float = 0.0,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    CALLS.append(dict(locals()))
    assert k.shape[1] % 256 == 0 and cu_seqlens_k.shape == cu_seqlens_q.shape
    numbers, lse = _attend(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k.diff(),
        block_table,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        slopes=alibi_slopes,
        folds=True,
    )
    return (numbers, lse, None) if return_attn_probs else numbers


def with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    qv: Any = None,
    cache_seqlens: Any = None,
    page_table: Any = None,
    cu_seqlens_q: Any = None,
    max_seqlen_q: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: Any = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    CALLS.append(dict(locals()))
    max_k = page_table.shape[1] * k_cache.shape[1]
    facts = (max_seqlen_q, max_k, tuple(window_size), causal, num_splits, softcap > 0, k_cache.shape[1])
    facts += (str(k_cache.dtype),)
    _check_plan(scheduler_metadata, cu_seqlens_q, cache_seqlens, *facts)
    numbers, lse = _attend(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q,
        cache_seqlens,
        page_table,
        max_q=max_seqlen_q,
        max_k=max_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        descales=(q_descale, k_descale, v_descale),
    )
    return (numbers, lse, None, None) if return_softmax_lse else numbers


def cute_varlen(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    page_table: Any = None,
    softmax_scale: Any = None,
    causal: bool = False,
    window_size: Any = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    return_lse: bool = False,
) -> Any:
    CALLS.append(dict(locals()))
    assert num_splits == 1 and -1 not in window_size
    numbers, lse = _attend(
        q,
        k,
        v,
        cu_seqlens_q,
        seqused_k,
        page_table,
        max_q=max_seqlen_q,
        max_k=max_seqlen_k,
        scale=softmax_scale,
        causal=causal,
        window=window_size,
        softcap=softcap,
        sinks=learnable_sink,
    )
    return numbers, lse if return_lse else None


_VARLEN = "from fake_flash import {} as flash_attn_varlen_func\n"
_PLAN = "from fake_flash import scheduler_metadata as get_scheduler_metadata\n"
_VLLM = {"vllm/__init__.py": "", "vllm/vllm_flash_attn/__init__.py": _VARLEN.format("vllm_varlen") + _PLAN}
_CUTE = "import cutlass\n"
PACKAGES: dict[str, dict[str, str]] = {
    "vllm 2": {**_VLLM, "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so": ""},
    "vllm 3": {**_VLLM, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": ""},
    "vllm 4": {**_VLLM, "vllm/vllm_flash_attn/cute/interface.py": _CUTE, "cutlass.py": ""},
    "package 2": {"flash_attn/__init__.py": _VARLEN.format("package_varlen"), "flash_attn_2_cuda.py": ""},
    "interface 3": {
        "flash_attn_interface.py": "from fake_flash import with_kvcache as flash_attn_with_kvcache\n" + _PLAN
    },
    "published 3": {
        "kernels.py": "import flash_kernel\n"
        "def get_kernel(name):\n    assert name == 'kernels-community/flash-attn3'\n    return flash_kernel\n",
        "flash_kernel.py": "from fake_flash import with_kvcache as flash_attn_with_kvcache\n" + _PLAN,
    },
    "cute 4": {
        "flash_attn/cute/__init__.py": _VARLEN.format("cute_varlen"),
        "flash_attn/cute/interface.py": _CUTE,
        "cutlass.py": "",
    },
}
"""Files of what can be installed, by name and the version it provides."""


def write_packages(folder: Path, *names: str) -> None:
    for name in names:
        for path, text in PACKAGES[name].items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
