"""Checks of one graph: captured as the engine captures it, and replayed on other batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from phonograph.attention.backend import MakeBackend
from phonograph.errors import CaptureError
from phonograph.graphs.modes import GraphKey
from phonograph.testing.addresses import moved, tensors_of
from phonograph.testing.conformance_batch import BatchShape, PagedBatch
from phonograph.testing.experiments import FROZEN, TAIL, Experiment, batch, describe, experiments, random_batches
from phonograph.testing.inputs import ALL_POISON, Poison, RigInputs
from phonograph.testing.judge import Verdict, difference, judge
from phonograph.testing.report import Check, Outcome
from phonograph.testing.rig import Outputs, Rig

REFUSED, MOVED, SHAPE, PADDING, UNWRITTEN, EARLY, UNLIKE, RANDOM = (
    "refused capture",
    "moved buffer",
    "wrong at the padded shape",
    "NaN in padding",
    "reads unwritten memory",
    "build reads the step before",
    "replay unlike eager",
    "wrong on a random batch",
)
_RANDOM_BATCHES = 3
_PADDING_CAUSE = "forward writes zeros to rows of no request, or declares clears_padding = False"
# Trials after a wrong run: each repeats it without one kind of NaN, to learn which memory it read.
_TRIALS = (
    (PADDING, Poison(padding=False), "it is right without NaN in the padding rows of query, key and value"),
    (
        UNWRITTEN,
        Poison(cache=False),
        "it is right without NaN in cache slots without a token: mask their keys and values before they are "
        "multiplied, because 0 times NaN is NaN",
    ),
    (UNWRITTEN, Poison(scratch=False), "it is right without NaN in the graph's scratch memory"),
    (
        EARLY,
        Poison(batch=False),
        "it is right if the batch's tensors are written before build runs; on a GPU they are written at the head of "
        "the graph, so build is to plan from query_start_loc_cpu and seq_lens_cpu",
    ),
)


@dataclass(slots=True)
class _Found:
    """Failures by name, and the reasons of checks that were not made.

    root: a failure that later runs would repeat under a wrong name
    """

    failures: dict[str, str] = field(default_factory=dict[str, str])
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    root: str | None = None
    clears_padding: bool = True

    def fail(self, name: str, text: str, *, is_root: bool = False) -> None:
        self.failures.setdefault(name, text)
        if is_root:
            self.root = self.root or name


def check_graph(make: MakeBackend, inputs: RigInputs, key: GraphKey, others: list[GraphKey], where: str) -> list[Check]:
    """Return all checks of one graph, next to `others` of the same backend; `where` names the configuration."""
    found = _Found()
    directed = experiments(key, inputs.limits)
    full, few = directed[0].captured, directed[-1].after
    attempts: list[tuple[str, Callable[[], None]]] = [
        (SHAPE, lambda: _eager(make, inputs, key, [full, few], found)),
        (REFUSED, lambda: _capture(make, inputs, key, full, others, found)),
        *((one.name, lambda one=one: _direct(make, inputs, key, one, found)) for one in directed if not one.skipped),
        (RANDOM, lambda: _random(make, inputs, key, full, others, found)),
    ]
    found.skipped = {one.name: one.skipped for one in directed if one.skipped}
    for name, attempt in attempts:
        root = next(iter(found.failures), None) if name == RANDOM else found.root
        if root is not None:
            found.skipped[name] = f"not tried: {root} may show in it too"
            continue
        try:
            attempt()
        except Exception as error:  # whatever a backend raises
            found.fail(name, f"raised {type(error).__name__}: {error}", is_root=name in (SHAPE, REFUSED))
    if not found.clears_padding:
        found.skipped[PADDING] = "the backend declares that the engine clears its padding"
    names = [SHAPE, EARLY, REFUSED, MOVED, *(one.name for one in directed), PADDING, UNWRITTEN, UNLIKE, RANDOM]
    return [_as_check(name, f"{key}{where}", found) for name in names]


def _as_check(name: str, subject: str, found: _Found) -> Check:
    if name in found.failures:
        return Check(name, subject, Outcome.FAILED, found.failures[name])
    if name in found.skipped:
        return Check(name, subject, Outcome.NOT_APPLICABLE, found.skipped[name])
    return Check(name, subject, Outcome.PASSED)


def _eager(make: MakeBackend, inputs: RigInputs, key: GraphKey, shapes: list[BatchShape], found: _Found) -> None:
    """Run each shape on a new backend, where nothing is stale. A fault here is not caused by a graph."""
    for shape in shapes:
        drawn = inputs.draw(shape, key)
        rig = Rig(make, inputs)
        found.clears_padding = rig.clears_padding
        verdict = _judged(rig, drawn, rig.eager(key, drawn), key)
        text = f"eager on {describe(shape)}: "
        if verdict.wrong:

            def again(poison: Poison, drawn: PagedBatch = drawn) -> Outputs:
                return Rig(make, inputs).eager(key, drawn, poison)

            name, cause = _explained(again, inputs, drawn, key) or (
                SHAPE,
                "without any graph, so the metadata that build makes for this key are wrong",
            )
            found.fail(name, f"{text}{verdict.wrong}; {cause}", is_root=True)
        if verdict.left or verdict.dirty:
            found.fail(PADDING, f"{text}rows of no request: {verdict.left or verdict.dirty}; {_PADDING_CAUSE}")


def _capture(
    make: MakeBackend, inputs: RigInputs, key: GraphKey, shape: BatchShape, others: list[GraphKey], found: _Found
) -> None:
    """Capture, and check that later builds of the key refill the tensors of the graph."""
    rig = Rig(make, inputs)
    try:
        captured = rig.capture(key, inputs.draw(shape, key))
    except CaptureError as error:
        found.fail(REFUSED, f"on {describe(shape)}: {error}", is_root=True)
        return
    first = tensors_of(captured, inputs.device)
    for other in others:
        rig.build(inputs.draw(_largest(other, inputs), other), other)
    eager = batch("eager", [inputs.limits.max_num_batched_tokens], [inputs.limits.max_model_len])
    rig.build(inputs.draw(eager, None), None)
    later = rig.build(inputs.draw(_largest(key, inputs), key), key)
    paths = moved(first, tensors_of(later, inputs.device))
    if paths:
        found.fail(
            MOVED,
            f"metadata {', '.join(paths[:4])} has another address in a later build for the same graph, which still "
            "reads the captured one; build is to return the same buffers for a graph each time, and to refill them",
            is_root=True,
        )


def _direct(make: MakeBackend, inputs: RigInputs, key: GraphKey, experiment: Experiment, found: _Found) -> None:
    rig = Rig(make, inputs)
    rig.capture(key, inputs.draw(experiment.captured, key))
    held = tensors_of([rig.backend, rig.builder], inputs.device)
    for shape in experiment.before:
        rig.replay(key, inputs.draw(shape, key))
    drawn = inputs.draw(experiment.after, key)
    replayed = rig.replay(key, drawn)
    verdict = _judged(rig, drawn, replayed, key)
    text = f"captured on {describe(experiment.captured)}, replayed on {describe(experiment.after)}: "
    if verdict.wrong:
        name, cause = experiment.name, experiment.cause
        paths = moved(held, tensors_of([rig.backend, rig.builder], inputs.device))
        if paths:
            name, cause = MOVED, f"{', '.join(paths[:4])} has moved since the capture, whose graph reads the old one"
        else:
            name, cause = _explained(
                lambda poison: rig.replay(key, drawn, poison), inputs, drawn, key, only=(UNWRITTEN,)
            ) or (name, cause)
        # With equal lengths, or under another name, all other replays have the fault too.
        found.fail(name, f"{text}{verdict.wrong}; {cause}", is_root=name != experiment.name or name == FROZEN)
        return
    _look_at_padding(verdict, text, found)
    _same_as_eager(make, inputs, key, drawn, replayed, text, found)


def _random(
    make: MakeBackend, inputs: RigInputs, key: GraphKey, shape: BatchShape, others: list[GraphKey], found: _Found
) -> None:
    """Replay random batches, between replays of other graphs of the same backend, as in an engine."""
    rig = Rig(make, inputs)
    for other in (key, *others):
        rig.capture(other, inputs.draw(_largest(other, inputs) if other != key else shape, other))
    for index, other in enumerate(random_batches(key, inputs.limits, _RANDOM_BATCHES, seed=key.num_tokens)):
        if others:
            neighbour = others[index % len(others)]
            rig.replay(neighbour, inputs.draw(_largest(neighbour, inputs), neighbour))
        drawn = inputs.draw(other, key)
        replayed = rig.replay(key, drawn)
        verdict = _judged(rig, drawn, replayed, key)
        text = f"captured on {describe(shape)}, replayed after other graphs on {describe(other)}: "
        if verdict.wrong:
            found.fail(
                RANDOM, f"{text}{verdict.wrong}; nothing simpler showed it, so compare this batch with the captured one"
            )
            return
        _look_at_padding(verdict, text, found)
        _same_as_eager(make, inputs, key, drawn, replayed, text, found)


def _look_at_padding(verdict: Verdict, text: str, found: _Found) -> None:
    """Check the padding rows of a replay. They were right in an eager run on a new builder."""
    if PADDING in found.failures:
        return
    if verdict.left:
        found.fail(PADDING, f"{text}rows of no request: {verdict.left}; {_PADDING_CAUSE}")
    elif verdict.dirty:
        found.fail(
            TAIL,
            f"{text}rows of no request: {verdict.dirty}; a new builder leaves them zeros, so the graph took them for "
            "rows of an earlier, larger batch; a builder clears the tail of what it refills",
        )


def _same_as_eager(
    make: MakeBackend, inputs: RigInputs, key: GraphKey, drawn: PagedBatch, replayed: Outputs, text: str, found: _Found
) -> None:
    unlike = difference(replayed, Rig(make, inputs).eager(key, drawn), drawn.common.num_tokens)
    if unlike:
        found.fail(
            UNLIKE,
            f"{text}{unlike} from an eager run at the same shape, though within tolerance; the order of additions "
            "depends on something frozen, or on an earlier run",
        )


def _judged(rig: Rig, drawn: PagedBatch, outputs: Outputs, key: GraphKey) -> Verdict:
    verdict = judge(rig.inputs, drawn, outputs, key.num_tokens)
    return verdict if rig.clears_padding else Verdict(wrong=verdict.wrong, left="", dirty="")


def _explained(
    again: Callable[[Poison], Outputs],
    inputs: RigInputs,
    drawn: PagedBatch,
    key: GraphKey,
    only: tuple[str, ...] = (PADDING, UNWRITTEN, EARLY),
) -> tuple[str, str] | None:
    """Return the name and sentence of the poison without which a wrong run is right, or None."""
    # If a second run with all NaN is right, the trials say nothing.
    if not judge(inputs, drawn, again(ALL_POISON), key.num_tokens).wrong:
        return None
    for name, poison, cause in _TRIALS:
        if name in only and not judge(inputs, drawn, again(poison), key.num_tokens).wrong:
            return name, cause
    return None


def _largest(key: GraphKey, inputs: RigInputs) -> BatchShape:
    """Return a batch that fills a graph, with the longest contexts."""
    each = key.num_tokens // key.num_reqs
    queries = [each] * (key.num_reqs - 1)
    return batch("largest", [*queries, key.num_tokens - sum(queries)], [inputs.limits.max_model_len] * key.num_reqs)
