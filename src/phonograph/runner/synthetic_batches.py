"""Synthetic batches with real metadata, for capture and verification.

Each sequence gets its own KV blocks, so that captures and verification run on the metadata of a possible step. Behind a
window, where an engine has freed the blocks, the table of a sliding group names one page that belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.blocks import blocks_for, most_step_tokens, most_tokens
from phonograph.core.kv_group import KVGroup
from phonograph.errors import MemoryLimitError
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.runner.step_inputs import SyntheticBatch


class SyntheticBatches:
    """Draws batches within the limits of an engine and writes them into its inputs.

    latest:     the latest batch
    freed_page: page behind the windows of the latest batch, or None

    Args:
        inputs: writes a batch, padded to a graph.
        max_model_len: tokens of the longest sequence.
        groups: KV groups.
        num_blocks: pages of the pool, each for a block of any group.
        vocab_size: token ids are below it.
        draft_tokens: most drafts of a decode.
        ragged_decodes: see `CaptureList.ragged`.
    """

    latest: SyntheticBatch
    freed_page: int | None = None

    def __init__(
        self,
        inputs: Callable[[SyntheticBatch, GraphKey], tuple[CommonMetadata, ...]],
        *,
        max_model_len: int,
        groups: Sequence[KVGroup],
        num_blocks: int,
        vocab_size: int,
        draft_tokens: int = 0,
        ragged_decodes: bool = True,
    ) -> None:
        self._inputs = inputs
        self._draft_tokens = draft_tokens
        self._ragged_decodes = ragged_decodes
        self._max_model_len = max_model_len
        self._groups = groups
        self._sizes = [group.block_size for group in groups]
        # Blocks of a common prefix, which a single group has.
        self._block_size = groups[0].block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size

    def most_tokens(self, max_num_seqs: int) -> int:
        """Return the tokens of the largest batch without context, of at most `max_num_seqs` sequences."""
        return most_step_tokens(
            num_blocks=self._num_blocks,
            block_sizes=self._sizes,
            max_model_len=self._max_model_len,
            max_num_seqs=max_num_seqs,
        )

    def capture_batch(self, key: GraphKey) -> tuple[CommonMetadata, ...]:
        """Write the simplest batch that fills `key`: no context, and as few sequences as can hold the tokens.

        A cascade has a prefix of one block, or of none if there is no room for it.
        """
        if key.graphs is GraphSet.DECODE:
            least, more = divmod(key.num_tokens, key.num_reqs)
            query_lens = [least + 1] * more + [least] * (key.num_reqs - more)
            num_decodes = key.num_reqs
        else:
            longest = min(self._max_model_len, key.num_tokens)
            query_lens = [longest] * (key.num_tokens // longest)
            query_lens += [rest] if (rest := key.num_tokens % longest) else []
            query_lens.sort()
            num_decodes = query_lens.count(1)
        prefix = min(1, self._most_prefix_blocks(query_lens)) if key.cascade else 0
        return self._load(np.random.default_rng(0), key, query_lens, [0] * len(query_lens), prefix, num_decodes)

    def random_batch(self, key: GraphKey, rng: np.random.Generator) -> tuple[CommonMetadata, ...]:
        """Write a random batch that pads to `key`: fewer tokens and sequences, ragged queries, long contexts.

        Common prefixes have any length that fits, not only lengths for which the cascade rule would choose a cascade.
        """
        if key.graphs is GraphSet.DECODE:
            query_lens = self._decodes(key, rng)
            num_decodes = len(query_lens)
        else:
            query_lens = self._ragged(key, rng)
            num_decodes = self._num_drafting(key, query_lens)
        most = self._most_prefix_blocks(query_lens) if key.cascade else 0
        prefix = min(most, int((most + 1) ** rng.random()))
        # One page stays free for the place of blocks behind windows.
        free = self._num_blocks - self._blocks_of(query_lens) - prefix - any(group.window for group in self._groups)
        max_len = self._max_model_len - prefix * self._block_size
        contexts: list[int] = []
        for left, length in zip(range(len(query_lens), 0, -1), query_lens, strict=True):
            # Contexts of every magnitude; one in twenty is up to the limit of the cache or the model.
            longest = most_tokens(free, self._most_context_blocks, max_len - length)
            fair = most_tokens(free // left, self._most_context_blocks, longest)
            context = int((fair + 1) ** rng.random()) - 1 if rng.random() < 0.95 else int(rng.integers(0, longest + 1))
            free -= sum(_blocks_in_use(group, context, length) for group in self._groups) - self._blocks_of([length])
            contexts.append(context)
        return self._load(rng, key, query_lens, contexts, prefix, num_decodes)

    def _decodes(self, key: GraphKey, rng: np.random.Generator) -> list[int]:
        """Draw query lengths of decodes: equal ones, or of different numbers of drafts where a graph takes these."""
        num_reqs = int(rng.integers(1, key.num_reqs + 1))
        if key.num_tokens == key.num_reqs * key.query_len and (not self._ragged_decodes or rng.random() < 0.5):
            return [key.query_len] * num_reqs
        lengths, left = [1] * num_reqs, key.num_tokens - num_reqs
        for index in rng.permutation(num_reqs):
            more = int(rng.integers(0, min(key.query_len - 1, left) + 1))
            lengths[index] += more
            left -= more
        return lengths

    def _num_drafting(self, key: GraphKey, query_lens: list[int]) -> int:
        """Return the number of leading decodes of a mixed batch; with drafts, where the graph has rows for them."""
        count, room = query_lens.count(1), key.logits - len(query_lens)
        for length in query_lens[count:] if key.num_logits else ():
            room -= length - 1
            if length > 1 + self._draft_tokens or room < 0:
                break
            count += 1
        return count

    def _blocks_of(self, lengths: list[int]) -> int:
        return sum(blocks_for(length, size) for size in self._sizes for length in lengths)

    def _most_context_blocks(self, context: int) -> int:
        """Return a bound on the blocks that a context takes beside those of its query."""
        return sum(
            blocks_for(context, group.block_size)
            if group.window is None
            else min(blocks_for(context, group.block_size), blocks_for(group.window, group.block_size) + 1)
            for group in self._groups
        )

    def _most_prefix_blocks(self, query_lens: list[int]) -> int:
        """Return the blocks of the longest prefix that sequences with these queries can share."""
        free = self._num_blocks - self._blocks_of(query_lens)
        return max(0, min(free, (self._max_model_len - max(query_lens)) // self._block_size))

    def _ragged(self, key: GraphKey, rng: np.random.Generator) -> list[int]:
        """Draw query lengths, decodes first, of at most key.num_tokens in total."""
        budget = int(rng.integers(max(1, key.num_tokens * 3 // 4), key.num_tokens + 1))
        # Each sequence may leave one block partly empty, which bounds the number of sequences.
        groups, blocks = len(self._groups), self._blocks_of([budget])
        most = max(1, min(key.num_reqs, budget, (self._num_blocks - blocks) // groups))
        num_reqs = int(rng.integers(1, most + 1)) if rng.random() < 0.5 else int(rng.integers(1, min(most, 4) + 1))
        num_reqs = max(num_reqs, blocks_for(budget, self._max_model_len))
        cuts = np.sort(rng.choice(np.arange(1, budget), size=num_reqs - 1, replace=False)) if num_reqs > 1 else []
        lengths: list[int] = []
        free = self._num_blocks
        for left, length in zip(range(num_reqs, 0, -1), np.diff(np.array([0, *cuts, budget])), strict=True):
            # One block of each group is reserved for each later sequence.
            room = free - (left - 1) * len(self._groups)
            fitting = most_tokens(room, lambda tokens: self._blocks_of([tokens]), min(int(length), self._max_model_len))
            free -= self._blocks_of([fitting])
            lengths.append(fitting)
        return sorted(lengths)

    def _load(
        self,
        rng: np.random.Generator,
        key: GraphKey,
        query_lens: list[int],
        context_lens: list[int],
        num_shared: int,
        num_decodes: int,
    ) -> tuple[CommonMetadata, ...]:
        """Write a batch whose sequences share `num_shared` blocks, and have separate blocks for the rest."""
        order = rng.permutation(self._num_blocks).astype(np.int32)
        lengths = [*zip(context_lens, query_lens, strict=True)]
        needed = [_blocks_in_use(group, *length) for group in self._groups for length in lengths]
        num_used = num_shared + sum(needed)
        if num_used > self._num_blocks:
            sizes = " and ".join(map(str, dict.fromkeys(self._sizes)))
            raise MemoryLimitError(
                f"a batch for {key} needs {num_used} KV blocks of {sizes} tokens, but there are {self._num_blocks}; "
                "grant more KV cache memory, or lower max_num_seqs or the capture sizes"
            )
        shared, *separate, unused = np.split(order, np.cumsum([num_shared, *needed]))
        freed = [_blocks_freed(group, context) for group in self._groups for context in context_lens]
        self.freed_page = int(unused[0]) if any(freed) else None
        tables = [
            np.concatenate([shared, np.full(count, unused[:1]), blocks] if count else [shared, blocks])
            for count, blocks in zip(freed, separate, strict=True)
        ]
        num_reqs, prefix_len = len(query_lens), num_shared * self._block_size
        self.latest = SyntheticBatch(
            query_lens=query_lens,
            context_lens=[prefix_len + context for context in context_lens],
            num_decodes=num_decodes,
            blocks=[tables[first : first + num_reqs] for first in range(0, len(tables), num_reqs)],
            token_ids=rng.integers(0, self._vocab_size, sum(query_lens), np.int32),
            prefix_len=prefix_len if key.cascade else None,
        )
        return self._inputs(self.latest, key)


def _blocks_freed(group: KVGroup, context: int) -> int:
    """Return the leading blocks that no query behind the context attends to."""
    return 0 if group.window is None else max(0, context + 1 - group.window) // group.block_size


def _blocks_in_use(group: KVGroup, context: int, query: int) -> int:
    return blocks_for(context + query, group.block_size) - _blocks_freed(group, context)
