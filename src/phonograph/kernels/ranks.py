"""Operations over the ranks of tensor parallelism, and the operators of torch by which graphs record them.

Every rank runs the same operations in the same order. A graph records each as one call with the number of the ranks.

Shapes: T tokens, N rows that need logits, E hidden size, V vocabulary, P the part of the vocabulary that a rank has.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from weakref import WeakValueDictionary

import torch

from phonograph.kernels.fp8_activations import Rows
from phonograph.kernels.triton.ranks.choose_sum import SumChoice


class Ranks(Protocol):
    """Connection of one rank with the others.

    Every operation raises RankError if a rank has ended, or does not take part in time.

    Attributes:
        rank: number of this rank, from 0.
        size: number of ranks.
        number: number by which operators find this object, from `register`.
        notes: problem of peer memory, if one was found when the ranks were connected.
        sums: kernels of sums by rows.
    """

    rank: int
    size: int
    number: int
    notes: tuple[str, ...] = ()
    sums: tuple[SumChoice, ...] = ()

    def sum(self, x_TE: torch.Tensor) -> None:
        """Replace a contiguous tensor by its sum over the ranks, in the order of the ranks: all get the same bits."""
        ...

    def add_and_norm(
        self,
        x_TE: torch.Tensor,
        hidden_TE: torch.Tensor,
        weight_E: torch.Tensor | None,
        eps: float,
        normed: Rows | None,
        factor: float,
    ) -> bool:
        """Compute hidden += factor * sum(x) and normed = rms_norm(hidden) by one kernel, if there is one for it.

        Args:
            x_TE: part of this rank; may overlay `normed`, and may be overwritten.
            hidden_TE: the stream.
            weight_E: weights of the norm; None for no norm, and nothing in `normed`.
            eps: of the norm.
            normed: result, or None.
            factor: factor of the sum.

        Returns:
            False if nothing was done.
        """
        return False

    def gather(self, part_NP: torch.Tensor, out_NV: torch.Tensor | None) -> None:
        """Bring the parts of all ranks together on rank 0.

        Args:
            part_NP: part of this rank, contiguous.
            out_NV: rank 0's result, at most as wide as the parts together; None on the others.
        """
        ...

    def share(self, part_THD: torch.Tensor, out_TXD: torch.Tensor) -> None:
        """Bring the heads of neighbours together on each of them.

        Args:
            part_THD: heads of this rank.
            out_TXD: [T, N * H, D], contiguous: those of the N ranks that have the same number // N.
        """
        ...

    def merge_heads(
        self,
        found_TXD: torch.Tensor,
        lse_XT: torch.Tensor,
        out_THD: torch.Tensor,
        lse_HT: torch.Tensor | None,
        own: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> bool:
        """Merge attention of neighbours to parts of the keys by one kernel, if there is one for it.

        Args:
            found_TXD: outputs of the heads of all N neighbours over the keys of this rank, contiguous.
            lse_XT: their log-sum-exps, float32.
            out_THD: receives the outputs of the heads of this rank.
            lse_HT: receives their log-sum-exps, or None.
            own: outputs and log-sum-exps of this rank's heads over other keys.

        Returns:
            False if nothing was done.
        """
        return False

    def exchange(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Send a part to each neighbour, and receive one from each.

        Args:
            x: [N, ...], contiguous: part i is for the i-th of the N ranks that have the same number // N.
            out: [N, ...], part i is that of the i-th.
        """
        ...

    def broadcast(self, words: torch.Tensor) -> None:
        """Replace a contiguous tensor by that of rank 0."""
        ...

    def agree(self, text: str) -> list[str]:
        """Return the text of each rank, on all ranks; up to 1,000 bytes of each."""
        ...

    def recording(self) -> AbstractContextManager[object]:
        """Return the context of a capture, in which no operation waits for a rank and results are arbitrary.

        So a capture that fails on one rank leaves no other rank waiting.
        """
        ...

    def checking(self) -> AbstractContextManager[object]:
        """Return a context in which each operation is compared with those of the other ranks first.

        RankError has the difference.
        """
        ...


_numbers = itertools.count(1)
_by_number: WeakValueDictionary[int, Ranks] = WeakValueDictionary()


def register(ranks: Ranks) -> int:
    """Return a number by which operators find `ranks`, as long as these are alive."""
    number = next(_numbers)
    _by_number[number] = ranks
    return number


_library = torch.library.Library("phonograph", "FRAGMENT")
_library.define("sum_ranks(Tensor(a!) x, int ranks) -> ()")
_library.define("gather_ranks(Tensor part, Tensor(a!)? out, int ranks) -> ()")
_library.define("share_ranks(Tensor part, Tensor(a!) out, int ranks) -> ()")
_library.define("exchange_ranks(Tensor x, Tensor(a!) out, int ranks) -> ()")


def sum_ranks(x_TE: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Replace a contiguous tensor by its sum over the ranks, and return it."""
    torch.ops.phonograph.sum_ranks.default(x_TE, ranks.number)
    return x_TE


def gather_ranks(part_NP: torch.Tensor, vocab_size: int, ranks: Ranks) -> torch.Tensor:
    """Return the logits [N, V] of all ranks on rank 0, a new tensor; the part itself on the others."""
    out_NV = part_NP.new_empty(part_NP.shape[0], vocab_size) if ranks.rank == 0 else None
    torch.ops.phonograph.gather_ranks.default(part_NP, out_NV, ranks.number)
    return part_NP if out_NV is None else out_NV


def share_ranks(part_THD: torch.Tensor, count: int, ranks: Ranks) -> torch.Tensor:
    """Return [T, count * H, D], the heads of this rank and its neighbours; see `Ranks.share`."""
    num_tokens, num_heads, head_size = part_THD.shape
    out_TXD = part_THD.new_empty(num_tokens, count * num_heads, head_size)
    torch.ops.phonograph.share_ranks.default(part_THD, out_TXD, ranks.number)
    return out_TXD


def exchange_ranks(x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return what the neighbours have for this rank; see `Ranks.exchange`."""
    out = torch.empty_like(x)
    torch.ops.phonograph.exchange_ranks.default(x, out, ranks.number)
    return out


def embed_over_ranks(input_ids_T: torch.Tensor, table_PE: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return the embeddings [T, E] of tokens, of which each rank has P, in new memory."""
    count = len(table_PE)
    own_T = input_ids_T - ranks.rank * count
    known_T = (own_T >= 0) & (own_T < count)
    found_TE = torch.nn.functional.embedding(own_T.clamp_(0, count - 1), table_PE)
    return sum_ranks(found_TE.mul_(known_T.unsqueeze(-1)), ranks)


def joint_norm_over_ranks(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], eps: torch.Tensor | float, ranks: Ranks
) -> torch.Tensor:
    """Return heads [T, X, D], each tensor normed over the heads of all ranks; see `kernels.torch.layers.rms_norm`.

    The mean square of all heads is the mean of those of the ranks, also where several ranks have a head.

    Args:
        pairs: heads [T, H, D] with their weights [H, D]: queries, and keys if there are any.
        eps: of the norms.
        ranks: ranks with equal numbers of heads.
    """
    squares_T2 = torch.stack([x_TXD.float().square().mean((1, 2)) for x_TXD, _ in pairs], 1)
    inverse_rms_T2 = sum_ranks(squares_T2, ranks).mul_(1 / ranks.size).add_(eps).rsqrt_()
    normed = [
        torch.mul(x_TXD, inverse_rms_T2[:, index, None, None]).to(x_TXD.dtype).mul_(weight_XD)
        for index, (x_TXD, weight_XD) in enumerate(pairs)
    ]
    return torch.cat(normed, 1)


def _sum(x_TE: torch.Tensor, number: int) -> None:
    _by_number[number].sum(x_TE)


def _gather(part_NP: torch.Tensor, out_NV: torch.Tensor | None, number: int) -> None:
    _by_number[number].gather(part_NP, out_NV)


def _share(part_THD: torch.Tensor, out_TXD: torch.Tensor, number: int) -> None:
    _by_number[number].share(part_THD, out_TXD)


def _exchange(x: torch.Tensor, out: torch.Tensor, number: int) -> None:
    _by_number[number].exchange(x, out)


for _name, _function in (("sum", _sum), ("gather", _gather), ("share", _share), ("exchange", _exchange)):
    for _device in ("CPU", "CUDA"):
        _library.impl(f"{_name}_ranks", _function, _device)
    # The tape's replay, which is on a CPU, calls the functions without torch's dispatch.
    getattr(torch.ops.phonograph, f"{_name}_ranks").default.python_function = _function
