"""Cost model of cascade attention.

With cascade attention all queries of a batch attend to the common prefix as to one sequence, without a causal mask, and
to their own suffixes as usual. The two outputs are merged by their LSE. The prefix is then read once, not once for each
request. The module is pure: `explain` and the engine use the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.errors import counted
from phonograph.graphs.modes import CascadeChoice, GraphKey

MIN_PREFIX = 256
"""Tokens. A shorter prefix does not pay for two more launches in each layer."""
MIN_REQUESTS = 8
_TILE = 128
"""Queries, and keys, that one block of threads takes at a time."""


def cascade_refusals(spec: AttentionSpec) -> list[str]:
    """Return reasons against cascading that hold for every backend: the prefix must be the same for all queries."""
    found: list[str] = []
    if spec.kind is not AttentionKind.DECODER:
        found.append(f"cascade attention in {spec.kind.value} attention; its batches share no computed prefix")
    if spec.windowed:
        found.append("cascade attention with windows; a window may end inside the prefix, elsewhere for each query")
    if spec.alibi:
        found.append("cascade attention with ALiBi; the bias on the prefix is different for each query")
    if spec.sinks:
        found.append("cascade attention with sinks; they would count in the prefix and in the suffix")
    return found


def part_limits(spec: AttentionSpec, limits: Limits) -> tuple[Limits, Limits]:
    """Return the limits of the launch over the prefix and of the launch over the suffixes.

    Only decodes cascade. Their tokens are one query over the prefix, which may be longer than any sequence.
    """
    num_tokens = limits.max_num_seqs * (1 + spec.speculative_tokens)
    decodes = replace(limits, max_num_batched_tokens=num_tokens)
    return replace(decodes, max_num_seqs=1, max_model_len=max(limits.max_model_len, num_tokens)), decodes


def cascade_bytes(
    capabilities: Capabilities, spec: AttentionSpec, device: DeviceSpec, limits: Limits, graphs: Sequence[GraphKey]
) -> int:
    """Return the bytes that cascade attention takes beside the ordinary backend."""
    prefix, suffixes = part_limits(spec, limits)
    with_lse = replace(spec, cascade=False, lse=True, non_causal=True)
    cascades = [key for key in graphs if key.cascade]
    parts = sum(capabilities.buffer_bytes(with_lse, device, part, cascades) for part in (prefix, suffixes))
    output = suffixes.max_num_batched_tokens * spec.num_query_heads * spec.head_size * spec.element_bytes
    table = 4 * limits.max_num_seqs * -(-limits.max_model_len // spec.block_size)
    return parts + output + table


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeTimeRule:
    """Comparison of the modelled time of two launches with that of one.

    Attributes:
        num_sms: multiprocessors of the device; 0, as on a CPU, counts as one.
    """

    num_query_heads: int
    num_kv_heads: int
    num_sms: int

    def weigh(self, *, num_reqs: int, prefix_len: int) -> CascadeChoice:
        """Decide for decodes of one token.

        If split decoding would serve the batch (grouped heads), compare times in tiles of keys that one
        multiprocessor goes through in sequence. Each tile of queries of the cascade walks the whole prefix. Split
        decoding spreads the prefixes of all requests evenly.
        """
        if num_reqs < MIN_REQUESTS:
            are = "is" if num_reqs == 1 else "are"
            return CascadeChoice(False, f"{counted(num_reqs, 'request')} {are} fewer than {MIN_REQUESTS}")
        if prefix_len < MIN_PREFIX:
            has = f"a common prefix of {prefix_len} tokens" if prefix_len else "no common prefix"
            return CascadeChoice(False, f"{has}, and {MIN_PREFIX} are worth it")
        shared = f"{num_reqs} requests share {prefix_len} tokens"
        group = self.num_query_heads // self.num_kv_heads
        if group == 1:
            why = "as many KV heads as query heads"
            return CascadeChoice(True, f"{shared}; with {why} no split decoding would serve them")
        sms = max(self.num_sms, 1)
        key_tiles = _tiles(prefix_len)
        once = -(-self.num_query_heads * _tiles(num_reqs) // sms) * key_tiles
        split = -(-num_reqs * self.num_kv_heads * _tiles(group) * key_tiles // sms)
        times = f"modelled time {once} with cascade, {split} without"
        return CascadeChoice(once < split, f"{shared}; {times}")


def _tiles(count: int) -> int:
    return -(-count // _TILE)
