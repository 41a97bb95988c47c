"""Incremental text is what the tokenizer's own decoder gives for the whole, for any tokens at all.

The decoder defines the text of an output: decode the prompt (what follows its last special token) with the output,
decode that prompt alone, and take what lies beyond the beginning that both have in common. Byte fallback is one
exception: the library makes U+FFFD of all bytes in a run with one broken byte, among them characters that a stream has
given out before the broken byte came. Here only the broken byte is U+FFFD.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from sentencepiece_like import sentencepiece_like
from tokenizers import decoders
from tokenizers_made import MAKERS

from phonograph.core.sampling_params import SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.server.openai.completion_logprobs import CompletionLogprobs, TokenTexts
from phonograph.text.detokenizer import TokenBytes
from phonograph.text.output_text import TextBuilder
from phonograph.text.tokenizer import Tokenizer

CASES = 150
"""Cases of each test and tokenizer; 20,000 by hand."""
BYTE = re.compile(r"<0x([0-9A-F]{2})>")
TEXTS = ["Tom has 12 apples.", "é😀 ﷺ\n\tx", "  two  spaces ", "a b ab.", "日本語", "👨‍👩‍👧", "<think>a</s>b"]
KINDS: dict[str, Callable[[], Tokenizer]] = {
    "demo": lambda: Tokenizer.load(MODEL_DIRECTORY),
    "sentencepiece": sentencepiece_like,
    **MAKERS,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return made(request.param)


@cache
def made(kind: str) -> Tokenizer:
    return KINDS[kind]()


def pieces(tokenizer: Tokenizer, token_ids: Sequence[int], *, skip: bool) -> list[str]:
    special = tokenizer.special_token_ids if skip else ()
    found = [tokenizer.piece(token_id) for token_id in token_ids if token_id not in special]
    return [piece for piece in found if piece is not None]


def mended(written: list[str]) -> list[str]:
    """Return the pieces with U+FFFD for each byte that belongs to no character of its run of bytes."""
    found: list[str] = []
    run: list[str] = []
    for piece in [*written, None]:
        if piece is not None and BYTE.fullmatch(piece):
            run.append(piece)
            continue
        while run:
            data = bytes(int(BYTE.fullmatch(one)[1], 16) for one in run[:4])  # pyright: ignore[reportOptionalSubscript]
            sizes = [size for size in range(1, len(data) + 1) if is_utf8(data[:size])]
            found += run[: sizes[0]] if sizes else ["\ufffd"]
            del run[: sizes[0] if sizes else 1]
        found += [] if piece is None else [piece]
    return found


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def decode(tokenizer: Tokenizer, written: list[str]) -> str:
    decoder = tokenizer._backend.decoder
    if "ByteFallback" in repr(decoder):
        written = mended(written)
    return " ".join(written) if decoder is None else decoder.decode(written)


def continuation(tokenizer: Tokenizer, prompt: list[int], output: list[int], *, skip: bool) -> str:
    ends = [place for place, token_id in enumerate(prompt) if token_id in tokenizer.special_token_ids]
    before = pieces(tokenizer, prompt[ends[-1] + 1 :] if ends else prompt, skip=skip)
    after = pieces(tokenizer, output, skip=skip)
    text, whole = decode(tokenizer, before), decode(tokenizer, before + after)
    if "ByteFallback" not in repr(tokenizer._backend.decoder) or mended(before + after) == before + after:
        ids = [*(prompt[ends[-1] + 1 :] if ends else prompt), *output]
        known = [token_id for token_id in ids if tokenizer.piece(token_id) is not None]
        assert whole == tokenizer.hugging_face.decode(
            known, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
    shared = os.path.commonprefix((text, whole))  # noqa: RUF071 - texts, not paths
    return whole[len(shared) :] if before else whole


def draw(tokenizer: Tokenizer, rng: random.Random, most: int) -> list[int]:
    """Tokens of any kind in any order, or of a text of which some are lost, doubled or others."""
    count, size = rng.randint(0, most), tokenizer.vocab_size
    special = sorted(tokenizer.special_token_ids)
    low = [token_id for token_id in range(min(size, 400)) if token_id not in special]
    if rng.random() < 0.4:
        token_ids = tokenizer.encode(rng.choice(TEXTS) + rng.choice(TEXTS), add_special_tokens=False)
        for _ in range(rng.randint(0, 3)):
            place = rng.randrange(len(token_ids) + 1)
            token_ids[place : place + rng.randint(0, 2)] = rng.choices(low, k=rng.randint(0, 2))
        return token_ids[: max(count, 1)]
    kinds = [low, range(size), special, [size + 7], [token_id for token_id in low if token_id >= 0x80] or low]
    weights = [rng.random() ** 2 for _ in kinds]
    return [rng.choice(kind) for kind in rng.choices(kinds, weights, k=count)]


def cases(tokenizer: Tokenizer, seed: int) -> Any:
    rng = random.Random(seed)
    for _ in range(CASES):
        prompt, output = draw(tokenizer, rng, 6), draw(tokenizer, rng, 14)
        yield rng, prompt, output, rng.random() < 0.5


def test_pieces_of_text_make_up_the_decoded_text(tokenizer: Tokenizer) -> None:
    for _, prompt, output, skip in cases(tokenizer, 1):
        stream = tokenizer.stream(skip_special_tokens=skip, after=prompt)
        shown = "".join(map(stream.push, output)) + stream.finish()
        assert shown == continuation(tokenizer, prompt, output, skip=skip), (prompt, output, skip)


def test_text_does_not_depend_on_how_many_tokens_come_at_once(tokenizer: Tokenizer) -> None:
    for rng, prompt, output, skip in cases(tokenizer, 2):
        whole = continuation(tokenizer, prompt, output, skip=skip)
        start = rng.randrange(len(whole) + 1)
        stop = [whole[start : start + rng.randint(1, 3)] or "a"] if rng.random() < 0.6 else []
        params = SamplingParams(
            skip_special_tokens=skip,
            stop=stop,
            min_tokens=rng.choice([0, 0, 3]),
            include_stop_str_in_output=rng.random() < 0.3,
        )
        results = []
        for chunked in (False, True):
            builder, count, shown = TextBuilder(tokenizer, params, prompt), 0, ""
            while count < len(output) and builder.stopped is None:
                count = min(len(output), count + (rng.randint(1, 5) if chunked else 1))
                builder.push(output[:count])
                assert builder.text.startswith(shown), "nothing shown is taken back"
                shown = builder.text
            builder.finish()
            assert builder.text.startswith(shown)
            results.append((builder.text, builder.stopped))
        assert results[0] == results[1], (prompt, output, params)
        text, stopped = results[0]
        if stopped is None:
            assert text == whole
            assert params.min_tokens or not any(one in whole for one in stop)
        else:
            ended = text if params.include_stop_str_in_output else text + stopped
            assert whole.startswith(ended) and ended.endswith(stopped)
            assert params.min_tokens or stopped not in ended[:-1]


def test_texts_and_offsets_of_logprobs_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    for rng, prompt, output, skip in cases(tokenizer, 3):
        writer = CompletionLogprobs(texts, tokenizer, prompt, as_ids=False, skips_special=skip)
        cut = rng.randint(0, len(output))
        blocks = [writer.block(part, [None] * len(part), top=0) for part in (output[:cut], output[cut:])]
        offsets = [offset for block in blocks for offset in block["text_offset"]]
        stream, length = tokenizer.stream(skip_special_tokens=skip, after=prompt), 0
        for token_id, offset in zip(output, offsets, strict=True):
            assert offset == length
            length += len(stream.push(token_id))
        for token_id in output:
            shown, data = texts.text(token_id), texts.bytes(token_id)
            assert shown.encode() == data or (shown.startswith("bytes:\\x") and not is_utf8(data))


# Where a token has its space depends on the token before in word_ends.
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"word_ends"}))
def test_bytes_of_logprobs_make_up_the_text(kind: str) -> None:
    tokenizer = made(kind)
    texts = TokenTexts(tokenizer)
    before = tokenizer.encode("a", add_special_tokens=False)[-1:]
    for _, _, output, skip in cases(tokenizer, 4):
        hidden = tokenizer.special_token_ids if skip else ()
        data = b"".join(texts.bytes(token_id) for token_id in output if token_id not in hidden)
        whole = continuation(tokenizer, before, output, skip=skip)
        if is_utf8(data):
            assert data.decode() == whole
        else:
            assert data.decode("utf-8", "replace").count("\ufffd") <= whole.count("\ufffd")


@pytest.mark.parametrize("kind", ["demo", "sentencepiece", "byte_level", "byte_fallback", "byte_fallback_unstripped"])
def test_thousands_of_lone_bytes_are_text(kind: str) -> None:
    tokenizer = made(kind)
    lone = next(one for one in range(tokenizer.vocab_size) if tokenizer.token_bytes.next(one) == b"\x80")
    stream = tokenizer.stream(skip_special_tokens=True)
    shown = [stream.push(lone) for _ in range(6000)]
    assert "".join(shown) + stream.finish() == "\ufffd" * 6000
    assert all(shown), "nothing waits for what cannot complete it"


@pytest.mark.parametrize(
    ("parts", "local"),
    [
        ([decoders.Fuse(), decoders.Strip(" ", 1, 0)], True),
        ([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)], True),
        ([decoders.Strip(" ", 0, 1), decoders.Fuse()], True),
        ([decoders.Replace("_", " "), decoders.Fuse(), decoders.Fuse()], True),
        # What ends the text so far is not stripped once more follows.
        ([decoders.Fuse(), decoders.Strip(" ", 0, 1)], False),
        ([decoders.ByteLevel(), decoders.Strip(" ", 1, 1)], False),
        # A replacement may take the end of a token with the beginning of the next one.
        ([decoders.Fuse(), decoders.Replace("_", " ")], False),
        ([decoders.Fuse(), decoders.ByteFallback()], False),
        ([decoders.BPEDecoder("</w>")], False),
        ([], True),
    ],
)
def test_decoders_whose_tokens_do_not_depend_on_their_neighbours(parts: list[Any], local: bool) -> None:
    backend = SimpleNamespace(decoder=decoders.Sequence(parts) if parts else None)
    assert TokenBytes(backend)._is_local is local
