"""`OfflineEngine`: start, end and verbs of the engine that an `LLM` drives on the threads of its callers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from phonograph.config.engine_config import EngineConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.engine.admission import Prompt, admit_level, admitted_config, admitted_tags
from phonograph.engine.build import Engine
from phonograph.engine.metrics.profiler import Profiler
from phonograph.engine.metrics.session_counts import MetricValue, metric_values
from phonograph.engine.offline.audio_prompts import encoder_prompt
from phonograph.engine.offline.call_lock import CallLock
from phonograph.engine.offline.model_defaults import default_sampling_params
from phonograph.engine.offline.vllm_methods import VllmMethods
from phonograph.engine.outputs import RequestOutput
from phonograph.engine.plan import EnginePlan
from phonograph.engine.process.client import StartProgress, no_progress
from phonograph.engine.session import Session, grammar_compiler
from phonograph.engine.startup.release import release_memory
from phonograph.engine.startup.sleeper import checked_sleeper
from phonograph.engine.startup.start import start_engine, verify_engine
from phonograph.errors import ConfigError, EngineUnavailable, RequestError
from phonograph.graphs.verification import VerifyReport
from phonograph.text.tokenizer import Tokenizer, load_tokenizer, transformers_tokenizer

VERIFY_REPLAYS = 200


class OfflineEngine(VllmMethods):
    """An engine with its requests in flight. The constructor is that of `LLM`, which has the methods for prompts."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | None = None,
        progress: StartProgress | None = None,
        serves: bool = True,
        **settings: Any,
    ) -> None:
        self.config = admitted_config(model, config, settings, serves=serves)
        if serves and self.config.kv_events is not None:
            problem = "an LLM publishes no events, phonograph serve and AsyncLLM do; leave it out"
            raise ConfigError("kv_events_config", self.config.kv_events_config, problem)
        if serves and self.config.data_parallel_size > 1:
            problem = "an LLM is one engine, phonograph serve runs several; leave it out"
            raise ConfigError("data_parallel_size", self.config.data_parallel_size, problem)
        start = time.perf_counter()
        engine = start_engine(self.config, progress or no_progress)
        tokenizer = load_tokenizer(self.config)
        spec = engine.plan.model.with_tokenizer_end(None if tokenizer is None else tokenizer.eos_token_id)
        grammars = grammar_compiler(lambda: tokenizer, spec, self.config)
        self._engine: Engine | None = engine
        self._session: Session | None = Session(engine.core, spec, tokenizer, self.config.seed, grammars)
        self._calls = CallLock(self._session.abort)
        self._profiler = Profiler(self.config.profile_dir)
        self._defaults: SamplingParams | None = None
        self._enqueued: list[RequestOutput] = []
        self.start_seconds = time.perf_counter() - start

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> Self:
        """Make an engine from a whole configuration, as the constructor does with `config`.

        Args:
            engine_args: configuration; `EngineArgs` is a name of its class.
        """
        return cls(config=engine_args)

    @property
    def engine(self) -> Engine:
        """Core, plan and captured graphs."""
        if self._engine is None:
            raise _closed()
        return self._engine

    @property
    def session(self) -> Session:
        """Requests in flight, for callers that drive the steps themselves, on one thread and without other calls."""
        if self._session is None:
            raise _closed()
        return self._session

    @property
    def plan(self) -> EnginePlan:
        """Decisions of the start, with their reasons."""
        return self.engine.plan

    @property
    def tokenizer(self) -> Tokenizer | None:
        """Tokenizer of the model, or None if it has none."""
        return self.session.tokenizer

    @property
    def step_counts(self) -> Counter[str]:
        """Number of steps by kind of decision ("full decode", "full mixed", "eager", ...)."""
        return self.engine.core.runner.counts

    def __enter__(self) -> Self:
        if self._engine is None:
            raise _closed()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine, and give its memory and threads back.

        It waits for the calls of other threads. Open streams and queued requests fail. Every later call but this one
        raises `EngineUnavailable`. `with LLM(...) as llm:` closes at the end of the block.

        Raises:
            RequestError: this is called inside another call of the same thread.
        """
        with self._calls.held("close"):
            session, engine, self._engine, self._session = self._session, self._engine, None, None
            self._profiler.close()
            if session is not None and engine is not None:
                try:
                    session.close("the LLM was closed before the output was complete")
                finally:  # a step in flight may fail
                    engine.close()
                    self._calls.close()
        del session, engine
        release_memory()

    def _prompt(self, prompt: object) -> Prompt:
        """Return the text or the token ids of a prompt, with the frames of its audio if it has some."""
        return encoder_prompt(prompt, self.tokenizer, self.plan.model.encoder)

    def get_tokenizer(self) -> Any:
        """Return the model's tokenizer as an object of transformers, as vLLM does.

        Raises:
            RequestError: the model has none.

        Example:
            ```python
            text = "Tom has 12 apples."
            tokenizer = llm.get_tokenizer()
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text
            ```
        """
        return transformers_tokenizer(self.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling parameters that the model recommends in generation_config.json.

        Requests without sampling parameters use them, as in vLLM and in the server.

        Raises:
            ModelError: the file is unusable.

        Example:
            ```python
            params = llm.get_default_sampling_params()
            assert params == SamplingParams()  # The demo model recommends none.
            ```
        """
        if self._defaults is None:
            self._defaults = default_sampling_params(self.config)
        return self._defaults

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes. Requests in flight continue.

        Returns:
            True, as in vLLM when the cache was reset.

        Example:
            ```python
            prompt = list(range(5, 105))
            llm.generate([prompt])
            assert llm.reset_prefix_cache()
            assert llm.generate([prompt])[0].num_cached_tokens == 0
            ```
        """
        with self._calls.held("reset_prefix_cache"):
            self.session.core.scheduler.reset_prefix_cache()
        return True

    def sleep(self, level: int = 1) -> None:
        """Give the memory of weights and KV cache back until `wake_up`. Cached prefixes are forgotten.

        Prompts are refused meanwhile. From level 1 a second call leads to level 2.

        Args:
            level: 1 keeps the weights in host memory; 2 reads their files again at the end of the sleep. A CPU has the
                weights in host memory, so that level 1 gives the KV cache back only.

        Raises:
            ConfigError: the engine was started without enable_sleep_mode.
            RequestError: requests are in flight, or there is no such level.
            MemoryLimitError: the host has no memory for the weights; nothing has changed.
            RankError: a rank failed otherwise; the engine has ended.

        Example:
            ```python
            with LLM("demo", enable_sleep_mode=True, max_num_seqs=1, enforce_eager=True) as sleeper:
                sleeper.sleep(level=2)
                assert sleeper.is_sleeping()
                sleeper.wake_up()
                sleeper.generate("Tom has 12 apples.")
            ```
        """
        admit_level(level)
        with self._calls.held("sleep"):
            sleeper = checked_sleeper(self.engine.sleeper)
            if self.session.has_unfinished:
                raise RequestError("sleep", "now", "requests are in flight; let them end first")
            sleeper.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory again. It has no effect on what is awake.

        Args:
            tags: parts of the memory, "weights" and "kv_cache"; None for both. Prompts are answered when both are
                there.

        Raises:
            ConfigError: the engine was started without enable_sleep_mode.
            RequestError: a tag is unknown.
            MemoryLimitError: there is too little memory; the engine still sleeps.
            WeightError: the files of the weights have changed; likewise.
            RankError: a rank failed otherwise; the engine has ended.
        """
        names = admitted_tags(tags)
        with self._calls.held("wake_up"):
            checked_sleeper(self.engine.sleeper).wake_up(names)

    def is_sleeping(self) -> bool:
        """Return True while weights or KV cache sleep."""
        return self.engine.core.asleep

    def start_profile(self) -> None:
        """Start to record the operators and kernels of this thread's calls.

        Raises:
            ConfigError: profile_dir is not set, or cannot be written.
            RequestError: a profile is running.

        Example:
            ```python
            with LLM("demo", profile_dir="profiles", max_num_seqs=1, enforce_eager=True) as profiled:
                profiled.start_profile()
                profiled.generate("Tom has 12 apples.")
                print(profiled.stop_profile())
            ```
        """
        with self._calls.held("start_profile"):
            self._checked_profiler().start()

    def stop_profile(self) -> str:
        """End the profile, and return the file of its trace, which Perfetto and chrome://tracing show.

        Raises:
            RequestError: no profile is running.
        """
        with self._calls.held("stop_profile"):
            return self._checked_profiler().stop()

    def _checked_profiler(self) -> Profiler:
        if self._engine is None:
            raise _closed()
        return self._profiler

    def get_metrics(self) -> list[MetricValue]:
        """Return the state of the engine and counts since its start, with the names of the server's /metrics.

        Example:
            ```python
            values = {metric.name: metric.value for metric in llm.get_metrics()}
            assert values["vllm:num_requests_running"] == 0
            ```
        """
        with self._calls.held("get_metrics"):
            session = self.session
            return list(metric_values(session.core.scheduler.stats, session.counts, self.step_counts))

    def verify(
        self,
        *,
        num_replays: int = VERIFY_REPLAYS,
        seed: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> VerifyReport:
        """Compare replays of every captured graph on random batches with eager runs.

        It overwrites the KV cache.

        Args:
            num_replays: replays of each graph; defaults to 200.
            seed: seed of the random batches; defaults to 0.
            progress: called with the number of replays done and their total.

        Returns:
            Counts and mismatches.

        Raises:
            RequestError: requests are in flight.
            ConfigError: the mode has no graphs.

        Example:
            ```python
            report = llm.verify(num_replays=1)
            assert report.ok, report.mismatches
            ```
        """
        with self._calls.held("verify"):
            if self.session.has_unfinished:
                raise RequestError("verify", "now", "overwrites the KV cache; let the requests in flight end first")
            return verify_engine(self.engine, num_replays=num_replays, seed=seed, progress=progress)


def _closed() -> EngineUnavailable:
    return EngineUnavailable("this LLM is closed; make a new one", "closed")
