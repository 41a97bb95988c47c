"""cohere: embeddings by its second version."""

from __future__ import annotations

import base64
import math
import struct
from typing import Any

import cohere
from calls import EMBEDDER, MODEL, call, run

client = cohere.ClientV2(api_key="none", base_url=EMBEDDER)
NONE: Any = None
"""Models whose folder has no prompts take no type of input; the client wants one."""
TEXTS = ["Tom has 12 apples.", "Anna buys 3 books and 4 pens."]


@call("`embed` in all forms")
def embed() -> None:
    kinds: Any = ["float", "binary", "ubinary", "base64"]
    found = client.embed(model=MODEL, texts=TEXTS, input_type=NONE, embedding_types=kinds)
    rows, coded = found.embeddings.float_ or [], found.embeddings.base64 or []
    assert len(rows) == len(coded) == 2 and all(math.isclose(math.hypot(*row), 1, abs_tol=1e-5) for row in rows)
    for row, text, bits, signed in zip(
        rows, coded, found.embeddings.ubinary or [], found.embeddings.binary or [], strict=True
    ):
        numbers = struct.unpack(f"<{len(row)}f", base64.b64decode(text))
        assert all(math.isclose(*pair, abs_tol=1e-6) for pair in zip(numbers, row, strict=True))
        signs = "".join(f"{byte:08b}" for byte in bits)
        assert signs == "".join(str(int(number >= 0)) for number in row) and [one + 128 for one in signed] == bits
    assert found.meta.billed_units.input_tokens > 8 and found.texts == TEXTS


@call("forms that the server lacks are errors")
def refused() -> None:
    try:
        client.embed(model=MODEL, texts=TEXTS, input_type=NONE, embedding_types=["int8"])
    except cohere.BadRequestError as error:
        assert "'ubinary'" in str(error)
    else:
        raise AssertionError("no error")


run("cohere")
