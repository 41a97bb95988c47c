"""/v2/embed, with the body and the answer of Cohere's API, on an encoder whose folder has prompts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from encoder_checkpoints import expected_rows, make_encoder
from servers import EngineThread, Server, serving
from tokenizers_made import make_pair_tokenizer
from transformers import PreTrainedModel

from phonograph.config.server_config import ServerConfig

TEXTS = ["w4 w5 w6 w7", "w1", "w30 w31 w2"]
PROMPTS = {"search_query": "w80 w81 ", "search_document": ""}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, PreTrainedModel]]:
    folder: Path = tmp_path_factory.mktemp("encoder")
    model = make_encoder("bert", folder)
    make_pair_tokenizer(folder)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS}), encoding="utf-8")
    settings = {"model": str(folder), "enforce_eager": True, "max_model_len": 64, "cudagraph_capture_sizes": None}
    with EngineThread(**settings) as thread, serving(thread, ServerConfig()) as server:
        yield server, model


def expected(model: PreTrainedModel, words: str) -> np.ndarray:
    """Return the normalised mean of the rows of a text, by transformers."""
    tokens = [1, *(4 + int(word[1:]) for word in words.split()), 2]
    row = expected_rows(model, tokens).detach().numpy().mean(0)
    return row / np.linalg.norm(row)


def embedded(server: Server, **body: Any) -> dict[str, Any]:
    answer = server.post("/v2/embed", {"model": "demo", "texts": TEXTS, **body})
    assert answer.is_success, answer.text
    return answer.json()


def test_all_forms_of_embeddings(encoder: tuple[Server, PreTrainedModel]) -> None:
    server, model = encoder
    kinds = ["ubinary", "float", "base64", "binary"]
    answer = embedded(server, embedding_types=kinds, input_type="search_document")
    assert answer["texts"] == TEXTS and answer["response_type"] == "embeddings_by_type"
    assert answer.keys() == {"id", "embeddings", "texts", "meta", "response_type"} and answer["id"].startswith("embd-")
    tokens = sum(len(text.split()) + 2 for text in TEXTS)
    units = {"input_tokens": tokens, "image_tokens": 0}
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": units}
    found = answer["embeddings"]
    assert [*found] == kinds
    rows = np.array(found["float"])
    assert np.abs(rows - np.stack([expected(model, text) for text in TEXTS])).max() < 1e-5
    decoded = np.stack([np.frombuffer(base64.b64decode(one), "<f4") for one in found["base64"]])
    assert np.array_equal(decoded, rows.astype(np.float32))
    for row, unsigned, signed in zip(rows, found["ubinary"], found["binary"], strict=True):
        bits = "".join("1" if number >= 0 else "0" for number in row)
        assert unsigned == [int(bits[place : place + 8], 2) for place in range(0, len(bits), 8)]
        assert signed == [byte - 128 for byte in unsigned]
    assert [*embedded(server)["embeddings"]] == ["float"]


def test_prompts_cuts_and_dimensions(encoder: tuple[Server, PreTrainedModel]) -> None:
    server, model = encoder

    def row(**body: Any) -> np.ndarray:
        return np.array(embedded(server, **body)["embeddings"]["float"][0])

    asked = row(input_type="search_query")
    assert np.abs(asked - expected(model, f"w80 w81 {TEXTS[0]}")).max() < 1e-5
    assert np.abs(row() - expected(model, TEXTS[0])).max() < 1e-5 < np.abs(row() - asked).max()
    for cut, kept in (({}, "w4 w5"), ({"truncate": "END"}, "w4 w5"), ({"truncate": "START"}, "w6 w7")):
        assert np.abs(row(max_tokens=4, **cut) - expected(model, kept)).max() < 1e-5
    long = " ".join(f"w{number % 90}" for number in range(200))
    words = long.split()
    for truncate, kept in (("END", words[:62]), ("START", words[-62:])):
        assert np.abs(row(texts=[long], truncate=truncate) - expected(model, " ".join(kept))).max() < 1e-5
    assert np.abs(row(max_tokens=6, truncate="NONE") - row()).max() < 1e-5
    short = expected(model, TEXTS[0])[:16]
    body = {"output_dimension": 16, "embedding_types": ["float", "binary"]}
    assert np.abs(row(**body) - short / np.linalg.norm(short)).max() < 1e-5


@pytest.mark.parametrize(
    ("body", "param", "parts"),
    [
        ({"texts": None}, "texts", ["missing"]),
        ({"texts": []}, "texts", ["is empty"]),
        ({"texts": ["w1", ""]}, "texts", ["item 1", "is empty"]),
        ({"texts": ["w1"] * 3000}, "texts", ["3000", "max_request_prompts"]),
        ({"texts": None, "images": ["data:image/png;base64,AA"]}, "images", ["models take text"]),
        ({"texts": None, "inputs": [{"content": [{"type": "text", "text": "w1"}]}]}, "inputs", ["give texts"]),
        ({"embedding_types": ["float", "int8"]}, "embedding_types.1", ["'ubinary'"]),
        ({"embedding_types": ["ubinary"], "output_dimension": 12}, "embedding_types", ["ubinary", "8", "12"]),
        ({"output_dimension": 49}, "output_dimension", ["49", "1 to 48"]),
        ({"input_type": "clustering"}, "input_type", ["clustering", "search_query, search_document"]),
        ({"truncate": "NONE", "max_tokens": 3}, "texts", ["6 tokens", "3", "START or END"]),
        ({"truncate": "NONE", "texts": ["w1 " * 100]}, "texts", ["102 tokens", "64"]),
        ({"max_tokens": 65}, "max_tokens", ["65", "1 to 64"]),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens", ["unknown field"]),
    ],
)
def test_bodies_that_are_refused(
    encoder: tuple[Server, PreTrainedModel], body: dict[str, Any], param: str, parts: list[str]
) -> None:
    answer = encoder[0].post("/v2/embed", {"model": "demo", "texts": TEXTS, **body})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param, error
    assert all(part in error["message"] for part in parts), error
