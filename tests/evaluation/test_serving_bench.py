"""`bench serve`: what it sends, when, and what it makes of the answers."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import run, run_json
from scripted_server import DONE, Script, events, plain, scripted, token, usage
from sentencepiece_like import sentencepiece_like
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from checks.serving.generated import make_tokenizer
from phonograph.bench.serving.events import Reply, TimedSample
from phonograph.bench.serving.lengths import LONGEST, SHORTEST, sharegpt_like_lengths
from phonograph.bench.serving.load import Load, arrival_times
from phonograph.bench.serving.serving_metrics import details, serving_metrics
from phonograph.bench.serving.workload import random_prompts, read_requests
from phonograph.cli.app import main
from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ConfigError
from phonograph.text.tokenizer import Tokenizer, load_tokenizer

VLLM_KEYS = {
    *("date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate"),
    *("burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    "max_concurrent_requests",
    *(f"{name}_{kind}_ms" for name in ("mean", "median", "std", "p99") for kind in ("ttft", "tpot", "itl", "e2el")),
}
VLLM_DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def test_sharegpt_like_lengths_have_the_published_means() -> None:
    for seed in range(5):
        drawn = np.array(sharegpt_like_lengths(random.Random(seed), 100))
        assert drawn.mean(axis=0) == pytest.approx([232, 217], rel=0.02)
        assert drawn.min() >= SHORTEST and drawn.max() <= LONGEST
        # Skewed, as conversations are: half are short, a few are long.
        assert (np.median(drawn, axis=0) < 170).all() and (np.percentile(drawn, 90, axis=0) > 450).all()
        assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.4
    many = np.array(sharegpt_like_lengths(random.Random(0), 20_000))
    assert many.mean(axis=0) == pytest.approx([232, 217], rel=0.003)
    assert sharegpt_like_lengths(random.Random(1), 9) == sharegpt_like_lengths(random.Random(1), 9)


def test_arrivals_keep_the_rate_whatever_their_burstiness() -> None:
    spread: dict[float, float] = {}
    for burstiness in (0.25, 1.0, 4.0, math.inf):
        times = arrival_times(random.Random(0), 2000, rate=50, burstiness=burstiness)
        gaps = np.diff([0.0, *times])
        assert times[-1] == pytest.approx(40) and gaps.min() >= 0
        spread[burstiness] = float(gaps.std() / gaps.mean())
    # Of a gamma distribution: 1 / sqrt(shape).
    assert spread == pytest.approx({0.25: 2.0, 1.0: 1.0, 4.0: 0.5, math.inf: 0.0}, abs=0.1)
    assert arrival_times(random.Random(0), 3, rate=math.inf, burstiness=1) == [0.0] * 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(EngineConfig(model="demo"))
    assert found is not None
    return found


def _byte_level() -> Tokenizer:
    """Half of its tokens are bytes that are no character alone; the others merge with their neighbours."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first in "aeiou\u0120" for second in "aeinst"]
    vocab = {piece: place for place, piece in enumerate([*alphabet, *dict.fromkeys(map("".join, merges))])}
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def _generated() -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(4000, {0: "<s>", 2: "</s>"})))


@pytest.mark.parametrize("make", [None, _byte_level, sentencepiece_like, _generated])
def test_random_prompts_have_the_asked_length_and_no_special_token(
    make: Callable[[], Tokenizer] | None, request: pytest.FixtureRequest
) -> None:
    """Byte-level, metaspace with byte fallback, and the tokenizer of a model folder that is made for a server."""
    tokenizer: Tokenizer = request.getfixturevalue("tokenizer") if make is None else make()
    rng = random.Random()
    tokens, text = (random_prompts(tokenizer, rng, form) for form in ("tokens", "text"))
    short = 0
    for length in (*range(1, 40), 500):
        ids = tokens(length)
        assert isinstance(ids, list) and len(ids) == length and max(ids) < tokenizer.vocab_size  # pyright: ignore[reportArgumentType]
        assert not tokenizer.special_token_ids.intersection(ids)  # pyright: ignore[reportArgumentType]
        made = text(length)
        assert isinstance(made, str)
        encoded = tokenizer.encode(made, add_special_tokens=False)
        assert 1 <= len(encoded) <= length
        short += len(encoded) < length
        assert not tokenizer.special_token_ids.intersection(encoded)
    assert short <= 2
    assert tokens(20) != tokens(20) and text(20) != text(20)


def test_a_tokenizer_that_makes_no_text_is_named() -> None:
    """Its tokens are halves of a character, which decode to nothing that could be sent."""
    backend = Backend(models.BPE({"\u00c3": 0, "\u00a9": 1}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    make = random_prompts(tokenizer, random.Random(), "text")
    with pytest.raises(ConfigError, match=r"prompt_format='text': no text has 1 token of this tokenizer; use tokens"):
        make(1)


def test_figures_of_known_answers() -> None:
    first = TimedSample(times=[0.1, 0.3, 0.7], end=0.7, tokens=3)
    # Five tokens in two chunks, and one token.
    second, third = (
        TimedSample(times=[0.3, 0.9], end=0.9, tokens=5, text="xy"),
        TimedSample(times=[0.5], end=0.5, tokens=1),
    )
    replies = [
        Reply(start=0.0, latency=0.7, prompt_tokens=10, output_tokens=3, cached_tokens=4, samples=[first]),
        Reply(start=0.5, latency=0.9, prompt_tokens=20, output_tokens=5, samples=[second]),
        Reply(start=1.5, latency=0.5, prompt_tokens=30, output_tokens=1, samples=[third]),
        Reply(start=0.2, error="HTTP 500: no"),
    ]
    load = Load(replies=replies, seconds=2.0, cpu_seconds=0.5, send_delay=0.003)
    found = serving_metrics(load)
    assert (found["completed"], found["failed"], found["error_counts"]) == (3, 1, {"HTTP 500: no": 1})
    assert (found["total_input_tokens"], found["total_output_tokens"], found["total_cached_tokens"]) == (60, 9, 4)
    assert (found["request_throughput"], found["output_throughput"]) == (1.5, 4.5)
    assert found["total_token_throughput"] == 34.5
    assert (found["client_cpu_share"], found["max_send_delay_ms"]) == (0.25, pytest.approx(3))
    assert (found["mean_ttft_ms"], found["median_ttft_ms"]) == (pytest.approx(300), pytest.approx(300))
    # (0.7 - 0.1) / 2 and (0.9 - 0.3) / 4; one token has no time per token after it.
    assert (found["mean_tpot_ms"], found["std_tpot_ms"]) == (pytest.approx(225), pytest.approx(75))
    assert (found["mean_itl_ms"], found["median_itl_ms"]) == (pytest.approx(400), pytest.approx(400))
    assert found["p99_e2el_ms"] == pytest.approx(np.percentile([700, 900, 500], 99))
    assert found["chunks_per_output_token"] == pytest.approx(6 / 9)
    # Requests run from 0 to 0.7, 0.5 to 1.4, 1.5 to 2. In second 0: 3 tokens and half of 5; in 1 half of 5; in 2 one.
    assert (found["max_concurrent_requests"], found["max_output_tokens_per_s"]) == (2, pytest.approx(5.5))
    assert details(load)["errors"] == ["", "", "", "HTTP 500: no"]
    assert details(load).keys() == VLLM_DETAILS

    nothing = serving_metrics(Load(replies=[replies[3]], seconds=1.0, cpu_seconds=0.0, send_delay=0.0))
    assert (nothing["completed"], nothing["mean_ttft_ms"], nothing["max_output_tokens_per_s"]) == (0, None, 0.0)


def test_samples_of_one_request_count_as_samples() -> None:
    """Two samples of one request: TPOT and ITL are of each, as if they were two requests; rates are of both."""
    fast, slow = TimedSample(times=[0.1, 0.2, 0.3], end=0.3, tokens=3), TimedSample(times=[0.1, 0.9], end=0.9, tokens=2)
    replies = [Reply(start=0.0, latency=0.9, prompt_tokens=9, output_tokens=5, samples=[fast, slow])]
    found = serving_metrics(Load(replies=replies, seconds=1.0, cpu_seconds=0.0, send_delay=0.0))
    assert (found["mean_tpot_ms"], found["std_tpot_ms"]) == (pytest.approx(450), pytest.approx(350))
    assert (found["mean_itl_ms"], found["median_itl_ms"]) == (pytest.approx(1000 / 3), pytest.approx(100))
    assert (found["mean_ttft_ms"], found["mean_e2el_ms"]) == (pytest.approx(100), pytest.approx(900))
    assert (found["completed"], found["output_throughput"], found["chunks_per_output_token"]) == (1, 5.0, 1.0)
    assert found["max_output_tokens_per_s"] == pytest.approx(5)


def _answer(body: dict[str, Any]) -> Script:
    """Three tokens in two chunks, for a prompt of five."""
    return plain(events(token("x")), 0.02, events(token("yz", "length")) + events(usage(5, 3)) + DONE)


def test_the_command_prints_a_table_or_vllms_keys(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    output = tmp_path / "results.jsonl"
    with scripted(_answer) as server:
        flags = ["--base-url", server.url, "--num-prompts", "6", "--input-len", "5", "--output-len", "3"]
        more = ["--request-rate", "100", "--num-warmups", "2", "--extra-body", '{"top_k": 7}', "--label", "first"]
        text = run(capsys, "bench", "serve", *flags, *more, "--output", str(output))
        found = json.loads(output.read_text())
        assert len(server.bodies) == 2 + 6
        assert all(b"authorization: Bearer secret\r\n" in head for head in server.heads)
        body = server.bodies[-1]
        prompts = [tuple(body.pop("prompt")) for body in server.bodies]
        assert {len(prompt) for prompt in prompts} == {5} and len(set(prompts)) == 8
        assert body == {
            "model": "scripted",
            "max_tokens": 3,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_k": 7,
        }
        detailed = run_json(capsys, "bench", "serve", *flags, "--save-detailed", "--endpoint", "/v1/chat/completions")
        assert server.heads[-1].startswith(b"POST /v1/chat/completions ")
        (message,) = server.bodies[-1]["messages"]
        assert message["role"] == "user" and message["content"]
        assert server.bodies[-1]["max_completion_tokens"] == 3
    assert VLLM_KEYS | {"commit", "hardware", "command", "versions"} < found.keys()
    assert (found["model_id"], found["tokenizer_id"], found["label"]) == ("scripted", "demo", "first")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (30, 18)
    assert found["request_rate"] == 100 and found["max_concurrency"] is None
    assert found["mean_itl_ms"] > 15 and found["mean_e2el_ms"] >= found["mean_ttft_ms"] + 15
    assert "TTFT" in text and "P99" in text and "Failed requests" in text and "{" not in text
    assert detailed["request_rate"] == "inf" and detailed.keys() > VLLM_KEYS | VLLM_DETAILS
    assert detailed["generated_texts"] == ["xyz"] * 6 and detailed["output_lens"] == [3] * 6


def test_failures_are_shown_and_the_exit_code_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    count = 0

    def script(body: dict[str, Any]) -> Script:
        nonlocal count
        count += 1
        return [b"HTTP/1.1 503 Later\r\n\r\nengine is dead"] if count in (3, 5) else _answer(body)

    with scripted(script) as server:
        flags = ["--base-url", server.url, "--num-prompts", "6", "--max-concurrency", "2"]
        found = run_json(capsys, "bench", "serve", *flags, code=1)
        count = 0
        table = run(capsys, "bench", "serve", *flags, code=1).splitlines()
    assert (found["completed"], found["failed"]) == (4, 2)
    assert found["error_counts"] == {"HTTP 503: engine is dead": 2}
    assert "2 failed: HTTP 503: engine is dead" in table


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"dataset_path='.*prompts\.jsonl': is not UTF-8 at byte 12; convert it"):
        read_requests(path, output_len=1)


def test_prompts_from_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 2}\n\n{"prompt": [1, 2]}\n{"prompt": "c", "output_len": 9}\n')
    flags = ["--dataset-name", "jsonl", "--dataset-path", str(path), "--output-len", "4"]
    with scripted(_answer) as server:
        address = ("--host", "127.0.0.1", "--port", server.url.rpartition(":")[2])
        found = run_json(capsys, "bench", "serve", *address, *flags, "--num-prompts", "2")
        sent = [(body["prompt"], body["max_tokens"], "ignore_eos" in body) for body in server.bodies]
        # The line that is not measured warms up; the end of sequence counts.
        assert sent == [("c", 9, False), ("a", 2, False), ([1, 2], 4, False)]
        assert found["num_prompts"] == 2 and found["tokenizer_id"] is None
        path.write_text('{"messages": [{"role": "user", "content": "q"}]}\n')
        run(capsys, "bench", "serve", "--base-url", server.url, *flags, "--endpoint", "/v1/chat/completions")
        assert server.bodies[-1]["messages"] == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--request-rate", "0"], "request_rate=0"),
        (["--burstiness", "-1"], "burstiness=-1"),
        (["--num-prompts", "0"], "num_prompts=0"),
        (["--max-concurrency", "0"], "max_concurrency=0"),
        (["--request-timeout", "nan"], "request_timeout=nan"),
        (["--endpoint", "/v1/messages"], "endpoint='/v1/messages'"),
        (["--endpoint", "/v1/chat/completions", "--prompt-format", "tokens"], "prompt_format='tokens'"),
        (["--dataset-name", "jsonl"], "dataset_path is required with dataset_name='jsonl'"),
        (["--dataset-path", "x"], "dataset_path="),
        (["--dataset-name", "trace"], "dataset_path is required with dataset_name='trace'"),
        (
            ["--dataset-name", "trace", "--dataset-path", "x.jsonl", "--request-rate", "2"],
            "request_rate=2.0: contradicts",
        ),
        (["--dataset-name", "trace", "--dataset-path", "x.txt"], "dataset_path='x.txt': must be a .jsonl file of"),
        (
            ["--dataset-name", "trace", "--dataset-path", "x.jsonl", "--endpoint", "/v1/chat/completions"],
            "dataset_name='trace': has prompts of token ids, for endpoint=/v1/completions alone",
        ),
        (["--extra-body", "[1]"], "extra_body='[1]'"),
        (["--input-len", "4090"], "max_model_len=4096"),
        (["--base-url", "nowhere"], "base_url='nowhere'"),
        (["--port", "0"], "port=0: must be a whole number from 1 to 65535"),
        (["--host", "http://127.0.0.1"], "host='http://127.0.0.1': must be a name or an address"),
        (["--base-url", "http://127.0.0.1:1", "--port", "9"], "contradicts http://127.0.0.1:9"),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_sent(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted(_answer) as server:
        url = [] if {"--base-url", "--host", "--port"} & set(flags) else ["--base-url", server.url]
        assert main(["bench", "serve", *url, *flags]) == 2
        assert server.bodies == []
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("phonograph: error: ") and problem in line


def test_a_trace_is_sent_at_its_times_with_equal_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, rows = tmp_path / "trace.jsonl", [(0, 520, 3, [7, 8]), (300, 20, 2, []), (600, 600, 1, [7, 9])]
    names = "timestamp", "input_length", "output_length", "hash_ids"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    with scripted(_answer) as server:
        flags = ["--base-url", server.url, "--dataset-name", "trace", "--dataset-path", str(path), "--json"]
        assert main(["bench", "serve", *flags, "--num-warmups", "0", "--save-detailed"]) == 0
        bodies = list(server.bodies)
    assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [(520, 3), (20, 2), (600, 1)]
    first, _, third = (body["prompt"] for body in bodies)
    assert first[:512] == third[:512] and first[512:] != third[512:520] and all(body["ignore_eos"] for body in bodies)
    facts = json.loads(capsys.readouterr().out)
    assert 0.5 < facts["duration"] < 5


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("", "no line with a prompt"),
        ("{", "line 1 is not JSON"),
        ('\n{"text": "a"}', "line 2 must be an object"),
        ('{"prompt": "a", "messages": [{}]}', "line 1 must be an object"),
        ('{"prompt": [1, "a"]}', "neither a text nor a list of token ids"),
        ('{"messages": ["a"]}', "nor a list of messages"),
        ('{"prompt": "a", "max_tokens": 0}', "wants 0 tokens"),
        ('{"messages": [{"role": "user"}]}', "takes no messages"),
        ('{"prompt": "a"}', "num_prompts=2"),
    ],
)
def test_a_file_that_cannot_be_used(
    lines: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    count = ["--num-prompts", "2"] if problem.startswith("num_prompts") else []
    with scripted(_answer) as server:
        flags = ["--base-url", server.url, "--dataset-name", "jsonl", "--dataset-path", str(path), *count]
        assert main(["bench", "serve", *flags]) == 2
        assert server.bodies == []
    assert problem in capsys.readouterr().err


def test_a_server_that_refuses_is_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = b'HTTP/1.1 400 Bad\r\n\r\n{"error": {"message": "ignore_eos is unknown"}}'
    with scripted(lambda _: [refusal]) as server:
        assert main(["bench", "serve", "--base-url", server.url]) == 2
        assert len(server.bodies) == 1
    assert "a request to warm up: HTTP 400: ignore_eos is unknown" in capsys.readouterr().err


def test_256_streams_cost_the_client_little() -> None:
    """Some 10 us a token on a quiet core; the bound leaves room for a busy one. `pytest -s` shows the figures.

    The client is a process of its own, whose time does not depend on what other tests left in this one. A machine
    that stands still for seconds adds to the processor's time too, so that the best of three runs counts.
    """
    script = Path(__file__).parents[2] / "benchmarks/client_cost.py"
    flags = ["--streams", "256", "--tokens", "20", "--step-ms", "20", "20", "20"]
    printed = subprocess.run([sys.executable, script, *flags], check=True, capture_output=True, text=True).stdout
    print(printed)
    runs = [json.loads(line) for line in printed.splitlines()]
    assert [found["tokens"] for found in runs] == [256 * 20] * 3
    # On a busy machine the server's steps take longer too.
    assert any(found["itl_p50_ms"] == pytest.approx(found["sent_p50_ms"], rel=0.25) for found in runs), printed
    assert min(found["receive_us"] for found in runs) < 100
