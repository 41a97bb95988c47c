"""/v1/embeddings, /pooling, /classify, /score and /rerank over HTTP, on engines that generate nothing."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from encoder_checkpoints import expected_rows, make_encoder
from servers import EngineThread, Server, serving
from tokenizers_made import make_pair_tokenizer
from transformers import PreTrainedModel

from phonograph import LLM
from phonograph.bench.serving.serving_bench import bench_serving
from phonograph.bench.serving.settings import EMBEDDINGS, ServingBench
from phonograph.config.server_config import ServerConfig
from phonograph.errors import ConfigError

TEXTS = ["Tom has 12 apples.", "1 2 3", "A much longer text about apples, pears, and the price of both in winter."]
SMALL = {"convert": "embed", "enforce_eager": True, "max_model_len": 64, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    with EngineThread(**SMALL) as thread, serving(thread, ServerConfig()) as server:
        yield server


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """Embeddings of the texts by `LLM`."""
    settings: dict[str, Any] = SMALL
    with LLM("demo", **settings) as llm:
        return np.stack([output.outputs.data for output in llm.embed(TEXTS, use_tqdm=False)])


def embedded(server: Server, **body: Any) -> np.ndarray:
    answer = server.post("/v1/embeddings", body)
    assert answer.is_success, answer.text
    return np.array([one["embedding"] for one in answer.json()["data"]], np.float32)


def refused(server: Server, path: str, **body: Any) -> tuple[str | None, str]:
    """Return the field and the message of an error."""
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_the_client_of_openai(embedder: Server, rows: np.ndarray) -> None:
    """It asks for base64 unless it is told otherwise."""
    client = embedder.client()
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="demo", input=TEXTS, **options)
        assert [one.index for one in answer.data] == [0, 1, 2] and answer.model == "demo"
        found = [one.embedding for one in answer.data]
        if options == {"encoding_format": "base64"}:
            found = [np.frombuffer(base64.b64decode(one), "<f4") for one in found]
        assert np.abs(np.array(found) - rows).max() < 1e-5
    num_tokens = len(embedder.post("/tokenize", {"prompt": TEXTS[0]}).json()["tokens"])
    usage = client.embeddings.create(model="demo", input=TEXTS[0]).usage
    assert usage.prompt_tokens == usage.total_tokens == num_tokens
    with pytest.raises(openai.BadRequestError, match="generates nothing") as caught:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "Hi"}])
    assert "/v1/embeddings" in str(caught.value) and caught.value.param == "model"


def test_texts_of_an_array_are_tokenized_together(
    embedder: Server, rows: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop and in a thread, for embeddings and for scores; an array without special tokens is not."""
    tokenizer = embedder.engine.tokenizer
    assert tokenizer is not None
    ahead, calls = tokenizer.encode_ahead, list[int]()
    monkeypatch.setattr(tokenizer, "encode_ahead", lambda texts: (calls.append(len(texts)), ahead(texts)))
    ids = embedder.post("/tokenize", {"prompt": TEXTS[1]}).json()["tokens"]
    assert np.abs(embedded(embedder, input=TEXTS) - rows).max() < 1e-5
    assert np.abs(embedded(embedder, input=TEXTS * 24) - np.tile(rows, (24, 1))).max() < 1e-5
    assert np.abs(embedded(embedder, input=[ids]) - rows[1]).max() < 1e-5
    embedded(embedder, input=TEXTS, add_special_tokens=False)
    assert calls == [3, 64, 8]
    assert embedder.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).is_success
    assert calls == [3, 64, 8, 3]


def test_forms_of_the_input(embedder: Server, rows: np.ndarray) -> None:
    ids = [embedder.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]
    for body, expected in (
        ({"input": ids[2]}, rows[2:]),
        ({"input": ids[:2]}, rows[:2]),
        ({"input": TEXTS[1]}, rows[1:2]),
    ):
        assert np.abs(embedded(embedder, **body) - expected).max() < 1e-5
    short = embedded(embedder, input=TEXTS, dimensions=16)
    assert np.allclose(short, rows[:, :16] / np.linalg.norm(rows[:, :16], axis=1, keepdims=True), rtol=0, atol=1e-5)
    raw = embedded(embedder, input=TEXTS, use_activation=False)
    assert np.abs(np.linalg.norm(raw, axis=1) - 1).min() > 0.01
    assert np.array_equal(raw, embedded(embedder, input=TEXTS, normalize=False))
    long = [5 + place for place in range(100)]
    for side, kept in (("right", long[:20]), ("left", long[-20:]), (None, long[:20])):
        body = {"input": long, "truncate_prompt_tokens": 20, "truncation_side": side}
        assert np.abs(embedded(embedder, **body) - embedded(embedder, input=kept)).max() < 1e-5
    text = "apples and pears " * 50
    cut = embedder.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1}).json()
    assert cut["usage"]["prompt_tokens"] == 64


def test_rows_of_tokens_and_scores_by_cosine(embedder: Server, rows: np.ndarray) -> None:
    answer = embedder.post("/pooling", {"input": TEXTS[:2], "task": "embed"}).json()
    assert np.abs(np.array([one["data"] for one in answer["data"]]) - rows[:2]).max() < 1e-5
    cosines = rows @ rows.T
    pairs = {"text_1": TEXTS[0], "text_2": TEXTS}
    for path in ("/score", "/v1/score"):
        found = embedder.post(path, pairs).json()["data"]
        assert np.allclose([one["score"] for one in found], cosines[0], rtol=0, atol=1e-5)
    both = embedder.post("/score", {"queries": TEXTS[:2], "documents": [{"text": text} for text in TEXTS[1:]]}).json()
    assert np.allclose([one["score"] for one in both["data"]], [cosines[0, 1], cosines[1, 2]], rtol=0, atol=1e-5)
    order = np.argsort(-cosines[0]).tolist()
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        ranked = embedder.post(path, {"model": "demo", "query": TEXTS[0], "documents": TEXTS, "top_n": 2}).json()
        assert [one["index"] for one in ranked["results"]] == order[:2] and ranked["id"].startswith("rerank-")
        assert ranked["results"][0]["document"] == {"text": TEXTS[0]}
    body = {"query": TEXTS[0], "documents": TEXTS, "return_documents": False}
    results = embedder.post("/rerank", body).json()["results"]
    assert len(results) == 3 and all(one.keys() == {"index", "relevance_score"} for one in results)


def test_models_and_metrics_name_the_task(embedder: Server, server: Server) -> None:
    assert embedder.get("/v1/models").json()["data"][0]["tasks"] == ["embed"]
    assert server.get("/v1/models").json()["data"][0]["tasks"] == ["generate"]

    def counts() -> dict[str, float]:
        lines = [line.rpartition(" ") for line in embedder.get("/metrics").text.splitlines() if line[:1] != "#"]
        return {
            name.partition("{")[0] + ("/stop" if 'finished_reason="stop"' in name else ""): float(value)
            for name, _, value in lines
            if "_bucket" not in name
        }

    before = counts()
    usage = embedder.post("/v1/embeddings", {"input": TEXTS}).json()["usage"]
    after = counts()
    for name, more in (
        ("vllm:request_success_total/stop", 3),
        ("vllm:prompt_tokens_total", usage["prompt_tokens"]),
        ("vllm:request_prompt_tokens_count", 3),
        ("vllm:e2e_request_latency_seconds_count", 3),
        ("vllm:request_queue_time_seconds_count", 3),
        ("vllm:generation_tokens_total", 0),
    ):
        assert after[name] - before[name] == more, name


def test_bench_serve_measures_embeddings(embedder: Server) -> None:
    settings: dict[str, Any] = {"base_url": embedder.url, "endpoint": EMBEDDINGS, "input_len": "5-30"}
    for more, inputs, prompts in (({"random_batch_size": 3}, 12, 4), ({"prompt_format": "tokens"}, 5, 5)):
        bench = ServingBench(**settings, **more, backend="openai-embeddings", num_prompts=prompts)
        found = bench_serving(bench, lambda *_: None)
        assert (found["completed"], found["failed"], found["backend"]) == (prompts, 0, "openai-embeddings")
        assert found["total_input_sequences"] == inputs and found["total_output_tokens"] == 0
        assert inputs * 4 <= found["total_input_tokens"] <= inputs * 31 and found["median_e2el_ms"] > 0
    with pytest.raises(ConfigError, match="/v1/completions"):
        ServingBench(**settings, backend="openai")
    with pytest.raises(ConfigError, match="random_batch_size"):
        ServingBench(random_batch_size=2)


@pytest.mark.parametrize(
    ("path", "body", "param", "parts"),
    [
        ("/v1/embeddings", {"input": []}, "input", ["is empty"]),
        ("/v1/embeddings", {"input": ""}, "input", ["is empty"]),
        ("/v1/embeddings", {"input": ["a", ""]}, "input", ["is empty"]),
        ("/v1/embeddings", {"input": [[]]}, "input", ["is empty"]),
        ("/v1/embeddings", {"input": ["a"] * 100_000}, "input", ["100000", "2048", "max_request_prompts"]),
        ("/v1/embeddings", {"input": [5, 999_999]}, "input", ["999999", "0 to"]),
        ("/v1/embeddings", {"input": [5, -1]}, "input", ["-1", "0 to"]),
        ("/v1/embeddings", {"input": "a", "dimensions": 1000}, "dimensions", ["1000", "1 to 256"]),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", ["0", ">= 1"]),
        ("/v1/embeddings", {"input": "a b " * 200}, "input", ["64", "truncate_prompt_tokens"]),
        ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens", ["65", "1 to 64"]),
        ("/v1/embeddings", {"input": "a", "encoding_format": "bytes"}, "encoding_format", ["'float' or 'base64'"]),
        ("/v1/embeddings", {"input": "a", "embed_dtype": "float16"}, "embed_dtype", ["float32"]),
        ("/v1/embeddings", {"input": "a", "normalize": True, "use_activation": False}, "normalize", ["contradicts"]),
        ("/v1/embeddings", {"input": "a", "messages": [{"role": "user"}]}, "messages", ["give texts as input"]),
        ("/v1/embeddings", {"input": "a", "dimension": 8}, "dimension", ["dimensions"]),
        ("/v1/embeddings", {"input": "a", "priority": 1}, "priority", ["scheduling-policy"]),
        (
            "/pooling",
            {"input": "a", "task": "token_embed"},
            "task",
            ["token_embed", "the model has embed", "/v1/embeddings"],
        ),
        ("/classify", {"input": "a"}, "task", ["classify", "the model has embed"]),
        ("/score", {"text_1": "a"}, "data_1", ["text_1", "text_1 and text_2"]),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", ["2 texts", "(1)"]),
        ("/rerank", {"query": "a", "documents": ["b", {"title": "c"}]}, "documents", ["item 1", "object with a text"]),
        ("/rerank", {"query": "a", "documents": []}, "documents", ["is empty"]),
        ("/rerank", {"query": "", "documents": ["a"]}, "query", ["is empty"]),
        ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "rank_fields", ["one text"]),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "chat_template_kwargs", ["rerankers"]),
        ("/v1/completions", {"prompt": "a"}, "model", ["generates nothing", "/v1/embeddings"]),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}, None, ["/v1/embeddings"]),
    ],
)
def test_bad_requests(embedder: Server, path: str, body: dict[str, Any], param: str | None, parts: list[str]) -> None:
    found, message = refused(embedder, path, **body) if param else (None, embedder.post(path, body).text)
    assert found == param and all(part in message for part in parts), message


def test_bad_requests_leave_others_alone(embedder: Server, rows: np.ndarray) -> None:
    """Requests in flight get all their rows while others are refused, or leave."""
    found: list[np.ndarray] = []
    clients = [threading.Thread(target=lambda: found.append(embedded(embedder, input=TEXTS * 20))) for _ in range(3)]
    for client in clients:
        client.start()
    for body in ({"input": [5, 10**9]}, {"input": [TEXTS[0], "a b " * 200]}, {"input": "a", "dimensions": 999}) * 3:
        assert embedder.post("/v1/embeddings", body).status_code == 400
    for client in clients:
        client.join()
    assert len(found) == 3
    for one in found:
        assert np.abs(one - np.concatenate([rows] * 20)).max() < 1e-5
    embedder.wait_until_idle()


def test_an_engine_that_generates_says_what_works(server: Server) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"data_1": "a", "data_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ):
        param, message = refused(server, path, **body)
        assert param == "model" and "--convert embed" in message and "/v1/chat/completions" in message


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, PreTrainedModel]]:
    """Serve a reranker whose tokens have types, with one class."""
    folder = tmp_path_factory.mktemp("reranker")
    model = make_encoder("bert_classes", folder, num_labels=1)
    make_pair_tokenizer(folder)
    settings = {"model": str(folder), "enforce_eager": True, "max_model_len": 64, "cudagraph_capture_sizes": None}
    with EngineThread(**settings) as thread, serving(thread, ServerConfig()) as server:
        yield server, model


def test_a_reranker(classifier: tuple[Server, PreTrainedModel]) -> None:
    server, model = classifier
    documents = ["w4 w5 w6 w7", "w1", "w30 w31"]

    def expected(first: list[int], second: list[int]) -> float:
        prompt = [1, *first, 2, *second, 2]
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        return float(expected_rows(model, prompt, token_type_ids=types).sigmoid())

    numbers = [[4 + int(word[1:]) for word in text.split()] for text in documents]
    scores = [expected([5, 6], one) for one in numbers]
    body = {"query": "w1 w2", "documents": documents}
    results = server.post("/rerank", body).json()["results"]
    assert [one["index"] for one in results] == sorted(range(3), key=lambda index: -scores[index])
    found = server.post("/score", {"data_1": "w1 w2", "data_2": documents}).json()
    assert np.allclose([one["score"] for one in found["data"]], scores, rtol=0, atol=1e-4)
    assert found["usage"]["prompt_tokens"] == sum(len(one) + 5 for one in numbers)
    cut = server.post("/score", {"data_1": "w1 w2", "data_2": documents[0], "max_tokens_per_doc": 2}).json()
    assert np.isclose(cut["data"][0]["score"], expected([5, 6], [8, 9]), rtol=0, atol=1e-4)
    classes = server.post("/classify", {"input": ["w1 w2"]}).json()["data"]
    assert classes[0]["label"] == "LABEL_0" and classes[0]["num_classes"] == 1 and 0 < classes[0]["probs"][0] < 1
    special = server.post("/classify", {"input": ["w1 w2"], "add_special_tokens": False}).json()
    assert special["usage"]["prompt_tokens"] == 2
    # The model has no template of pairs, for which a variable would be; the server may have one.
    param, message = refused(server, "/score", data_1="w1", data_2="w2", instruction="w3")
    assert param == "chat_template_kwargs" and "w3" in message
    param, message = refused(server, "/v1/embeddings", input="w1")
    assert param == "task" and "score and classify" in message and "/rerank" in message and "not embed" in message
