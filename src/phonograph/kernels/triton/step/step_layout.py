"""Layout of the buffer that a step uploads, and the state of sequences on the device.

Shapes: R requests (slots), T tokens, L rows of logits, A appended blocks, G KV groups, N blocks of the longest sequence
in the group with the smallest blocks, K most drafts of a sequence.

    words   | header | slots | context_lens | ... | appends .. | starts .. | tokens .. | row_slots | ... | draw_keys |
              a few numbers a request               of changing number                   of rows of logits, not uploaded
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_HEADER = 8
_NUM_LOGITS = 3
EARLY_ROW = 5
"""Header word with the ring's row for results that are sent early; the next word is its tag."""
_ALIGN = 4
"""Alignment of fields, in words: 16 bytes, which is enough for the int64 draw keys."""
START_WORDS = 10
"""Words of the parameters of a slot."""
_READ_BY_KERNEL = (
    "slots", "context_lens", "query_starts", "token_starts", "append_starts", "append_at", "samples", "start_at",
    "block_sizes", "appends", "starts", "tokens", "row_slots", "sample_slots", "lengths", "temperature", "top_k",
    "top_p", "min_p", "edits", "draw_keys",
)  # fmt: skip


class SlotState(NamedTuple):
    """State of sequences on the device, by slot.

    last_token:   int32 [R]
    num_computed: int32 [R]    tokens whose keys and values are computed
    parameters:   int32 [R, 10] as in `HostViews.starts`
    drafts:       int32 [R, K] tokens that may follow the last one; -1 for none
    block_tables: int32 [G, R, N]
    """

    last_token: torch.Tensor
    num_computed: torch.Tensor
    parameters: torch.Tensor
    drafts: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def make(
        cls, *, num_groups: int, max_num_seqs: int, max_blocks: int, device: torch.device, most_drafts: int = 0
    ) -> SlotState:
        """Return the state of empty slots. Each entry of a block table must be a page: kernels may read it."""
        rows = max_num_seqs
        shapes = (rows,), (rows,), (rows, START_WORDS), (rows, most_drafts), (num_groups, rows, max_blocks)
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


class HostViews(NamedTuple):
    """Fields of a staging buffer as numpy arrays on its memory, by row of the batch.

    header:        int32 [8]: numbers of requests, of tokens, of decodes and of rows of logits; 1 if the step writes
                               states of layers that have them; row and tag of `send_words`; the rest is not read
    slots:         int32 [R]
    context_lens:  int32 [R]   tokens computed before this step; read with a token_start
    query_starts:  int32 [R+1] running sum of the query lengths, from 0; `num_reqs + 1` entries are read
    token_starts:  int32 [R]   first of the row's tokens in `tokens`; -1 if the row continues from its slot, by its
                               last token and its drafts
    append_starts: int32 [G, R+1] the row's new blocks are `appends[append_starts[g, r] : append_starts[g, r + 1]]`
    append_at:     int32 [G, R] entry of the slot's block table for the first new block
    samples:       int32 [R]   1 if the step's sampling kernel chooses the row's token, else 0
    start_at:      int32 [R]   entry of `starts` for a row whose sequence starts, else -1
    block_sizes:   int32 [G]   tokens of a block, the same in every step; empty for a single group
    checkpoints:   int32 [3, R] checkpoints of states; empty for a model whose layers have none
    appends:       int32 [A]   block ids of all groups
    starts:        int32 [R, 10] of sequences that start: temperature, top_k, top_p and min_p as `sampling.sample` takes
                               them, stream key (two words), length of the prompt, most tokens, 1 if its logits are
                               edited, and the tokens before which it must not end
    tokens:        int32 [T]   token ids, of the rows with a token_start
    """

    header: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray
    token_starts: np.ndarray
    append_starts: np.ndarray
    append_at: np.ndarray
    samples: np.ndarray
    start_at: np.ndarray
    block_sizes: np.ndarray
    checkpoints: np.ndarray
    appends: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray


class SamplingViews(NamedTuple):
    """Fields of the staging buffer that sampling reads, by row of logits, all written by `prepare`.

    row_slots:    int32, slot of the row's sequence
    sample_slots: int32, the same for rows that the step samples; -1 for others and for padding
    lengths:      int32, tokens of the sequence up to the row's own
    temperature:  float32, as are top_p and min_p; top_k int32 and draw_keys int64: see `sampling.sample`
    edits:        int32, see `LogitEdits`
    """

    row_slots: torch.Tensor
    sample_slots: torch.Tensor
    lengths: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    edits: torch.Tensor
    draw_keys: torch.Tensor


class StepLayout:
    """Layout of a staging buffer of `num_words` int32 words.

    The areas of changing size come last, so that a step uploads no more than `used_words`. After them is what
    `prepare` writes for sampling.

    fields: element type and words of each field
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_tokens: int,
        max_appends: int,
        *,
        num_groups: int = 1,
        max_num_logits: int | None = None,
        has_states: bool = False,
    ) -> None:
        rows, self.max_appends, self.num_groups = max_num_seqs, max_appends, num_groups
        logits = max_num_logits or max_num_seqs
        self.fields: dict[str, tuple[str, slice]] = {}
        self.num_words = 0
        for name, dtype, words in (
            ("header", "int32", _HEADER),
            ("slots", "int32", rows),
            ("context_lens", "int32", rows),
            ("query_starts", "int32", rows + 1),
            ("token_starts", "int32", rows),
            ("append_starts", "int32", num_groups * (rows + 1)),
            ("append_at", "int32", num_groups * rows),
            ("samples", "int32", rows),
            ("start_at", "int32", rows),
            ("block_sizes", "int32", num_groups if num_groups > 1 else 0),
            ("checkpoints", "int32", 3 * rows if has_states else 0),
            ("appends", "int32", max_appends),
            ("starts", "int32", rows * START_WORDS),
            ("tokens", "int32", max_num_tokens),
            ("row_slots", "int32", logits),
            ("sample_slots", "int32", logits),
            ("lengths", "int32", logits),
            ("temperature", "float32", logits),
            ("top_k", "int32", logits),
            ("top_p", "float32", logits),
            ("min_p", "float32", logits),
            ("edits", "int32", logits),
            ("draw_keys", "int64", 2 * logits),
        ):
            self.fields[name] = dtype, slice(self.num_words, self.num_words + words)
            self.num_words += -(-words // _ALIGN) * _ALIGN
        self.constants = {name.upper(): self._start(name) for name in _READ_BY_KERNEL} | {"ROWS": rows}

    def host_views(self, words: np.ndarray) -> HostViews:
        """Return views of a staging buffer on the host, int32 [num_words]."""
        views = HostViews(*(words[self.fields[name][1]] for name in HostViews._fields))
        by_group = {name: getattr(views, name).reshape(self.num_groups, -1) for name in ("append_starts", "append_at")}
        by_group["checkpoints"] = views.checkpoints.reshape(3, -1)
        return views._replace(**by_group, starts=views.starts.reshape(-1, START_WORDS))

    def sampling_views(self, staging: torch.Tensor) -> SamplingViews:
        """Return views of the staging buffer on the device, int32 [num_words]."""
        fields = (self.fields[name] for name in SamplingViews._fields)
        return SamplingViews(*(staging[where].view(getattr(torch, dtype)) for dtype, where in fields))

    def checkpoints(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the checkpoints of states in the staging buffer on the device, [3, R] int32, or [3, 0]."""
        return staging[self.fields["checkpoints"][1]].view(3, -1)

    def num_logits(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the number of rows of logits in the staging buffer on the device, [1] int32."""
        start = self._start("header") + _NUM_LOGITS
        return staging[start : start + 1]

    def used_words(self, *, num_appends: int, num_tokens: int) -> int:
        """Return the words to upload, from the buffer's start, with that many appended blocks and host tokens.

        A sequence that starts has tokens.
        """
        if num_tokens:
            return self._start("tokens") + num_tokens
        return self._start("appends") + num_appends

    def _start(self, name: str) -> int:
        return self.fields[name][1].start
