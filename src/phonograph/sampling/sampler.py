"""Sampling: chooses the next token of each sequence from its logits, by the parameters loaded in its slot.

A greedy batch is one argmax. Order of processing: logit bias and the mask of min_tokens, penalties, the mask of a
grammar, temperature, min-p, top-k, top-p.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from phonograph.core.batch import SlotFailure, TokenLogprobs
from phonograph.core.grammar import Grammar
from phonograph.core.sampling_params import SamplingParams
from phonograph.kernels.host_arrays import to_device
from phonograph.kernels.torch import sampling
from phonograph.kernels.torch.sampling import Rows
from phonograph.sampling.draw_tokens import draw_tokens
from phonograph.sampling.failures import SlotFailures
from phonograph.sampling.grammar_masks import GrammarMasks
from phonograph.sampling.logprobs import RAW_LOGPROBS, ScoreKind, padded, token_logprobs
from phonograph.sampling.penalties import Penalties
from phonograph.sampling.slot_edits import SlotEdits

# Logits per chunk: on a CPU what the cache holds, on a GPU enough to fill it.
_CHUNK_LOGITS = {"cpu": 2**17, "cuda": 2**22}
_BYTES_PER_LOGIT = 84
"""Bytes per logit of the temporaries of choosing a token, at most (tests/sampling/test_memory.py)."""


@dataclass(slots=True, kw_only=True)
class Sampled:
    """Result of sampling.

    Attributes:
        token_ids: in the order of the slots; -1 for a slot without a token (NaN or +inf among its logits, or all -inf).
        logprobs: by slot, for requests with `logprobs` and a token; numbers of the sampler's `scores`.
        failures: by slot, errors of the work for it.
    """

    token_ids: list[int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict[int, TokenLogprobs])
    failures: dict[int, SlotFailure] = field(default_factory=dict[int, SlotFailure])


class KernelParameters(NamedTuple):
    """Parameters of some slots. Temperature 0 is greedy, top_k 0 keeps all; stream keys are int64.

    edits_N is True for slots with edits in `SlotEdits`, and min_tokens_N the tokens before which these must not end.
    """

    temperature_N: np.ndarray
    top_k_N: np.ndarray
    top_p_N: np.ndarray
    min_p_N: np.ndarray
    stream_keys_N: np.ndarray
    edits_N: np.ndarray
    min_tokens_N: np.ndarray

    @classmethod
    def greedy(cls, num_slots: int) -> KernelParameters:
        """Return those of slots whose most likely token is taken."""
        integers, floats = np.zeros(num_slots, np.int64), np.zeros(num_slots)
        return cls(floats, integers, np.ones(num_slots), floats, integers, np.zeros(num_slots, bool), integers)


class Sampler:
    """Sampling state of the runner's slots 0 .. max_num_seqs - 1.

    Args:
        max_num_seqs: number of slots.
        vocab_size: columns of the logits.
        device: device of the logits.
        seed: requests without a seed take one from it, in order of loading. None uses the operating system's entropy.
        batch_invariant: process rows one by one, because torch's sums depend on their number.
        scores: numbers to report as log-probabilities.

    Attributes:
        grammars: token masks of slots with a grammar.
        logprobs: tokens to report beside each sampled one, by slot; -1 for none. int64.
        listed: these tokens by slot, where they are not the most likely ones.
        lists: slots that are in `listed`. bool.
        chunk_rows: rows of logits that are worked on together.
        edits: bias, min_tokens and penalties for kernels, which then sample in the place of `sample`; set it before the
            first `load`.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        seed: int | None,
        batch_invariant: bool = False,
        scores: ScoreKind = RAW_LOGPROBS,
    ) -> None:
        self.vocab_size = vocab_size
        self.scores = scores
        self.device = device
        self._seeds = random.Random(seed)
        self._penalties = Penalties(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device)
        self.grammars = GrammarMasks(max_num_seqs=max_num_seqs, vocab_size=vocab_size, device=device)
        self.edits: SlotEdits | None = None
        self.chunk_rows = 1 if batch_invariant else _chunk_rows(vocab_size, device.type)
        # Host arrays by slot, so that a step reads each with one index.
        self._temperature = np.zeros(max_num_seqs)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.ones(max_num_seqs)
        self._min_p = np.zeros(max_num_seqs)
        self._stream_key = np.zeros(max_num_seqs, dtype=np.int64)
        self.logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self.listed: dict[int, Sequence[int]] = {}
        self.lists = np.zeros(max_num_seqs, dtype=bool)
        self._min_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self._penalized = np.zeros(max_num_seqs, dtype=bool)
        self._biased = np.zeros(max_num_seqs, dtype=bool)
        self._edited = np.zeros(max_num_seqs, dtype=bool)
        self._plain = np.ones(max_num_seqs, dtype=bool)  # greedy and nothing else
        self._bias: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._stop_ids: dict[int, np.ndarray] = {}

    @staticmethod
    def nbytes(*, max_num_seqs: int, vocab_size: int, device_type: str, logits_bytes: int) -> int:
        """Return the maximum device memory of the sampling state, with temporaries.

        On a GPU these are of log-probabilities and of copies of the rows that a grammar masks.

        Args:
            max_num_seqs: number of slots.
            vocab_size: columns of the logits.
            device_type: "cpu" or "cuda".
            logits_bytes: bytes of one logit as the model computes it; rows are copied before they are sampled.
        """
        copied = max_num_seqs * vocab_size * logits_bytes
        chunk = min(max_num_seqs, _chunk_rows(vocab_size, device_type)) * vocab_size * _BYTES_PER_LOGIT
        state = Penalties if device_type == "cpu" else SlotEdits
        return state.nbytes(max_num_seqs=max_num_seqs, vocab_size=vocab_size) + copied + chunk

    @torch.inference_mode()
    def load(
        self,
        slot: int,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        output_token_ids: Sequence[int],
        stop_token_ids: Sequence[int],
        sample_index: int,
        grammar: Grammar | None = None,
    ) -> None:
        """Load a request into a slot, anew or after a preemption. Its token ids must be in the vocabulary.

        Args:
            slot: the slot.
            params: sampling parameters, checked by `SamplingParams.check_vocabulary`.
            prompt_token_ids: tokens of the prompt.
            output_token_ids: tokens generated before a preemption.
            stop_token_ids: every token that ends the request; masked before min_tokens are generated.
            sample_index: index of this sample among the request's n.
            grammar: constraint on the output.
        """
        self.clear(slot)
        if params.structured_outputs is not None:
            stop_token_ids = ()  # The grammar masks them (`structured.min_tokens`).
        # Bounds at which (logit - max) / temperature stays free of 0/0 and inf/inf in float32.
        self._temperature[slot] = min(max(params.temperature, 1e-30), 1e30) if not params.greedy else 0.0
        self._top_k[slot] = params.top_k if params.top_k < self.vocab_size else 0
        self._top_p[slot] = params.top_p
        self._min_p[slot] = params.min_p
        seed = params.seed if params.seed is not None else self._seeds.getrandbits(64) - 2**63
        self._stream_key[slot] = sampling.stream_key(seed, sample_index)
        if params.logprobs is not None:
            self.logprobs[slot] = params.logprobs if params.logprobs >= 0 else self.vocab_size
        if params.logprob_token_ids is not None:
            self.listed[slot] = params.logprob_token_ids
            self.lists[slot] = True
        if grammar is not None:
            self.grammars.load(slot, grammar, output_token_ids)
        if self.edits is not None:
            self._min_tokens[slot] = params.min_tokens if stop_token_ids else 0
            self._edited[slot] = self.edits.load(slot, params, prompt_token_ids, output_token_ids, stop_token_ids)
            return
        if params.has_penalties:
            self._penalties.load(slot, params, prompt_token_ids, output_token_ids)
            self._penalized[slot] = True
        if params.logit_bias:
            self._bias[slot] = _ids(params.logit_bias), np.array([*params.logit_bias.values()], dtype=np.float32)
            self._biased[slot] = True
        if params.min_tokens and stop_token_ids:
            self._stop_ids[slot] = _ids(stop_token_ids)
            self._min_tokens[slot] = params.min_tokens
        self._plain[slot] = (
            params.greedy
            and params.logprobs is None
            and grammar is None
            and not (params.has_penalties or params.logit_bias or params.min_tokens)
        )

    def clear(self, slot: int) -> None:
        """Remove the request from a slot, if there is one."""
        self._temperature[slot] = 0.0
        self.logprobs[slot] = -1
        self.listed.pop(slot, None)
        self.lists[slot] = False
        self._min_tokens[slot] = 0
        self._plain[slot] = True
        self._penalized[slot] = False
        self._biased[slot] = False
        self._edited[slot] = False
        self._bias.pop(slot, None)
        self._stop_ids.pop(slot, None)
        self.grammars.clear(slot)

    def for_drafts(self) -> Sampler:
        """Return a sampler of the same slots for the drafts of another model.

        It leaves out what keeps state by token, penalties and grammars, and log-probabilities.
        """
        drafts = copy.copy(self)
        num_slots = len(self._penalized)
        drafts._penalized = np.zeros(num_slots, dtype=bool)
        drafts.logprobs = np.full(num_slots, -1, dtype=np.int64)
        drafts.grammars = GrammarMasks(max_num_seqs=num_slots, vocab_size=self.vocab_size, device=self.device)
        return drafts

    def kernel_parameters(self, slots_N: np.ndarray) -> KernelParameters:
        """Return the parameters with which a kernel draws for these slots as `sample` does."""
        return KernelParameters(
            temperature_N=self._temperature[slots_N],
            top_k_N=self._top_k[slots_N],
            top_p_N=self._top_p[slots_N],
            min_p_N=self._min_p[slots_N],
            stream_keys_N=self._stream_key[slots_N],
            edits_N=self._edited[slots_N],
            min_tokens_N=self._min_tokens[slots_N],
        )

    @torch.inference_mode()
    def sample(self, logits_NV: torch.Tensor, slots: Sequence[int], output_lens: Sequence[int] | np.ndarray) -> Sampled:
        """Choose a token for each row, and advance penalties and grammars of its slot. The logits are not changed.

        Args:
            logits_NV: any float dtype; row i belongs to slots[i].
            slots: slot of each row, distinct.
            output_lens: tokens that each request has generated, the index of this draw.
        """
        assert logits_NV.shape == (len(slots), self.vocab_size), (logits_NV.shape, len(slots), self.vocab_size)
        by_row = np.asarray(slots, dtype=np.int64)
        if self._plain[by_row].all():
            max_N, tokens_N = logits_NV.max(dim=-1)
            # The maximum of a row with NaN is NaN, which the comparison excludes.
            pairs = zip(tokens_N.tolist(), max_N.tolist(), strict=True)
            return Sampled(token_ids=[token if -math.inf < value < math.inf else -1 for token, value in pairs])
        draws = np.asarray(output_lens, dtype=np.int64)
        failures = SlotFailures()
        sampled = Sampled(token_ids=[-1] * len(slots), failures=failures.by_slot)

        def choose(rows: Sequence[int]) -> None:
            span = slice(rows[0], rows[-1] + 1)
            sampled.token_ids[span] = self._choose(logits_NV[span], by_row[span], draws[span], failures)

        def count(rows: Sequence[int]) -> None:
            tokens = self.to_device(np.array([sampled.token_ids[row] for row in rows]))
            self._penalties.record(self.to_device(by_row[rows]), tokens)

        def score(rows: Sequence[int]) -> None:
            tokens = self.to_device(np.array([sampled.token_ids[row] for row in rows]))
            scored_slots: list[int] = by_row[rows].tolist()
            lists = [self.listed[slot] for slot in scored_slots] if self.lists[scored_slots[0]] else None
            listed = None if lists is None else self.to_device(padded(lists))
            tops: list[int] = self.logprobs[scored_slots].tolist()
            logits = logits_NV[self.to_device(np.array(rows))]
            if self.scores.processed:
                edited = self._edit(logits, by_row[rows], draws[rows], failures)
                logits = self.filtered(edited, by_row[rows], tokens)
            found = token_logprobs(logits, tokens, tops, listed, as_logits=self.scores.as_logits)
            sampled.logprobs |= zip(scored_slots, found, strict=True)

        for rows in _pieces(range(len(slots)), self.chunk_rows):
            failures.run_rows(rows, slots, "sampling", choose)
        chosen = np.array(sampled.token_ids) >= 0
        # Processed logits are those before the token is counted.
        scored = (self.logprobs[by_row] >= 0) & chosen
        for kind in (scored & ~self.lists[by_row], scored & self.lists[by_row]):
            for rows in _pieces(np.flatnonzero(kind).tolist(), self.chunk_rows):
                failures.run_rows(rows, slots, "log-probabilities", score)
        failures.run_rows(np.flatnonzero(self._penalized[by_row] & chosen).tolist(), slots, "penalties", count)
        for row in np.flatnonzero(self.grammars.constrained[by_row] & chosen).tolist():
            self.grammars.accept(slots[row], sampled.token_ids[row], failures)
        return sampled

    def filtered(self, edited_NV: torch.Tensor, by_row: np.ndarray, tokens_N: torch.Tensor) -> torch.Tensor:
        """Return logits as tokens are drawn from them: divided by temperatures, and -inf for tokens that are removed.

        Args:
            edited_NV: logits with bias, penalties and masks.
            by_row: slot of each row.
            tokens_N: int64, token of each row.
        """
        out_NV = edited_NV.to(torch.float32, copy=True)
        drawn = np.flatnonzero(self._temperature[by_row] > 0.0)
        if drawn.size:
            rows_G, slots = self.to_device(drawn), by_row[drawn]
            logits_GV = out_NV[rows_G]
            rows = self._rows(logits_GV, logits_GV.amax(dim=-1), slots, np.zeros_like(slots))
            by_rank = bool(((self._top_k[slots] > 0) | (self._top_p[slots] < 1.0)).any())
            found_GV = sampling.filtered(rows, tokens_N[rows_G], by_rank=by_rank)
            if self.scores.as_logits:
                found_GV += (rows.max_N / rows.temperature_N).to(torch.float32)[:, None]
            out_NV[rows_G] = found_GV
        return out_NV

    def _choose(
        self, logits_NV: torch.Tensor, by_row: np.ndarray, draws: np.ndarray, failures: SlotFailures
    ) -> list[int]:
        """Return the tokens of a few rows, -1 for none, without changing any state."""
        edited_NV = self._edit(logits_NV, by_row, draws, failures)
        max_N, tokens_N = edited_NV.max(dim=-1)  # of equal maxima the first
        temperature = self._temperature[by_row]
        if (temperature > 0.0).any():
            rows = self._rows(edited_NV, max_N, by_row, draws)
            draw_tokens(rows, temperature, self._top_k[by_row], self._top_p[by_row], tokens_N)
        return tokens_N.where(max_N.isfinite(), -1).tolist()

    def _edit(
        self, logits_NV: torch.Tensor, by_row: np.ndarray, draws: np.ndarray, failures: SlotFailures
    ) -> torch.Tensor:
        """Apply bias, penalties, and masks to a float32 copy; return the logits themselves if no row has any."""
        biased = np.flatnonzero(self._biased[by_row])
        short = np.flatnonzero(draws < self._min_tokens[by_row])
        ruled = np.flatnonzero(self.grammars.constrained[by_row])
        penalized = np.flatnonzero(self._penalized[by_row])
        if not (biased.size or short.size or ruled.size or penalized.size):
            return logits_NV
        edited_NV = logits_NV.to(torch.float32, copy=True)
        if biased.size:
            entries = [self._bias[slot] for slot in by_row[biased].tolist()]
            where = self._scatter(biased, [ids for ids, _ in entries])
            edited_NV[where] += self.to_device(np.concatenate([values for _, values in entries]))
        if short.size:
            edited_NV[self._scatter(short, [self._stop_ids[slot] for slot in by_row[short].tolist()])] = -torch.inf
        if penalized.size:
            rows_P = self.to_device(penalized)
            edited_NV[rows_P] = self._penalties.apply(edited_NV[rows_P], self.to_device(by_row[penalized]))
        if ruled.size:
            self.grammars.apply(edited_NV, ruled, by_row[ruled].tolist(), failures)
        return edited_NV

    def _rows(self, logits_NV: torch.Tensor, max_N: torch.Tensor, by_row: np.ndarray, draws: np.ndarray) -> Rows:
        """Return rows with the parameters of their slots."""
        keys_N = sampling.draw_keys(torch.from_numpy(self._stream_key[by_row]), torch.from_numpy(draws))
        temperature, min_p, top_p = self._temperature[by_row], self._min_p[by_row], self._top_p[by_row]
        floats_3N = self.to_device(np.stack((temperature, min_p, top_p)))
        return Rows(
            logits_NV=logits_NV,
            max_N=max_N,
            keys_N=self.to_device(keys_N.numpy()),
            temperature_N=floats_3N[0],
            min_p_N=floats_3N[1],
            top_p_N=floats_3N[2],
            top_k_N=self.to_device(self._top_k[by_row]),
        )

    def _scatter(self, rows: np.ndarray, ids: list[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index of the elements `ids[i]` of row `rows[i]`, for all i."""
        repeated = np.repeat(rows, [len(entry) for entry in ids])
        return self.to_device(repeated), self.to_device(np.concatenate(ids))

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Return an array on the device, without waiting for it."""
        return to_device(array, self.device)


def _chunk_rows(vocab_size: int, device_type: str) -> int:
    return max(1, _CHUNK_LOGITS[device_type] // vocab_size)


def _pieces(rows: Sequence[int], length: int) -> Iterator[Sequence[int]]:
    return (rows[start : start + length] for start in range(0, len(rows), length))


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.fromiter(dict.fromkeys(token_ids), dtype=np.int64)
