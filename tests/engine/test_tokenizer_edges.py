"""Special tokens, templates and folders of tokenizers, at their edges."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sentencepiece_like import END, sentencepiece_like
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.normalizers import NFC
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from phonograph import LLM, SamplingParams, StructuredOutputs
from phonograph.config.engine_config import EngineConfig
from phonograph.demo import MODEL_DIRECTORY
from phonograph.engine.admission import admitted_token_ids
from phonograph.errors import ModelError, RequestError
from phonograph.text import tokenizer as tokenizer_module
from phonograph.text.light_tokenizer import LightTokenizer
from phonograph.text.texts_ahead import TextsAhead
from phonograph.text.tokenizer import Tokenizer, load_tokenizer


def of_demo() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(MODEL_DIRECTORY)


def test_added_tokens_that_are_not_special_stay_in_the_text() -> None:
    theirs = of_demo()
    theirs.add_tokens([AddedToken("<think>", special=False)])
    ours = Tokenizer(theirs)
    (token_id,) = ours.encode("<think>", add_special_tokens=False)
    assert token_id not in ours.special_token_ids and ours.eos_token_id in ours.special_token_ids


def test_the_vocabulary_ends_behind_its_last_token() -> None:
    tokenizer = Tokenizer(of_demo())
    assert tokenizer.piece(tokenizer.vocab_size - 1) is not None and tokenizer.piece(tokenizer.vocab_size) is None


def test_special_tokens_are_added_where_they_are_wanted() -> None:
    theirs = of_demo()
    eos = theirs.eos_token
    theirs.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{eos} $A", special_tokens=[(eos, theirs.eos_token_id)]
    )
    ours = Tokenizer(theirs)
    assert ours.encode("a b") == [ours.eos_token_id, *ours.encode("a b", add_special_tokens=False)]


def test_a_template_of_the_request_needs_none_of_the_model() -> None:
    theirs = of_demo()
    theirs.chat_template = None
    ours = Tokenizer(theirs)
    assert ours.encode_chat([{"role": "user", "content": "a"}], template="{{ messages[0].content }}") == ours.encode(
        "a"
    )


@pytest.mark.parametrize("skip", [True, False])
def test_a_stream_behind_a_special_token_begins_a_text(skip: bool) -> None:
    tokenizer = sentencepiece_like()
    prompt, answer = tokenizer.encode("To" + END), tokenizer.encode("a Tom.")
    stream = tokenizer.stream(skip_special_tokens=skip, after=prompt)
    assert "".join(map(stream.push, answer)) == "a Tom."


def test_booleans_are_no_token_ids() -> None:
    with pytest.raises(RequestError, match="prompt=True: must be text or a list of integers"):
        admitted_token_ids([5, True], 100)


def test_a_tokenizer_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_tokenizer(EngineConfig(model="demo", tokenizer=str(tmp_path)))


def test_the_tokenizer_that_was_named_is_loaded_at_its_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load_tokenizer(EngineConfig(model=str(tmp_path), tokenizer="demo")) is not None
    asked: list[Any] = []
    monkeypatch.setattr(Tokenizer, "load", lambda *args, **options: asked.append((*args, options)))
    load_tokenizer(EngineConfig(model="a/b", revision="v2", trust_remote_code=True))
    load_tokenizer(EngineConfig(model="a/b", revision="v2", tokenizer_revision="v3", download_dir="/models"))
    assert asked == [
        ("a/b", {"trust_remote_code": True, "revision": "v2", "download_dir": None}),
        ("a/b", {"trust_remote_code": False, "revision": "v3", "download_dir": "/models"}),
    ]
    asked.clear()
    load_tokenizer(EngineConfig(model="a/b", revision="v2", tokenizer="a/b"))
    load_tokenizer(EngineConfig(model="a/b", revision="v2", tokenizer="c/d"))
    load_tokenizer(EngineConfig(model="a/b", revision="v2", tokenizer="c/d", tokenizer_revision="v3"))
    assert [(name, options["revision"]) for name, options in asked] == [("a/b", "v2"), ("c/d", None), ("c/d", "v3")]


def test_the_tokenizer_of_a_file_on_the_hub_is_in_that_file(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def path_of(model: str, **options: Any) -> Path:
        asked.append((model, options))
        return Path("/models/m.gguf")

    monkeypatch.setattr(tokenizer_module, "model_path", path_of)
    monkeypatch.setattr(Tokenizer, "load", lambda source, **options: source)
    config = EngineConfig(model="a/b:Q4_0", revision="v2", download_dir="/models")
    assert load_tokenizer(config) == Path("/models/m.gguf")
    load_tokenizer(EngineConfig(model="c/d", revision="v1", tokenizer="a/b:Q4_0", tokenizer_revision="v3"))
    load_tokenizer(EngineConfig(model="c/d", revision="v1", tokenizer="a/b:Q4_0"))
    assert asked == [
        ("a/b:Q4_0", {"revision": "v2", "download_dir": "/models"}),
        ("a/b:Q4_0", {"revision": "v3", "download_dir": None}),
        ("a/b:Q4_0", {"revision": None, "download_dir": None}),
    ]


def test_no_text_has_more_characters_than_its_tokens_can_have() -> None:
    tokenizer, rng = Tokenizer(of_demo()), random.Random(5)
    each = tokenizer.max_token_characters
    assert each is not None
    longest = max((tokenizer.piece(token_id) or "" for token_id in range(tokenizer.vocab_size)), key=len)
    for _ in range(50):
        text = "".join(rng.choice(("a", " ", "\n", "é", "😀", "apples", longest, "<|user|>")) for _ in range(40))
        assert len(text) <= each * len(tokenizer.encode(text))
    assert len(tokenizer.encode(longest * 5)) <= 5, "the bound is one that a text reaches"
    composing = of_demo()
    composing.backend_tokenizer.normalizer = NFC()
    text = "e\u0301" * 20
    assert Tokenizer(composing).max_token_characters == 4 * each
    assert len(text) <= 4 * each * len(Tokenizer(composing).encode(text))


def test_tokens_that_stand_for_any_unknown_text_bound_nothing() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Backend(WordLevel({"a": 0, "?": 1}, unk_token="?")))
    assert Tokenizer(words).max_token_characters is None
    assert len(Tokenizer(words).encode("b" * 10_000)) == 1


def test_long_lists_of_tokens_decode_as_short_ones() -> None:
    tokenizer, rng = Tokenizer(of_demo()), random.Random(6)
    token_ids = [rng.randrange(tokenizer.vocab_size) for _ in range(9000)]
    for skip in (True, False):
        expected = tokenizer.hugging_face.decode(token_ids, skip_special_tokens=skip)
        assert tokenizer.decode(token_ids, skip_special_tokens=skip) == expected


def test_a_chat_is_encoded_as_transformers_encodes_it() -> None:
    theirs = of_demo()
    chat = [{"role": "user", "content": "Tom has 3 apples. <|assistant|>\n"}, {"role": "assistant", "content": " é"}]
    for options in ({"add_generation_prompt": True}, {"continue_final_message": True, "add_generation_prompt": False}):
        expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=True, **options)["input_ids"]
        assert Tokenizer(theirs).encode_chat(chat, **options) == list(expected)


@pytest.mark.parametrize("light", [False, True])
def test_texts_that_are_tokenized_ahead_have_the_same_tokens(light: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = sentencepiece_like().hugging_face
    backend = theirs.backend_tokenizer
    backend.post_processor = TemplateProcessing(f"{END} $A", special_tokens=[(END, backend.token_to_id(END))])
    tokenizer = Tokenizer(LightTokenizer(backend, {}, None) if light else theirs)
    texts = ["Tom has 3 apples.", "", "é  b", "a" * 300, "Tom has 3 apples."]
    expected = [tokenizer.encode(text) for text in texts]
    cut = [tokenizer.encode_cut(text, most=7) for text in texts[1:4]]
    tokenizer.encode_ahead(texts)
    assert [tokenizer.encode(text, add_special_tokens=False) for text in texts[:1]] != expected[:1]
    assert [tokenizer.encode(text) for text in texts] == expected
    for most, found in ((7, cut), (None, expected[1:4])):
        tokenizer.encode_ahead(texts)
        assert [tokenizer.encode_cut(text, most=most) for text in texts[1:4]] == found
    tokenizer.encode_ahead(texts)
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "_tokenizer", None)
        assert [tokenizer.encode(text) for text in texts[:4]] == expected[:4]
    tokenizer.encode_ahead(["Tom", "half \ud83d of a pair"])
    assert tokenizer.encode("Tom") == Tokenizer(theirs).encode("Tom")
    with pytest.raises(RequestError, match="valid Unicode"):
        tokenizer.encode("half \ud83d of a pair")


def test_tokens_ahead_are_those_of_the_thread_and_of_the_class() -> None:
    class Shouting(PreTrainedTokenizerFast):
        def __call__(self, text: Any, *args: Any, **options: Any) -> Any:
            shouted = text.upper() if isinstance(text, str) else [one.upper() for one in text]
            return super().__call__(shouted, *args, **options)

    shouting = Tokenizer(Shouting(tokenizer_object=of_demo().backend_tokenizer))
    expected = shouting.encode("Tom has 3 apples.")
    shouting.encode_ahead(["Tom has 3 apples.", "1"])
    assert shouting.encode("Tom has 3 apples.") == expected != Tokenizer(of_demo()).encode("Tom has 3 apples.")
    ahead = TextsAhead(of_demo())
    ahead.encode(["1", "2"])
    with ThreadPoolExecutor(1) as thread:
        thread.submit(ahead.encode, ["3"]).result()
        assert thread.submit(ahead.take, "1").result() is None
    assert ahead.take("3") is None and ahead.take("2") == Tokenizer(of_demo()).encode("2") and ahead.take("2") is None


def test_one_call_tokenizes_its_texts_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order; what cannot be served has its error."""
    with LLM("demo", max_num_seqs=2, enforce_eager=True) as llm:
        assert llm.tokenizer is not None
        ahead, calls = llm.tokenizer.encode_ahead, list[list[str]]()
        monkeypatch.setattr(llm.tokenizer, "encode_ahead", lambda texts: (calls.append(texts), ahead(texts)))
        texts = [f"{number} apples" for number in range(70)]
        prompts = [texts[0], [5, 6, 7], "", *texts[1:]]
        params = SamplingParams(max_tokens=1, temperature=0.0)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert calls == [[texts[0], "", *texts[1:62]], texts[62:]]
        assert [output.prompt for output in outputs] == [texts[0], None, "", *texts[1:]]
        assert [output.error is None for output in outputs] == [True, True, False, *[True] * 69]
        alone = [llm.generate(text, params, use_tqdm=False)[0] for text in texts[:3]]
        assert len(calls) == 2
        assert [one.prompt_token_ids for one in alone] == [outputs[i].prompt_token_ids for i in (0, 3, 4)]


def test_libraries_get_a_tokenizer_of_transformers() -> None:
    """Whatever the engine itself uses."""
    theirs = of_demo()
    assert Tokenizer(theirs).hugging_face is theirs
    light = LightTokenizer(theirs.backend_tokenizer, {"eos_token": theirs.eos_token}, theirs.chat_template)
    found = Tokenizer(light).hugging_face
    assert isinstance(found, PreTrainedTokenizerFast) and found.eos_token_id == theirs.eos_token_id
    assert found.chat_template == theirs.chat_template and Tokenizer(light).hugging_face is found


@pytest.mark.parametrize("count", [8192, 8193])
@pytest.mark.parametrize("skip", [True, False])
def test_long_outputs_are_decoded_as_short_ones_are(count: int, skip: bool) -> None:
    tokenizer = Tokenizer(of_demo())
    text = tokenizer.encode("Tom has 12 apples. ", add_special_tokens=False)
    token_ids = [*(text * count)[: count - 1], tokenizer.eos_token_id]
    wanted = tokenizer.hugging_face.decode(token_ids, skip_special_tokens=skip)
    assert tokenizer.decode(token_ids, skip_special_tokens=skip) == wanted


def test_without_its_tokenizer_a_model_takes_token_ids(capsys: pytest.CaptureFixture[str]) -> None:
    from phonograph.cli.app import main

    with LLM("demo", skip_tokenizer_init=True, max_model_len=64, max_num_seqs=2, enforce_eager=True) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 4 and not output.outputs[0].text
        with pytest.raises(RequestError, match="without a tokenizer"):
            llm.generate("a")
        with pytest.raises(RequestError, match="needs the model's tokenizer"):
            llm.generate([[5]], SamplingParams(structured_outputs=StructuredOutputs(regex="a")))
    assert main(["serve", "demo", "--skip-tokenizer-init"]) == 2
    assert "skip_tokenizer_init=True: a server needs the tokenizer" in capsys.readouterr().err
