"""Refuses tasks that the model does not have, such as generation by an encoder, with the endpoints that work."""

from __future__ import annotations

from collections.abc import Mapping

from phonograph.core.pooling_params import PoolingTask
from phonograph.engine.process.messages import EngineFacts
from phonograph.server.http.api_errors import invalid

ENDPOINTS: Mapping[PoolingTask, tuple[str, ...]] = {
    "embed": ("/v1/embeddings", "/v2/embed", "/score", "/rerank", "/pooling"),
    "classify": ("/classify", "/pooling"),
    "score": ("/score", "/rerank", "/pooling"),
    "token_embed": ("/pooling",),
    "token_classify": ("/pooling",),
}
"""Endpoints that serve each task."""


def check_task(facts: EngineFacts, *, pools: bool, task: PoolingTask | None = None) -> None:
    """Check that the model has the task of a request.

    Args:
        facts: properties of the engine.
        pools: the request generates nothing.
        task: its task then; None is any.

    Raises:
        ApiError: the model does something else.
    """
    pooler = facts.pooler
    if pooler is None:
        if pools:
            problem = "/v1/completions and /v1/chat/completions work; a server with --convert embed makes embeddings"
            raise invalid("model", f"model: the model generates text: {problem}", code="unsupported_task")
        return
    if pools and (task is None or task in pooler.tasks):
        return
    has = f"{' and '.join(pooler.tasks)} ({pooler.origin})"
    works = ", ".join(dict.fromkeys(path for one in pooler.tasks for path in ENDPOINTS[one]))
    does = f"generates nothing; it has {has}" if not pools else f"has {has}, not {task}"
    raise invalid("task" if pools else "model", f"the model {does}: {works} work", code="unsupported_task")
