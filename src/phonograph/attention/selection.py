"""Chooses the attention backend, and says why: every step of the choice is a reason, every refusal is kept.

The version of a family is settled first and everything else is asked of that version: in a peer, version and graph
support are decided in different places and can disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points

from phonograph.attention.backend import AnyBackend, AttentionSpec, Capabilities, MakeBackend
from phonograph.attention.cascade.backend import CascadeBackend
from phonograph.attention.cascade.rule import cascade_refusals
from phonograph.attention.composite.capabilities import SplitCapabilities, parse_parts
from phonograph.attention.flash_attn.capabilities import (
    FlashAttention2Capabilities,
    FlashAttention3Capabilities,
    FlashAttention4Capabilities,
)
from phonograph.attention.flash_attn.providers import functions_of
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.preferences import MEASURED
from phonograph.attention.reference.backend import ReferenceBackend, ReferenceCapabilities
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import DeviceSpec
from phonograph.errors import BackendError, ConfigError

AUTO = "auto"
"""What leaves the choice to `MEASURED`, then to the order of preference, which is all that asking for nothing does."""
ENTRY_POINTS = "phonograph.attention_backends"
"""Group of entry points of out-of-tree backends. Each leads to a `Registered`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend that can be chosen. `loader` imports its class; it is called only where `missing()` is None.

    automatic:   may be chosen without being asked for
    part_loader: imports what is one part of a split batch, where `loader` makes both
    cascade_loader: imports what cascades (AttentionSpec.cascade); None where the backend cannot
    """

    capabilities: Capabilities
    loader: Callable[[], MakeBackend]
    automatic: bool = False
    part_loader: Callable[[], MakeBackend] | None = None
    cascade_loader: Callable[[], MakeBackend] | None = None

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Every reason why it cannot run `spec` on `device`: those of its capabilities, and of what can be loaded."""
        found = [*self.capabilities.why_not(spec, device)]
        if spec.cascade:
            found += cascade_refusals(spec)
            if self.cascade_loader is None:
                found.append("cascade attention; it is not made to attend a common prefix and the suffixes apart")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What was chosen; `rejected` has the refusals of those looked at before, by label; loaders as in `Registered`."""

    capabilities: Capabilities
    reasons: tuple[str, ...]
    rejected: dict[str, list[str]]
    loader: Callable[[], MakeBackend]
    part_loader: Callable[[], MakeBackend] | None = None


def _reference() -> type[AnyBackend]:
    return ReferenceBackend


def _reference_cascade() -> MakeBackend:
    from phonograph.kernels.torch.attention import cascade

    return partial(CascadeBackend, ordinary=ReferenceBackend, part=ReferenceBackend, kernels=cascade)


def _triton() -> type[AnyBackend]:
    # Here, since it imports triton, which machines without a GPU need not have.
    from phonograph.attention.triton.backend import TritonBackend

    return TritonBackend


def _flash_attn(version: str) -> type[AnyBackend]:
    from phonograph.attention.flash_attn.backend import BACKENDS

    functions_of(version)  # imports the library: one that does not fit is known before a model is loaded
    return BACKENDS[version]


def _flash_attn_whole(version: str) -> MakeBackend:
    part = _flash_attn(version)
    if version != "2":
        return part
    from phonograph.attention.composite.backend import SplitBackend

    return partial(SplitBackend, decode=part, prefill=part)


def _flash_attn_cascade(version: str) -> MakeBackend:
    from phonograph.kernels.triton.attention import cascade

    return partial(CascadeBackend, ordinary=_flash_attn_whole(version), part=_flash_attn(version), kernels=cascade)


def _flashinfer(*, splits_mixed: bool) -> MakeBackend:
    from phonograph.attention.flashinfer.backend import FlashInferBackend
    from phonograph.attention.flashinfer.library import load_library

    load_library()  # one that does not fit is known before a model is loaded
    return partial(FlashInferBackend, splits_mixed=splits_mixed)


# In order of preference. Ours first on a GPU, as it alone makes its schedule on the device; the newest FlashAttention
# that fits comes next; the reference serves any device but is slow on all but the CPU, where nothing else runs.
BUILT_IN = (
    Registered(capabilities=TritonCapabilities(), loader=_triton, automatic=True),
    *(
        Registered(
            capabilities=capabilities,
            loader=partial(_flash_attn_whole, capabilities.version),
            automatic=True,
            part_loader=partial(_flash_attn, capabilities.version),
            cascade_loader=partial(_flash_attn_cascade, capabilities.version),
        )
        for capabilities in (
            FlashAttention3Capabilities(),
            FlashAttention4Capabilities(),
            FlashAttention2Capabilities(),
        )
    ),
    Registered(
        capabilities=FlashInferCapabilities(),
        loader=partial(_flashinfer, splits_mixed=True),
        automatic=True,
        part_loader=partial(_flashinfer, splits_mixed=False),
    ),
    Registered(
        capabilities=ReferenceCapabilities(), loader=_reference, automatic=True, cascade_loader=_reference_cascade
    ),
)


def registered_backends() -> list[Registered]:
    """The built-in backends in order of preference, then those of other packages.

    Raises:
        BackendError: another package's entry point cannot be loaded, or is not a `Registered`.
    """
    found = list(BUILT_IN)
    for entry_point in entry_points(group=ENTRY_POINTS):
        try:
            registered = entry_point.load()
        except Exception as error:  # whatever another package's import raises
            raise BackendError(f"attention backend {entry_point.name} ({entry_point.value}): {error}") from error
        if not isinstance(registered, Registered):
            raise BackendError(
                f"attention backend {entry_point.name} ({entry_point.value}): is a {type(registered).__name__}; "
                "an entry point of this group leads to a phonograph.attention.selection.Registered"
            )
        found.append(registered)
    return found


def select(
    asked: str | None,
    version: str | None,
    spec: AttentionSpec,
    device: DeviceSpec,
    registry: Sequence[Registered] | None = None,
) -> Selection:
    """The backend asked for, or else the first in the order of preference that serves `spec` on `device`.

    Whether its kernels are installed plays no part: `explain` compares what is not here, and `load` tells.

    Args:
        asked: a backend's name in any case, or one for each part of a batch (`parse_parts`); None leaves the choice to
            the order of preference, and so does "auto" where nothing that is installed was measured to be faster.
        version: of a family that has versions; given alone, it asks for flash_attn.

    Raises:
        ConfigError: there is no such backend, or no such version of it.
        BackendError: the one asked for refuses, or all do; the message has every refusal and what would serve.
    """
    everyone = registered_backends() if registry is None else list(registry)
    passed_over: list[str] = []
    if asked is not None and asked.lower() == AUTO:
        if version is None:
            measured, passed_over = _measured(spec, device, everyone)
            if measured is not None:
                return measured
        asked = None
    parts = parse_parts(asked) if asked is not None else None
    if parts is not None:
        return _select_parts(parts, version, spec, device, everyone)
    candidates, reason = _candidates(asked, version, everyone)
    reasons = [*passed_over, reason]
    rejected: dict[str, list[str]] = {}
    for candidate in candidates:
        label = candidate.capabilities.label
        refusals = candidate.refusals(spec, device)
        unverified = candidate.capabilities.unverified
        if unverified and version is None:
            refusals = [*refusals, f"it is unverified ({unverified}); it runs where its version is asked for"]
        if refusals:
            rejected[label] = refusals
            reasons.append(f"{label} refuses: {'; '.join(refusals)}")
            continue
        reasons.append(f"{label} serves this configuration on {device.name}")
        if unverified:
            reasons.append(f"{label} is unverified: {unverified}")
        missing = candidate.capabilities.missing()
        if missing is not None:
            reasons.append(f"{label} cannot run here: {missing}")
        return Selection(
            capabilities=candidate.capabilities,
            reasons=tuple(reasons),
            rejected=rejected,
            loader=(candidate.cascade_loader if spec.cascade else None) or candidate.loader,
            part_loader=candidate.part_loader,
        )
    refused = ". ".join(f"{label} refuses: {'; '.join(refusals)}" for label, refusals in rejected.items())
    others = [other.capabilities for other in everyone if not other.refusals(spec, device)]
    others = [other for other in others if not other.unverified]
    would = f"would serve: {', '.join(other.label for other in others)}" if others else "no backend would serve"
    raise BackendError(f"attention_backend={asked!r} on {device.name}: {refused}. {would[0].upper()}{would[1:]}")


def _measured(
    spec: AttentionSpec, device: DeviceSpec, everyone: list[Registered]
) -> tuple[Selection | None, list[str]]:
    """The first in the table for the device that is installed and serves `spec`, and why those before it were not."""
    passed_over: list[str] = []
    for backend, version, why in MEASURED.get(device.capability, ()):
        told = (
            f"auto: {backend} was measured to be faster on compute capability {'.'.join(map(str, device.capability))}"
        )
        if spec.kv_cache_dtype != spec.dtype:
            passed_over.append(f"{told}, but not with a KV cache of {spec.kv_cache_dtype}")
            continue
        try:
            selection = select(backend, version, spec, device, everyone)
        except (BackendError, ConfigError) as error:
            passed_over.append(f"{told}, but {error}")
            continue
        missing = selection.capabilities.missing()
        if missing is None:
            return replace(selection, reasons=(f"{told}: {why}", *selection.reasons)), []
        passed_over.append(f"{told}, but cannot run here: {missing}")
    return None, passed_over


def load(selection: Selection) -> MakeBackend:
    """The class of the chosen backend, or what makes two as one.

    Raises:
        ConfigError: its kernels or its library are not here; the message says what to install.
        BackendError: its library is one that the adapter does not fit.
    """
    missing = selection.capabilities.missing()
    if missing is not None:
        raise ConfigError("attention_backend", selection.capabilities.label, f"cannot run: {missing}")
    return selection.loader()


def _select_parts(
    parts: dict[str, str], version: str | None, spec: AttentionSpec, device: DeviceSpec, everyone: list[Registered]
) -> Selection:
    """A backend for each part; `version` is that of the parts that have versions."""
    if spec.cascade:
        backends = ", ".join(f"{part}={name}" for part, name in parts.items())
        raise ConfigError("cascade_attention", True, f"takes one backend for the whole batch, and {backends} is two")
    versioned = {one.capabilities.name for one in everyone if one.capabilities.version}
    if version is not None and versioned.isdisjoint(name.lower() for name in parts.values()):
        raise ConfigError("flash_attn_version", version, f"neither part has versions: {parts}; leave it out")
    chosen = {
        part: select(name, version if name.lower() in versioned else None, spec, device, everyone)
        for part, name in parts.items()
    }
    capabilities = SplitCapabilities(chosen["decode"].capabilities, chosen["prefill"].capabilities)
    refusals = capabilities.why_not(spec, device)
    if refusals:
        raise BackendError(f"attention_backend={capabilities.name!r} on {device.name}: {'; '.join(refusals)}")

    def loader() -> MakeBackend:
        # Here, since it imports triton, which machines without a GPU need not have.
        from phonograph.attention.composite.backend import SplitBackend

        parts = {part: load(replace(one, loader=one.part_loader or one.loader)) for part, one in chosen.items()}
        return partial(SplitBackend, **parts)

    return Selection(
        capabilities=capabilities,
        reasons=tuple(f"{part}: {reason}" for part, selection in chosen.items() for reason in selection.reasons),
        rejected={label: why for selection in chosen.values() for label, why in selection.rejected.items()},
        loader=loader,
    )


def _candidates(asked: str | None, version: str | None, everyone: list[Registered]) -> tuple[list[Registered], str]:
    """Who is to be asked, in order, and why these."""
    if asked is None and version is None:
        return [one for one in everyone if one.automatic], "none was asked for: the first in order of preference"
    name = "flash_attn" if asked is None else asked.lower()
    family = [one for one in everyone if one.capabilities.name == name]
    if not family:
        names = dict.fromkeys(one.capabilities.name for one in everyone)
        raise ConfigError("attention_backend", asked, f"there is no such backend; there are {', '.join(names)}")
    if version is None:
        return family, f"{name} was asked for" + (": its first version that fits" if len(family) > 1 else "")
    exact = [one for one in family if one.capabilities.version == version]
    if not exact:
        versions = [one.capabilities.version for one in family if one.capabilities.version]
        there = f"has versions {', '.join(versions)}" if versions else "has no versions; leave it out"
        raise ConfigError("flash_attn_version", version, f"attention backend {name} {there}")
    return exact, f"{exact[0].capabilities.label} was asked for"
