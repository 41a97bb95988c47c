"""The conformance suite: declaration, numerics, capture and replay of a backend."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec
from phonograph.attention.backend import MakeBackend
from phonograph.attention.selection import Registered, registered_backends
from phonograph.core.device import DeviceSpec
from phonograph.errors import BackendError
from phonograph.graphs.modes import GraphKey, GraphSet, GraphSupport
from phonograph.testing.declaration import check_declaration
from phonograph.testing.experiments import limits_for
from phonograph.testing.features import NUMERICS, UNDECLARED, check_features, check_numerics
from phonograph.testing.inputs import RigInputs
from phonograph.testing.replays import PADDING, UNWRITTEN, check_graph
from phonograph.testing.report import Check, ConformanceReport, Outcome
from phonograph.testing.specs import PLAIN, SPECULATIVE_TOKENS, base_specs, spec_text

MISSING, REFUSES, LOADING, SUPPORT, LOST = "missing", "refuses everything", "loading", "graph support", "lost device"


def check_conformance(
    backend: Registered | str,
    *,
    device: str | torch.device | None = None,
    specs: Sequence[AttentionSpec] = (),
    seed: int = 0,
) -> ConformanceReport:
    """Run a backend through declaration, numerics, capture and replay; every detected fault has a name.

    Args:
        backend: object that an entry point leads to, or the name or label of a registered backend.
        device: "cpu", "cuda" or None for the GPU if there is one.
        specs: plain configurations to start from; by default one that the backend accepts.
        seed: seed of the batches' contents.

    Returns:
        All checks; `ok` is True if none failed.

    Raises:
        BackendError: no backend of this name is registered, or its entry point cannot be loaded.
        ConfigError: a GPU was asked for and there is none.

    Example:
        ```python
        report = check_conformance("my_backend", device="cpu")
        assert report.ok, str(report)
        ```
    """
    # Here, since it brings the whole engine, which a backend's own tests need not have at import.
    from phonograph.engine.build import this_device

    kind = "auto" if device is None else torch.device(device).type
    device_spec = this_device(kind)
    registered = find_backend(backend) if isinstance(backend, str) else backend
    capabilities = registered.capabilities
    report = ConformanceReport(backend=capabilities.label, device=device_spec.name)
    report.checks += check_declaration(capabilities, device_spec)
    if not report.ok:
        return report
    bases = list(specs) or base_specs(capabilities, device_spec)
    make = _loaded(registered, bases, device_spec)
    if isinstance(make, Check):
        report.checks.append(make)
        return report
    report.checks.append(Check(LOADING, capabilities.label, Outcome.PASSED))
    try:
        for base in bases:
            for check in _check_spec(make, registered, base, device_spec, seed):
                report.checks.append(check)
    except RuntimeError as error:
        # Errors of a backend become checks. Here a kernel may have broken the device, and nothing runs on it any more.
        text = f"nothing could be run after the check before this one: {error}"
        report.checks.append(Check(LOST, capabilities.label, Outcome.FAILED, text))
    return report


def find_backend(name: str) -> Registered:
    """Find a registered backend by name or label, in any case; of several versions the first that is installed.

    Raises:
        BackendError: there is none.
    """
    everyone = registered_backends()
    found = [one for one in everyone if name.lower() in (one.capabilities.name, one.capabilities.label)]
    if not found:
        labels = ", ".join(one.capabilities.label for one in everyone)
        raise BackendError(f"there is no attention backend {name!r}; registered are {labels}")
    return next((one for one in found if one.capabilities.missing() is None), found[0])


def _loaded(registered: Registered, bases: list[AttentionSpec], device: DeviceSpec) -> MakeBackend | Check:
    """Return the factory of the backend, or the failed check that says why there is none."""
    capabilities = registered.capabilities
    label, missing = capabilities.label, capabilities.missing()
    refusals = [(one, capabilities.refusals(one, device)) for one in bases or [PLAIN]]
    refused = [f"{spec_text(one)}: {'; '.join(reasons)}" for one, reasons in refusals if reasons]
    if missing is not None:
        return Check(MISSING, label, Outcome.FAILED, f"nothing can be run here: {missing}")
    if refused or not bases:
        text = ". ".join(refused) or "no configuration that was tried is accepted"
        return Check(REFUSES, label, Outcome.FAILED, f"on {device.name}: {text}")
    try:
        make = registered.loader()
    except Exception as error:  # whatever another package's import raises
        text = f"the loader raised {type(error).__name__}: {error}; missing() is to name the missing library"
        return Check(LOADING, label, Outcome.FAILED, text)
    if isinstance(make, type) and make.capabilities.label != label:
        text = f"the loader's class is {make.capabilities.label}, registered is {label}"
        return Check(LOADING, label, Outcome.FAILED, text)
    return make


def _check_spec(
    make: MakeBackend, registered: Registered, base: AttentionSpec, device_spec: DeviceSpec, seed: int
) -> Iterator[Check]:
    device = torch.device(device_spec.kind)
    capabilities = registered.capabilities
    numerics = check_numerics(make, base, device)
    if numerics.outcome is Outcome.FAILED:
        # The graph checks know faults from reading padding or unwritten memory by name.
        graphs = _check_graphs(make, registered, base, device_spec, seed)
        yield from (one for one in graphs if one.outcome is Outcome.FAILED and one.name in (PADDING, UNWRITTEN))
        yield numerics
        yield Check(UNDECLARED, "", Outcome.NOT_APPLICABLE, f"not tried: {NUMERICS} would show in it too")
        return
    yield numerics
    checks, most = check_features(make, capabilities, base, device_spec, device)
    yield from checks
    yield from _check_graphs(make, registered, base, device_spec, seed)
    if most != base:
        yield from _check_graphs(make, registered, most, device_spec, seed, where=", all features")
    speculative = replace(base, speculative_tokens=SPECULATIVE_TOKENS)
    if not base.speculative_tokens and not capabilities.refusals(speculative, device_spec):
        yield from _check_graphs(make, registered, speculative, device_spec, seed, only_decodes=True)


def _check_graphs(
    make: MakeBackend,
    registered: Registered,
    spec: AttentionSpec,
    device_spec: DeviceSpec,
    seed: int,
    *,
    where: str = "",
    only_decodes: bool = False,
) -> Iterator[Check]:
    """Return the largest graph of each kind that the declared level allows; with all features the last kind only."""
    if spec.kind is not AttentionKind.DECODER:
        yield Check(SUPPORT, spec.kind.value, Outcome.NOT_APPLICABLE, "graphs are captured of decoders")
        return
    support = registered.capabilities.graph_support(spec, device_spec)
    keys = _keys(spec, support.level, device_spec.kind)
    if not keys:
        yield Check(SUPPORT, f"query length {1 + spec.speculative_tokens}", Outcome.NOT_APPLICABLE, support.reason)
        return
    inputs = RigInputs(spec, torch.device(device_spec.kind), limits_for(device_spec.kind), seed)
    largest = list({key.graphs: key for key in reversed(keys)}.values())[::-1]
    if only_decodes:
        largest = largest[:1]
    for key in largest[-1:] if where else largest:
        yield from check_graph(make, inputs, key, [other for other in keys if other != key], where)


def _keys(spec: AttentionSpec, level: GraphSupport, device_type: str) -> list[GraphKey]:
    """Return two sizes of decode graphs, and a mixed one if any batch may be captured; the largest of a set first."""
    limits = limits_for(device_type)
    query_len, slots = 1 + spec.speculative_tokens, limits.max_num_seqs
    needed = GraphSupport.UNIFORM_SINGLE_TOKEN_DECODE if query_len == 1 else GraphSupport.UNIFORM_BATCH
    if level < needed:
        return []
    decodes = [GraphKey(GraphSet.DECODE, size * query_len, size, query_len) for size in (slots, 3)]
    mixed = [GraphKey(GraphSet.MIXED, limits.max_num_batched_tokens, slots)] if level is GraphSupport.ALWAYS else []
    return [*decodes, *mixed]
