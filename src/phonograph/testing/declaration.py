"""Are a backend's capabilities pure: the same answers each time, with reasons, and without its kernel library?"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Any, cast

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import Capabilities
from phonograph.core.device import KNOWN_DEVICES, DeviceSpec
from phonograph.graphs.modes import GraphSupport, Support
from phonograph.testing.report import Check, failed, passed

_HARMLESS = {"phonograph", "torch", "numpy"} | set(sys.stdlib_module_names)
PLAIN = AttentionSpec(
    num_query_heads=4, num_kv_heads=2, head_size=64, dtype="float16", kv_cache_dtype="float16", block_size=16
)
# No kernel has these, so each must be refused, or run.
_ODD = (
    replace(PLAIN, head_size=100, block_size=3),
    replace(PLAIN, num_query_heads=5, sinks=True, alibi=True),
    replace(PLAIN, dtype="int4", kv_cache_dtype="int4"),
)


def check_declaration(capabilities: Capabilities, device: DeviceSpec) -> list[Check]:
    """Asks for every known device, twice."""
    questions = [(spec, one) for spec in (PLAIN, *_ODD) for one in (device, *KNOWN_DEVICES.values())]
    label = capabilities.label
    try:
        with _imports(type(capabilities).__module__.split(".")[0]) as imported:
            first = [_answer(capabilities, *question) for question in questions]
        second = [_answer(capabilities, *question) for question in questions]
    except Exception as error:  # whatever an answer raises
        text = f"an answer raised {type(error).__name__}: {error}; capabilities answer for any device and configuration"
        return [failed("impure capabilities", label, text)]
    return [
        _purity(questions, first, second, label),
        _named(
            "imports while answering",
            label,
            f"answering imported {', '.join(sorted(imported))}; explain asks where no library is installed, so look "
            "for it with importlib.util.find_spec and import it in the loader"
            if imported
            else "",
        ),
        _reasons(questions, first, label),
        _supports(questions, first, label),
    ]


_Answer = tuple[Any, Support, Support, str | None]


def _answer(capabilities: Capabilities, spec: AttentionSpec, device: DeviceSpec) -> _Answer:
    return (
        capabilities.refusals(spec, device),
        capabilities.graph_support(spec, device),
        capabilities.ragged_support(spec, device),
        capabilities.missing(),
    )


def _purity(
    questions: list[tuple[AttentionSpec, DeviceSpec]], first: list[_Answer], second: list[_Answer], label: str
) -> Check:
    for (spec, device), one, other in zip(questions, first, second, strict=True):
        if one != other:
            text = f"asked twice about {spec} on {device.name} it answered {one}, then {other}; an answer may depend on"
            return failed("impure capabilities", label, f"{text} the configuration and the device only")
    return passed("impure capabilities", label)


def _reasons(questions: list[tuple[AttentionSpec, DeviceSpec]], answers: list[_Answer], label: str) -> Check:
    for (spec, device), (refusals, _, _, missing) in zip(questions, answers, strict=True):
        where = f"for {spec} on {device.name}"
        if not isinstance(refusals, list) or not all(
            isinstance(reason, str) and reason.strip() for reason in cast(list[object], refusals)
        ):
            return failed(
                "refusal without a reason", label, f"refusals() is {refusals!r} {where}; each is a sentence, in a list"
            )
        if missing is not None and not missing.strip():
            return failed("refusal without a reason", label, "missing() is an empty text; None says that all is here")
    return passed("refusal without a reason", label)


def _supports(questions: list[tuple[AttentionSpec, DeviceSpec]], answers: list[_Answer], label: str) -> Check:
    for (spec, device), (_, *supports, _) in zip(questions, answers, strict=True):
        for support in supports:
            # A backend need not be type-checked, so an answer may be anything.
            answer, level = cast(object, support), cast(object, support.level) if hasattr(support, "level") else None
            if not isinstance(answer, Support) or not isinstance(level, GraphSupport) or not answer.reason.strip():
                text = f"graph support is {support!r} for {spec} on {device.name}; it is a Support with its reason"
                return failed("support without a reason", label, text)
    return passed("support without a reason", label)


def _named(name: str, label: str, problem: str) -> Check:
    return failed(name, label, problem) if problem else passed(name, label)


@contextmanager
def _imports(own: str) -> Generator[set[str]]:
    """Collect the modules imported meanwhile: those of other packages, and extension modules of package `own`."""
    found: set[str] = set()
    before = set(sys.modules)
    real: Callable[..., Any] = builtins.__import__

    def note(name: str, *args: Any, **kwargs: Any) -> Any:
        level = kwargs.get("level", args[3] if len(args) > 3 else 0)
        caller = str((args[0] if args else kwargs.get("globals") or {}).get("__name__", ""))
        # What torch and the standard library import on their own account is theirs.
        if level == 0 and name.split(".")[0] not in _HARMLESS | {own} and caller.split(".")[0] == own:
            found.add(name)
        return real(name, *args, **kwargs)

    builtins.__import__ = note
    try:
        yield found
    finally:
        builtins.__import__ = real
        for name in set(sys.modules) - before:
            origin = str(getattr(sys.modules[name], "__file__", "") or "")
            top = name.split(".")[0]
            if top not in _HARMLESS and (top != own or origin.endswith(tuple(EXTENSION_SUFFIXES))):
                found.add(name)
