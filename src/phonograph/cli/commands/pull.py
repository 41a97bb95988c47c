"""`phonograph pull`: downloads a model, so that a later start needs no network."""

from __future__ import annotations

from phonograph.cli.options import takes_engine_config
from phonograph.cli.show import Json, notes_of_downloads, print_json
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import GIB


@takes_engine_config
def pull(config: EngineConfig, *, as_json: Json = False) -> None:
    """Download the weights and the tokenizer of a model, and print their folder or file."""
    from phonograph.files.gguf_parts import parts_of
    from phonograph.files.model_files import WEIGHT_FILES, is_gguf, model_path
    from phonograph.text.tokenizer import load_tokenizer

    with notes_of_downloads():
        path = model_path(config.model, weights=True, revision=config.revision, download_dir=config.download_dir)
        load_tokenizer(config)
    files = parts_of(path) if is_gguf(path) else [file for one in WEIGHT_FILES for file in path.glob(one)]
    size = sum(file.stat().st_size for file in files)
    if as_json:
        print_json({"model": config.model, "path": str(path), "bytes": size})
    else:
        print(f"{path} ({size / GIB:.2f} GiB)")
