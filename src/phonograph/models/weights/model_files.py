"""Location of a model's files: a local folder, the demo model in the package, or a snapshot from the hub."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path

from phonograph.demo import MODEL_DIRECTORY
from phonograph.errors import ModelError, shortened
from phonograph.models.catalog import CONFIGS_DIRECTORY, HUB_IDS, catalog_name
from phonograph.models.hub import first_line, hub_problem

DEMO = "demo"
CONFIG_FILES = ("config.json", "generation_config.json")
# Some repositories have the same weights again in the layout of their training code.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
DUPLICATE_WEIGHT_FILES = ("consolidated*.safetensors", "*/*")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def names_model(text: str) -> bool:
    """Return True if `text` names a model: "demo", a catalog model, or a folder with a config.json."""
    known = text == DEMO or catalog_name(text, hub_ids=True) is not None
    return known or os.path.isfile(os.path.join(os.path.expanduser(text), "config.json"))


def model_folder(
    model: str | Path,
    *,
    weights: bool = False,
    revision: str | None = None,
    config_only: bool = False,
) -> Path:
    """Return the local folder of `model`: a path, "demo", or a hub id, whose files are downloaded.

    Args:
        model: path, "demo" or hub id.
        weights: download the safetensors too, besides the configuration.
        revision: branch, tag or commit on the hub.
        config_only: allow names of the catalog, whose folders only have a config.json.

    Raises:
        ModelError: there is no such folder, or the hub cannot provide it.
    """
    if model == DEMO and not Path(model).exists():
        return MODEL_DIRECTORY
    # os.path takes any text; pathlib raises for texts that cannot be paths.
    folder = Path(model).expanduser()
    if os.path.isdir(folder):
        return folder
    if os.path.exists(folder):
        raise ModelError(f"model {str(model)!r} is a file; give the folder that holds its config.json")
    name = catalog_name(model)
    if name is not None:
        if config_only and revision is None:
            return CONFIGS_DIRECTORY / name
        raise ModelError(
            f"model {name!r} is a configuration in the package, without weights, tokenizer and revisions: explain "
            f"takes it, and so does --load-format dummy; for the model itself give its hub id, {HUB_IDS[name]}"
        )
    hub_id = str(model)
    if not _HUB_ID.fullmatch(hub_id) or hub_id.startswith("."):
        shown = shortened(hub_id)
        raise ModelError(f"model {shown!r}: no such folder; give a local folder, a hub id (owner/name) or {DEMO!r}")
    # Slow to import, and not needed for a local folder.
    from huggingface_hub import snapshot_download

    patterns = [*CONFIG_FILES, *(WEIGHT_FILES if weights else ())]
    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=list(DUPLICATE_WEIGHT_FILES)
            )
        )
    except Exception as error:  # errors of the client and of its HTTP library
        at_revision = f" at revision {revision!r}" if revision else ""
        problem = hub_problem(error) or f"could not be read from the hub ({first_line(error)}); give a local folder"
        near = difflib.get_close_matches(hub_id.lower(), HUB_IDS, n=3)
        hint = f"; configurations in the package have names like it: {', '.join(near)}" if near else ""
        raise ModelError(f"model {hub_id!r}{at_revision} is not a local folder and {problem}{hint}") from error
