"""Checks of a backend's capabilities: the same answers each time, with reasons, and without its kernel library."""

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
from phonograph.testing.report import Check, Outcome
from phonograph.testing.specs import PLAIN

_HARMLESS = {"phonograph", "torch", "numpy"} | set(sys.stdlib_module_names)
# Values that no kernel has. A backend refuses each, or runs it.
_ODD = (
    replace(PLAIN, head_size=100, block_size=3),
    replace(PLAIN, num_query_heads=5, sinks=True, alibi=True),
    replace(PLAIN, dtype="int4", kv_cache_dtype="int4"),
)


def check_declaration(capabilities: Capabilities, device: DeviceSpec) -> list[Check]:
    """Check the answers for every known device, each asked for twice."""
    questions = [(spec, one) for spec in (PLAIN, *_ODD) for one in (device, *KNOWN_DEVICES.values())]
    label = capabilities.label
    try:
        with _imports(type(capabilities).__module__.split(".")[0]) as imported:
            first = [_answer(capabilities, *question) for question in questions]
        second = [_answer(capabilities, *question) for question in questions]
    except Exception as error:  # whatever an answer raises
        text = f"an answer raised {type(error).__name__}: {error}; capabilities answer for any device and configuration"
        return [Check("impure capabilities", label, Outcome.FAILED, text)]
    asked = [f"{spec} on {one.name}" for spec, one in questions]
    answers = zip(asked, first, second, strict=True)
    changed = (f"{where} it answered {one}, then {other}" for where, one, other in answers if one != other)
    refusals = (_refusal_problem(one[0], one[3], where) for where, one in zip(asked, first, strict=True))
    supports = (_support_problem(one, where) for where, (_, *both, _) in zip(asked, first, strict=True) for one in both)
    problems = {
        "impure capabilities": [
            f"asked twice about {text}; an answer may depend on the configuration and the device only"
            for text in changed
        ],
        "imports while answering": [
            f"answering imported {', '.join(sorted(imported))}; explain asks where no library is installed, so look "
            "for it with importlib.util.find_spec and import it in the loader"
        ]
        if imported
        else [],
        "refusal without a reason": [text for text in refusals if text],
        "support without a reason": [text for text in supports if text],
    }
    return [
        Check(name, label, Outcome.FAILED, texts[0]) if texts else Check(name, label, Outcome.PASSED)
        for name, texts in problems.items()
    ]


_Answer = tuple[Any, Support, Support, str | None]


def _answer(capabilities: Capabilities, spec: AttentionSpec, device: DeviceSpec) -> _Answer:
    return (
        capabilities.refusals(spec, device),
        capabilities.graph_support(spec, device),
        capabilities.ragged_support(spec, device),
        capabilities.missing(),
    )


def _refusal_problem(refusals: object, missing: str | None, where: str) -> str:
    if not isinstance(refusals, list) or not all(
        isinstance(reason, str) and reason.strip() for reason in cast(list[object], refusals)
    ):
        return f"refusals() is {refusals!r} for {where}; each is a sentence, in a list"
    empty = missing is not None and not missing.strip()
    return "missing() is an empty text; None says that all is here" if empty else ""


def _support_problem(support: object, where: str) -> str:
    # A backend need not be type-checked, so an answer may be anything.
    level = getattr(support, "level", None)
    if isinstance(support, Support) and isinstance(level, GraphSupport) and support.reason.strip():
        return ""
    return f"graph support is {support!r} for {where}; it is a Support with its reason"


@contextmanager
def _imports(own: str) -> Generator[set[str]]:
    """Collect the imports of other packages, and of extension modules of package `own`, inside the `with` block."""
    found: set[str] = set()
    before = set(sys.modules)
    real: Callable[..., Any] = builtins.__import__

    def note(name: str, *args: Any, **kwargs: Any) -> Any:
        level = kwargs.get("level", args[3] if len(args) > 3 else 0)
        caller = str((args[0] if args else kwargs.get("globals") or {}).get("__name__", ""))
        # Imports by torch and by the standard library do not count.
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
