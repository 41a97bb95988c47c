"""Layout of the buffer that a step uploads, and the state of sequences on the device.

Shapes: R requests (slots), T tokens, A appended blocks, G KV groups, N blocks of the longest sequence in the group with
the smallest blocks.

    words   | header | slots | context_lens | ... | appends .. | starts .. | tokens .. | temperature | ... | draw_keys |
              a few numbers a row                   of changing number                   not uploaded
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

_HEADER = 8
_PREFIX_LEN = 3
"""Word of the header that `cascade.cut_prefix` reads."""
_ALIGN = 4
"""Alignment of fields, in words: 16 bytes, which is enough for the int64 draw keys."""
START_WORDS = 8
"""Words of the parameters of a slot."""
_READ_BY_KERNEL = (
    "slots", "context_lens", "query_starts", "token_starts", "append_starts", "append_at", "sample_slots", "start_at",
    "block_sizes", "appends", "starts", "tokens", "temperature", "top_k", "top_p", "min_p", "draw_keys",
)  # fmt: skip


class SlotState(NamedTuple):
    """State of sequences on the device, by slot.

    last_token:   int32 [R]
    num_computed: int32 [R]    tokens whose keys and values are computed
    parameters:   int32 [R, 8] as in `HostViews.starts`
    block_tables: int32 [G, R, N]
    """

    last_token: torch.Tensor
    num_computed: torch.Tensor
    parameters: torch.Tensor
    block_tables: torch.Tensor

    @classmethod
    def make(cls, *, num_groups: int, max_num_seqs: int, max_blocks: int, device: torch.device) -> SlotState:
        """Return the state of empty slots. Each entry of a block table must be a page: kernels may read it."""
        shapes = (max_num_seqs,), (max_num_seqs,), (max_num_seqs, START_WORDS), (num_groups, max_num_seqs, max_blocks)
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


class HostViews(NamedTuple):
    """Fields of a staging buffer as numpy arrays on its memory, by row of the batch.

    header:        int32 [8]: numbers of requests, of tokens and of decodes, and the length of a cascade's prefix; the
                   rest is not read
    slots:         int32 [R]
    context_lens:  int32 [R]   tokens computed before this step; read with a token_start
    query_starts:  int32 [R+1] running sum of the query lengths, from 0; `num_reqs + 1` entries are read
    token_starts:  int32 [R]   first of the row's tokens in `tokens`; -1 if the row continues from its slot, by its
                               last token
    append_starts: int32 [G, R+1] the row's new blocks are `appends[append_starts[g, r] : append_starts[g, r + 1]]`
    append_at:     int32 [G, R] entry of the slot's block table for the first new block
    sample_slots:  int32 [R]   slot for the token that the sampling kernel chooses, or -1; `prepare` sets it to -1 in
                               the padding rows of the device's copy
    start_at:      int32 [R]   entry of `starts` for a row whose sequence starts, else -1
    block_sizes:   int32 [G]   tokens of a block, the same in every step; empty for a single group
    appends:       int32 [A]   block ids of all groups
    starts:        int32 [R, 8] of sequences that start: temperature, top_k, top_p and min_p as `sampling.sample` takes
                               them, stream key (two words), length of the prompt
    tokens:        int32 [T]   token ids, of the rows with a token_start
    """

    header: np.ndarray
    slots: np.ndarray
    context_lens: np.ndarray
    query_starts: np.ndarray
    token_starts: np.ndarray
    append_starts: np.ndarray
    append_at: np.ndarray
    sample_slots: np.ndarray
    start_at: np.ndarray
    block_sizes: np.ndarray
    appends: np.ndarray
    starts: np.ndarray
    tokens: np.ndarray


class SamplingViews(NamedTuple):
    """Fields of the staging buffer that sampling reads, by row; `slots` is for rows sampled after the step.

    `prepare` writes temperature, top_p and min_p, float32, top_k, int32, and draw_keys, int64; see `sampling.sample`.
    """

    slots: torch.Tensor
    sample_slots: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    draw_keys: torch.Tensor


class StepLayout:
    """Layout of a staging buffer of `num_words` int32 words.

    The areas of changing size come last, so that a step uploads no more than `used_words`. Behind them is what
    `prepare` writes for sampling.

    fields: element type and words of each field
    """

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_appends: int, *, num_groups: int = 1) -> None:
        rows, self.max_appends, self.num_groups = max_num_seqs, max_appends, num_groups
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
            ("sample_slots", "int32", rows),
            ("start_at", "int32", rows),
            ("block_sizes", "int32", num_groups if num_groups > 1 else 0),
            ("appends", "int32", max_appends),
            ("starts", "int32", rows * START_WORDS),
            ("tokens", "int32", max_num_tokens),
            ("temperature", "float32", rows),
            ("top_k", "int32", rows),
            ("top_p", "float32", rows),
            ("min_p", "float32", rows),
            ("draw_keys", "int64", 2 * rows),
        ):
            self.fields[name] = dtype, slice(self.num_words, self.num_words + words)
            self.num_words += -(-words // _ALIGN) * _ALIGN
        self.constants = {name.upper(): self._start(name) for name in _READ_BY_KERNEL} | {"ROWS": rows}

    def host_views(self, words: np.ndarray) -> HostViews:
        """Return views of a staging buffer on the host, int32 [num_words]."""
        views = HostViews(*(words[self.fields[name][1]] for name in HostViews._fields))
        by_group = {name: getattr(views, name).reshape(self.num_groups, -1) for name in ("append_starts", "append_at")}
        return views._replace(**by_group, starts=views.starts.reshape(-1, START_WORDS))

    def sampling_views(self, staging: torch.Tensor) -> SamplingViews:
        """Return views of the staging buffer on the device, int32 [num_words]."""
        fields = (self.fields[name] for name in SamplingViews._fields)
        return SamplingViews(*(staging[where].view(getattr(torch, dtype)) for dtype, where in fields))

    def prefix_len(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the prefix's length in the staging buffer on the device, [1] int32."""
        start = self._start("header") + _PREFIX_LEN
        return staging[start : start + 1]

    def num_reqs(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the number of requests in the staging buffer on the device, [1] int32."""
        start = self._start("header")
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
