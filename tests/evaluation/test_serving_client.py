"""The client of `bench serve`: streams in any form, and everything that can go wrong with one."""

from __future__ import annotations

import itertools
import random
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_server import DONE, OK, Script, events, plain, scripted, token, usage

from phonograph.bench.serving import load
from phonograph.bench.serving.connection import Recording, Target
from phonograph.bench.serving.events import read_reply
from phonograph.errors import ConfigError, EndpointError

WHOLE = events(token("a"), token("b"), token("ü"), token("", "length"), usage(7, 4)) + DONE


def offer(url: str, bodies: list[bytes], **settings: Any) -> load.Load:
    client = load.Client(
        target=Target.parse(url), path="/v1/completions", headers={}, timeout=settings.pop("timeout", 5)
    )
    due = settings.pop("due", [0.0] * len(bodies))
    return load.run(load.offer(client, bodies, due, progress=lambda *_: None, max_concurrency=None, **settings))


def recorded(*pieces: bytes) -> Recording:
    """Pieces that came a second apart, the first one at 1."""
    return Recording(start=0.0, status=200, times=[float(1 + n) for n in range(len(pieces))], pieces=list(pieces))


@given(st.lists(st.integers(0, len(WHOLE)), max_size=12).map(sorted))
def test_where_a_stream_is_cut_into_pieces_changes_times_only(cuts: list[int]) -> None:
    bounds = [0, *cuts, len(WHOLE)]
    pieces = [WHOLE[low:high] for low, high in itertools.pairwise(bounds)]
    reply = read_reply(recorded(*pieces), 0.0)
    assert (reply.error, reply.text, reply.prompt_tokens, reply.output_tokens) == (None, "abü", 7, 4)
    # An event has come when its last byte has.
    at = [next(n + 1 for n, end in enumerate(bounds[1:]) if end >= WHOLE.index(mark) + len(mark)) for mark in ENDS]
    assert reply.ttft == at[0]
    assert [sample.itls for sample in reply.samples] == [[at[1] - at[0], at[2] - at[1]]]
    assert reply.latency == at[3]


ENDS = [events(token(text, reason)) for text, reason in (("a", None), ("b", None), ("ü", None), ("", "length"))]


def test_line_ends_comments_and_a_missing_end_of_stream() -> None:
    lines = b": ping\r\n\r\n" + WHOLE.removesuffix(DONE).replace(b"\n", b"\r\n")
    for stream in (lines, lines.removesuffix(b"\r\n\r\n"), WHOLE.replace(b"data: ", b"data:")):
        reply = read_reply(recorded(stream), 0.0)
        assert (reply.error, reply.text, reply.output_tokens) == (None, "abü", 4)


def test_tokens_without_text_are_output_and_roles_are_not() -> None:
    def chat(delta: dict[str, Any], reason: str | None = None) -> bytes:
        return events({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    pieces = [
        chat({"role": "assistant", "content": ""}),
        chat({"reasoning_content": "hm"}),
        chat({"content": ""}),
        chat({"content": "x"}),
        chat({}, "stop"),
        events(usage(3, 5)),
    ]
    reply = read_reply(recorded(*pieces), 0.0)
    (sample,) = reply.samples
    assert (reply.ttft, sample.itls, reply.latency, reply.text) == (2.0, [1.0, 1.0], 5.0, "hmx")
    assert sample.tpot == pytest.approx(3.0 / 4)
    # All that was generated is an end of sequence, which is no text: it came with the chunk that ends the answer.
    only_end = read_reply(recorded(events(token("", "stop")), events(usage(3, 1))), 0.0)
    (sample,) = only_end.samples
    assert (only_end.ttft, sample.itls, sample.tpot) == (1.0, [], None)
    nothing = read_reply(recorded(events(token("", "stop")), events(usage(3, 0))), 0.0)
    assert (nothing.ttft, nothing.error) == (None, None)


def test_samples_of_one_request_have_times_and_tokens_of_their_own() -> None:
    """Choices of n=3 with 5, 2 and 1 tokens, in lockstep; `usage` says 8 of them all."""
    rng = random.Random()
    lengths = {0: 5, 1: 2, 2: 1}
    order = list(lengths)
    pieces: list[bytes] = []
    arrivals: dict[int, list[int]] = {index: [] for index in lengths}
    for step in range(max(lengths.values())):
        rng.shuffle(order)
        for index in order:
            if step < lengths[index]:
                reason = "length" if step == lengths[index] - 1 else None
                text = f"{index}{'abcde'[step]}"
                pieces.append(events({"choices": [{"index": index, "text": text, "finish_reason": reason}]}))
                arrivals[index].append(len(pieces))
    reply = read_reply(recorded(*pieces, events(usage(3, 8)) + DONE), 0.0)
    assert (reply.error, reply.output_tokens, reply.text) == (None, 8, "0a0b0c0d0e1a1b2a")
    assert (reply.ttft, reply.latency) == (1.0, 8.0)
    for sample, (index, at) in zip(reply.samples, arrivals.items(), strict=True):
        assert (sample.tokens, sample.times, sample.end) == (lengths[index], at, at[-1])
        assert sample.tpot == (None if len(at) == 1 else pytest.approx((at[-1] - at[0]) / (len(at) - 1)))
    # Three choices in every chunk, two tokens in each of them: the shares are still those of the samples.
    whole = [{"choices": [{"index": index, "text": "xy", "finish_reason": "length"} for index in range(3)]}] * 2
    merged = read_reply(recorded(*(events(chunk) for chunk in whole), events(usage(3, 12))), 0.0)
    assert [(sample.tokens, sample.itls, sample.tpot) for sample in merged.samples] == [(4, [1.0], 1 / 3)] * 3


def test_transcripts_of_openai_and_of_vllm() -> None:
    """Events without choices, and chunks without a usage: tokens are counted later."""
    done = {"type": "transcript.text.done", "text": "ab"}
    pieces = [events({"type": "transcript.text.delta", "delta": text}) for text in "ab"]
    counted = {"type": "tokens", "input_tokens": 4, "output_tokens": 3, "total_tokens": 7}
    reply = read_reply(recorded(*pieces, events({**done, "usage": counted})), 0.0)
    assert (reply.error, reply.text, reply.prompt_tokens, reply.output_tokens) == (None, "ab", 4, 3)
    assert (reply.ttft, reply.latency, reply.samples[0].itls) == (1.0, 3.0, [1.0])
    chunk = {"object": "transcription.chunk", "choices": [{"delta": {"content": "a"}}]}
    end = {"object": "transcription.chunk", "choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}
    for found in (
        read_reply(recorded(*pieces, events(done)), 0.0),
        read_reply(recorded(*map(events, (chunk, end))), 0.0),
    ):
        assert (found.error, found.text, found.ttft, found.output_tokens) == (None, "ab", 1.0, 0)
        found.count_tokens(5)
        (sample,) = found.samples
        assert sample.tokens == found.output_tokens == 5 and sample.tpot == pytest.approx((found.latency - 1) / 4)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            [b"HTTP/1.1 429 Too Many\r\ncontent-length: 33\r\n\r\n", b'{"error": {"message": "queue is"}}'[:33]],
            "HTTP 429",
        ),
        ([b'HTTP/1.1 400 Bad\r\ncontent-length: 28\r\n\r\n{"error":{"message":"no, 4"}}'[:-1]], "HTTP 400"),
        ([b"HTTP/1.1 500 Oh\r\n\r\nsorry"], "HTTP 500: sorry"),
        ([OK, events(token("a")), events({"error": {"message": "engine died"}})], "in the stream: engine died"),
        ([OK, events(token("a"))], "without a finish_reason"),
        ([OK, events(token("a", "stop")), DONE], "no usage"),
        ([OK, b"data: {nonsense\n\n"], "not a JSON object"),
        ([OK, b"data: [1]\n\n"], "not a JSON object"),
        ([OK, events({"choices": [None]})], "not in OpenAI's form"),
        ([OK, events(token("a", "stop"), {"choices": [], "usage": {"tokens": 3}})], "not in OpenAI's form"),
        ([*plain(WHOLE)[:1], WHOLE[:99]], "broke before the answer was complete"),
        (
            [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n"],
            "broke before the answer was complete",
        ),
        ([b"SSH-2.0-what\r\n"], "not HTTP"),
        ([], "broke before the answer was complete"),
        ([OK, events(token("a")), 5.0], "no complete answer within 1.5 s"),
    ],
)
def test_failures_are_counted_by_kind_and_harm_no_other_request(script: Script, error: str) -> None:
    def answer(body: dict[str, Any]) -> Script:
        return script if body["which"] == 1 else [*plain(WHOLE[:50], 0.01, WHOLE[50:])]

    with scripted(answer) as server:
        # On a busy machine the others take long too.
        timeout = 1.5 if "within" in error else 20
        result = offer(server.url, [b'{"which": %d}' % which for which in range(3)], timeout=timeout)
    errors = [reply.error for reply in result.replies if reply.error is not None]
    assert len(errors) == 1 and error in errors[0]
    assert [reply.text for reply in result.replies if reply.error is None] == ["abü"] * 2


def test_a_closed_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (reply,) = offer(url, [b"{}"]).replies
        assert reply.error is not None and reply.error.startswith("no connection")
        with pytest.raises(EndpointError, match="/v1/models: no connection"):
            load.run(load.find_model(Target.parse(url), {}))


def test_concurrency_is_bounded_and_requests_leave_when_due() -> None:
    with scripted(lambda _: [OK, events(token("a")), 0.05, WHOLE]) as server:
        result = offer(server.url, [b"{}"] * 12)
        assert server.peak == 12
        client = load.Client(target=Target.parse(server.url), path="/v1/completions", headers={}, timeout=5)
        server.peak = 0
        work = load.offer(client, [b"{}"] * 9, [0.0] * 9, max_concurrency=3, progress=lambda *_: None)
        bounded = load.run(work)
        assert server.peak == 3
        # Waiting for room is no part of an answer's time.
        assert max(reply.latency for reply in bounded.replies) < bounded.seconds / 2
        server.times.clear()
        due = [0.0, 0.1, 0.2, 0.2]
        late = offer(server.url, [b"{}"] * 4, due=due)
        sent = [at - server.times[0] for at in server.times]
        assert sent == pytest.approx(due, abs=0.06)
    assert all(reply.error is None for one in (result, bounded, late) for reply in one.replies)
    # The first chunk came at once, the others after a pause.
    assert (
        min(reply.samples[0].itls[0] for reply in result.replies)
        > 0.04
        > max(reply.ttft or 0 for reply in late.replies)
    )


def test_answers_are_read_early_where_too_much_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted(lambda _: plain(WHOLE)) as server:
        monkeypatch.setattr(load, "HELD_BYTES", 2 * len(WHOLE))
        result = offer(server.url, [b"{}"] * 5)
    assert [reply.text for reply in result.replies] == ["abü"] * 5
    assert all(reply.ttft is not None and 0 < reply.ttft <= reply.latency < 5 for reply in result.replies)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://a", "http://", "http://a:0", "http://a:99999", "http://a?b=c"]
)
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        Target.parse(url)


def test_the_head_of_a_request() -> None:
    head = Target.parse("http://[::1]:80/api/").head("POST", "/v1/x", 3, {"authorization": "Bearer k"})
    assert head.startswith(b"POST /api/v1/x HTTP/1.1\r\nhost: [::1]:80\r\n")
    assert b"content-length: 3\r\n" in head and head.endswith(b"authorization: Bearer k\r\n\r\n")
