"""Fields and flags of vLLM's server that change when an answer ends, or how it is sent."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from servers import QUESTION, Server

from phonograph import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from phonograph.engine.offline.beam_search import BeamSearchOutput
from phonograph.engine.process.beam_call import open_beams
from phonograph.errors import EngineUnavailable
from phonograph.server.openai.invocations import endpoint_of

PROMPT = f"<|begin|><|user|>{QUESTION}<|end|><|assistant|>"
GREEDY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 24}


def chunks(server: Server, **fields: Any) -> list[Any]:
    """Return the chunks of a streamed completion."""
    return list(server.client().completions.create(stream=True, **{**GREEDY, **fields}))


def test_a_repeated_pattern_ends_the_answer(server: Server) -> None:
    pattern = {"max_pattern_size": 4, "min_count": 5}
    body = {**GREEDY, "allowed_token_ids": [65, 66], "repetition_detection": pattern}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    refused = server.post("/v1/completions", {**body, "repetition_detection": {"max_pattern_size": 4}})
    assert refused.status_code == 400 and "min_count=0: must be an integer >= 2" in refused.text


def test_chunks_of_several_tokens_by_request_and_by_flag(server: Server, serve_with: Callable[..., Server]) -> None:
    ids = {"return_token_ids": True, "ignore_eos": True}
    for found in (
        chunks(server, extra_body={"stream_interval": 8, **ids}),
        chunks(serve_with({"stream_interval": 8}), extra_body=ids),
    ):
        counts = [len(chunk.choices[0].token_ids) for chunk in found]
        assert len(counts) <= 4 and all(count >= 8 for count in counts[1:-1]) and sum(counts) == 24
    text = "".join(chunk.choices[0].text for chunk in chunks(server))
    assert "".join(chunk.choices[0].text for chunk in chunks(server, extra_body={"stream_interval": 7})) == text


def test_flags_that_replace_fields_of_requests(serve_with: Callable[..., Server]) -> None:
    server = serve_with(
        return_tokens_as_token_ids=True, enable_force_include_usage=True, enable_per_request_metrics=True
    )
    found = chunks(server, logprobs=1)
    answer = server.post("/v1/completions", GREEDY).json()
    for metrics in (found[-1].metrics, answer["metrics"]):
        assert metrics["time_to_first_token_ms"] > 0 and metrics["generation_time_ms"] > metrics["mean_itl_ms"] > 0
        assert metrics["queue_time_ms"] >= 0 and metrics["tokens_per_second"] > 1
    assert not hasattr(found[-2], "metrics")
    assert all(chunk.usage.completion_tokens > 0 for chunk in found)
    assert found[0].choices[0].logprobs.tokens[0].startswith("token_id:")
    named = chunks(server, logprobs=1, extra_body={"return_tokens_as_token_ids": False})
    assert not named[0].choices[0].logprobs.tokens[0].startswith("token_id:")


def test_the_chat_template_of_a_request(server: Server, serve_with: Callable[..., Server]) -> None:
    template = "{% for message in messages %}{{ message.content }}{{ sign }}{% endfor %}"
    body = {
        "messages": [{"role": "user", "content": "Tom"}],
        "chat_template": template,
        "chat_template_kwargs": {"sign": " has", "other": 1},
    }
    refused = server.post("/v1/chat/completions", {**body, "max_tokens": 1})
    assert refused.status_code == 400 and "--trust-request-chat-template" in refused.text
    trusting = serve_with(trust_request_chat_template=True)
    tokens = trusting.post("/tokenize", body)
    plain = trusting.post("/tokenize", {"prompt": "Tom has", "add_special_tokens": False}).json()["tokens"]
    assert tokens.json()["tokens"] == plain
    assert "chat_template_kwargs.other" in tokens.headers["warning"] and "sign" not in tokens.headers["warning"]
    chat = trusting.post("/v1/chat/completions", {**body, "max_tokens": 4, "return_token_ids": True}).json()
    assert chat["prompt_token_ids"] == plain
    broken = trusting.post("/v1/chat/completions", {**body, "chat_template": "{% if %}"})
    assert broken.status_code == 400 and "chat template" in broken.text


BEAMS: dict[str, Any] = {**GREEDY, "max_tokens": 6, "n": 3, "use_beam_search": True}


@pytest.fixture(scope="module")
def searched() -> list[BeamSearchOutput]:
    with LLM("demo", max_model_len=256, max_num_seqs=8, enforce_eager=True) as llm:
        return llm.beam_search([PROMPT, "Tom has"], BeamSearchParams(3, 6))


def test_beams_of_completions_are_those_of_python(server: Server, searched: list[BeamSearchOutput]) -> None:
    body = {**BEAMS, "prompt": [PROMPT, "Tom has"], "logprobs": 2, "return_token_ids": True}
    answer = server.post("/v1/completions", body).json()
    expected = [one for output in searched for one in output.sequences]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    for choice, sequence in zip(answer["choices"], expected, strict=True):
        assert choice["prompt_token_ids"] + choice["token_ids"] == sequence.tokens
        assert (choice["finish_reason"], choice["stop_reason"]) == (sequence.finish_reason, sequence.stop_reason)
        total = sum(choice["logprobs"]["token_logprobs"])
        assert sequence.finish_reason == "stop" or math.isclose(total, sequence.cum_logprob, abs_tol=1e-3)
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
    streamed = list(
        server.client().completions.create(
            stream=True, extra_body={"use_beam_search": True}, **{**GREEDY, "max_tokens": 6, "n": 3}
        )
    )
    assert [chunk.choices[0].text for chunk in streamed] == [choice["text"] for choice in answer["choices"][:3]]


def test_beams_of_chats(server: Server, searched: list[BeamSearchOutput]) -> None:
    chat = {name: value for name, value in BEAMS.items() if name != "prompt"}
    answer = server.post("/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": QUESTION}]}).json()
    completion = server.post("/v1/completions", BEAMS).json()
    assert [choice["message"]["content"] for choice in answer["choices"]] == [
        choice["text"] for choice in completion["choices"]
    ]
    assert answer["usage"]["completion_tokens"] == sum(
        len(one.tokens) - answer["usage"]["prompt_tokens"] for one in searched[0].sequences
    )


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"n": 600}, "n", "must be an integer >= 1 and <= 512"),
        ({"top_p": 0.5}, "top_p", "no effect on a beam search"),
        ({"stop": "a"}, "stop", "no effect on a beam search"),
        ({"bad_words": ["a"]}, "bad_words", "no effect on a beam search"),
        ({"echo": True, "logprobs": 1}, "echo", "no log-probabilities"),
        ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "needs use_beam_search"),
        ({"max_tokens": 2000}, "max_tokens", "context holds 1024"),
    ],
)
def test_fields_that_contradict_beams_are_named(server: Server, fields: dict[str, Any], param: str, says: str) -> None:
    refused = server.post("/v1/completions", {**BEAMS, **fields})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param and says in refused.json()["error"]["message"]


def test_beams_of_a_constraint(server: Server) -> None:
    choice = {"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 20}
    answer = server.post("/v1/completions", {**BEAMS, **choice, "prompt": [PROMPT, "Tom has"], "logprobs": 1}).json()
    found = {one["index"]: one for one in answer["choices"]}
    assert {0, 3} <= set(found) <= {0, 1, 2, 3, 4, 5}
    assert {(one["text"], one["finish_reason"]) for one in found.values()} <= {("yes", "stop"), ("no", "stop")}
    assert all("".join(one["logprobs"]["tokens"]) == one["text"] for one in found.values())
    single = {**BEAMS, "allowed_token_ids": server.post("/tokenize", {"prompt": "7"}).json()["tokens"], "n": 3}
    answer = server.post("/v1/completions", {**single, "max_tokens": 3}).json()
    assert [one["text"] for one in answer["choices"]] == ["777"] and answer["usage"]["completion_tokens"] == 3
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**single, "stream": True}, timeout=30) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert json.loads(lines[0][6:])["choices"][0]["text"] == "7" * 6 and lines[-1] == "data: [DONE]"
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    loose = {"structured_outputs": {"json": schema}, "structured_outputs_strictness": "relaxed"}
    assert "uniqueItems" in server.post("/v1/completions", {**BEAMS, **loose}).headers["warning"]
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    chat = {"messages": [{"role": "user", "content": QUESTION}], "tools": [tool], "tool_choice": "required"}
    rest = {name: value for name, value in BEAMS.items() if name != "prompt"}
    answer = server.post("/v1/chat/completions", {**chat, **rest, "max_tokens": 60}).json()
    calls = [call for one in answer["choices"] for call in one["message"]["tool_calls"]]
    assert calls and all(call["function"] == {"name": "add", "arguments": "{}"} for call in calls)


def test_a_client_that_leaves_ends_its_search(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**BEAMS, "max_tokens": 900, "ignore_eos": True}, timeout=0.5)
    server.wait_until_idle()


@pytest.mark.parametrize("seconds", [60.0, 0.1])
def test_a_search_ends_during_a_shutdown_unless_its_time_is_over(seconds: float) -> None:
    async def drained() -> None:
        async with AsyncLLM("demo", max_model_len=512, max_num_seqs=2, enforce_eager=True) as engine:
            num_tokens = 40 if seconds == 60 else 500
            params, beams = SamplingParams(n=2), BeamSearchParams(2, num_tokens, ignore_eos=True)
            call = open_beams(engine, [[5, 6, 7]], params, beams)
            while not engine.num_steps:
                await asyncio.sleep(0.001)
            ending = asyncio.create_task(engine.drain(seconds))
            await asyncio.sleep(0)
            with pytest.raises(EngineUnavailable, match="shutting down"):
                open_beams(engine, [[5, 6, 7]], params, beams)
            if seconds == 60:
                await call.wait()
                assert [(len(one.token_ids), one.finish_reason) for one in call.samples] == [(40, "length")] * 2
            else:
                with pytest.raises(EngineUnavailable, match="before the answer was complete"):
                    await call.wait()
            call.close()
            began = time.monotonic()
            await ending
            await asyncio.sleep(0.01)
            assert time.monotonic() - began < 5 and not engine.searches and not engine.num_open

    asyncio.run(drained())


def test_structured_outputs_of_responses(server: Server) -> None:
    body = {"model": "demo", "input": QUESTION, "structured_outputs": {"choice": ["red", "blue"]}, "session_id": "a"}
    answer = server.post("/v1/responses", {**body, "spaces_between_special_tokens": False})
    (item,) = answer.json()["output"]
    assert item["content"][0]["text"] in ("red", "blue") and "session_id" in answer.headers["warning"]


def test_invocations_answer_as_the_endpoint_of_their_fields(server: Server, serve_with: Callable[..., Server]) -> None:
    chat = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 4}
    for path, body in (("/v1/completions", GREEDY), ("/v1/chat/completions", chat)):
        answer, found = server.post(path, body).json(), server.post("/invocations", body)
        assert found.status_code == 200 and found.json()["choices"] == answer["choices"], path
    with httpx.stream("POST", f"{server.url}/invocations", json={**chat, "stream": True}, timeout=30) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert "chat.completion.chunk" in lines[0] and lines[-1] == "data: [DONE]"
    behind = serve_with(root_path="/llm", api_key=["k"])
    assert behind.post("/llm/invocations", GREEDY).status_code == 401
    assert behind.post("/llm/invocations", GREEDY, headers={"x-api-key": "k"}).status_code == 200
    wrong = [({"input": "a"}, "messages, prompt"), (["a"], "messages, prompt"), ({**GREEDY, "top_p": 5}, "top_p")]
    for body, problem in wrong:
        refused = server.post("/invocations", body)
        assert refused.status_code == 400 and problem in refused.json()["error"]["message"]
    broken = httpx.post(f"{server.url}/invocations", content=b"{")
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("tasks", "fields", "path"),
    [
        (("embed",), "input", "/v1/embeddings"),
        (("classify", "token_classify"), "input", "/classify"),
        (("token_embed",), "input", "/pooling"),
        (("embed", "token_embed"), "input task", "/pooling"),
        (("score",), "query documents", "/rerank"),
        (("score",), "queries documents", "/score"),
        (("embed",), "text_1 text_2", "/score"),
        (("embed",), "texts input_type", "/v2/embed"),
        (None, "prompt messages", "/v1/chat/completions"),
    ],
)
def test_endpoints_of_invocations(tasks: Any, fields: str, path: str) -> None:
    assert endpoint_of(dict.fromkeys(fields.split(), "x"), tasks) == path


def test_the_load_in_a_header(server: Server) -> None:
    plain = server.post("/v1/completions", GREEDY)
    assert "endpoint-load-metrics" not in plain.headers
    text = server.post("/v1/completions", GREEDY, headers={"endpoint-load-metrics-format": "text"})
    kind, _, rest = text.headers["endpoint-load-metrics"].partition(" ")
    load = dict(one.split("=") for one in rest.split(", "))
    assert kind == "TEXT" and set(load) == {
        "named_metrics.kv_cache_usage_perc",
        "named_metrics.num_requests_waiting",
    }
    headers = {"endpoint-load-metrics-format": "JSON"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**GREEDY, "stream": True}, headers=headers) as one:
        kind, _, rest = one.headers["endpoint-load-metrics"].partition(" ")
        assert kind == "JSON" and json.loads(rest)["named_metrics"]["kv_cache_usage_perc"] > 0
    other = server.post("/v1/completions", GREEDY, headers={"endpoint-load-metrics-format": "BIN"})
    assert "endpoint-load-metrics" not in other.headers
