"""Packages that provide FlashAttention, by version.

Files show whether a package is installed, without an import, as capabilities must be cheap. The package is imported
when its backend is loaded. Then its functions must take our arguments: builds of one package differ in that.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.flash_attn.libraries import (
    CuteLibrary4,
    FlashAttentionLibrary,
    Functions,
    InterfaceLibrary3,
    PackageLibrary2,
    VllmLibrary2,
    VllmLibrary3,
    VllmLibrary4,
)
from phonograph.errors import BackendError, ConfigError

_PUBLISHED_KERNEL = "kernels-community/flash-attn3"
_DISTRIBUTIONS = {"cutlass": "nvidia-cutlass-dsl", "quack": "quack-kernels", "cuda": "cuda-python"}
"""Distributions of the packages that version 4 imports, where the names differ."""


def _import(provider: Provider) -> Any:
    module = importlib.import_module(provider.module)
    for part in provider.parts:
        importlib.import_module(part)
    # vLLM's module imports without its compiled parts, and keeps their error.
    interface = getattr(module, "flash_attn_interface", None)
    reason = getattr(interface, f"FA{provider.version}_UNAVAILABLE_REASON", None)
    if reason is not None:
        raise ImportError(reason)
    return module


def _fetch(provider: Provider) -> Any:
    return importlib.import_module(provider.module).get_kernel(_PUBLISHED_KERNEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """A package that provides one version.

    Attributes:
        module: the module with the functions.
        distribution: its version stands in errors.
        install: remedy if it is absent.
        files: patterns below the folder of the top-level package; each must match.
        modules: other top-level modules that it needs.
        parts: modules that it would import in its first call, after the weights are loaded.
        block_size_multiple: of the pages that its kernels take.
        open: imports it and returns the object with the functions.
    """

    version: str
    module: str
    distribution: str
    library: type[FlashAttentionLibrary]
    install: str
    files: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    block_size_multiple: int = 16
    open: Callable[[Provider], Any] = _import

    def absent(self) -> str | None:
        """Return the reason why it is not installed, or None. Imports nothing."""
        package = self.module.partition(".")[0]
        found = _spec(package)
        if found is None:
            return f"{package} is not installed ({self.install})"
        folders = [Path(folder) for folder in found.submodule_search_locations or ()]
        for pattern in self.files:
            if not any(any(folder.glob(pattern)) for folder in folders):
                return f"{package} is installed without {package}/{pattern} ({self.install})"
        for module in self.modules:
            if _spec(module) is None:
                install = _install(module) if module in _DISTRIBUTIONS else self.install
                return f"{package} is installed without {module} ({install})"
        return None


def _of_vllm(version: str, library: type[FlashAttentionLibrary], file: str, **others: Any) -> Provider:
    return Provider(
        version=version,
        module="vllm.vllm_flash_attn",
        distribution="vllm",
        library=library,
        files=(f"vllm_flash_attn/{file}",),
        install="pip install vllm",
        **others,
    )


# The first installed one of a version is used. Those that write into our output tensor come first.
PROVIDERS = (
    _of_vllm("2", VllmLibrary2, "_vllm_fa2_C*.so"),
    Provider(
        version="2",
        module="flash_attn",
        distribution="flash-attn",
        library=PackageLibrary2,
        modules=("flash_attn_2_cuda",),
        block_size_multiple=256,
        install="pip install flash-attn; with a block size that is a multiple of 256",
    ),
    _of_vllm("3", VllmLibrary3, "_vllm_fa3_C*.so"),
    Provider(
        version="3",
        module="flash_attn_interface",
        distribution="flash-attn-3",
        library=InterfaceLibrary3,
        install="build it from hopper/ of the flash-attention repository",
    ),
    Provider(
        version="3",
        module="kernels",
        distribution="kernels",
        library=InterfaceLibrary3,
        open=_fetch,
        install=f"pip install kernels; it fetches {_PUBLISHED_KERNEL}",
    ),
    _of_vllm(
        "4",
        VllmLibrary4,
        "cute/interface.py",
        modules=("cutlass",),
        parts=("vllm.vllm_flash_attn.cute.interface",),
    ),
    Provider(
        version="4",
        module="flash_attn.cute",
        distribution="flash-attn-4",
        library=CuteLibrary4,
        files=("cute/interface.py",),
        modules=("cutlass",),
        parts=("flash_attn.cute.interface",),
        install="pip install flash-attn-4",
    ),
)


def provider_of(version: str) -> Provider | None:
    """Return the installed provider of `version`, or None."""
    return next((one for one in PROVIDERS if one.version == version and one.absent() is None), None)


def missing(version: str) -> str | None:
    """Return what is absent and what to install if no package here provides `version`, else None."""
    reasons = [one.absent() for one in PROVIDERS if one.version == version]
    if None in reasons:
        return None
    return f"nothing here provides FlashAttention {version}: {'; or '.join(reason for reason in reasons if reason)}"


def functions_of(version: str, spec: AttentionSpec | None = None) -> tuple[type[FlashAttentionLibrary], Functions]:
    """Import the provider of `version`, and check its functions' arguments (for `spec`, or for every model).

    Raises:
        ConfigError: no provider is installed, or it needs a package that is not.
        BackendError: it cannot be imported, or lacks a function or an argument.
    """
    provider = provider_of(version)
    if provider is None:
        raise ConfigError("attention_backend", f"flash_attn {version}", f"cannot run: {missing(version)}")
    name = f"{provider.module} ({provider.distribution} {_version(provider.distribution)})"
    try:
        module = provider.open(provider)
    except ModuleNotFoundError as error:
        absent = error.name or str(error)
        problem = f"{name} needs the package {absent}, which is not installed ({_install(absent)})"
        raise ConfigError("attention_backend", f"flash_attn {version}", problem) from error
    except Exception as error:  # whatever another package's import, or its compiled part, raises
        raise BackendError(f"attention backend flash_attn {version}: {name} cannot be imported: {error}") from error
    functions: Functions = {}
    for function, arguments in provider.library.needs(spec).items():
        found = getattr(module, function, None)
        if found is None:
            raise BackendError(_unfit(version, name, f"has no function {function}"))
        lacking = sorted(arguments - _arguments(found))
        if lacking:
            raise BackendError(_unfit(version, name, f"has {function} without the argument {', '.join(lacking)}"))
        functions[function] = found
    return provider.library, functions


def make_library(version: str, spec: AttentionSpec) -> FlashAttentionLibrary:
    """Make the library of `version` for one KV group. Raises as `functions_of` does."""
    library, functions = functions_of(version, spec)
    return library(functions, spec)


def _install(module: str) -> str:
    package = module.partition(".")[0]
    return f"pip install {_DISTRIBUTIONS.get(package, package)}"


def _unfit(version: str, name: str, problem: str) -> str:
    return f"attention backend flash_attn {version}: {name} {problem}; another version of the package is needed"


def _arguments(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _spec(module: str) -> Any:
    try:
        return find_spec(module)
    except ValueError:  # a module without a spec
        return None


def _version(distribution: str) -> str:
    try:
        return installed_version(distribution)
    except PackageNotFoundError:
        return "of unknown version"
