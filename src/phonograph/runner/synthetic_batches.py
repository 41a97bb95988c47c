"""Synthetic batches with real metadata, for capture and verification.

Each sequence gets KV blocks, so that captures and verification run on the metadata of a possible step. The first
sequences of a random batch may have the blocks of a prefix in common. Behind a window, where an engine has freed the
blocks, the table of a sliding group names one page that belongs to no sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import lcm
from typing import NamedTuple

import numpy as np

from phonograph.attention.metadata import CommonMetadata
from phonograph.core.batch import StateCopy
from phonograph.core.blocks import blocks_for, encoder_positions, group_blocks, most_step_tokens, most_tokens
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
        num_checkpoints: checkpoints of states behind the slots, which random batches read and write.
        ends_in_blocks: no sequence of a random batch may grow beyond its blocks, and each can grow; for draft models of
            one KV group, whose passes write the keys of drafts.
        num_slots: slots that random batches choose from, for models whose layers have states; 0 for the first ones.
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
        num_slots: int = 0,
        num_checkpoints: int = 0,
        ends_in_blocks: bool = False,
    ) -> None:
        self._ends_in_blocks = ends_in_blocks
        self._num_checkpoints = num_checkpoints
        self._num_slots = num_slots
        self._inputs = inputs
        self._draft_tokens = draft_tokens
        self._ragged_decodes = ragged_decodes
        self._max_model_len = max_model_len
        self._groups = groups
        self._sizes = [group.block_size for group in groups]
        # Tokens of a common prefix are whole blocks of each group of full attention.
        self._shared_sizes = [group.block_size for group in groups if group.window is None and not group.encoder_len]
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size

    def most_tokens(self, max_num_seqs: int) -> int:
        """Return the tokens of the largest batch without context, of at most `max_num_seqs` sequences."""
        return most_step_tokens(
            num_blocks=self._num_blocks,
            groups=self._groups,
            max_model_len=self._max_model_len,
            max_num_seqs=max_num_seqs,
        )

    def capture_batch(self, key: GraphKey) -> tuple[CommonMetadata, ...]:
        """Write the simplest batch that fills `key`: no context, and as few sequences as can hold the tokens.

        It writes no state, whatever the slots have.
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
        rng = np.random.default_rng(0)
        return self._load(rng, key, query_lens, [0] * len(query_lens), (0, 0), num_decodes, writes_states=False)

    def random_batch(self, key: GraphKey, rng: np.random.Generator) -> tuple[CommonMetadata, ...]:
        """Write a random batch that pads to `key`: fewer tokens and sequences, ragged queries, long contexts.

        In half of the batches the first sequences have a prefix of any length that fits in the same blocks.
        """
        if key.graphs is GraphSet.DECODE:
            query_lens = self._decodes(key, rng)
            num_decodes = len(query_lens)
        else:
            query_lens = self._ragged(key, rng)
            num_decodes = self._num_drafting(key, query_lens)
        # One page stays free for the place of blocks behind windows.
        free = self._num_blocks - self._blocks_of(query_lens) - any(group.window for group in self._groups)
        sharing, prefix, num_blocks = self._prefix(query_lens, free, rng)
        free -= num_blocks
        contexts: list[int] = []
        for left, length in zip(range(len(query_lens), 0, -1), query_lens, strict=True):
            # Contexts of every magnitude; one in twenty is up to the limit of the cache or the model.
            longest = most_tokens(free, self._most_context_blocks, self._max_model_len - prefix - length)
            fair = most_tokens(free // left, self._most_context_blocks, longest)
            context = int((fair + 1) ** rng.random()) - 1 if rng.random() < 0.95 else int(rng.integers(0, longest + 1))
            free -= sum(_blocks_in_use(group, context, length) for group in self._groups) - self._blocks_of([length])
            contexts.append(context)
        contexts = [context + prefix * (index < sharing) for index, context in enumerate(contexts)]
        if not self._ends_in_blocks:
            return self._load(rng, key, query_lens, contexts, (sharing, prefix), num_decodes)
        size = self._sizes[0]
        for index, (context, length) in enumerate(zip(contexts, query_lens, strict=True)):
            if (context + length) % size == 0:
                (contexts if context else query_lens)[index] -= 1
        max_lens = [
            blocks_for(context + length, size) * size for context, length in zip(contexts, query_lens, strict=True)
        ]
        return self._load(rng, key, query_lens, contexts, (sharing, prefix), num_decodes, max_lens=max_lens)

    def _prefix(self, query_lens: list[int], free: int, rng: np.random.Generator) -> tuple[int, int, int]:
        """Draw how many leading sequences have a prefix in common, and its tokens; return the blocks it takes too."""
        if not self._shared_sizes or rng.random() < 0.5:
            return 0, 0, 0
        size, sharing = lcm(*self._shared_sizes), int(rng.integers(1, len(query_lens) + 1))
        # Each sequence has blocks of its own in sliding groups, and for its encoder.
        own = [group.block_size for group in self._groups if group.window is not None or group.ragged_encoder]
        each = sum(size // one for one in self._shared_sizes) + sharing * sum(blocks_for(size, one) for one in own)
        most = max(0, min((self._max_model_len - max(query_lens)) // size, free // each))
        count = min(most, int((most + 1) ** rng.random()))
        return sharing, count * size, count * each

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
        return sum(group_blocks(group, length) for group in self._groups for length in lengths)

    def _most_context_blocks(self, context: int) -> int:
        """Return a bound on the blocks that a context takes beside those of its query.

        With a ragged encoder, each token of a context may add a position of the encoder.
        """
        return sum(
            blocks_for(context, group.block_size)
            if group.window is None
            else min(blocks_for(context, group.block_size), blocks_for(group.window, group.block_size) + 1)
            for group in self._groups
            if not group.encoder_len or group.ragged_encoder
        )

    def _ragged(self, key: GraphKey, rng: np.random.Generator) -> list[int]:
        """Draw query lengths, decodes first, of at most key.num_tokens in total."""
        budget = int(rng.integers(max(1, key.num_tokens * 3 // 4), key.num_tokens + 1))
        # Each sequence may leave one block partly empty, which bounds the number of sequences.
        least, blocks = self._blocks_of([1]), self._blocks_of([budget])
        most = max(1, min(key.num_reqs, budget, (self._num_blocks - blocks) // least))
        num_reqs = int(rng.integers(1, most + 1)) if rng.random() < 0.5 else int(rng.integers(1, min(most, 4) + 1))
        num_reqs = max(num_reqs, blocks_for(budget, self._max_model_len))
        cuts = np.sort(rng.choice(np.arange(1, budget), size=num_reqs - 1, replace=False)) if num_reqs > 1 else []
        lengths: list[int] = []
        free = self._num_blocks
        for left, length in zip(range(num_reqs, 0, -1), np.diff(np.array([0, *cuts, budget])), strict=True):
            # The least blocks are reserved for each later sequence.
            room = free - (left - 1) * least
            fitting = most_tokens(room, lambda tokens: self._blocks_of([tokens]), min(int(length), self._max_model_len))
            free -= self._blocks_of([fitting])
            lengths.append(fitting)
        return sorted(lengths)

    def _states(self, rng: np.random.Generator, lengths: list[tuple[int, int]]) -> _StateRows:
        """Draw slots of sequences with these contexts and queries, and checkpoints that some read and some write."""
        slots = rng.permutation(self._num_slots)[: len(lengths)].tolist()
        rows = iter((self._num_slots + rng.permutation(self._num_checkpoints)).tolist())
        restored: list[StateCopy] = []
        saved: list[StateCopy] = []
        for slot, (context, query) in zip(slots, lengths, strict=True):
            if context and rng.random() < 0.3 and (row := next(rows, None)) is not None:
                restored.append(StateCopy(slot, row, context))
            if rng.random() < 0.3 and (row := next(rows, None)) is not None:
                saved.append(StateCopy(slot, row, context + int(rng.integers(1, query + 1))))
        return _StateRows(slots, restored, saved)

    def _load(
        self,
        rng: np.random.Generator,
        key: GraphKey,
        query_lens: list[int],
        context_lens: list[int],
        prefix: tuple[int, int],
        num_decodes: int,
        *,
        writes_states: bool = True,
        max_lens: list[int] | None = None,
    ) -> tuple[CommonMetadata, ...]:
        """Write a batch.

        Args:
            rng: source of the block and token ids.
            key: graph that it runs as.
            query_lens: of each sequence.
            context_lens: of each sequence, with the prefix.
            prefix: leading sequences with a common prefix, and its tokens.
            num_decodes: leading sequences that are decodes.
            writes_states: see `SyntheticBatch`.
            max_lens: see `SyntheticBatch`.
        """
        sharing, prefix_len = prefix
        num_shared = [
            0 if group.window is not None or group.encoder_len else prefix_len // group.block_size
            for group in self._groups
        ]
        lengths = [*zip(context_lens, query_lens, strict=True)]
        needed = [
            _blocks_in_use(group, *length) - (shared if index < sharing else 0)
            for group, shared in zip(self._groups, num_shared, strict=True)
            for index, length in enumerate(lengths)
        ]
        num_used = sum(num_shared) + sum(needed)
        if num_used > self._num_blocks:
            sizes = " and ".join(map(str, dict.fromkeys(self._sizes)))
            raise MemoryLimitError(
                f"a batch for {key} needs {num_used} KV blocks of {sizes} tokens, but there are {self._num_blocks}; "
                "grant more KV cache memory, or lower max_num_seqs or the capture sizes"
            )
        # And one for the place of blocks behind windows. A permutation of a million blocks would take 40 ms.
        drawn = rng.choice(self._num_blocks, min(num_used + 1, self._num_blocks), replace=False).astype(np.int32)
        *parts, unused = np.split(drawn, np.cumsum([*num_shared, *needed]))
        shared, separate = parts[: len(num_shared)], parts[len(num_shared) :]
        num_reqs = len(query_lens)
        leading = [blocks[: len(blocks) * (row < sharing)] for blocks in shared for row in range(num_reqs)]
        freed = [_blocks_freed(group, context) for group in self._groups for context in context_lens]
        self.freed_page = int(unused[0]) if any(freed) else None
        tables = [
            np.concatenate([first, np.full(count, unused[:1]), blocks] if count else [first, blocks])
            for first, count, blocks in zip(leading, freed, separate, strict=True)
        ]
        states = self._states(rng, lengths) if self._num_slots and writes_states else _StateRows()
        self.latest = SyntheticBatch(
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=num_decodes,
            blocks=[tables[first : first + num_reqs] for first in range(0, len(tables), num_reqs)],
            token_ids=rng.integers(0, self._vocab_size, sum(query_lens), np.int32),
            prefix_len=prefix_len,
            writes_states=writes_states,
            slots=states.slots,
            restored=states.restored,
            saved=states.saved,
            max_lens=max_lens,
            encoder_lens=[max(encoder_positions(group, sum(one)) for group in self._groups) for one in lengths],
        )
        return self._inputs(self.latest, key)


class _StateRows(NamedTuple):
    """States of a batch; see `SyntheticBatch`."""

    slots: list[int] | None = None
    restored: Sequence[StateCopy] = ()
    saved: Sequence[StateCopy] = ()


def _blocks_freed(group: KVGroup, context: int) -> int:
    """Return the leading blocks that no query behind the context attends to."""
    return 0 if group.window is None else max(0, context + 1 - group.window) // group.block_size


def _blocks_in_use(group: KVGroup, context: int, query: int) -> int:
    return group_blocks(group, context + query) - _blocks_freed(group, context)
