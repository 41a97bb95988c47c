"""Common work of endpoints whose requests generate nothing: admission, the engine's rows, and the answer."""

from __future__ import annotations

import asyncio
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
from fastapi import Request
from pydantic_core import to_json
from starlette.responses import Response

from phonograph.core.pooling_params import PoolingParams, PoolingTask
from phonograph.engine.admission import Prompt, admitted_pooling, admitted_whole_prompt, tokenized_ahead
from phonograph.errors import PhonographError, RequestError, RequestFailure
from phonograph.server.chat.serving import Serving
from phonograph.server.http.api_errors import api_error, invalid
from phonograph.server.openai.answers import answer_head, usage_of
from phonograph.server.pooling.check_task import check_task
from phonograph.server.pooling.pooled_body import PooledBody

INLINE_NUMBERS = 65_536
"""Numbers of an answer that are written on the event loop, in about 5 ms; a thread writes more."""

Rows = list[np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class PooledCall:
    """A request that generates nothing, which has been admitted.

    serving: the server
    request: of the framework
    body:    its fields
    params:  its parameters, with the task
    headers: of the answer
    names:   the request's names of engine parameters, where they differ
    """

    serving: Serving
    request: Request
    body: PooledBody
    params: PoolingParams
    headers: Mapping[str, str]
    names: Mapping[str, str]

    async def answer(
        self,
        tokens: Callable[[], Iterable[list[int]]],
        written: Callable[[Rows], Mapping[str, Any]],
        *,
        head: tuple[str, str],
        num_prompts: int,
        whole: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]] = operator.or_,
    ) -> Response:
        """Return the answer to a request.

        Args:
            tokens: returns the tokens of each prompt, which a thread may iterate.
            written: returns fields of the answer for the results of the prompts.
            head: prefix of the answer's id, and its object.
            num_prompts: prompts of the request.
            whole: makes the answer of its head and its other fields, which are those of `written` and the usage.

        Raises:
            ApiError: the request is refused, or fails.
        """
        serving, body = self.serving, self.body

        def checked(gone: threading.Event) -> list[list[int]]:
            # The rest is left out when the client has disconnected.
            prompts = list(takewhile(lambda _: not gone.is_set(), tokens()))
            self._check_lengths(prompts)
            return prompts

        try:
            prompts = await serving.prepare(self.request, checked, num_prompts=num_prompts)
            call = serving.open(
                self.request, prompts, self.params, priority=body.priority or 0, cache_salt=body.cache_salt
            )
            fields = answer_head(*head, serving.names[0], body.request_id)
            call.name = fields["id"]
            try:
                await call.wait()
                rows = [one.pooled for one in call.prompts if one.pooled is not None]
            finally:
                call.close()
            if len(rows) < len(prompts):
                raise RequestFailure(fields["id"], "engine", "was aborted")
        except PhonographError as error:
            raise api_error(error, self.names) from None

        def content() -> bytes:
            return to_json(whole(fields, {**written(rows), "usage": usage_of(call)}))

        numbers = sum(row.size for row in rows)
        made = content() if numbers <= INLINE_NUMBERS else await asyncio.to_thread(content)
        return Response(made, media_type="application/json", headers=dict(self.headers))

    def admitted(self, prompts: Iterable[Prompt], *, special: bool = True) -> Iterator[list[int]]:
        """Yield the tokens of prompts, cut as the request says.

        Raises:
            RequestError: a prompt cannot be served.
        """
        engine, keeps_last = self.serving.engine, self.body.keeps_last
        size, most = engine.facts.vocab_size, engine.facts.context_len
        for prompt in tokenized_ahead(engine.tokenizer, prompts) if special else prompts:
            yield admitted_whole_prompt(
                prompt, self.params, engine.tokenizer, size, most, special=special, keeps_last=keeps_last
            )

    def _check_lengths(self, prompts: Sequence[list[int]]) -> None:
        """Check the tokens of prompts, so that the engine is not sent those that it refuses."""
        field, most = self.names["prompt"], self.serving.engine.facts.context_len
        longest = max(map(len, prompts), default=0)
        if longest > most:
            problem = f"{field} has {longest} tokens; the model takes {most} (max_model_len): shorten it, "
            problem += "or set truncate_prompt_tokens=-1"
            raise invalid(field, problem, code="context_length_exceeded")
        limit = self.serving.config.max_request_token_ids
        if sum(map(len, prompts)) > limit:
            raise invalid(field, f"{field} has more than {limit} tokens together (max_request_token_ids): send fewer")


def admitted_call(
    body: PooledBody,
    request: Request,
    task: PoolingTask | None,
    *,
    field: str,
    num_prompts: int,
) -> PooledCall:
    """Check a request before any work for it.

    Args:
        body: its fields.
        request: of the framework.
        task: its task; None is the first of the model.
        field: name of the field with the prompts.
        num_prompts: prompts of the request.

    Raises:
        ApiError: the request is wrong, the model has no such task, or too many requests are in progress.
    """
    serving: Serving = request.app.state.serving
    headers = serving.admit(body, num_prompts=num_prompts, priority=body.priority or 0, pooled=field)
    names, facts = {**body.names, "prompt": field}, serving.engine.facts
    check_task(facts, pools=True, task=task)
    try:
        params = admitted_pooling(body.params(task), facts.pooler, facts.row_size)
    except RequestError as error:
        raise api_error(error, names) from None
    return PooledCall(serving=serving, request=request, body=body, params=params, headers=headers, names=names)
