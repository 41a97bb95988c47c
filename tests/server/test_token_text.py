"""Single tokens as text and bytes, for tokenizers that write bytes in either of the usual ways."""

from __future__ import annotations

import pytest
from sentencepiece_like import sentencepiece_like

from phonograph.files.model_files import model_path
from phonograph.server.openai.completion_logprobs import CompletionLogprobs, TokenTexts
from phonograph.text.tokenizer import Tokenizer

TEXTS = ["Tom has 12 apples.", "é😀 ﷺ\n\tx", "  two  spaces ", "\ufffd?", "a", "👨‍👩‍👧"]


@pytest.fixture(params=["demo", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer.load(model_path("demo")) if request.param == "demo" else sentencepiece_like()


def logprobs_after(tokenizer: Tokenizer, prompt: list[int]) -> CompletionLogprobs:
    return CompletionLogprobs(TokenTexts(tokenizer), tokenizer, prompt, as_ids=False, skips_special=False)


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_make_up_the_text(tokenizer: Tokenizer, text: str) -> None:
    texts = TokenTexts(tokenizer)
    ids = tokenizer.encode(text)
    assert b"".join(map(texts.bytes, ids)).decode().removeprefix(" ") == text.removeprefix(" ")
    for token_id in ids:
        shown = texts.text(token_id)
        assert shown.encode() == texts.bytes(token_id) or shown.startswith("bytes:\\x")


def test_every_token_has_bytes_of_its_own(tokenizer: Tokenizer) -> None:
    texts = TokenTexts(tokenizer)
    single = {texts.bytes(token_id) for token_id in range(tokenizer._backend.get_vocab_size())}
    assert {bytes([byte]) for byte in range(0x80, 0x100)} - {
        b"\xc0",
        b"\xc1",
        *(bytes([b]) for b in range(0xF5, 256)),
    } <= single
    assert texts.text(10**6) == ""


def test_offsets_are_those_of_characters(tokenizer: Tokenizer) -> None:
    text = "To 😀m."
    ids = tokenizer.encode(text)
    block = logprobs_after(tokenizer, []).block(ids, [None] * len(ids), top=0)
    assert block["text_offset"][-1] == len(text) - 1
    assert block["text_offset"][0] == 0 and block["text_offset"] == sorted(block["text_offset"])


@pytest.mark.parametrize("written", [False, True])
def test_offsets_of_an_echo_find_its_tokens(tokenizer: Tokenizer, written: bool) -> None:
    """The special token is one that the tokenizer puts before the text, or one in the text."""
    special_id = min(tokenizer.special_token_ids)
    shown = tokenizer.decode([special_id], skip_special_tokens=False)
    text = "To 😀m."
    prompt = [special_id, *tokenizer.encode(text, add_special_tokens=False)]
    more = tokenizer.encode("a", add_special_tokens=False)[-1:]
    writer = logprobs_after(tokenizer, prompt)
    text = shown + text if written else text
    offsets = writer.echo(prompt, text, num_before=0)
    block = writer.block([*prompt, *more], [None] * (len(prompt) + 1), top=0, echoed=offsets)
    assert block["text_offset"][1] == (len(shown) if written else 0)
    assert block["text_offset"][-2:] == [len(text) - 1, len(text)]
    for token, offset in zip(block["tokens"][1:-1], offsets[1:], strict=True):
        begun = token.removeprefix(" ") if offset == offsets[1] else token
        assert token.startswith("bytes:") or text[offset:].startswith(begun), (token, offset)


def test_an_added_special_token_is_not_one_that_the_text_has(tokenizer: Tokenizer) -> None:
    """The client wrote the same special token once more."""
    special_id = min(tokenizer.special_token_ids)
    text = tokenizer.decode([special_id], skip_special_tokens=False) + "m"
    prompt = [special_id, *tokenizer.encode(text, add_special_tokens=False)]
    assert prompt[:2] == [special_id, special_id]
    writer = logprobs_after(tokenizer, prompt)
    offsets = writer.echo(prompt, text, num_before=1)
    assert offsets == [0, 0, *[len(text) - 1] * (len(prompt) - 2)]


def test_special_tokens_before_a_text_are_counted(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer.num_tokens_before == len(tokenizer.encode("")) == 0
    other = sentencepiece_like()
    plain = other.encode
    monkeypatch.setattr(
        other, "encode", lambda text, *, add_special_tokens=True: [1] * (2 * add_special_tokens) + plain(text)
    )
    assert other.num_tokens_before == 2
