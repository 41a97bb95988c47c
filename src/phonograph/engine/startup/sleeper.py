"""`Sleeper`: an engine's memory of weights and KV cache, given back while the engine is not used."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager

import torch

from phonograph.engine.admission import SLEEP_TAGS
from phonograph.engine.core import EngineCore
from phonograph.engine.plan import EnginePlan
from phonograph.engine.startup.platform import ModelParts, Platform
from phonograph.engine.startup.release import release_memory
from phonograph.engine.startup.static_memory import StaticMemory
from phonograph.errors import ConfigError
from phonograph.models.modules.step_model import StepModel
from phonograph.models.quantization.block_embedding import BlockEmbedding
from phonograph.models.transformer import Transformer
from phonograph.models.weights.loading import Loading

log = logging.getLogger(__name__)

Load = Callable[..., AbstractContextManager[Loading[StepModel]]]
"""Starts to load the weights again; `make_empty` allocates them."""
MakeEmpty = Callable[..., torch.Tensor]
"""Allocates a tensor; called as `torch.empty`."""


class Sleeper:
    """Sleep of an engine without requests in flight. All tensors keep their addresses, so that graphs stay valid.

    Args:
        weights: memory of the weights.
        kv_cache: memory of the KV cache.
        loads: load the weights of each model a second time, in the order of the first.

    Attributes:
        asleep: tags of the memory that was given back.
        level: of the sleep, 0 when all memory is awake.
    """

    def __init__(self, weights: StaticMemory, kv_cache: StaticMemory, loads: Sequence[Load]) -> None:
        self.asleep: frozenset[str] = frozenset()
        self.level = 0
        self._weights = weights
        self._kv_cache = kv_cache
        self._loads = loads

    def prepare(self) -> None:
        """Begin to make the host memory of a sleep at level 1, in threads. The weights are allocated, if not loaded."""
        self._weights.prepare()

    def start(self, parts: ModelParts, core: EngineCore | None, *, zeroes: bool) -> None:
        """Take the parts of a started engine.

        Args:
            parts: models and KV caches in the two memories. A draft model may share tensors of its target.
            core: is told whether it can run steps; None on other ranks than 0.
            zeroes: fill the KV cache with 0 after each sleep.
        """
        drafting = [] if parts.draft is None else [parts.draft]
        self._models = [parts.model, *(one.model for one in drafting)]
        self._kv_caches = [*parts.kv_caches, *(cache for one in drafting for cache in one.kv_caches)]
        self._kv_caches += [state for states in parts.states.values() for state in states]
        self._core, self._zeroes = core, zeroes

    def sleep(self, level: int) -> None:
        """Give the memory back. Prefixes are forgotten. A sleep from level 1 to 2 drops the copy of the weights.

        Args:
            level: 1 keeps a copy of the weights in host memory; 2 reads the files again at the end of the sleep.

        Raises:
            MemoryLimitError: the host has no memory for the copy; nothing has changed.
        """
        start = time.perf_counter()
        if "weights" not in self.asleep or level == 2:
            self._weights.release(_weights(*self._models), keep=level == 1)
            self.level = level
        if self._core is not None:
            self._core.scheduler.reset_prefix_cache()
        self._kv_cache.release(_storages(self._kv_caches), keep=False)
        self._set(SLEEP_TAGS)
        release_memory()
        log.info("the engine sleeps at level %d, after %.1f s", level, time.perf_counter() - start)

    def wake_up(self, tags: Collection[str] = SLEEP_TAGS) -> None:
        """Take the memory again. It has no effect on memory that is awake.

        Args:
            tags: parts of the memory.

        Raises:
            MemoryLimitError: there is too little memory; the part still sleeps.
            WeightError: the files of the weights have changed; likewise.
        """
        start = time.perf_counter()
        if "weights" in self.asleep and "weights" in tags:
            self._weights.claim()
            if self.level == 2:
                try:
                    self._reload()
                except BaseException:
                    self._weights.release(_weights(*self._models), keep=False)
                    raise
            self._set(self.asleep - {"weights"})
        if "kv_cache" in self.asleep and "kv_cache" in tags:
            self._kv_cache.claim()
            if self._zeroes:
                for cache in self._kv_caches:
                    cache.zero_()
            self._set(self.asleep - {"kv_cache"})
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # Steps run on another stream.
        log.info("the engine woke up in %.1f s; asleep: %s", time.perf_counter() - start, sorted(self.asleep) or "none")

    def _set(self, asleep: Collection[str]) -> None:
        self.asleep = frozenset(asleep)
        if self._core is not None:
            self._core.asleep = bool(asleep)
        if not asleep:
            self.level = 0

    @torch.inference_mode()
    def _reload(self) -> None:
        """Read the weights into the tensors that graphs read.

        On a GPU the second model has their addresses. On a CPU, where weights may be converted, it is copied.
        """
        shared: set[int] = set()
        for load, model in zip(self._loads, self._models, strict=True):
            with load(make_empty=self._weights.empty) as loading:
                loading.finish()
            own = [one for one in _weights(model) if one.data_ptr() not in shared]
            shared.update(one.data_ptr() for one in own)
            for old, new in zip(own, _weights(loading.model), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new, non_blocking=False)
                    if new.resizable():  # A mapped file's storage is not.
                        new.resize_(0)  # so that the weights are there once, not twice


def make_sleeper(
    plan: EnginePlan, platform: Platform, loads: Sequence[Load], kind: Callable[..., Sleeper] = Sleeper
) -> tuple[Sleeper | None, MakeEmpty, MakeEmpty]:
    """Return a rank's sleeper, None without sleep mode, and what allocates its weights and its KV cache.

    Args:
        plan: of the engine.
        platform: its memory.
        loads: as for `Sleeper`.
        kind: makes the sleeper.
    """
    if not plan.config.enable_sleep_mode:
        return None, torch.empty, torch.empty
    weights, kv_cache = platform.static_memory(), platform.static_memory()
    return kind(weights, kv_cache, loads), weights.empty, kv_cache.empty


def checked_sleeper(sleeper: Sleeper | None) -> Sleeper:
    """Return the sleeper of an engine.

    Raises:
        ConfigError: the engine has none.
    """
    if sleeper is None:
        raise ConfigError("enable_sleep_mode", False, "sleep and wake_up need enable_sleep_mode=True at the start")
    return sleeper


def _weights(*models: StepModel) -> list[torch.UntypedStorage]:
    """Return the memory of models' weights, without copies of those of other ranks, which stay in a sleep."""
    copies = _storages(one for model in models if isinstance(model, Transformer) for one in model.gathered)
    stay = {one.data_ptr() for one in copies}
    return [one for one in _storages(_tensors(models)) if one.data_ptr() not in stay]


def _storages(tensors: Collection[torch.Tensor] | Iterator[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the memory of tensors, each once."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's weights, without those that are mapped from a file."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Transformer):
        parts = value.weights, value.layer_embeddings, value.final_norm, value.lm_head, value.embedding_VE
        yield from _tensors((*parts, value.features))
    elif isinstance(value, list | tuple):
        for item in value:  # pyright: ignore[reportUnknownVariableType]
            yield from _tensors(item)  # pyright: ignore[reportUnknownArgumentType]
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])  # pyright: ignore[reportUnknownArgumentType]
    elif dataclasses.is_dataclass(value) and not isinstance(value, BlockEmbedding):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
