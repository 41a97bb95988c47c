"""Examples in docstrings of the public API, run on one engine of the demo model."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phonograph import LLM, EngineConfig
from phonograph.testing import ConformanceReport, check_conformance

DOCS_PAGES = Path(__file__).parents[1] / "scripts" / "docs_pages.py"
BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", flags=re.MULTILINE | re.DOTALL)


def public_names() -> list[str]:
    """Return the objects and modules of the API reference, as the site's script lists them."""
    for node in ast.parse(DOCS_PAGES.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="API")], value=value):
                return [name for _, names in ast.literal_eval(value).values() for name in names]
    raise AssertionError("scripts/docs_pages.py has no API")


def public_objects() -> Iterator[tuple[str, Any]]:
    """Yield the classes, functions and methods of the reference with their names."""
    for name in public_names():
        module, _, attribute = name.rpartition(".")
        if attribute[0].isupper() or attribute == "check_conformance":
            found = {attribute: getattr(importlib.import_module(module), attribute)}
        else:
            found = {key: value for key, value in vars(importlib.import_module(name)).items() if key[0] != "_"}
            found = {key: value for key, value in found.items() if getattr(value, "__module__", None) == name}
        for key, value in found.items():
            if inspect.isclass(value) or inspect.isfunction(value):
                yield key, value
            if inspect.isclass(value):
                own = [base for base in reversed(value.__mro__) if base.__module__.startswith("phonograph.")]
                for method, function in (item for base in own for item in vars(base).items()):
                    if inspect.isfunction(function) and method[0] != "_":
                        yield f"{key}.{method}", function


OBJECTS = dict(public_objects())
EXAMPLES = {
    name: textwrap.dedent(block[2]) for name, value in OBJECTS.items() for block in BLOCK.finditer(value.__doc__ or "")
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", max_num_seqs=2, cudagraph_capture_sizes=[1, 2, 32])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_the_reference_runs(name: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(model: str, **settings: Any) -> LLM:
        EngineConfig(model=model, **settings)
        return llm

    def conforming(*arguments: Any, **settings: Any) -> ConformanceReport:
        bound = inspect.signature(check_conformance).bind(*arguments, **settings).arguments
        return ConformanceReport(backend=bound["backend"], device=bound["device"])

    public = importlib.import_module("phonograph")
    names = {
        **vars(importlib.import_module(OBJECTS[name].__module__)),
        **{one: getattr(public, one) for one in public.__all__},
        "llm": llm,
        "LLM": shared,
        # The suite takes a minute, and tests/testing runs it.
        "check_conformance": conforming,
    }
    owner, _, method = name.partition(".")
    # The example of a method continues that of its class.
    source = EXAMPLES.get(owner, "") * bool(method) + EXAMPLES[name]
    if "with LLM(" in source:
        # It ends its engine, and may write files.
        names["LLM"] = LLM
        monkeypatch.chdir(tmp_path)
    code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(code, names))
    else:
        exec(code, names)


@pytest.mark.parametrize(("owner", "name"), [("AttentionBackend", "backend"), ("Capabilities", "capabilities")])
def test_the_guide_calls_each_method_that_a_backend_implements(owner: str, name: str) -> None:
    """Its runnable blocks run in tests/cli/test_documentation.py."""
    guide = (DOCS_PAGES.parents[1] / "docs" / "guides" / "writing-a-backend.md").read_text(encoding="utf-8")
    runnable = "".join(re.findall(r"^<!-- runnable -->\n```python\n(.*?)^```$", guide, re.MULTILINE | re.DOTALL))
    methods = [method.removeprefix(f"{owner}.") for method in OBJECTS if method.startswith(f"{owner}.")]
    assert len(methods) > 3
    assert not [method for method in methods if f"{name}.{method}(" not in runnable]


def test_docstrings_name_every_argument_and_field() -> None:
    assert len(EXAMPLES) > 20
    missing: list[str] = []
    for name, value in OBJECTS.items():
        text = inspect.getdoc(value)
        assert text, f"{name} has no docstring"
        expected = list(getattr(value, "__dataclass_fields__", ()))
        if inspect.isfunction(value):
            expected = [one for one in inspect.signature(value).parameters if one != "self"]
            assert not expected or "Args:" in text, f"{name} has no Args"
        missing += [f"{name}: {one}" for one in expected if not re.search(rf"\b{one}\b", text)]
    assert not missing
