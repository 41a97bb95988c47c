"""Times of steps for simulations: a table measured on a device, or a roofline where there is none.

A step's time depends on the graph that runs it, which the dispatcher decides, and on the work of attention: keys that
decodes read, and pairs of query and key of prefills. `phonograph bench steps` measures steps and writes them to a file;
here each graph gets a function of that work, fitted to its steps.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from phonograph.core.batch import ScheduledBatch
from phonograph.engine.plan import EnginePlan
from phonograph.errors import ConfigError
from phonograph.graphs.dispatch import Decision

FORMAT = "phonograph step times 1"
ENOUGH = 6
"""Measured steps that a fit needs."""
NEAR = 1.6
"""Factor between the tokens of graphs whose steps are fitted together. Steps of 129 to 1,024 tokens of an 8B model on
an H200 that were left out of the fits were 3.6 to 5.4% off with a fit for each graph; they are 2.3 to 4.1% off now."""
_ROUNDS, _USUAL = 4, 0.05
"""Rounds of a fit, and the relative error from which a step counts less in the next one."""
_BANDWIDTH_SHARE, _COMPUTE_SHARE, _STEP_SECONDS = 0.8, 0.6, 3e-4
"""Assumptions of the roofline: shares of the published figures that a step reaches, and what each step costs."""
_PEAKS = {
    "a100-40gb": (1.56e12, 312e12),
    "a100-80gb": (2.04e12, 312e12),
    "a10": (0.6e12, 125e12),
    "rtx3090": (0.94e12, 71e12),
    "rtx4090": (1.01e12, 165e12),
    "l4": (0.3e12, 121e12),
    "l40s": (0.86e12, 362e12),
    "h100": (3.35e12, 989e12),
    "h200": (4.8e12, 989e12),
    "b200": (8.0e12, 2250e12),
    "rtx5090": (1.79e12, 210e12),
}
"""Published bytes and dense bfloat16 operations a second, by device."""


class StepWork(NamedTuple):
    """Work of one step.

    Attributes:
        graph: kind of decision and tokens, such as "full decode 8"; "eager" for steps without a graph.
        num_tokens: tokens after padding.
        num_reqs: sequences.
        decode_keys: keys that decodes read, all together.
        prefill_pairs: pairs of a query of a prefill and a key that it attends to.
    """

    graph: str
    num_tokens: int
    num_reqs: int
    decode_keys: int
    prefill_pairs: int

    @property
    def kind(self) -> str:
        return self.graph.rstrip("0123456789 ")


class StepTimes(Protocol):
    """Model of the time of steps."""

    @property
    def notes(self) -> Sequence[str]:
        """Sentences about it for its users."""
        ...

    def seconds(self, work: StepWork) -> float:
        """Return the time that a step has the device."""
        ...

    def host_seconds(self, num_reqs: int) -> float:
        """Return the time of the host between two steps, where none overlaps them."""
        ...


def work_of(batch: ScheduledBatch, decision: Decision) -> StepWork:
    """Return the work of a batch that runs by a decision."""
    decodes = batch.num_decodes
    pairs = sum(
        query_len * context + query_len * (query_len + 1) // 2
        for query_len, context in zip(batch.query_lens[decodes:], batch.context_lens[decodes:], strict=True)
    )
    graph = "eager" if decision.key is None else f"{decision.label} {decision.num_tokens}"
    keys = sum(batch.context_lens[:decodes]) + batch.num_decode_tokens
    return StepWork(graph, decision.num_tokens, batch.num_reqs, keys, pairs)


class MeasuredStep(NamedTuple):
    """A step's work, the median of its seconds, and the number of steps that were measured."""

    work: StepWork
    seconds: float
    num_steps: int = 1


class _Fit:
    """A function of work with coefficients that are not negative, fitted to relative errors.

    By least squares, in which errors above `_USUAL` count less from round to round (Huber's weights).
    """

    def __init__(self, steps: Sequence[MeasuredStep]) -> None:
        rows = np.array([_features(step.work) for step in steps]) / np.array([[step.seconds] for step in steps])
        counts = weights = np.sqrt(np.array([step.num_steps for step in steps]))
        coefficients = np.zeros(rows.shape[1])
        for _ in range(_ROUNDS):
            coefficients = _not_negative(rows * weights[:, None], weights)
            # A step that something held up must not count as much as the others.
            errors = np.abs(rows @ coefficients - 1)
            weights = counts * np.sqrt(_USUAL / np.maximum(errors, _USUAL))
        self._coefficients: list[float] = coefficients.tolist()

    def __call__(self, work: StepWork) -> float:
        return sum(map(mul, self._coefficients, _features(work)))


def _not_negative(rows: np.ndarray[Any, Any], values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the coefficients of a least squares fit, without features whose coefficients would be negative."""
    coefficients, used = np.zeros(rows.shape[1]), np.arange(rows.shape[1])
    while len(used):
        scale = np.maximum(np.abs(rows[:, used]).max(axis=0), 1e-30)
        found = np.linalg.lstsq(rows[:, used] / scale, values, rcond=None)[0] / scale
        if (found >= 0).all():
            coefficients[used] = found
            break
        used = np.delete(used, int(np.argmin(found * scale)))
    return coefficients


def _features(work: StepWork) -> tuple[float, ...]:
    return 1.0, work.num_tokens, work.num_reqs, work.decode_keys, work.prefill_pairs


class MeasuredTimes:
    """Times of steps from measured ones.

    A graph has the fit of the steps of its kind with about as many tokens, times a factor of its own: the median by
    which its steps differ from it. Steps without a graph have a fit for each class of tokens, whose bounds are a factor
    of 1.4 apart.

    Args:
        steps: measured steps.
        host: times of the host between two steps, by sequences.
        source: name of the table, for the notes.
    """

    def __init__(self, steps: Sequence[MeasuredStep], host: Sequence[tuple[int, float]], source: str) -> None:
        by_kind: dict[str, list[MeasuredStep]] = defaultdict(list)
        by_graph: dict[str, list[MeasuredStep]] = defaultdict(list)
        for step in steps:
            by_kind[step.work.kind].append(step)
            by_graph[_class_of(step.work)].append(step)
        self._all = _Fit(steps)
        self._kinds = {kind: _Fit(those) if len(those) >= ENOUGH else self._all for kind, those in by_kind.items()}
        self._graphs: dict[str, tuple[_Fit, float]] = {}
        for graph, those in by_graph.items():
            kind, tokens = those[0].work.kind, those[0].work.num_tokens
            near = those
            if kind != "eager":
                near = [one for one in by_kind[kind] if tokens / NEAR <= one.work.num_tokens <= tokens * NEAR]
            fit = _Fit(near) if len(near) >= ENOUGH else self._kinds[kind]
            ratios = np.repeat([one.seconds / fit(one.work) for one in those], [one.num_steps for one in those])
            self._graphs[graph] = fit, float(np.median(ratios))
        self._host = np.polynomial.Polynomial([0.0])
        if host:
            reqs, gaps = zip(*host, strict=True)
            self._host = np.polynomial.Polynomial.fit(reqs, gaps, min(1, len(set(reqs)) - 1)).convert()
        self._named = {step.work.graph for step in steps}
        self.notes = [f"step times: {len(steps)} measured steps of {len(self._named)} graphs ({source})"]

    def seconds(self, work: StepWork) -> float:
        fit, scale = self._graphs.get(_class_of(work), (None, 1.0))
        if fit is None:
            fit = self._kinds.get(work.kind, self._all)
            if work.graph not in self._named:
                self._named.add(work.graph)
                like = f"other {work.kind} steps" if work.kind in self._kinds else "all steps"
                self.notes.append(f"step times: {work.graph} was not measured; its times are those of {like}")
        return max(scale * fit(work), 1e-6)

    def host_seconds(self, num_reqs: int) -> float:
        return max(0.0, float(self._host(num_reqs)))


def _class_of(work: StepWork) -> str:
    """Return the name of the steps that share a fit with one."""
    return f"eager {round(2 * math.log2(work.num_tokens))}" if work.graph == "eager" else work.graph


class RooflineTimes:
    """Times of steps by the bytes and operations that a device can do, where no table is at hand.

    Args:
        plan: plan of the engine.

    Raises:
        ConfigError: the device has no published figures here.
    """

    def __init__(self, plan: EnginePlan) -> None:
        name = next((name for name in _PEAKS if name in plan.device.name.lower()), None)
        if name is None:
            problem = f"is required for {plan.device.name}; phonograph bench steps writes one, and a roofline is known "
            raise ConfigError("step_times", "none", f"{problem}for --device-name {', '.join(_PEAKS)}")
        bandwidth, compute = _PEAKS[name]
        model, attention = plan.model, next(iter(plan.model.attentions.values()))
        self._bandwidth, self._compute = bandwidth * _BANDWIDTH_SHARE, compute * _COMPUTE_SHARE
        self._weights = model.weight_bytes(plan.dtype)
        self._key_bytes = sum(plan.kv.page_bytes / group.block_size for group in plan.kv.groups)
        self._pair_flops = 4 * len(model.attentions) * attention.num_query_heads * attention.head_size
        self._token_flops = 2 * model.num_parameters
        self.notes = [
            f"step times: a roofline of {name}, not measured: {_BANDWIDTH_SHARE:.0%} of {bandwidth / 1e12:g} TB/s, "
            f"{_COMPUTE_SHARE:.0%} of {compute / 1e12:g} TFLOPS, {_STEP_SECONDS * 1e3:g} ms for each step"
        ]

    def seconds(self, work: StepWork) -> float:
        moved = (self._weights + self._key_bytes * (work.decode_keys + work.num_tokens)) / self._bandwidth
        computed = (self._token_flops * work.num_tokens + self._pair_flops * work.prefill_pairs) / self._compute
        return max(moved, computed) + _STEP_SECONDS

    def host_seconds(self, num_reqs: int) -> float:
        return 0.0


def model_facts(plan: EnginePlan) -> dict[str, Any]:
    """Return what a table of step times must share with a plan."""
    model, attention = plan.model, next(iter(plan.model.attentions.values()))
    return {
        "architecture": model.architecture,
        "num_parameters": model.num_parameters,
        "weight_bytes": model.weight_bytes(plan.dtype),
        "num_layers": model.num_layers,
        "num_kv_heads": attention.num_kv_heads,
        "head_size": attention.head_size,
    }


def table_of(plan: EnginePlan, steps: Iterable[MeasuredStep], host: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """Return measured steps as the JSON object of a table."""
    return {
        "format": FORMAT,
        "model": model_facts(plan),
        "device": plan.device.name,
        "attention_backend": plan.backends,
        "host": [list(one) for one in host],
        "steps": [[*step.work, step.seconds, step.num_steps] for step in steps],
    }


def read_table(path: Path, plan: EnginePlan) -> MeasuredTimes:
    """Read the table of a file.

    Raises:
        ConfigError: the file is none, or of another model.
    """

    def wrong(problem: str) -> ConfigError:
        return ConfigError("step_times", str(path), problem)

    try:
        table: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise wrong(f"cannot be read: {error}") from None
    if not isinstance(table, Mapping) or table.get("format") != FORMAT:
        raise wrong("is no table of phonograph bench steps")
    ours, theirs = model_facts(plan), table["model"]
    unlike = [name for name in ours if ours[name] != theirs.get(name)]
    if unlike:
        parts = [f"{name} {theirs.get(name)} and not {ours[name]}" for name in unlike]
        raise wrong(f"is of another model, with {', '.join(parts)}; phonograph bench steps measures this one")
    steps = [MeasuredStep(StepWork(*row[:5]), row[5], row[6]) for row in table["steps"]]
    return MeasuredTimes(steps, [(reqs, gap) for reqs, gap in table["host"]], f"{path.name}, {table['device']}")


def summarized(steps: Iterable[tuple[StepWork, float]]) -> list[MeasuredStep]:
    """Return one step for each graph and similar work, with the median of the seconds."""
    groups: dict[tuple[Any, ...], list[tuple[StepWork, float]]] = defaultdict(list)
    for work, seconds in steps:
        # Works within a few percent of each other are one point.
        sizes = (round(8 * np.log2(1 + size)) for size in (work.decode_keys, work.prefill_pairs))
        groups[(work.graph, work.num_tokens, work.num_reqs, *sizes)].append((work, seconds))
    found: list[MeasuredStep] = []
    for members in groups.values():
        works = np.array([work[1:] for work, _ in members])
        middle = StepWork(members[0][0].graph, *(int(value) for value in np.median(works, axis=0)))
        found.append(MeasuredStep(middle, float(np.median([seconds for _, seconds in members])), len(members)))
    return found
