"""Checks that a backend computes each feature that its capabilities accept, and does not ignore it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from phonograph.attention.attention_spec import AttentionKind, AttentionSpec
from phonograph.attention.backend import Capabilities, MakeBackend
from phonograph.core.device import DeviceSpec
from phonograph.testing.conformance import check_backend
from phonograph.testing.conformance_batch import BatchShape, shapes_of
from phonograph.testing.report import Check, Outcome
from phonograph.testing.specs import everything, spec_text, variations

NUMERICS = "wrong numerics"
UNDECLARED = "undeclared feature"


def check_numerics(make: MakeBackend, base: AttentionSpec, device: torch.device) -> Check:
    """Check the plain configuration on every batch of the suite, eagerly and without padding."""
    problem = _problem(make, base, device, shapes_of(base))
    if not problem:
        return Check(NUMERICS, spec_text(base), Outcome.PASSED)
    text = f"{problem}; nothing is asked of it here beyond plain attention"
    return Check(NUMERICS, spec_text(base), Outcome.FAILED, text)


def check_features(
    make: MakeBackend, capabilities: Capabilities, base: AttentionSpec, device_spec: DeviceSpec, device: torch.device
) -> tuple[list[Check], AttentionSpec]:
    """Check `base` with one change at a time, then with all features that are accepted together.

    Returns:
        The checks, and a configuration with all features that work together: `base` if one or the combination fails.
    """
    checks: list[Check] = []
    varied, most = variations(base, capabilities, device_spec), everything(base, capabilities, device_spec)
    if device.type == "cuda" and getattr(make, "only_triton", False):
        _compile(make, [*(one.spec for one in varied if not one.refusals), most.spec], device)
    for variation in varied:
        name = f"{UNDECLARED}: {variation.name}"
        if variation.refusals:
            checks.append(Check(name, "", Outcome.NOT_APPLICABLE, f"refused: {'; '.join(variation.refusals)}"))
            continue
        checks.append(_check(make, name, variation.name, variation.spec, device))
    if any(check.name.startswith(UNDECLARED) and check.text.startswith("accepted") for check in checks):
        return checks, base
    if most.spec == base:
        return checks, base
    together = _check(make, f"{UNDECLARED}: all together", most.name, most.spec, device)
    return [*checks, together], base if together.text else most.spec


def _compile(make: MakeBackend, specs: Sequence[AttentionSpec], device: torch.device) -> None:
    """Compile the kernels of all configurations in parallel; one after another takes minutes."""
    # Here, since Triton is not everywhere.
    from phonograph.kernels.triton.launch.precompile import compile_only

    # A configuration that fails here fails again in its own check.
    with contextlib.suppress(Exception), compile_only():
        for spec in specs:
            _problem(make, spec, device, _shapes(spec))


def _check(make: MakeBackend, name: str, feature: str, spec: AttentionSpec, device: torch.device) -> Check:
    problem = _problem(make, spec, device, _shapes(spec))
    if not problem:
        return Check(name, "", Outcome.PASSED)
    text = f"accepted, but not computed: {feature}: {problem}; refusals() is to name it, with the reason"
    return Check(name, "", Outcome.FAILED, text)


def _shapes(spec: AttentionSpec) -> list[BatchShape]:
    """Return few batches, because there are many configurations: decodes, mixed, uniform, and some if allowed."""
    shapes = shapes_of(spec)
    if spec.kind is not AttentionKind.DECODER:
        return shapes
    query_len, size = 1 + spec.speculative_tokens, spec.block_size
    uniform = BatchShape(name="uniform", query_lens=(query_len,) * 3, seq_lens=(query_len, size + 5, 2 * size))
    names = "decodes", "mixed", "not causal", "without keys"
    return [*(shape for shape in shapes if shape.name in names), uniform]


def _problem(make: MakeBackend, spec: AttentionSpec, device: torch.device, shapes: Sequence[BatchShape]) -> str:
    """Return the first wrong batch in words, or "". Padding rows have a check of their own, in `replays`."""
    try:
        results = check_backend(make, spec, device, shapes=shapes)
    except Exception as error:  # whatever a backend raises
        return f"raised {type(error).__name__}: {error}"
    return next((str(result) for result in results if result.wrong), "")
