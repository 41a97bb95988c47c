"""lm-evaluation-harness against the server, unmodified: what it scores in process, it scores over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install 'phonograph[eval]' to run this")

from harness import evaluate
from servers import SMALL, Server

from phonograph.bench.harness.adapter import PhonographLM
from phonograph.demo import MODEL_DIRECTORY

LIMIT = 4


def over_http(server: Server, model: str, path: str, tasks: list[str], **more: Any) -> Any:
    arguments = {"model": "demo", "base_url": f"{server.url}{path}", "num_concurrent": 4, "max_length": 1024, **more}
    return evaluate(model, tasks, limit=LIMIT, model_args=arguments)


def test_completions_and_chats_score_as_the_offline_api(server: Server) -> None:
    offline = PhonographLM(pretrained="demo", **SMALL)
    generated, texts = evaluate(offline, ["demo_problems"], limit=LIMIT)
    chosen, likelihoods = evaluate(offline, ["demo_choices"], limit=LIMIT)
    assert set(generated.values()) | set(chosen.values()) == {1.0}
    chat = over_http(server, "local-chat-completions", "/v1/chat/completions", ["demo_problems"])
    assert chat == (generated, texts)
    settings = {"tokenizer": str(MODEL_DIRECTORY)}
    assert over_http(server, "local-completions", "/v1/completions", ["demo_problems"], **settings) == (
        generated,
        texts,
    )
    # One request at a time, with eight prompts each: likelihoods as exact as JSON has them.
    batched = {**settings, "num_concurrent": 1, "batch_size": 8}
    for more in (settings, batched):
        assert over_http(server, "local-completions", "/v1/completions", ["demo_choices"], **more) == (
            chosen,
            likelihoods,
        )


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_completions_score_prompts(server: Server, max_tokens: int) -> None:
    context, rest = "Tom has", " 12 apples"
    ids, first = (server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in (context + rest, context))
    body = {"model": "demo", "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(ids) + max_tokens
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert found["text_offset"][len(first)] == len(context)
    end = len(ids)
    total = sum(found["token_logprobs"][len(first) : end])
    # The most likely token is there, and the token itself.
    assert all(
        top[name] == logprob <= max(top.values())
        for name, logprob, top in zip(
            *(found[key][1:end] for key in ("tokens", "token_logprobs", "top_logprobs")), strict=True
        )
    )
    scored = over_http_score(server, context, rest)
    assert scored == pytest.approx(total, abs=1e-4)


def over_http_score(server: Server, context: str, rest: str) -> float:
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.models.openai_completions import LocalCompletionsAPI  # pyright: ignore[reportMissingImports]

    url = f"{server.url}/v1/completions"
    lm = LocalCompletionsAPI(
        base_url=url, tokenizer_backend="huggingface", model="demo", tokenizer=str(MODEL_DIRECTORY)
    )
    ((total, _),) = lm.loglikelihood(
        [Instance(request_type="loglikelihood", doc={}, arguments=(context, rest), idx=0)], disable_tqdm=True
    )
    return total
