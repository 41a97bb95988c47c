"""Description of a batch, the same for all attention backends.

The tensors are views of persistent buffers. A captured graph froze their addresses, so the runner writes new contents
into them at each step and never allocates new ones. The host integers are for planning. A graph that captures one has
frozen it, which is the first fault that `phonograph verify` looks for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from phonograph.graphs.modes import GraphKey


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonMetadata:
    """One step of one KV group. Sequences are ordered decodes first, then prefills, then empty slots.

    Host integers count the actual batch, without padding. Tensors are padded to the R request slots and T tokens of
    the graph; an eager step may have no padding.

    Attributes:
        num_reqs, num_decodes: sequences, and those that continue their output. These have one query token, or as many
            as the specification allows with speculation. Prefills may have one too.
        num_tokens, num_decode_tokens: their query tokens.
        max_query_len, max_seq_len: tokens of the longest query, and of the longest sequence.
        query_start_loc: [R+1] int32, cumulative query lengths; empty slots repeat the last value.
        seq_lens: [R] int32, context + query length; 0 in empty slots.
        block_table: [R, max_blocks_per_seq] int32. Each entry is a valid block id, also behind a sequence's end and
            behind a window, where the block may belong to another sequence.
        plan_tables: block tables of all groups that use this group's plan, its own among them; empty if no other does.
        slot_mapping: [T] int64, where each token's key and value go; -1 writes nothing.
        query_start_loc_cpu, seq_lens_cpu: host copies, for backends that plan on the host. For backends with
            `takes_length_bounds`, lengths of decodes may be upper bounds, and so may `max_seq_len`.
        causal: a query attends to no later token.
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
    plan_tables: tuple[torch.Tensor, ...] = ()


def leading_decodes(query_start_loc_cpu: np.ndarray, query_len: int) -> int:
    """Count the sequences of `query_len` tokens before the first one of another length, empty slots included.

    Args:
        query_start_loc_cpu: [R+1], cumulative query lengths.
        query_len: tokens of a decode.

    Example:
        ```python
        assert leading_decodes(np.array([0, 1, 2, 30]), 1) == 2  # Two decodes and a prefill of 28 tokens.
        ```
    """
    other_lens = np.flatnonzero(np.diff(query_start_loc_cpu) != query_len)
    return int(other_lens[0]) if len(other_lens) else len(query_start_loc_cpu) - 1


class HostCut(NamedTuple):
    """Decodes and prefills of a batch of R slots, each as a batch of R slots.

    The sequences of the other part are empty, so that the border may move from step to step in a graph. The starts
    are [R+1], the lengths [R].

    Attributes:
        num_decodes: as `leading_decodes` counts them.
        border: tokens of the decodes.
    """

    num_decodes: int
    border: int
    decode_starts: np.ndarray
    decode_lens: np.ndarray
    prefill_starts: np.ndarray
    prefill_lens: np.ndarray
    max_prefill_query_len: int


def cut_on_host(query_start_loc_cpu: np.ndarray, seq_lens_cpu: np.ndarray, query_len: int) -> HostCut:
    """Cut a batch as the kernel cuts its tensors (`kernels/triton/attention/split_batch.py`).

    Args:
        query_start_loc_cpu: [R+1], cumulative query lengths.
        seq_lens_cpu: [R], tokens of each sequence.
        query_len: tokens of a decode.

    Example:
        ```python
        cut = cut_on_host(np.array([0, 1, 2, 30]), np.array([50, 9, 28]), 1)
        assert cut.border == 2 and cut.prefill_lens.tolist() == [0, 0, 28]
        ```
    """
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
    """A step as a backend sees it: the batch, and in subclasses what the backend's builder adds.

    Attributes:
        common: the batch.
    """

    common: CommonMetadata


MetadataT = TypeVar("MetadataT", bound=AttentionMetadata)
"""Metadata of one backend."""


class MetadataBuilder(ABC, Generic[MetadataT]):
    """Maker of a backend's metadata, in buffers that live as long as the builder.

    Attributes:
        units: int32 [3], counts of the latest step: units of prefixes that decodes share, their other units, and tiles
            of keys of those prefixes. The step's schedule writes them. None if the backend shares no prefix.
        depends_on_key: what is built for a graph depends on the key alone, and on tensors that stay where they are. The
            caller may keep it.
    """

    units: torch.Tensor | None = None
    depends_on_key: ClassVar[bool] = False

    @abstractmethod
    def build(self, common: CommonMetadata, *, key: GraphKey | None) -> MetadataT:
        """Build the metadata of the step that runs next. The runner calls it exactly once for each step.

        What it returns for a capture must stay valid as long as the graph lives, and later builds with the same key
        must refill it.

        Args:
            common: the batch; at a capture too it is a real one, of the graph's shape.
            key: the graph that will be captured or replayed; None for an eager step.

        Returns:
            The metadata, for `schedule`, `write_kv` and `forward`.
        """


AnyBuilder = MetadataBuilder[Any]
"""A builder whose metadata the caller only passes on."""
