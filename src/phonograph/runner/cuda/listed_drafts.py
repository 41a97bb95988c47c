"""Drafts of a draft model for sequences with a grammar: passes behind masked sampling, in graphs of their own.

The passes in the step's graph end before these sequences have a token. They compute keys of the step's tokens for all
sequences; what remains are passes of one row for each sequence, which begin with the token that the mask allowed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from phonograph.graphs.runtime import CapturedGraph, GraphRuntime
from phonograph.runner.cuda.draft_passes import DraftPasses
from phonograph.runner.cuda.masked_sampling import graph_sizes


class ListedDrafts:
    """Passes for sequences of a step, with one graph for each power of two of sequences.

    Args:
        passes: of the draft model.
        requests_G: int32, static: rows of the batch that have masks, see `MaskedSampling`.
        max_num_seqs: slots.
        pieces: graphs are split at each call of attention.
    """

    def __init__(self, passes: DraftPasses, requests_G: torch.Tensor, *, max_num_seqs: int, pieces: bool) -> None:
        self._passes, self._requests_G, self._pieces = passes, requests_G, pieces
        self._sizes = graph_sizes(max_num_seqs)
        self._graphs: dict[int, CapturedGraph] = {}

    def draft(self, numbers: Sequence[int]) -> None:
        """Leave drafts in the slots of sequences, behind a step with passes and the sampling of their rows.

        Args:
            numbers: rows of the batch, the first entries of `requests_G`.
        """
        size = self._sizes[(len(numbers) - 1).bit_length()]
        run, graph = self._prepared(numbers, size), self._graphs.get(size)
        if graph is None:
            run()
        else:
            graph.replay()

    def launch(self) -> None:
        """Launch the kernels of each size."""
        for size in self._sizes:
            self._prepared([0] * size, size)()

    def capture(self, runtime: GraphRuntime) -> int:
        """Capture the graphs, largest first, with kernels that are loaded. Return their number."""
        for size in reversed(self._sizes):
            run = self._prepared([0] * size, size)
            if self._pieces and not runtime.runs_captured:
                with torch.inference_mode(), runtime.scope():
                    run()  # Attention between the pieces runs during the capture, on the results of this run.
            self._graphs[size] = runtime.capture(run)
        return len(self._graphs)

    def _prepared(self, numbers: Sequence[int], size: int) -> functools.partial[tuple[torch.Tensor, ...]]:
        self._passes.build_listed(numbers, size)
        return functools.partial(self._passes.run_listed, self._requests_G[:size], pieces=self._pieces)
