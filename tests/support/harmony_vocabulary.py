"""The vocabulary of harmony as the file that its library reads, made from a package that ships the same one."""

from __future__ import annotations

import base64
from pathlib import Path

import bpe_openai

NUM_TOKENS = 199_998


def write_vocabulary(folder: Path) -> None:
    """Write o200k_base.tiktoken; the library checks its hash."""
    encoding = bpe_openai.get_encoding("o200k_base")
    lines = (
        base64.b64encode(encoding.decode_single_token_bytes(token_id)) + b" %d\n" % token_id
        for token_id in range(NUM_TOKENS)
    )
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))
