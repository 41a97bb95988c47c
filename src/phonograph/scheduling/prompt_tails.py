"""Ends of prompts behind their last full block, which a sequence with an equal prompt copies instead of computing.

Only full blocks are shared, because a sequence still writes the others. The *tail* of a prompt is its tokens behind the
last full block, without the last token, which each sequence computes for its logits. A running sequence has the keys
and values of its tail in a block of its own. A sequence that is admitted with an equal prompt copies that block, and
computes one token.

    prompt       | full block | full block | tail t t t t | last token |
    first sample | computed   | computed   | computed     | computed   |
    others       | shared     | shared     | copied       | computed   |

A block is copied at the head of a step, so the tail must be computed in an earlier one. A prompt whose tail is computed
in the step that is being scheduled waits for the next step, if this saves as much as a step costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice, takewhile

from phonograph.core.request import Request, RequestState
from phonograph.kv_cache.tables import FREED, SequenceTable

WORTH_A_STEP = 256
"""Tokens whose computation takes about as long as a step of few tokens, which reads all weights."""


class PromptTails:
    """Knows which running sequences hold the tails of prompts.

    Args:
        tables: block tables by request id.
        block_size: tokens of a block in every KV group; None if no tail is copied.
    """

    def __init__(self, tables: Mapping[str, SequenceTable], block_size: int | None) -> None:
        self._tables = tables
        self._block_size = block_size
        # Tails of running sequences by name, the names by request id, and tails that the latest batch computes.
        self._held: dict[bytes, Request] = {}
        self._names: dict[str, bytes] = {}
        self._computed: dict[bytes, Request] = {}
        self._waited_for: bytes | None = None

    def computes(self, request: Request) -> None:
        """Note that the batch which is being scheduled computes the end of a request's known tokens."""
        table = self._tables[request.request_id]
        if self._block_size is not None and table.publishes:
            name = table.tail_name(request.num_tokens - 1)
            if name is not None:
                self._computed[name] = request

    def begin_batch(self) -> None:
        """Note that the batches before are complete: the tails of sequences that still run can be copied."""
        for name, request in self._computed.items():
            if request.state is RequestState.RUNNING:
                self._held[name] = request
                self._names[request.request_id] = name
                self._waited_for = None
        self._computed.clear()

    def drop(self, request: Request) -> None:
        """Forget the tail of a sequence that loses its blocks."""
        name = self._names.pop(request.request_id, None)
        if name is not None and self._held.get(name) is request:
            del self._held[name]

    def clear(self) -> None:
        """Forget all tails."""
        self._held.clear()
        self._names.clear()
        self._computed.clear()

    def block_ids(self, request: Request, num_cached: int) -> list[int]:
        """Return the block to copy in each KV group; an empty list if there is none.

        Args:
            request: a request that is admitted.
            num_cached: tokens that it found in full blocks.
        """
        size = self._block_size
        if size is None or not self._held or num_cached != (request.num_tokens - 1) // size * size:
            return []
        name = self._tables[request.request_id].tail_name(request.num_tokens - 1)
        if name is None or (source := self._held.get(name)) is None:
            return []
        # A draft model may lack keys of the other sequence, and drafts gain more than the copy.
        if request.whole_drafts and not source.whole_drafts:
            return []
        found = [one.block_ids[num_cached // size] for one in self._tables[source.request_id].groups]
        # The window of the other sequence may have passed.
        return [] if FREED in found else found

    def is_worth_waiting(self, request: Request, waiting: Iterable[Request]) -> bool:
        """Return True if a request should wait for the next batch, to copy a tail that this one computes.

        It waits once: if the sequence with the tail ends meanwhile, the next batch computes it again.

        Args:
            request: the request that would be admitted now.
            waiting: requests that could be admitted now, in the order of their admission.
        """
        if not self._computed or self._block_size is None:
            return False
        num_tokens = request.num_tokens - 1
        name, tail = self._tables[request.request_id].tail_name(num_tokens), num_tokens % self._block_size
        if name not in self._computed or name in self._held or name == self._waited_for:
            return False
        tokens, needed = request.prompt_token_ids, -(-WORTH_A_STEP // tail)
        # Samples of a prompt have one list.
        alike = takewhile(lambda one: one.prompt_token_ids is tokens or one.prompt_token_ids == tokens, waiting)
        if sum(1 for _ in islice(alike, needed)) < needed:
            return False
        self._waited_for = name
        return True
