"""/v1/completions through OpenAI's client: prompts of every kind, samples, stops, log-probabilities, streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI
from servers import QUESTION, Server

from phonograph.engine.process.client import REPORTS_AT_ONCE

PROMPT = f"<|begin|><|user|>{QUESTION}<|end|><|assistant|>"
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 40}


def ids_of(server: Server, text: str) -> list[int]:
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_text_and_token_ids_alone_and_in_batches_get_the_same_answers(server: Server, client: OpenAI) -> None:
    ids = ids_of(server, PROMPT)
    single = client.completions.create(prompt=PROMPT, **GREEDY)
    (choice,) = single.choices
    assert choice.text.endswith("#### 19") and choice.finish_reason == "stop"
    assert single.object == "text_completion" and single.model == "demo" and single.id.startswith("cmpl-")
    assert single.usage is not None
    assert single.usage.prompt_tokens == len(ids)
    assert single.usage.total_tokens == len(ids) + single.usage.completion_tokens

    other = client.completions.create(prompt="Once upon", **GREEDY).choices[0].text
    for prompts in ([PROMPT, "Once upon"], [ids, ids_of(server, "Once upon")]):
        batch = client.completions.create(prompt=prompts, **GREEDY)  # pyright: ignore[reportArgumentType]
        assert [one.index for one in batch.choices] == [0, 1]
        assert [one.text for one in batch.choices] == [choice.text, other]
    assert client.completions.create(prompt=ids, **GREEDY).choices[0].text == choice.text


def test_samples_are_ordered_by_prompt_and_seeds_repeat(client: OpenAI) -> None:
    def draw(seed: int | None) -> list[str]:
        answer = client.completions.create(model="demo", prompt=["Tom has", "The"], n=3, seed=seed, max_tokens=12)
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert answer.usage is not None and answer.usage.completion_tokens <= 6 * 12
        return [choice.text for choice in answer.choices]

    first = draw(5)
    assert draw(5) == first != draw(6)
    assert len(set(first)) > 3, "samples are drawn apart"
    assert draw(None) != draw(None)


def test_a_stop_string_cuts_the_text_and_is_named(client: OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stopped = client.completions.create(prompt=PROMPT, stop=["nowhere", "= 19"], **GREEDY).choices[0]
    assert stopped.text == whole[: whole.index("= 19")]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == "= 19"  # pyright: ignore[reportAttributeAccessIssue]
    kept = client.completions.create(
        prompt=PROMPT, stop="= 19", extra_body={"include_stop_str_in_output": True}, **GREEDY
    )
    assert kept.choices[0].text == stopped.text + "= 19"


def test_stop_tokens_and_lengths(server: Server, client: OpenAI) -> None:
    (plus,) = ids_of(server, " +")
    stopped = client.completions.create(prompt=PROMPT, extra_body={"stop_token_ids": [plus]}, **GREEDY).choices[0]
    assert stopped.stop_reason == plus and stopped.text.startswith("12")  # pyright: ignore[reportAttributeAccessIssue]
    longer = client.completions.create(prompt=PROMPT, extra_body={"ignore_eos": True}, **GREEDY)
    assert longer.usage is not None and longer.usage.completion_tokens == 40
    assert longer.choices[0].finish_reason == "length"
    least = client.completions.create(prompt=PROMPT, extra_body={"min_tokens": 39}, **GREEDY)
    assert least.usage is not None and least.usage.completion_tokens >= 39
    assert client.completions.create(model="demo", prompt="The").usage.completion_tokens <= 16  # pyright: ignore[reportOptionalMemberAccess]


def test_parameters_reach_the_sampler(server: Server, client: OpenAI) -> None:
    (word,) = ids_of(server, " apples")
    forced = client.completions.create(prompt="The", logit_bias={str(word): 100}, model="demo", max_tokens=3, seed=1)
    assert forced.choices[0].text == " apples" * 3
    greedy = client.completions.create(prompt="The", **GREEDY).choices[0].text
    for narrow in ({"top_k": 1}, {"min_p": 1.0}):
        body = {"prompt": "The", "model": "demo", "max_tokens": 40, "extra_body": narrow}
        assert client.completions.create(**body).choices[0].text == greedy
    penalized = client.completions.create(
        prompt="The", extra_body={"repetition_penalty": 5.0, "ignore_eos": True}, **GREEDY
    )
    assert penalized.choices[0].text != greedy


def test_logprobs_of_output_and_echoed_prompt(client: OpenAI) -> None:
    # The tokenizer writes é as two tokens of one byte each.
    text = "Tom é has 12"
    answer = client.completions.create(
        model="demo", prompt=text, max_tokens=5, temperature=0, logprobs=2, echo=True, extra_body={"ignore_eos": True}
    )
    (choice,) = answer.choices
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    found = choice.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs and found.text_offset
    assert choice.text.startswith(text) and found.tokens[0] == "Tom"
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == answer.usage.total_tokens
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    assert [token for token in found.tokens if token.startswith("bytes:")] == ["bytes:\\xc3", "bytes:\\xa9"]
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token), (token, offset)
    for token, logprob, top in zip(found.tokens[1:], found.token_logprobs[1:], found.top_logprobs[1:], strict=True):
        assert top[token] == logprob <= 0.0 and len(top) in (2, 3)
    greedy = zip(found.token_logprobs[-5:], found.top_logprobs[-5:], strict=True)
    assert all(logprob == max(top.values()) for logprob, top in greedy)


def test_a_prompt_is_scored_without_output(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "demo", "prompt": "Tom has 12", "temperature": 0, "logprobs": 0, "echo": True}
    scored = client.completions.create(max_tokens=0, **body)
    longer = client.completions.create(max_tokens=1, **body)
    assert scored.choices[0].text == "Tom has 12" and scored.usage.completion_tokens == 0  # pyright: ignore[reportOptionalMemberAccess]
    ours, theirs = scored.choices[0].logprobs, longer.choices[0].logprobs
    assert ours is not None and theirs is not None
    assert ours.token_logprobs == theirs.token_logprobs[:-1]  # pyright: ignore[reportOptionalSubscript]
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(max_tokens=0, stream=True, stream_options=options, **body))
    assert len(chunks) > 1 and all(chunk.usage == scored.usage for chunk in chunks)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_offsets_find_tokens_behind_special_tokens(server: Server, client: OpenAI, stream: bool, skip: bool) -> None:
    """Special tokens of a prompt are echoed, written out or given as ids, as by vLLM."""
    special = ("<|begin|>", "<|user|>", "<|end|>", "<|assistant|>")
    prompt: Any
    for prompt in (PROMPT, ids_of(server, PROMPT)):
        body: dict[str, Any] = {"model": "demo", "prompt": prompt, "max_tokens": 30, "temperature": 0, "echo": True}
        extra = {"skip_special_tokens": skip, "ignore_eos": True}
        answer: Any = client.completions.create(**body, logprobs=0, stream=stream, extra_body=extra)
        parts = [one for chunk in answer for one in chunk.choices] if stream else answer.choices
        text = "".join(part.text for part in parts)
        tokens = [token for part in parts for token in part.logprobs.tokens]
        offsets = [offset for part in parts for offset in part.logprobs.text_offset]
        num_prompt = len(ids_of(server, PROMPT))
        shown = [token not in special or place < num_prompt or not skip for place, token in enumerate(tokens)]
        assert tokens[:2] == ["<|begin|>", "<|user|>"]
        for is_shown, token, offset, end in zip(shown, tokens, offsets, [*offsets[1:], len(text)], strict=True):
            assert text[offset:end] == (token if is_shown else ""), (token, offset)


def test_prompt_logprobs_by_token_id(server: Server) -> None:
    ids = ids_of(server, "Tom has 12 apples")
    body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 1, "logprobs": 0, "return_tokens_as_token_ids": True}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None and len(rest) == len(ids) - 1
    for token_id, position in zip(ids[1:], rest, strict=True):
        entry = position[str(token_id)]
        assert entry["logprob"] < 0 and entry["rank"] >= 1 and len(position) == (1 if entry["rank"] == 1 else 2)
    assert choice["logprobs"]["tokens"][0].startswith("token_id:")


@pytest.mark.parametrize("most", [-1, 10**6])
def test_log_probabilities_of_the_whole_vocabulary(
    server: Server, serve_with: Callable[..., Server], most: int
) -> None:
    body = {"prompt": "Tom has 12", "max_tokens": 2, "temperature": 0, "logprobs": -1, "prompt_logprobs": -1}
    ids = {"return_tokens_as_token_ids": True, "echo": True}
    refused = server.post("/v1/completions", body)
    assert refused.status_code == 400 and "logprobs=-1: this server gives 20 at most" in refused.text
    whole = serve_with(max_logprobs=most)
    (choice,) = whole.post("/v1/completions", {**body, **ids}).json()["choices"]
    sizes = {len(one) for one in (*choice["logprobs"]["top_logprobs"][1:], *choice["prompt_logprobs"][1:])}
    assert sizes == {server.engine.facts.vocab_size}
    chat = {"messages": [{"role": "user", "content": "1"}], "max_tokens": 2, "logprobs": True, "top_logprobs": -1}
    (choice,) = whole.post("/v1/chat/completions", chat).json()["choices"]
    assert {len(one["top_logprobs"]) for one in choice["logprobs"]["content"]} == sizes
    assert whole.post("/v1/completions", {**body, "logprobs": -2}).status_code == 400
    beams = {**body, "use_beam_search": True, "n": 2, "prompt_logprobs": None}
    choices = whole.post("/v1/completions", beams).json()["choices"]
    assert all(len(top) == 4 for choice in choices for top in choice["logprobs"]["top_logprobs"])


def test_log_probabilities_of_listed_tokens(server: Server) -> None:
    body = {
        "prompt": "Tom has 12",
        "max_tokens": 2,
        "temperature": 0,
        "logprobs": 1,
        "return_tokens_as_token_ids": True,
    }
    (choice,) = server.post("/v1/completions", {**body, "logprob_token_ids": [9, 4], "echo": True}).json()["choices"]
    tokens, tops = choice["logprobs"]["tokens"], choice["logprobs"]["top_logprobs"]
    assert all(len(top) <= 2 for top in tops[1:-2])
    assert [{*top} for top in tops[-2:]] == [{token, "token_id:9", "token_id:4"} for token in tokens[-2:]]


@pytest.mark.parametrize("extra", [{}, {"n": 2, "seed": 3, "temperature": 1.0}, {"stop": "apples"}])
def test_a_stream_is_the_answer_in_pieces(client: OpenAI, extra: dict[str, Any]) -> None:
    body: dict[str, Any] = {**GREEDY, "prompt": [PROMPT, "Once"], **extra}
    whole = client.completions.create(**body)
    texts, reasons = [""] * len(whole.choices), {}
    chunks = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **body))
    for chunk in chunks[:-1]:
        assert chunk.id == chunks[0].id and chunk.usage is None
        (choice,) = chunk.choices
        assert choice.index not in reasons
        texts[choice.index] += choice.text
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    last = chunks[-1]
    assert last.choices == [] and last.usage is not None and whole.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    # A loop that is late joins tokens, but of no more reports than it takes at once.
    assert len(chunks) > last.usage.completion_tokens // REPORTS_AT_ONCE > 0


def test_a_stream_has_logprobs_echo_and_usage_all_along(client: OpenAI) -> None:
    body: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "logprobs": 1, "echo": True}
    whole = client.completions.create(**body).choices[0]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(stream=True, stream_options=options, **body))  # pyright: ignore[reportArgumentType]
    choices = [chunk.choices[0] for chunk in chunks[:-1]]
    assert "".join(choice.text for choice in choices) == whole.text
    assert whole.logprobs is not None
    for name in ("tokens", "token_logprobs", "text_offset"):
        pieces = [item for choice in choices for item in getattr(choice.logprobs, name)]
        assert pieces == getattr(whole.logprobs, name)
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks) and counts == sorted(counts) and counts[0] < counts[-2] == counts[-1]


def test_fields_without_effect_are_named(server: Server) -> None:
    answer = server.post("/v1/completions", {"prompt": "The", "user": "me", "store": False, "suffix": None})
    assert answer.status_code == 200 and answer.headers["warning"] == '299 - "no effect: user, store"'
    assert "warning" not in server.post("/v1/completions", {"prompt": "The", "user": None}).headers
    for value, warns in ((True, True), (False, False), (None, False)):
        body = {"prompt": "The", "stream": True, "stream_options": {"include_obfuscation": value}}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 200
        expected = '299 - "no effect: stream_options.include_obfuscation"' if warns else None
        assert answer.headers.get("warning") == expected


@pytest.mark.parametrize(("n", "best_of"), [(2, 2), (None, 1), (1, None)])
def test_best_of_equal_to_n_has_no_effect(client: OpenAI, n: int | None, best_of: int | None) -> None:
    answer = client.completions.create(model="demo", prompt="The", n=n, best_of=best_of, max_tokens=2)
    assert len(answer.choices) == (n or 1)


def test_cached_prefixes_are_shared_by_requests_of_one_salt(client: OpenAI) -> None:
    prompt = [7 + position * position % 1999 for position in range(40)]

    def cached(**extra: str) -> int | None:
        answer = client.completions.create(prompt=prompt, extra_body=extra, **GREEDY)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    salts = ("a", "b", "a", "b")
    assert [cached(cache_salt=salt) for salt in salts] == [0, 0, 32, 32]
    assert cached() == 0 and cached() == 32


def test_rules_of_tokens_reach_the_engine(server: Server) -> None:
    body = {"prompt": "Tom has 12 apples.", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}

    def tokens(**fields: Any) -> list[str]:
        answer = server.post("/v1/completions", {**body, "return_tokens_as_token_ids": True, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["logprobs"]["tokens"]

    assert set(tokens(allowed_token_ids=[5, 70])) <= {"token_id:5", "token_id:70"}
    plain = server.post("/v1/completions", body).json()["choices"][0]["text"]
    word = plain.split()[0]
    for fields in ({"bad_words": [word]}, {"bad_words": word}):
        assert word not in server.post("/v1/completions", {**body, **fields}).json()["choices"][0]["text"].split()
    assert tokens(bad_words=None, allowed_token_ids=None) == tokens(bad_words=[])
