"""`phonograph list`: models that were downloaded, with the names that commands take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Column, Table

from phonograph.cli.show import Json, note, print_json
from phonograph.core.device import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Downloaded:
    """A model in the cache of the hub.

    Attributes:
        model: name for commands; a GGUF file has its type after the name of the repository.
        bytes: size of its weights.
        used: time of the last use, in seconds since 1970.
    """

    model: str
    bytes: int
    used: float


def list_models(
    *,
    download_dir: Annotated[str | None, Parameter(help="Folder of downloads; default: the hub's cache.")] = None,
    as_json: Json = False,
) -> None:
    """List downloaded models with their sizes, the latest used first."""
    found = sorted(_downloaded(download_dir), key=lambda one: -one.used)
    if as_json:
        for one in found:
            print_json(asdict(one))
        return
    if not found:
        note("no model was downloaded; `phonograph pull MODEL` does, and demo is in the package")
        return
    table = Table("model", Column("GiB", justify="right"), "used", box=None, pad_edge=False)
    for one in found:
        table.add_row(one.model, f"{one.bytes / GIB:.2f}", f"{datetime.fromtimestamp(one.used, UTC):%Y-%m-%d %H:%M}")
    Console().print(table, markup=False)


def _downloaded(download_dir: str | None) -> Iterator[Downloaded]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from phonograph.files.hub_gguf import GGUF, gguf_names

    try:
        repos = scan_cache_dir(download_dir).repos
    except CacheNotFound:
        return
    for repo in repos:
        # A file that several revisions share is one file on the disk.
        files = {
            file.file_path.relative_to(revision.snapshot_path).as_posix(): file.size_on_disk
            for revision in repo.revisions
            for file in revision.files
        }
        if repo.repo_type != "model":
            continue
        weights = sum(size for name, size in files.items() if name.endswith(".safetensors"))
        if weights:
            yield Downloaded(model=repo.repo_id, bytes=weights, used=repo.last_accessed)
        sizes = {name: size for name, size in files.items() if name.endswith(GGUF)}
        for kind, names in gguf_names(sizes).items():
            size = sum(sizes[name] for name in names)
            yield Downloaded(model=f"{repo.repo_id}:{kind}", bytes=size, used=repo.last_accessed)
