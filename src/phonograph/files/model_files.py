"""Location of a model's files: a local folder or GGUF file, the demo model, or a snapshot from the hub."""

from __future__ import annotations

import difflib
import json
import logging
import os
import re
from functools import cache
from pathlib import Path
from typing import Any, cast

from phonograph.demo import HEAD_DIRECTORY, MODEL_DIRECTORY
from phonograph.errors import ModelError, shortened
from phonograph.files.catalog import CONFIGS_DIRECTORY, HUB_IDS, catalog_name
from phonograph.files.gguf_parts import parts_of
from phonograph.files.hub_client import check_room, download, download_problem, earlier_download, list_files
from phonograph.files.hub_gguf import check_no_gguf, gguf_reference, hub_gguf

log = logging.getLogger(__name__)

DEMO = "demo"
DEMO_HEAD = "demo-eagle3"
_GGUF = ".gguf"
CONFIG_FILES = (
    *("config.json", "generation_config.json", "modules.json", "sentence_*_config.json"),
    *("config_sentence_transformers.json", "*_Pooling/config.json", "*_Dense/*"),
)
# Some repositories have the same weights again in the layout of their training code.
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
# Folders of sentence-transformers' modules begin with a number.
DUPLICATE_WEIGHT_FILES = ("consolidated*.safetensors", "[!0-9]*/*")
TOKENIZER_FILES = ("*.json", "*.txt", "*.jinja", "*.model")
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_OLLAMA_NAME = re.compile(r"[\w.-]+:[\w.-]+")
_OLLAMA = "; names of Ollama's library are not known: a GGUF file of the hub has a name such as owner/name-GGUF:Q4_K_M"


def names_model(text: str) -> bool:
    """Return True if `text` names a model: "demo", a catalog model, a GGUF file, or a folder with a configuration."""
    if text == DEMO or catalog_name(text, hub_ids=True) is not None:
        return True
    path = os.path.expanduser(text)
    if os.path.isdir(path):
        return _holds_model(path)
    return text.endswith(_GGUF) and os.path.isfile(path)


def _holds_model(folder: str) -> bool:
    return any(name == "config.json" or name.endswith(_GGUF) for name in os.listdir(folder))


def is_gguf(path: Path) -> bool:
    """Return True for a GGUF file."""
    return path.suffix == _GGUF and path.is_file()


def model_path(
    model: str | Path,
    *,
    weights: bool = False,
    tokenizer: bool = False,
    revision: str | None = None,
    config_only: bool = False,
    download_dir: str | None = None,
) -> Path:
    """Return the local folder of `model`, or its GGUF file.

    Args:
        model: path of a folder or of a GGUF file, "demo" or its draft head "demo-eagle3", or a hub id, whose files are
            downloaded; owner/name:TYPE is the GGUF file of this type.
        weights: download the safetensors too, besides the configuration.
        tokenizer: download the files of the tokenizer too.
        revision: branch, tag or commit on the hub.
        config_only: allow names of the catalog, whose folders only have a config.json.
        download_dir: folder of downloads; default: the hub's cache.

    Raises:
        ModelError: there is no such folder, it has several GGUF files, or the hub cannot provide it.
    """
    if model == DEMO:
        if os.path.isdir(DEMO) and _holds_model(DEMO):
            _warn_of_folder()
        return MODEL_DIRECTORY
    if model == DEMO_HEAD:
        return HEAD_DIRECTORY
    # os.path takes any text; pathlib raises for texts that cannot be paths.
    folder = Path(model).expanduser()
    if os.path.isdir(folder):
        return _gguf_file(folder) or folder
    if os.path.exists(folder):
        if folder.suffix == _GGUF:
            return folder
        raise ModelError(f"model {str(model)!r} is a file; give the folder that holds its config.json, or a .gguf file")
    name = catalog_name(model)
    if name is not None:
        if config_only and revision is None:
            return CONFIGS_DIRECTORY / name
        raise ModelError(
            f"model {name!r} is a configuration in the package, without weights, tokenizer and revisions: explain "
            f"takes it, and so does --load-format dummy; for the model itself give its hub id, {HUB_IDS[name]}"
        )
    hub_id = str(model)
    if (reference := gguf_reference(hub_id)) is not None:
        return hub_gguf(*reference, revision=revision, download_dir=download_dir)
    if not _HUB_ID.fullmatch(hub_id) or hub_id.startswith(".") or hub_id.endswith(_GGUF):
        shown = shortened(hub_id)
        raise ModelError(
            f"model {shown!r}: no such folder; give a local folder, a hub id (owner/name) or {DEMO!r}"
            + (_OLLAMA if _OLLAMA_NAME.fullmatch(hub_id) else "")
        )
    patterns = [*CONFIG_FILES, *(WEIGHT_FILES if weights else ()), *(TOKENIZER_FILES if tokenizer else ())]
    try:
        if weights:
            _check_room(hub_id, patterns, revision=revision, download_dir=download_dir)
        folder = download(
            hub_id, revision=revision, download_dir=download_dir, patterns=patterns, ignored=DUPLICATE_WEIGHT_FILES
        )
    except ModelError:
        raise
    except Exception as error:  # errors of the client and of its HTTP library
        at_revision = f" at revision {revision!r}" if revision else ""
        problem = download_problem(error, "give a local folder")
        raise ModelError(
            f"model {hub_id!r}{at_revision} is not a local folder and {problem}{_similar(hub_id)}"
        ) from error
    if not (folder / CONFIG_FILES[0]).is_file():
        check_no_gguf(hub_id, revision)
    return folder


def _check_room(hub_id: str, patterns: list[str], *, revision: str | None, download_dir: str | None) -> None:
    """Check that the disk has room for the weights, if none were downloaded before.

    Raises:
        ModelError: it has not.
    """
    folder = earlier_download(hub_id, revision=revision, download_dir=download_dir)
    if folder is not None and any(folder.glob("*.safetensors")):
        return
    try:
        sizes = list_files(hub_id, revision)
    except Exception:  # the download says what is wrong
        log.debug("the files of %s cannot be listed", hub_id, exc_info=True)
        return
    check_room(
        hub_id,
        sizes,
        revision=revision,
        download_dir=download_dir,
        patterns=patterns,
        ignored=DUPLICATE_WEIGHT_FILES,
    )


@cache
def _warn_of_folder() -> None:
    """Log, once, that a folder has the name of the demo model."""
    log.warning("model 'demo' is the model in the package; the folder of that name here is './demo'")


def _similar(hub_id: str) -> str:
    """Return a hint with the names in the package that are like a name, or nothing."""
    near = difflib.get_close_matches(hub_id.lower(), [DEMO, *HUB_IDS], n=3)
    if near[:1] == [DEMO]:
        return f"; did you mean {DEMO!r}, the model in the package?"
    near = [name for name in near if name != DEMO]
    ollama = "" if "/" in hub_id else _OLLAMA
    return (f"; configurations in the package have names like it: {', '.join(near)}" if near else "") + ollama


def _gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file of a folder whose weights are in no other format, or the first of its parts; or None.

    Raises:
        ModelError: there are several.
    """
    files = sorted(folder.glob(f"*{_GGUF}"))
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1 and files == parts_of(files[0]):
        return files[0]
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"model {str(folder)!r} has {len(files)} GGUF files; give the path of one: {names}")
    return files[0]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        ModelError: the file is not readable, is not JSON, or holds another value.
    """
    content = _read_any_json(path)
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(content).__name__}")
    return cast("dict[str, Any]", content)


def read_json_list(path: Path) -> list[Any]:
    """Return the list in a JSON file; raises as `read_json`."""
    content = _read_any_json(path)
    if not isinstance(content, list):
        raise ModelError(f"{path} must hold a JSON list, not {type(content).__name__}")
    return cast("list[Any]", content)


def _read_any_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} is not readable JSON ({error})") from error
