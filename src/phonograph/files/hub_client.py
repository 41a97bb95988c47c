"""Files of models on a hub: Hugging Face's, or ModelScope with PHONOGRAPH_USE_MODELSCOPE.

Both clients keep finished files for the next attempt, and go on with a file whose connection broke. Hugging Face's
takes its settings from HF_TOKEN, HF_HOME and HF_ENDPOINT, ModelScope's from MODELSCOPE_API_TOKEN, MODELSCOPE_CACHE and
MODELSCOPE_DOMAIN. Imports of both are slow.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from phonograph.errors import ConfigError, ModelError
from phonograph.files.hub import first_line, hub_problem

log = logging.getLogger(__name__)

USE_MODELSCOPE = "PHONOGRAPH_USE_MODELSCOPE"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
_GIB = 2**30


def uses_modelscope() -> bool:
    """Return True if models come from ModelScope.

    Raises:
        ConfigError: the variable is neither true nor false.
        ModelError: the package modelscope is not installed.
    """
    text = os.environ.get(USE_MODELSCOPE, "")
    if text.lower() not in (*_TRUE, *_FALSE):
        raise ConfigError(USE_MODELSCOPE, text, "must be true or false")
    if text.lower() in _FALSE:
        return False
    if importlib.util.find_spec("modelscope") is None:
        raise ModelError(f"{USE_MODELSCOPE} needs the package modelscope: pip install modelscope")
    return True


def list_files(repo: str, revision: str | None) -> dict[str, int]:
    """Return the names of a repository's files with their sizes in bytes."""
    if uses_modelscope():
        from modelscope.hub.api import HubApi  # pyright: ignore[reportMissingImports]

        return {one["Path"]: one["Size"] or 0 for one in HubApi().get_model_files(repo, revision=revision)}
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    return {one.rfilename: one.size or 0 for one in info.siblings or ()}


def download(
    repo: str,
    *,
    revision: str | None,
    download_dir: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
    offline: bool = False,
) -> Path:
    """Return the folder of a repository, after downloading the files of the patterns that are missing.

    Args:
        repo: owner/name.
        revision: branch, tag or commit.
        download_dir: folder of downloads; default: the hub's cache.
        patterns: names of files, with * for any text.
        ignored: patterns of files that are left out.
        offline: use an earlier download and no network.
    """
    if uses_modelscope():
        from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]
    else:
        from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo,
            revision=revision,
            cache_dir=download_dir,
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=offline,
        )
    )


def earlier_download(repo: str, *, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the folder of an earlier download, which may lack files, without asking the network."""
    try:
        # No file is asked for: the client refuses a folder that lacks one.
        return download(repo, revision=revision, download_dir=download_dir, patterns=[], offline=True)
    except Exception:
        log.debug("%s was not downloaded before", repo, exc_info=True)
        return None


def check_room(
    repo: str,
    sizes: dict[str, int],
    *,
    revision: str | None,
    download_dir: str | None,
    patterns: Sequence[str],
    ignored: Sequence[str] = (),
) -> None:
    """Log what will be downloaded of a repository, and check that the disk has room for it.

    Raises:
        ModelError: it has not.
    """
    folder = earlier_download(repo, revision=revision, download_dir=download_dir)
    missing = [
        size
        for name, size in sizes.items()
        if _matches(name, patterns) and not _matches(name, ignored) and not (folder and (folder / name).is_file())
    ]
    if not sum(missing):
        return
    target = _cache(download_dir)
    log.info("downloading %d files of %s, %.1f GiB, to %s", len(missing), repo, sum(missing) / _GIB, target)
    existing = next(path for path in (target.absolute(), *target.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < sum(missing):
        raise ModelError(
            f"{repo} needs {sum(missing) / _GIB:.1f} GiB, and {target} has {free / _GIB:.1f} GiB of free space; make "
            "room, or choose another folder with --download-dir"
        )


def download_problem(error: BaseException, remedy: str) -> str:
    """Return problem and remedy for an error of a client, in words that follow the model's name."""
    name = "ModelScope" if uses_modelscope() else "the hub"
    return hub_problem(error) or f"could not be read from {name} ({first_line(error)}); {remedy}"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _cache(download_dir: str | None) -> Path:
    if download_dir is not None:
        return Path(download_dir)
    if uses_modelscope():
        return Path(os.environ.get("MODELSCOPE_CACHE") or Path.home() / ".cache" / "modelscope")
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
