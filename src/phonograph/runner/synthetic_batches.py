"""Synthetic batches with real metadata, for capture and verification.

Each sequence gets its own KV blocks, so that captures and verification run on the metadata of a possible step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.blocks import blocks_for, most_step_tokens
from phonograph.errors import MemoryLimitError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.runner.step_inputs import SyntheticBatch


class SyntheticBatches:
    """Draws batches within the limits of an engine and writes them into its inputs.

    inputs: writes a batch, padded to a graph
    """

    def __init__(
        self,
        inputs: Callable[[SyntheticBatch, GraphKey], CommonMetadata],
        *,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
    ) -> None:
        self._inputs = inputs
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size

    def most_tokens(self, max_num_seqs: int) -> int:
        """Return the tokens of the largest batch without context, of at most `max_num_seqs` sequences."""
        return most_step_tokens(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            max_num_seqs=max_num_seqs,
        )

    def capture_batch(self, key: GraphKey) -> CommonMetadata:
        """Write the simplest batch that fills `key`: no context, and as few sequences as can hold the tokens.

        A cascade has a prefix of one block, or of none if there is no room for it.
        """
        if key.graphs is GraphSet.DECODE:
            query_lens = [key.query_len] * key.num_reqs
        else:
            longest = min(self._max_model_len, key.num_tokens)
            query_lens = [longest] * (key.num_tokens // longest)
            query_lens += [rest] if (rest := key.num_tokens % longest) else []
            query_lens.sort()
        prefix = min(1, self._most_prefix_blocks(query_lens)) if key.cascade else 0
        return self._load(np.random.default_rng(0), key, query_lens, [0] * len(query_lens), prefix)

    def random_batch(self, key: GraphKey, rng: np.random.Generator) -> CommonMetadata:
        """Write a random batch that pads to `key`: fewer tokens and sequences, ragged queries, long contexts.

        Common prefixes have any length that fits, not only lengths for which the cascade rule would choose a cascade.
        """
        if key.graphs is GraphSet.DECODE:
            query_lens = [key.query_len] * int(rng.integers(1, key.num_reqs + 1))
        else:
            query_lens = self._ragged(key, rng)
        most = self._most_prefix_blocks(query_lens) if key.cascade else 0
        prefix = min(most, int((most + 1) ** rng.random()))
        free = self._num_blocks - self._blocks_of(query_lens) - prefix
        max_len = self._max_model_len - prefix * self._block_size
        contexts: list[int] = []
        for left, length in zip(range(len(query_lens), 0, -1), query_lens, strict=True):
            # Contexts of every magnitude; one in twenty is up to the limit of the cache or the model.
            longest = min(max_len - length, max(0, free) * self._block_size)
            fair = min(longest, max(0, free) // left * self._block_size)
            context = int((fair + 1) ** rng.random()) - 1 if rng.random() < 0.95 else int(rng.integers(0, longest + 1))
            extra = blocks_for(context + length, self._block_size) - blocks_for(length, self._block_size)
            free -= extra
            contexts.append(context)
        return self._load(rng, key, query_lens, contexts, prefix)

    def _blocks_of(self, lengths: list[int]) -> int:
        return sum(blocks_for(length, self._block_size) for length in lengths)

    def _most_prefix_blocks(self, query_lens: list[int]) -> int:
        """Return the blocks of the longest prefix that sequences with these queries can share."""
        free = self._num_blocks - self._blocks_of(query_lens)
        return max(0, min(free, (self._max_model_len - max(query_lens)) // self._block_size))

    def _ragged(self, key: GraphKey, rng: np.random.Generator) -> list[int]:
        """Draw query lengths, decodes first, of at most key.num_tokens in total."""
        budget = int(rng.integers(max(1, key.num_tokens * 3 // 4), key.num_tokens + 1))
        # Each sequence may leave one block partly empty, which bounds the number of sequences.
        most = max(1, min(key.num_reqs, budget, self._num_blocks - blocks_for(budget, self._block_size)))
        num_reqs = int(rng.integers(1, most + 1)) if rng.random() < 0.5 else int(rng.integers(1, min(most, 4) + 1))
        num_reqs = max(num_reqs, blocks_for(budget, self._max_model_len))
        cuts = np.sort(rng.choice(np.arange(1, budget), size=num_reqs - 1, replace=False)) if num_reqs > 1 else []
        lengths: list[int] = []
        free = self._num_blocks
        for left, length in zip(range(num_reqs, 0, -1), np.diff(np.array([0, *cuts, budget])), strict=True):
            # One block is reserved for each later sequence.
            fitting = min(int(length), self._max_model_len, (free - left + 1) * self._block_size)
            free -= blocks_for(fitting, self._block_size)
            lengths.append(fitting)
        return sorted(lengths)

    def _load(
        self,
        rng: np.random.Generator,
        key: GraphKey,
        query_lens: list[int],
        context_lens: list[int],
        num_shared: int,
    ) -> CommonMetadata:
        """Write a batch whose sequences share `num_shared` blocks, and have separate blocks for the rest."""
        order = rng.permutation(self._num_blocks).astype(np.int32)
        needed = [
            blocks_for(query + context, self._block_size)
            for query, context in zip(query_lens, context_lens, strict=True)
        ]
        if num_shared + sum(needed) > self._num_blocks:
            raise MemoryLimitError(
                f"a batch for {key} needs {num_shared + sum(needed)} KV blocks of {self._block_size} tokens, but there "
                f"are {self._num_blocks}; grant more KV cache memory, or lower max_num_seqs or the capture sizes"
            )
        shared, *separate, _ = np.split(order, np.cumsum([num_shared, *needed]))
        prefix_len = num_shared * self._block_size
        return self._inputs(
            SyntheticBatch(
                query_lens=query_lens,
                context_lens=[prefix_len + context for context in context_lens],
                blocks=[np.concatenate([shared, blocks]) for blocks in separate],
                token_ids=rng.integers(0, self._vocab_size, sum(query_lens), np.int32),
                prefix_len=prefix_len if key.cascade else None,
            ),
            key,
        )
