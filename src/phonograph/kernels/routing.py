"""Routing of tokens to experts, as a value that all kernels share."""

from __future__ import annotations

from typing import NamedTuple

LEAST = -3.0e38
"""Score in place of one that is not a number."""


class Routing(NamedTuple):
    """Choice of a token's experts from the logits of a router, and the weights of their results.

    A softmax over the chosen logits alone is the softmax over all, renormalised. Of experts, and of groups, with equal
    scores the lower ids are chosen. An expert whose logit is not a number comes after all others.

    Attributes:
        num_experts: X.
        top_k: k experts of a token.
        sigmoid: scores are sigmoids of the logits; otherwise their softmax.
        renormalised: weights are scores divided by their sum over the chosen experts; otherwise scores.
        scale: factor of the weights.
        num_groups: groups of consecutive experts, of which only `top_groups` are chosen from. The score of a group is
            the sum of its two highest.
        top_groups: see `num_groups`.
        logit_factor: factor of the logits.
        shared: each token has expert X too, as its last one. The weight is the sigmoid of a gate, or 1.
    """

    num_experts: int
    top_k: int
    sigmoid: bool = False
    renormalised: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    logit_factor: float = 1.0
    shared: bool = False

    @property
    def num_matrices(self) -> int:
        """Number of experts, with a shared one."""
        return self.num_experts + self.shared

    @property
    def num_pairs(self) -> int:
        """Number of a token's experts, with a shared one."""
        return self.top_k + self.shared
