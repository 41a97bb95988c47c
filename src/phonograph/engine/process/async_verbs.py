"""`AsyncVerbs`: commands of an `AsyncLLM` beside its requests, each answered by the engine."""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from phonograph.config.engine_config import EngineConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.token_types import EncoderTokens
from phonograph.engine.admission import admit_level, admitted_tags
from phonograph.engine.offline.model_defaults import default_sampling_params
from phonograph.engine.offline.vllm_methods import VllmMethods
from phonograph.engine.process.calls import Call
from phonograph.engine.process.client import EngineClient
from phonograph.engine.process.engine_pool import EnginePool
from phonograph.engine.process.messages import (
    Align,
    Answer,
    Command,
    Pause,
    PauseMode,
    Profile,
    ResetPrefixCache,
    Resume,
    Sleep,
    Verb,
    WakeUp,
)
from phonograph.errors import EngineUnavailable, PhonographError, RequestError, shortened
from phonograph.text.tokenizer import Tokenizer, transformers_tokenizer


def shut_down() -> EngineUnavailable:
    """Return the error of requests that a shutdown ends."""
    return EngineUnavailable("the engine was shut down before the answer was complete", "shutting_down")


class AsyncVerbs(VllmMethods):
    """Base of `AsyncLLM`: the client of its engine, and the verbs.

    Attributes:
        asleep: parts of the engine's memory that were given back, as of the latest report.
        sleep_level: of the sleep, 0 while all memory is awake.
        searches: beam searches in progress, whose steps are calls of their own.
    """

    tokenizer: Tokenizer | None

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.death: str | None = None
        self.draining = False
        self.searches: set[Call] = set()
        self._client: EngineClient | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._defaults: SamplingParams | None = None
        self.asleep: frozenset[str] = frozenset()
        self.sleep_level = 0
        self._paused = False
        self._verb_keys = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._starts_itself = False
        self._starting: asyncio.Future[None] | None = None

    @abstractmethod
    async def start(self) -> None:
        """Start the engine."""

    @abstractmethod
    def _released_client(self) -> EngineClient | None:
        """Fail the requests in progress, and return the client to close, if there is one."""

    async def close(self) -> None:
        """Fail the requests in progress and end the engine. Further calls have no effect."""
        client = self._released_client()
        if client is not None:
            await client.close()

    def shutdown(self) -> None:
        """Do the same as `close`, while the event loop waits. Name and form are vLLM's."""
        client = self._released_client()
        if client is not None:
            client.close_now()

    @property
    def engines(self) -> EnginePool | None:
        """The engines behind this one, where `data_parallel_size` has several."""
        return self._client if isinstance(self._client, EnginePool) else None

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
        _admit_mode(mode)
        self._check()
        self._paused = True
        await self._execute(lambda key: Pause(key, mode, bool(clear_cache)))

    async def resume_generation(self) -> None:
        """Continue after `pause_generation`. It has no effect without a pause.

        Raises:
            RequestError: the engine sleeps.
            EngineUnavailable: the engine has not started, or ends meanwhile.
        """
        self._check()
        paused, self._paused = self._paused, False
        try:
            await self._execute(Resume)
        except RequestError:
            self._paused = paused
            raise

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

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Give the memory of weights and KV cache back, and return when that is done.

        Requests that come meanwhile wait for `wake_up`. Cached prefixes are forgotten. From level 1 a second call
        leads to level 2.

        Args:
            level: 1 keeps the weights in host memory; 2 reads their files again at the end of the sleep.
            mode: requests in progress, as of `pause_generation`; what is kept is computed again.

        Raises:
            ConfigError: the engine was started without enable_sleep_mode.
            RequestError: there is no such level or mode, or `wake_up` came before the requests had ended.
            MemoryLimitError: the host has no memory for the weights; the engine continues.
            EngineUnavailable: the engine has not started, or ends meanwhile.

        Example:
            ```python
            async with AsyncLLM("demo", enable_sleep_mode=True, max_num_seqs=1, enforce_eager=True) as llm:
                await llm.sleep(level=2)
                assert await llm.is_sleeping()
                await llm.wake_up()
            ```
        """
        admit_level(level)
        _admit_mode(mode)
        await self._execute(lambda key: Sleep(key, level, mode))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again. Requests continue when all of it is there. It has no effect on what is awake.

        Args:
            tags: parts of the memory, "weights" and "kv_cache"; None for both.

        Raises:
            ConfigError: the engine was started without enable_sleep_mode.
            RequestError: a tag is unknown.
            MemoryLimitError: there is too little memory; the engine still sleeps.
            WeightError: the files of the weights have changed; likewise.
            EngineUnavailable: the engine has not started, or ends meanwhile.
        """
        names = admitted_tags(tags)
        await self._execute(lambda key: WakeUp(key, names))

    async def is_sleeping(self) -> bool:
        """Return True while weights or KV cache sleep."""
        return bool(self.asleep)

    async def start_profile(self) -> None:
        """Start to record the engine's operators and kernels.

        Raises:
            ConfigError: profile_dir is not set, or cannot be written.
            RequestError: a profile is running.
            EngineUnavailable: the engine has not started, or ends meanwhile.
        """
        await self._execute(lambda key: Profile(key, start=True))

    async def stop_profile(self) -> str:
        """End the profile, and return the file of its trace, which Perfetto and chrome://tracing show.

        Raises:
            RequestError: no profile is running.
            EngineUnavailable: the engine has not started, or ends meanwhile.
        """
        return str(await self._execute(lambda key: Profile(key, start=False)))

    async def _start_itself(self) -> None:
        """Start an engine of `from_engine_args` at its first request: vLLM's has started by then."""
        if self._starts_itself and self._receiver is None and not self.draining:
            if self._starting is None:
                self._starting = asyncio.ensure_future(self.start())
            await asyncio.shield(self._starting)

    def _check(self) -> None:
        if self.problem is not None:
            raise self.problem

    def _send(self, command: Command) -> None:
        assert self._client is not None, "requests are open only while there is a client"
        self._client.send(command)

    async def align(self, prompt: EncoderTokens, token_ids: list[int], num_positions: int) -> np.ndarray:
        """Return how well the tokens behind a prompt and positions of its audio fit; see `align_words`.

        Args:
            prompt: prompt with audio.
            token_ids: text of the audio.
            num_positions: positions of the encoder that have audio.

        Raises:
            EngineUnavailable: the engine has not started, or ends meanwhile.
        """
        matrix = await self._execute(lambda key: Align(key, prompt, token_ids, num_positions))
        if matrix is None:
            raise EngineUnavailable("an engine ended before it answered; try again", "engine_died")
        return matrix

    async def _execute(self, verb: Callable[[int], Verb]) -> Any:
        """Send a verb with a key of its own, and return the answer."""
        self._check()
        key = next(self._verb_keys)
        answer = self._answers[key] = asyncio.get_running_loop().create_future()
        self._send(verb(key))
        try:
            return await answer
        finally:
            self._answers.pop(key, None)

    def _take_answers(self, results: Mapping[int, Answer]) -> None:
        for key, result in results.items():
            answer = self._answers.get(key)
            if answer is None or answer.done():  # The caller was cancelled meanwhile.
                continue
            if isinstance(result, PhonographError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    def _fail_verbs(self, error: EngineUnavailable) -> None:
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)


def _admit_mode(mode: object) -> None:
    if mode not in get_args(PauseMode):
        raise RequestError("mode", shortened(repr(mode)), f"must be one of {', '.join(get_args(PauseMode))}")
