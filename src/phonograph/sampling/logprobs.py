"""Log-probabilities of sampled tokens and of prompts.

By default they are the model's own: log-softmax of the raw logits, before bias, penalties, temperature and filters.
Evaluations need these, and they are comparable between requests. `ScoreKind` names the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from phonograph.core.batch import NewSequence, ScheduledBatch, TokenLogprobs
from phonograph.core.sampling_params import MAX_LOGPROBS, SamplingParams
from phonograph.kernels.torch.sampling import ranked
from phonograph.sampling.failures import SlotFailures

# Float32 logits, their int64 sort keys and a sorted copy of both; several copies of each reported token.
_BYTES_PER_LOGIT = 4 + 8 + 12
_BYTES_PER_TOP = 32


class ScoreKind(NamedTuple):
    """Numbers that are reported as log-probabilities.

    processed: those of sampled tokens come from the logits that the token was drawn from, after all edits and filters
    as_logits: they are logits, without the log-softmax
    """

    processed: bool = False
    as_logits: bool = False

    @classmethod
    def named(cls, mode: str) -> ScoreKind:
        """Return the kind of a value of the setting `logprobs_mode`."""
        return cls(mode.startswith("processed"), mode.endswith("logits"))


RAW_LOGPROBS = ScoreKind()


def token_logprobs(
    logits_NV: torch.Tensor,
    token_ids_N: torch.Tensor,
    tops: Sequence[int],
    listed_NK: torch.Tensor | None = None,
    *,
    as_logits: bool = False,
) -> list[TokenLogprobs]:
    """Return log-probability and rank of one token of each row, then of its `tops[i]` other tokens.

    Args:
        logits_NV: any float dtype.
        token_ids_N: int64 on the same device.
        tops: other tokens to report, by row.
        listed_NK: these tokens, as `padded` makes them; None for the most likely ones.
        as_logits: report logits in place of log-probabilities.
    """
    if listed_NK is None:
        return as_entries(tops, *score_tokens(logits_NV, token_ids_N, max(tops), as_logits=as_logits))
    return as_entries(tops, *score_listed(logits_NV, token_ids_N, listed_NK, as_logits=as_logits))


def score_tokens(
    logits_NV: torch.Tensor, token_ids_N: torch.Tensor, top: int, *, as_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one token of each row and the most likely ones, without waiting for a device.

    Args:
        logits_NV: any float dtype.
        token_ids_N: int64 on the same device.
        top: most likely tokens to report.
        as_logits: report logits in place of log-probabilities.

    Returns:
        Token ids, log-probabilities and ranks, each [N, 1 + top], with `top` at most V.
    """
    logits_NV = logits_NV.to(torch.float32)
    ids = token_ids_N[:, None]
    values = logits_NV.gather(-1, ids)
    ranks = (logits_NV > values).sum(dim=-1, keepdim=True) + 1
    width = min(top, logits_NV.shape[-1])
    if width:
        top_values, top_ids = ranked(logits_NV, width)
        ids = torch.cat((ids, top_ids), dim=-1)
        ranks = torch.cat((ranks, _ranks_of_sorted(top_values)), dim=-1)
        values = torch.cat((values, top_values), dim=-1)
    return ids, values if as_logits else values - logits_NV.logsumexp(dim=-1, keepdim=True), ranks


def score_listed(
    logits_NV: torch.Tensor, token_ids_N: torch.Tensor, listed_NK: torch.Tensor, *, as_logits: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return one token of each row and listed ones, as `score_tokens` does: token ids, log-probabilities and ranks.

    Args:
        logits_NV: any float dtype.
        token_ids_N: int64 on the same device.
        listed_NK: int64 on the same device.
        as_logits: report logits in place of log-probabilities.
    """
    logits_NV = logits_NV.to(torch.float32)
    ids = torch.cat((token_ids_N[:, None], listed_NK), dim=-1)
    values = logits_NV.gather(-1, ids)
    num_not_above = torch.searchsorted(logits_NV.sort(dim=-1).values, values, right=True)
    ranks = logits_NV.shape[-1] + 1 - num_not_above
    return ids, values if as_logits else values - logits_NV.logsumexp(dim=-1, keepdim=True), ranks


def padded(lists: Sequence[Sequence[int]]) -> np.ndarray:
    """Return lists of token ids as rows of one length, int64; token 0 fills them up."""
    rows = np.zeros((len(lists), max(map(len, lists))), dtype=np.int64)
    for row, token_ids in zip(rows, lists, strict=True):
        row[: len(token_ids)] = token_ids
    return rows


def as_entries(
    tops: Sequence[int], ids_NK: torch.Tensor, values_NK: torch.Tensor, ranks_NK: torch.Tensor
) -> list[TokenLogprobs]:
    """Return the results of `score_tokens` or `score_listed` as an entry for each row, with its `tops[i]` tokens."""
    if max(tops) > MAX_LOGPROBS:  # the whole vocabulary, perhaps of one row among many
        tensors = ids_NK, values_NK, ranks_NK
        return [TokenLogprobs(*(one[row, : t + 1].tolist() for one in tensors)) for row, t in enumerate(tops)]
    rows = zip(tops, ids_NK.tolist(), values_NK.tolist(), ranks_NK.tolist(), strict=True)
    return [TokenLogprobs(token_ids=i[: t + 1], logprobs=v[: t + 1], ranks=r[: t + 1]) for t, i, v, r in rows]


def _ranks_of_sorted(values_NK: torch.Tensor) -> torch.Tensor:
    """Return 1 + the number of greater values, for rows in descending order. Equal values share a rank."""
    places_K = torch.arange(1, values_NK.shape[-1] + 1, device=values_NK.device)
    changes_NK = torch.ones_like(values_NK, dtype=torch.bool)
    changes_NK[:, 1:] = values_NK[:, 1:] != values_NK[:, :-1]
    return (places_K * changes_NK).cummax(dim=-1).values


def prompt_logprobs(
    hidden_TE: torch.Tensor,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    target_token_ids: Sequence[int],
    top: int,
    listed: Sequence[Sequence[int]] | None = None,
    *,
    as_logits: bool = False,
    max_bytes: int = 64 * 1024**2,
) -> list[TokenLogprobs]:
    """Return log-probabilities of prompt tokens, without materializing the logits of a whole prompt.

    Args:
        hidden_TE: hidden states that logits_fn takes; row t predicts target_token_ids[t], the next prompt token.
        logits_fn: hidden states [rows, E] -> logits [rows, V]; called with one row first, to learn V.
        target_token_ids: the predicted tokens.
        top: most likely tokens to report beside each target; -1 is the whole vocabulary.
        listed: tokens to report after these, for each target, with rank 0; -1 has minus infinity. None for none.
        as_logits: report logits in place of log-probabilities.
        max_bytes: bound of the temporaries; one row is always computed.
    """
    assert len(target_token_ids) == hidden_TE.shape[0], (len(target_token_ids), hidden_TE.shape)
    targets_T = torch.tensor(target_token_ids, dtype=torch.int64, device=hidden_TE.device)
    result: list[TokenLogprobs] = []
    start, stop = 0, 1
    while start < len(target_token_ids):
        logits_NV = logits_fn(hidden_TE[start:stop])
        top = logits_NV.shape[1] if top < 0 else top
        found = token_logprobs(logits_NV, targets_T[start:stop], [top] * logits_NV.shape[0], as_logits=as_logits)
        result += found if listed is None else _with_listed(found, logits_NV, listed[start:stop], as_logits=as_logits)
        row_bytes = logits_NV.shape[1] * _BYTES_PER_LOGIT + top * _BYTES_PER_TOP
        start, stop = stop, stop + max(1, max_bytes // row_bytes)
    return result


def _with_listed(
    found: Sequence[TokenLogprobs], logits_NV: torch.Tensor, listed: Sequence[Sequence[int]], *, as_logits: bool
) -> list[TokenLogprobs]:
    """Return positions with the log-probabilities of listed tokens at their ends."""
    logits_NV = logits_NV.to(torch.float32)
    ids_NK = torch.from_numpy(padded(listed)).to(logits_NV.device)
    values_NK = logits_NV.gather(-1, ids_NK.clamp(min=0))
    if not as_logits:
        values_NK -= logits_NV.logsumexp(dim=-1, keepdim=True)
    rows: list[list[float]] = values_NK.masked_fill_(ids_NK < 0, -torch.inf).tolist()
    return [
        TokenLogprobs([*one.token_ids, *ids], [*one.logprobs, *row[: len(ids)]], [*one.ranks, *[0] * len(ids)])
        for one, ids, row in zip(found, listed, rows, strict=True)
    ]


def step_prompt_logprobs(
    batch: ScheduledBatch,
    live: Mapping[int, NewSequence],
    hidden_TE: torch.Tensor,
    logits_fn: Callable[[torch.Tensor], torch.Tensor],
    failures: SlotFailures,
    *,
    as_logits: bool = False,
) -> dict[int, list[TokenLogprobs]]:
    """Return by slot the log-probabilities of the prompt tokens in a step's chunks, for requests that ask for them.

    `live` has the sequence of each slot, and `hidden_TE` the rows of the whole batch. A slot whose work raises is added
    to `failures`. With `as_logits` logits stand in place of log-probabilities.
    """

    def score(slot: int, hidden_TE: torch.Tensor, targets: list[int], params: SamplingParams, first: int) -> None:
        listed, top = params.prompt_logprob_token_ids, params.prompt_logprobs
        if listed is not None:
            places = range(first - params.prompt_logprob_start, first - params.prompt_logprob_start + len(targets))
            listed = [listed[place] if place >= 0 else () for place in places]
        assert top is not None, "the request asks for log-probabilities of its prompt"
        found[slot] = prompt_logprobs(hidden_TE, logits_fn, targets, top, listed, as_logits=as_logits)

    found: dict[int, list[TokenLogprobs]] = {}
    start = 0
    for slot, query_len, context_len in zip(batch.slots, batch.query_lens, batch.context_lens, strict=True):
        sequence = live[slot]
        # Row p predicts token p + 1; the prompt's last row predicts the output.
        rows = min(query_len, sequence.prompt_len - 1 - context_len)
        if sequence.params.prompt_logprobs is not None and rows > 0:
            targets = sequence.token_ids[context_len + 1 : context_len + 1 + rows]
            part = "log-probabilities of the prompt"
            hidden = hidden_TE[start : start + rows]
            failures.run(slot, part, score, slot, hidden, targets, sequence.params, context_len)
        start += query_len
    return found
