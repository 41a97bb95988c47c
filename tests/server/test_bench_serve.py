"""`bench serve` against our server: the counts are the server's, whatever the endpoint and the form of the prompts."""

from __future__ import annotations

from typing import Any

import pytest
from servers import Server

from phonograph.bench.serving.serving_bench import bench_serving
from phonograph.bench.serving.settings import CHAT, ServingBench


def measure(server: Server, **settings: Any) -> dict[str, Any]:
    return bench_serving(
        ServingBench(base_url=server.url, num_prompts=10, output_len="5-9", num_warmups=2, **settings),
        lambda *_: None,
    )


@pytest.mark.parametrize(("prompt_format", "seed"), [("tokens", 10), ("text", 20)])
def test_completions(server: Server, prompt_format: str, seed: int) -> None:
    settings: dict[str, Any] = {"input_len": "30-40", "max_concurrency": 3, "prompt_format": prompt_format}
    found = measure(server, request_rate=200.0, save_detailed=True, seed=seed, **settings)
    assert (found["completed"], found["failed"], found["model_id"]) == (10, 0, "demo")
    assert found["server"] == {"owned_by": "phonograph", "root": "demo", "max_model_len": 1024}
    # Each answer has the length that was asked for: its end of sequence was ignored.
    assert set(found["output_lens"]) <= set(range(5, 10)) and found["total_output_tokens"] == sum(found["output_lens"])
    assert all(28 <= length <= 42 for length in found["input_lens"])
    assert found["max_concurrent_requests"] <= 3 and found["total_cached_tokens"] == 0
    assert 0 < found["median_ttft_ms"] <= found["median_e2el_ms"]
    again = measure(server, seed=seed, **settings)
    assert again["total_output_tokens"] == found["total_output_tokens"]
    # The same seed asks the same, which the server now knows. Another seed asks something else.
    assert again["total_cached_tokens"] > 0
    assert measure(server, seed=seed + 1, **settings)["total_cached_tokens"] == 0


def test_chats(server: Server) -> None:
    found = measure(server, endpoint=CHAT, input_len="20", ignore_eos=False)
    assert (found["completed"], found["backend"]) == (10, "openai-chat")
    # The template's tokens come on top.
    assert 10 * 20 < found["total_input_tokens"] < 10 * 30
    assert 10 <= found["total_output_tokens"] <= 10 * 9


def test_a_refusal_of_the_server_is_printed(server: Server) -> None:
    asked = ServingBench(base_url=server.url, extra_body='{"nonsense": 1}', num_warmups=0, num_prompts=2, input_len="9")
    found = bench_serving(asked, lambda *_: None)
    assert found["failed"] == 2 and found["completed"] == 0
    ((error, count),) = found["error_counts"].items()
    assert count == 2 and error.startswith("HTTP 400: ") and "nonsense" in error
