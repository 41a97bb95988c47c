"""Keys and values of a draft model whose passes end the target's steps: requests and blocks that lack some of them.

A step makes drafts if one of its requests lacks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from phonograph.core.request import Request
from phonograph.scheduling.draft_budget import DraftBudget


class DraftCaches:
    """Knows what a draft model lacks after steps without its passes.

    It then has no keys and values of the tokens of such a step. So the step's requests have no drafts from there on,
    and neither has a request that shares a block that they filled since.

    Args:
        budget: says if drafts gain time.
    """

    def __init__(self, budget: DraftBudget) -> None:
        self._budget = budget
        self._holed: set[int] = set()

    def admit(self, request: Request, shared: Iterable[int], num_decodes: int) -> None:
        """Decide if a request that is admitted may have drafts.

        Args:
            request: the request.
            shared: its blocks that other requests have filled.
            num_decodes: running requests past their prompts.
        """
        may_draft = request.params.speculate and self._holed.isdisjoint(shared)
        if may_draft:
            self._budget.try_again(num_decodes + 1)
        request.whole_drafts = may_draft and self._budget.makes_drafts

    def begin(self, running: Iterable[Request]) -> None:
        """Begin a step, before its blocks are filled. In the steps of an engine that rests, all requests get holes."""
        if not self._budget.makes_drafts:
            for request in running:
                request.whole_drafts = False

    def filled(self, request: Request, block_ids: Iterable[int]) -> None:
        """Note blocks that others may share from now on."""
        if not request.whole_drafts:
            self._holed.update(block_ids)

    def taken(self, block_ids: Iterable[int]) -> None:
        """Note blocks that are about to get other contents."""
        self._holed.difference_update(block_ids)
