"""Sampling parameters that a model recommends in generation_config.json, for the offline API and for servers."""

from __future__ import annotations

import json
from typing import Any

from phonograph.config.engine_config import EngineConfig
from phonograph.core.sampling_params import SamplingParams
from phonograph.errors import ModelError, RequestError
from phonograph.files.model_files import model_path

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that become defaults of requests."""


def model_sampling_defaults(config: EngineConfig, *, remedy: str) -> dict[str, Any]:
    """Return the model's sampling parameters by name; empty if the model recommends none.

    Args:
        config: names the model.
        remedy: what works without the file, for the error.

    Raises:
        ModelError: generation_config.json is unusable.
    """
    folder = model_path(
        config.model,
        revision=config.revision,
        config_only=config.load_format == "dummy",
        download_dir=config.download_dir,
    )
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = {name: content[name] for name in FIELDS if content.get(name) is not None}
        SamplingParams(**found)
    except (OSError, ValueError, AttributeError, RequestError) as error:
        raise ModelError(f"{file}: is unusable; {remedy} ({error})") from error
    return found


def default_sampling_params(config: EngineConfig) -> SamplingParams:
    """Return the parameters of requests of the Python API that have none.

    Raises:
        ModelError: generation_config.json is unusable.
    """
    return SamplingParams(**model_sampling_defaults(config, remedy="requests with sampling_params do without it"))
