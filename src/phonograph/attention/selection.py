"""Selection of the attention backend. Each step of it is a reason, and every refusal is kept.

The version of a family is settled first. Everything else, graph support included, follows from that version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AnyBackend, Capabilities, MakeBackend
from phonograph.attention.composite.capabilities import SplitCapabilities, parse_parts
from phonograph.attention.flash_attn.capabilities import (
    FlashAttention2Capabilities,
    FlashAttention3Capabilities,
    FlashAttention4Capabilities,
)
from phonograph.attention.flash_attn.providers import functions_of
from phonograph.attention.flashinfer.capabilities import FlashInferCapabilities
from phonograph.attention.reference.backend import ReferenceBackend, ReferenceCapabilities
from phonograph.attention.triton.capabilities import TritonCapabilities
from phonograph.core.device import DeviceSpec
from phonograph.errors import BackendError, ConfigError

AUTO = "auto"
"""Name that selects by order of preference, as no name does."""
ENTRY_POINTS = "phonograph.attention_backends"
"""Group of entry points of out-of-tree backends. Each leads to a `Registered`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A backend that can be selected. Its loaders are called only if `missing()` is None.

    Attributes:
        loader: imports the backend.
        automatic: True if it may be selected without its name.
        part_loader: imports the backend for one part of a split batch, if that differs from `loader`.
    """

    capabilities: Capabilities
    loader: Callable[[], MakeBackend]
    automatic: bool = False
    part_loader: Callable[[], MakeBackend] | None = None

    def refusals(self, spec: AttentionSpec, device: DeviceSpec) -> list[str]:
        """Return every reason why it cannot run `spec` on `device`."""
        return [*self.capabilities.why_not(spec, device)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The selected backend.

    Attributes:
        reasons: steps of the selection.
        rejected: refusals of the backends before it, by label.
        loader, part_loader: as in `Registered`.
    """

    capabilities: Capabilities
    reasons: tuple[str, ...]
    rejected: dict[str, list[str]]
    loader: Callable[[], MakeBackend]
    part_loader: Callable[[], MakeBackend] | None = None


def _reference() -> type[AnyBackend]:
    return ReferenceBackend


def _triton() -> type[AnyBackend]:
    # Lazy: it imports triton, which machines without a GPU need not have.
    from phonograph.attention.triton.backend import TritonBackend

    return TritonBackend


def _flash_attn(version: str) -> type[AnyBackend]:
    from phonograph.attention.flash_attn.backend import BACKENDS

    functions_of(version)  # import the library now, to report a misfit before a model is loaded
    return BACKENDS[version]


def _flash_attn_whole(version: str) -> MakeBackend:
    part = _flash_attn(version)
    if version != "2":
        return part
    from phonograph.attention.composite.backend import SplitBackend

    return partial(SplitBackend, decode=part, prefill=part)


def _flashinfer(*, splits_mixed: bool) -> MakeBackend:
    from phonograph.attention.flashinfer.backend import FlashInferBackend
    from phonograph.attention.flashinfer.library import load_library

    load_library()  # report a misfit before a model is loaded
    return partial(FlashInferBackend, splits_mixed=splits_mixed)


# In order of preference. Ours is first on a GPU, as only it makes its schedule on the device. The newest FlashAttention
# that fits comes next. The reference serves any device, but is fast only on the CPU, where nothing else runs.
BUILT_IN = (
    Registered(capabilities=TritonCapabilities(), loader=_triton, automatic=True),
    *(
        Registered(
            capabilities=capabilities,
            loader=partial(_flash_attn_whole, capabilities.version),
            automatic=True,
            part_loader=partial(_flash_attn, capabilities.version),
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
    Registered(capabilities=ReferenceCapabilities(), loader=_reference, automatic=True),
)


def registered_backends() -> list[Registered]:
    """Return the built-in backends in order of preference, then those of other packages.

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
    name: str | None,
    version: str | None,
    spec: AttentionSpec,
    device: DeviceSpec,
    registry: Sequence[Registered] | None = None,
) -> Selection:
    """Select the named backend, or the first in the order of preference that serves `spec` on `device`.

    The backend need not be installed: `explain` compares all of them, and `load` reports what is missing.

    Args:
        name: a backend's name in any case, or one for each part of a batch (`parse_parts`). None selects by order of
            preference, and so does "auto".
        version: of a family that has versions; without a name it selects flash_attn.
        spec: attention of the KV group.
        device: the device; it need not be present.
        registry: backends to select from; None for `registered_backends()`.

    Raises:
        ConfigError: there is no such backend, or no such version of it.
        BackendError: the named backend refuses, or all do; the message has every refusal and what would serve.
    """
    backends = registered_backends() if registry is None else list(registry)
    if name is not None and name.lower() == AUTO:
        name = None
    parts = parse_parts(name) if name is not None else None
    if parts is not None:
        return _select_parts(parts, version, spec, device, backends)
    candidates, reason = _candidates(name, version, backends)
    reasons = [reason]
    rejected: dict[str, list[str]] = {}
    for candidate in candidates:
        label = candidate.capabilities.label
        refusals = candidate.refusals(spec, device)
        if refusals:
            rejected[label] = refusals
            reasons.append(f"{label} refuses: {'; '.join(refusals)}")
            continue
        reasons.append(f"{label} serves this configuration on {device.name}")
        missing = candidate.capabilities.missing()
        if missing is not None:
            reasons.append(f"{label} cannot run here: {missing}")
        return Selection(
            capabilities=candidate.capabilities,
            reasons=tuple(reasons),
            rejected=rejected,
            loader=candidate.loader,
            part_loader=candidate.part_loader,
        )
    refused = ". ".join(f"{label} refuses: {'; '.join(refusals)}" for label, refusals in rejected.items())
    labels = [one.capabilities.label for one in backends if not one.refusals(spec, device)]
    would = f"would serve: {', '.join(labels)}" if labels else "no backend would serve"
    asked = "attention" if name is None else f"attention_backend={name!r}"
    raise BackendError(f"{asked} on {device.name}: {refused}. {would[0].upper()}{would[1:]}")


def load(selection: Selection) -> MakeBackend:
    """Import the selected backend.

    Raises:
        ConfigError: its kernels or its library are missing; the message says what to install.
        BackendError: the adapter does not fit its library.
    """
    missing = selection.capabilities.missing()
    if missing is not None:
        raise ConfigError("attention_backend", selection.capabilities.label, f"cannot run: {missing}")
    return selection.loader()


def _select_parts(
    parts: dict[str, str], version: str | None, spec: AttentionSpec, device: DeviceSpec, backends: list[Registered]
) -> Selection:
    """Select a backend for each part. `version` is for the parts that have versions."""
    versioned = {one.capabilities.name for one in backends if one.capabilities.version}
    if version is not None and versioned.isdisjoint(name.lower() for name in parts.values()):
        raise ConfigError("flash_attn_version", version, f"neither part has versions: {parts}; leave it out")
    chosen = {
        part: select(name, version if name.lower() in versioned else None, spec, device, backends)
        for part, name in parts.items()
    }
    capabilities = SplitCapabilities(chosen["decode"].capabilities, chosen["prefill"].capabilities)
    refusals = capabilities.why_not(spec, device)
    if refusals:
        raise BackendError(f"attention_backend={capabilities.name!r} on {device.name}: {'; '.join(refusals)}")

    def loader() -> MakeBackend:
        # Lazy: it imports triton, which machines without a GPU need not have.
        from phonograph.attention.composite.backend import SplitBackend

        parts = {part: load(replace(one, loader=one.part_loader or one.loader)) for part, one in chosen.items()}
        return partial(SplitBackend, **parts)

    return Selection(
        capabilities=capabilities,
        reasons=tuple(f"{part}: {reason}" for part, selection in chosen.items() for reason in selection.reasons),
        rejected={label: why for selection in chosen.values() for label, why in selection.rejected.items()},
        loader=loader,
    )


def _candidates(name: str | None, version: str | None, backends: list[Registered]) -> tuple[list[Registered], str]:
    """Return the backends to consider, in order, and the reason."""
    if name is None and version is None:
        return [one for one in backends if one.automatic], "none was asked for: the first in order of preference"
    family_name = "flash_attn" if name is None else name.lower()
    family = [one for one in backends if one.capabilities.name == family_name]
    if not family:
        names = ", ".join(dict.fromkeys(one.capabilities.name for one in backends))
        raise ConfigError("attention_backend", name, f"is not a backend; there are {names}")
    if version is None:
        return family, f"{family_name} was asked for" + (": its first version that fits" if len(family) > 1 else "")
    exact = [one for one in family if one.capabilities.version == version]
    if not exact:
        versions = [one.capabilities.version for one in family if one.capabilities.version]
        there = f"has versions {', '.join(versions)}" if versions else "has no versions; leave it out"
        raise ConfigError("flash_attn_version", version, f"attention backend {family_name} {there}")
    return exact, f"{exact[0].capabilities.label} was asked for"
