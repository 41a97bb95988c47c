"""/v1/graphs: the captured graphs, the reasons for them, and the graphs of the latest steps."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from phonograph.engine.async_llm import AsyncLLM
from phonograph.engine.metrics.histogram import Histogram
from phonograph.engine.metrics.step_log import KEPT, StepTally
from phonograph.engine.metrics.step_record import StepRecord
from phonograph.graphs.modes import GraphKey
from phonograph.server.chat.serving import Serving

router = APIRouter()


@router.get("/v1/graphs")
async def graphs(
    request: Request,
    last: Annotated[int, Query(ge=0, le=KEPT, description="Steps to show at most, the latest.")] = 64,
    after: Annotated[int, Query(ge=0, description="Only steps with a higher number.")] = 0,
) -> dict[str, Any]:
    """Return the resolution with its reasons, the capture list, counts of all decisions, and the latest steps."""
    serving: Serving = request.app.state.serving
    engine = serving.engine
    facts, log = engine.facts, engine.steps
    errors = serving.errors
    resolution, support = facts.resolution, facts.resolution.support
    return {
        "object": "graphs",
        "model": serving.names[0],
        "device": facts.device,
        "attention_backend": facts.attention_backend,
        "support": {"level": support.level.name, "reason": support.reason},
        "resolution": {
            "asked": None if resolution.asked is None else resolution.asked.value,
            "mode": resolution.mode.value,
            "reasons": [
                {"from": None if step.before is None else step.before.value, "to": step.after.value, "why": step.text}
                for step in resolution.reasons
            ],
        },
        "captures": {
            "graphs": [_graph(key) for key in reversed(facts.captures.largest_first())],
            "memory_bytes": facts.graph_memory_bytes,
            "seconds": facts.capture_seconds,
            "retries": [{**_graph(retry.key), "reason": retry.reason} for retry in facts.capture_retries],
        },
        "kv_groups": [asdict(group) for group in facts.kv_groups],
        "sums_over_ranks": [one._asdict() for one in facts.sums],
        "notes": [*facts.notes, *serving.formats.notes],
        "engine": {**_engine(engine), "errors": {"refused": errors.refused, "failed": errors.failed}},
        "engines": _members(engine),
        "decisions": [_tally(tally) for tally in log.tallies],
        "attention_units": {"shared": log.shared_units, "own": log.own_units},
        "num_steps": log.num_steps,
        "steps": [_step(number, step, log.epoch_offset) for number, step in log.since(after, last)],
    }


def _graph(key: GraphKey) -> dict[str, Any]:
    return {"set": key.kind, "tokens": key.num_tokens, "slots": key.num_reqs}


def _engine(engine: AsyncLLM) -> dict[str, Any]:
    """Return the present state of the engine. With `time`, two answers give a rate."""
    stats, facts = engine.stats, engine.facts
    return {
        "time": time.time(),
        "up": engine.death is None,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "max_num_seqs": facts.max_num_seqs,
        "kv_blocks_used": stats.blocks_used,
        "kv_blocks": stats.num_blocks,
        "kv_block_size": facts.block_size,
        "preemptions": stats.num_preemptions,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "drafts": {**stats.drafts._asdict(), "choices": dict(stats.drafts.choices)},
        "prompt_tokens": engine.requests.num_prompt_tokens,
        "generation_tokens": engine.requests.num_output_tokens,
        "first_token": _latency(engine.requests.first_token),
        "inter_token": _latency(engine.requests.inter_token),
    }


def _members(engine: AsyncLLM) -> list[dict[str, Any]]:
    """Return the state of each of several engines; empty for one."""
    if engine.engines is None:
        return []
    members = []
    for rank, member in enumerate(engine.engines.members):
        assert member.stats is not None, "the engines have started"
        routed = {reason: count for (to, reason), count in engine.engines.router.counts.items() if to == rank}
        members.append(
            {
                "engine": rank,
                "up": member.up,
                "restarts": member.num_restarts,
                "running": member.stats.num_running,
                "waiting": member.stats.num_waiting,
                "kv_blocks_used": member.stats.blocks_used,
                "kv_blocks": member.stats.num_blocks,
                "prefix_queries": member.stats.prefix_queries,
                "prefix_hits": member.stats.prefix_hits,
                "routed": routed,
            }
        )
    return members


def _latency(histogram: Histogram) -> dict[str, float]:
    return {"count": histogram.count, "seconds": histogram.total}


def _tally(tally: StepTally) -> dict[str, Any]:
    return {
        "engine": tally.engine,
        "mode": tally.mode,
        "kind": tally.kind,
        "cause": tally.cause,
        "steps": tally.num_steps,
        "tokens": tally.num_tokens,
        "padded_tokens": tally.num_padded,
        "seconds": tally.seconds.total,
    }


def _step(number: int, step: StepRecord, epoch_offset: float) -> dict[str, Any]:
    """Return one step. `decodes` are sequences that continue their output, `prefills` the tokens of each other one."""
    return {
        "number": number,
        "time": step.ended + epoch_offset,
        "seconds": step.seconds,
        "kind": step.kind,
        "decodes": step.num_decodes,
        "prefills": step.prefill_lens,
        "tokens": step.num_tokens,
        "mode": step.mode,
        "graph": step.graph,
        "graph_tokens": step.graph_tokens,
        "graph_slots": step.graph_slots,
        "padded_tokens": step.graph_tokens - step.num_tokens,
        "reason": step.reason,
        "attention_units": {"shared": step.shared_units, "own": step.own_units},
    }
