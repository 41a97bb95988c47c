"""`AsyncVerbs`: commands of an `AsyncLLM` beside its requests, each answered by the engine."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from typing import Any, get_args

from phonograph.config.engine_config import EngineConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.offline.model_defaults import default_sampling_params
from phonograph.engine.offline.vllm_methods import VllmMethods
from phonograph.engine.process.client import EngineClient
from phonograph.engine.process.messages import Command, Pause, PauseMode, ResetPrefixCache, Resume, Verb
from phonograph.errors import EngineUnavailable, RequestError, shortened
from phonograph.text.tokenizer import Tokenizer, transformers_tokenizer


class AsyncVerbs(VllmMethods):
    """Base of `AsyncLLM`: the client of its engine, and the verbs."""

    tokenizer: Tokenizer | None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.death: str | None = None
        self.draining = False
        self._client: EngineClient | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._defaults: SamplingParams | None = None
        self._paused = False
        self._verb_keys = itertools.count()
        self._answers: dict[int, asyncio.Future[None]] = {}

    @property
    def problem(self) -> EngineUnavailable | None:
        """Error that says why no request can be opened, or None."""
        if self.death is not None:
            return EngineUnavailable(self.death, "engine_died")
        if self.draining:
            return EngineUnavailable("the engine is shutting down", "shutting_down")
        if self._receiver is None:
            return EngineUnavailable("the engine has not started; await start() or use `async with`", "not_started")
        return None

    async def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as an object of transformers.

        Raises:
            RequestError: the model has none.
            EngineUnavailable: the engine has not started, or has ended.
        """
        self._check()
        return transformers_tokenizer(self.tokenizer)

    async def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model recommends in generation_config.json.

        Raises:
            ModelError: the file is unusable.
        """
        if self._defaults is None:
            # A thread, because the file may come from the hub.
            self._defaults = await asyncio.to_thread(default_sampling_params, self.config)
        return self._defaults

    async def pause_generation(self, *, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop the engine's steps, and return when none is in flight. Requests that come meanwhile wait.

        Args:
            mode: "abort" ends the requests in progress, with finish reason "abort"; "wait" lets them end first; "keep"
                continues them after `resume_generation`.
            clear_cache: forget the cached prefixes; defaults to True.

        Raises:
            RequestError: there is no such mode.
            EngineUnavailable: the engine has not started, or ends meanwhile.

        Example:
            ```python
            async with AsyncLLM("demo", max_num_seqs=1, cudagraph_capture_sizes=[1, 32]) as llm:
                await llm.pause_generation(mode="keep")
                assert await llm.is_paused()
                await llm.resume_generation()
            ```
        """
        if mode not in get_args(PauseMode):
            raise RequestError("mode", shortened(repr(mode)), f"must be one of {', '.join(get_args(PauseMode))}")
        self._check()
        self._paused = True
        await self._execute(lambda key: Pause(key, mode, bool(clear_cache)))

    async def resume_generation(self) -> None:
        """Continue after `pause_generation`. It has no effect without a pause.

        Raises:
            EngineUnavailable: the engine has not started, or ends meanwhile.
        """
        self._check()
        self._paused = False
        await self._execute(Resume)

    async def is_paused(self) -> bool:
        """Return True from the call of `pause_generation` to that of `resume_generation`."""
        return self._paused

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Requests in progress continue.

        Returns:
            True, as in vLLM when the cache was reset.

        Raises:
            EngineUnavailable: the engine has not started, or ends meanwhile.
        """
        await self._execute(ResetPrefixCache)
        return True

    def _check(self) -> None:
        if self.problem is not None:
            raise self.problem

    def _send(self, command: Command) -> None:
        assert self._client is not None, "requests are open only while there is a client"
        self._client.send(command)

    async def _execute(self, verb: Callable[[int], Verb]) -> None:
        """Send a verb with a key of its own, and wait for the answer."""
        self._check()
        key = next(self._verb_keys)
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._send(verb(key))
        try:
            await answer
        finally:
            self._answers.pop(key, None)

    def _take_answers(self, keys: Iterable[int]) -> None:
        for key in keys:
            # The caller may have been cancelled meanwhile.
            if (answer := self._answers.get(key)) is not None and not answer.done():
                answer.set_result(None)

    def _fail_verbs(self, error: EngineUnavailable) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)
