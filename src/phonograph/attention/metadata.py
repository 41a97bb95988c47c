"""What every attention backend is told about a batch, in the same words.

The tensors are views of persistent buffers: their addresses are what a captured graph froze, so the runner writes new
contents into them at each step and never makes new ones. The host integers beside them are for planning; a graph that
captures them has frozen them, which is the first thing `phonograph verify` looks for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from phonograph.graphs.modes import GraphKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonPrefix:
    """Leading tokens whose keys and values all sequences of a batch have in the same blocks, all of them full.

    num_tokens: how many, on the host; at least one token of each sequence comes behind them
    length:     the same, [1] int32, where the step's other inputs are
    """

    num_tokens: int
    length: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonMetadata:
    """One step of one KV group. Sequences are ordered decodes first, then prefills, then empty slots.

    Host integers (of the actual batch, without padding):
        num_reqs, num_decodes, num_tokens, num_decode_tokens, max_query_len, max_seq_len

    Tensors (padded to the graph's R request slots and T tokens; equal to the actual batch when eager without padding):
        query_start_loc [R+1] int32  cumulative query lengths; empty slots repeat the last value
        seq_lens        [R]   int32  context + query length; 0 in empty slots
        block_table     [R, max_blocks_per_seq] int32
        slot_mapping    [T]   int64  where each token's key and value go; -1 writes nothing

    Host copies of the first two, for backends that plan on the host:
        query_start_loc_cpu [R+1], seq_lens_cpu [R]  numpy int32

    prefix: what cascade attention is to attend once; None where the step does not cascade
    """

    num_reqs: int
    num_decodes: int
    num_tokens: int
    num_decode_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    query_start_loc_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    causal: bool = True
    prefix: CommonPrefix | None = None


def leading_decodes(query_start_loc_cpu: np.ndarray, query_len: int) -> int:
    """How many sequences of `query_len` tokens come before the first of any other length, empty slots included.

    Args:
        query_start_loc_cpu: [R+1], as CommonMetadata has it
    """
    others = np.flatnonzero(np.diff(query_start_loc_cpu) != query_len)
    return int(others[0]) if len(others) else len(query_start_loc_cpu) - 1


class HostCut(NamedTuple):
    """A batch of R slots as two: each is the whole batch with the other's sequences empty, so that the border may move
    from step to step in a graph. Decodes are those of `leading_decodes`; the starts are [R+1], the lengths [R].

    border: tokens of the decodes
    """

    num_decodes: int
    border: int
    decode_starts: np.ndarray
    decode_lens: np.ndarray
    prefill_starts: np.ndarray
    prefill_lens: np.ndarray
    max_prefill_query_len: int


def cut_on_host(query_start_loc_cpu: np.ndarray, seq_lens_cpu: np.ndarray, query_len: int) -> HostCut:
    """By the rule of the kernel that cuts the tensors (`kernels/triton/attention/split_batch.py`)."""
    starts, lens = query_start_loc_cpu, seq_lens_cpu
    num_decodes = leading_decodes(starts, query_len)
    border = int(starts[num_decodes])
    is_decode = np.arange(len(lens)) < num_decodes
    return HostCut(
        num_decodes=num_decodes,
        border=border,
        decode_starts=np.minimum(starts, border),
        decode_lens=np.where(is_decode, lens, 0),
        prefill_starts=np.maximum(starts, border),
        prefill_lens=np.where(is_decode, 0, lens),
        max_prefill_query_len=int(np.diff(starts[num_decodes:]).max(initial=0)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMetadata:
    """A step as a backend sees it: the batch, and in subclasses what its builder adds."""

    common: CommonMetadata


MetadataT = TypeVar("MetadataT", bound=AttentionMetadata)
"""The metadata of one backend, which its builder makes and its methods take."""


class MetadataBuilder(ABC, Generic[MetadataT]):
    """Turns common metadata into a backend's own, writing into buffers that live as long as the builder.

    The runner calls `build` exactly once for what will run next: an eager step (`key` None), the capture of a graph, or
    its replay (`key` names it). At capture `common` describes a real batch of that graph's shape, never nothing.
    Whatever `build` returns for a capture must stay valid, and be refilled by later builds with the same key, for as
    long as the graph lives.
    """

    @abstractmethod
    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> MetadataT: ...


AnyBuilder = MetadataBuilder[Any]
"""A builder whose metadata the holder only passes on."""
