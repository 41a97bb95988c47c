"""`phonograph collect-env`: facts about this machine for a report of a problem."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

from phonograph.cli.show import Json, print_json

PACKAGES = (
    *("cyclopts", "fastapi", "flash-attn", "flashinfer-python", "gguf", "huggingface-hub", "llguidance", "numpy"),
    *("opentelemetry-sdk", "prometheus-client", "pydantic", "safetensors", "tokenizers", "torch", "transformers"),
    *("triton", "uvicorn", "uvloop"),
)
SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "ENDPOINT", "HEADERS")
"""Parts of names of variables whose values are not printed."""
PREFIXES = ("CUDA_", "HF_", "LD_LIBRARY_PATH", "NVIDIA_", "OMP_", "PHONOGRAPH_", "PYTORCH_", "TRITON_", "VLLM_")
"""Beginnings of the environment variables that change how an engine runs."""


def collect_env(*, as_json: Json = False) -> None:
    """Print versions, hardware and settings of this machine, without keys."""
    facts = _facts()
    if as_json:
        print_json(facts)
        return
    for heading, values in facts.items():
        print(f"{heading}:")
        for name, value in values.items():
            print(f"  {name}: {value}")


def _facts() -> dict[str, dict[str, Any]]:
    import torch

    from phonograph.bench.records.record import provenance

    found = provenance()
    commit = found["commit"] or {"id": "an installed package"}
    system = {"system": platform.platform(), "cuda_of_torch": torch.version.cuda, "threads": found["threads"]}
    return {
        "versions": {**found["versions"], "commit": commit["id"]},
        "hardware": {**found["hardware"], **system, **_gpus(torch)},
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "environment": {
            name: "(set)" if any(part in name for part in SECRET) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(PREFIXES)
        },
    }


def _gpus(torch: Any) -> dict[str, str]:
    """Return each GPU with its compute capability and memory."""
    if not torch.cuda.is_available():
        return {"gpus": "none"}
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        f"gpu_{index}": f"{one.name}, {one.major}.{one.minor}, {one.total_memory / 2**30:.1f} GiB"
        for index, one in enumerate(found)
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
