"""GGUF files of a repository on the hub, by the name of their type: `owner/repo:Q4_K_M`."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from phonograph.errors import ModelError
from phonograph.files.gguf_parts import parts_of, without_part
from phonograph.files.hub_client import check_room, download, download_problem, earlier_download, list_files

log = logging.getLogger(__name__)

GGUF = ".gguf"
_REFERENCE = re.compile(r"([\w.-]+/[\w.-]+):([\w./-]+)")
_TYPE = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|T?Q\d_\d|BF16|F16|F32|MXFP4\w*|NVFP4\w*))$", re.IGNORECASE)
_NO_MODELS = ("mmproj", "imatrix")
"""Beginnings of the names of files that hold no language model."""


def gguf_reference(model: str) -> tuple[str, str] | None:
    """Return repository and type of a text such as owner/repo:Q4_K_M, or None for another text."""
    match = _REFERENCE.fullmatch(model)
    return None if match is None else (match[1], match[2])


def hub_gguf(repo: str, kind: str, *, revision: str | None, download_dir: str | None) -> Path:
    """Return the GGUF file of a type, or the first of its parts, after downloading what is missing.

    Args:
        repo: owner/name on the hub.
        kind: type of the weights in the file's name, such as Q4_K_M, or the name of a file.
        revision: branch, tag or commit.
        download_dir: folder of downloads; default: the hub's cache.

    Raises:
        ModelError: the repository has no such file, the hub cannot be read, or the disk has no room.
    """
    try:
        sizes = list_files(repo, revision)
        names = files_of_type(sizes, kind, repo)
        check_room(repo, sizes, revision=revision, download_dir=download_dir, patterns=names)
        folder = download(repo, revision=revision, download_dir=download_dir, patterns=names)
    except ModelError:
        raise
    except Exception as error:  # errors of the client and of its HTTP library
        cached = _cached(repo, kind, revision, download_dir)
        if cached is not None:
            return cached
        raise ModelError(f"model {f'{repo}:{kind}'!r} {download_problem(error, 'give a local file')}") from error
    return folder / names[0]


def check_no_gguf(repo: str, revision: str | None) -> None:
    """Check that a repository without config.json is not one of GGUF files.

    Raises:
        ModelError: it is; the message has the types of its files.
    """
    try:
        files = list_files(repo, revision)
    except Exception:  # the missing config.json is reported by the caller
        log.debug("the files of %s cannot be listed", repo, exc_info=True)
        return
    types = gguf_types(files)
    if types:
        best = next((one for one in types if one == "Q4_K_M"), types[0])
        raise ModelError(
            f"{repo} has GGUF files; choose one by its type, such as {repo}:{best}; it has {', '.join(types)}"
        )


def files_of_type(files: Iterable[str], kind: str, where: str) -> list[str]:
    """Return the files of a type among those of a repository: one, or all parts in order.

    Raises:
        ModelError: there is none, or there are several; the message has the types that exist.
    """
    known = [name for name in files if name.endswith(GGUF) and not PurePosixPath(name).name.startswith(_NO_MODELS)]
    if kind in known:
        return [kind]
    found: dict[str, list[str]] = {}
    for name in known:
        stem = without_part(name).removesuffix(GGUF)
        if re.search(rf"(?:^|[-._/]){re.escape(kind)}$", stem, re.IGNORECASE):
            found.setdefault(stem, []).append(name)
    if not found:
        types = gguf_types(known)
        if not known:
            raise ModelError(f"{where} has no GGUF file, and so none of type {kind!r}; leave the type out")
        shown = ", ".join(types) if types else ", ".join(sorted(known))
        raise ModelError(f"{where} has no GGUF file of type {kind!r}; it has {shown}")
    if len(found) > 1:
        names = ", ".join(sorted(f"{stem}{GGUF}" for stem in found))
        raise ModelError(f"{where} has {len(found)} GGUF files of type {kind!r}; give one by its name: {names}")
    (names,) = found.values()
    names.sort()
    count = len(parts_of(Path(names[0])))
    if len(names) != count:
        raise ModelError(f"{where} has {len(names)} of the {count} parts of type {kind!r}; choose another type")
    return names


def gguf_names(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the GGUF files by type, or by name where that ends with no type; parts of one file together."""
    found: dict[str, list[str]] = {}
    for name in sorted(files):
        stem = without_part(name).removesuffix(GGUF)
        match = _TYPE.search(stem)
        found.setdefault(match[1].upper() if match else name, []).append(name)
    return found


def gguf_types(files: Iterable[str]) -> list[str]:
    """Return the types that the names of GGUF files end with."""
    stems = (without_part(name).removesuffix(GGUF) for name in files if name.endswith(GGUF))
    return sorted({match[1].upper() for stem in stems if (match := _TYPE.search(stem))})


def _cached(repo: str, kind: str, revision: str | None, download_dir: str | None) -> Path | None:
    """Return the file from an earlier download, for a machine without network."""
    folder = earlier_download(repo, revision=revision, download_dir=download_dir)
    if folder is None:
        return None
    files = [path.relative_to(folder).as_posix() for path in folder.rglob(f"*{GGUF}")]
    try:
        return folder / files_of_type(files, kind, repo)[0]
    except ModelError:
        log.debug("%s:%s is not in the cache", repo, kind, exc_info=True)
        return None
