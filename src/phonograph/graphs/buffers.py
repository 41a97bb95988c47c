"""The static inputs of all graphs: one set of tensors whose addresses every capture freezes, refilled at each step.

The runner writes through the numpy views (on the CPU they are the tensors' own memory). A replay consumes what was
prepared for it: `consume` refuses one for which nothing was written, because a peer's kernels once looped forever on
the stale plan of an earlier batch.
"""

from __future__ import annotations

import numpy as np
import torch

from phonograph.errors import ReplayError
from phonograph.graphs.modes import GraphKey


class StaticBuffers:
    """Inputs of a step, sized for the largest one.

    Shapes, with T = max_num_tokens, R = max_num_seqs and N the blocks of the longest sequence:
        input_ids       [T]    int32
        positions       [T]    int64
        slot_mapping    [T]    int64   -1 writes nothing
        query_start_loc [R+1]  int32
        seq_lens        [R]    int32
        block_table     [R, N] int32
        logits_rows     [R]    int64   row of `hidden` whose logits request r wants
        prefix_len      [1]    int32   tokens of the prefix that a cascade attends once

    Each has a numpy view of the same name with `_np` behind it.
    """

    def __init__(self, *, max_num_tokens: int, max_num_seqs: int, max_blocks_per_seq: int) -> None:
        self.max_num_seqs = max_num_seqs
        self.input_ids_np = np.zeros(max_num_tokens, np.int32)
        self.positions_np = np.zeros(max_num_tokens, np.int64)
        self.slot_mapping_np = np.full(max_num_tokens, -1, np.int64)
        self.query_start_loc_np = np.zeros(max_num_seqs + 1, np.int32)
        self.seq_lens_np = np.zeros(max_num_seqs, np.int32)
        self.block_table_np = np.zeros((max_num_seqs, max_blocks_per_seq), np.int32)
        self.logits_rows_np = np.zeros(max_num_seqs, np.int64)
        self.prefix_len_np = np.zeros(1, np.int32)
        self.counting_np = np.arange(max_num_seqs + 1, dtype=np.int32)
        """0, 1, 2, ...: query_start_loc of a batch of single tokens."""
        self.input_ids = torch.from_numpy(self.input_ids_np)
        self.positions = torch.from_numpy(self.positions_np)
        self.slot_mapping = torch.from_numpy(self.slot_mapping_np)
        self.query_start_loc = torch.from_numpy(self.query_start_loc_np)
        self.seq_lens = torch.from_numpy(self.seq_lens_np)
        self.block_table = torch.from_numpy(self.block_table_np)
        self.logits_rows = torch.from_numpy(self.logits_rows_np)
        self.prefix_len = torch.from_numpy(self.prefix_len_np)
        self._prepared_for: GraphKey | None = None

    def prepare(self, *, num_reqs: int, num_tokens: int) -> None:
        """Do nothing: the host has written all inputs before the step."""

    def prepared(self, key: GraphKey | None) -> None:
        """Marks the contents as written, padding included, for `key` (None: for an eager step)."""
        self._prepared_for = key

    def consume(self, key: GraphKey) -> None:
        """Takes the contents for one replay of `key`.

        Raises:
            ReplayError: they were written for something else, or are used up.
        """
        if self._prepared_for != key:
            raise ReplayError(f"{key} was to replay, but the static buffers hold the inputs of {self._prepared_for}")
        self._prepared_for = None
