"""Tokenizers of GGUF files: the tokens of the tokenizer that the header was written from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest
from gguf_files import tokenizer_header, write_gguf
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, trainers

from phonograph import LLM, SamplingParams
from phonograph.demo import MODEL_DIRECTORY
from phonograph.errors import ModelError, RequestError
from phonograph.text.gguf_tokenizer import make_gguf_tokenizer
from phonograph.text.tokenizer import Tokenizer

TEXTS = ["Tom has 12 apples; isn't it?", "  two  spaces\n\n\tand tabs ", "h\u00e9llo \u65e5\u672c \U0001f642", ""]
SPACE = "\u2581"


def write_header(path: Path, header: dict[str, Any]) -> Path:
    """Write a file without tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in header.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
        add[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def header() -> dict[str, Any]:
    return tokenizer_header(MODEL_DIRECTORY, "smollm")


def test_the_demo_model_as_a_gguf_file(header: dict[str, Any], tmp_path: Path) -> None:
    """It answers a chat in F32 as from its folder; its template and its end come from the header."""
    write_gguf(tmp_path / "demo.gguf", MODEL_DIRECTORY, lambda name: "F32", header=header)
    question = [{"role": "user", "content": "Tom has 12 apples and buys 7 more. How many apples does Tom have?"}]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    settings: dict[str, Any] = {"max_num_seqs": 1, "max_model_len": 128, "enforce_eager": True, "device": "cpu"}
    answers = [
        LLM(model=model, **settings).chat(question, sampling_params=params)[0]
        for model in ("demo", str(tmp_path / "demo.gguf"))
    ]
    assert answers[0].prompt_token_ids == answers[1].prompt_token_ids
    assert answers[0].outputs[0].text == answers[1].outputs[0].text
    assert answers[0].outputs[0].finish_reason == answers[1].outputs[0].finish_reason


def test_byte_level_tokens(header: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = Tokenizer.load(write_header(tmp_path / "a.gguf", header)), Tokenizer.load(MODEL_DIRECTORY)
    for text in (*TEXTS, "<|user|>Hi<|end|>"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), skip_special_tokens=False) == text
    assert ours.special_token_ids == theirs.special_token_ids
    begins = Tokenizer.load(write_header(tmp_path / "b.gguf", {**header, "tokenizer.ggml.add_bos_token": True}))
    assert begins.encode("Tom") == [begins.bos_token_id, *ours.encode("Tom")]
    assert begins.encode_chat([{"role": "user", "content": "a"}]) == ours.encode_chat(
        [{"role": "user", "content": "a"}]
    )


TEMPLATES = [
    None,
    "{{ bos_token }}{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
    "{% if tools is not none %}{{ tools | tojson(indent=1) }}{% endif %}{{ documents is none }}{{ unk_token }}",
    "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}\n",
    "{{ strftime_now('%Y') }}{{ eos_token }}{{ colour or 'plain' }}{% if add_generation_prompt %}>{% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False, "variables": {"colour": "red"}},
        {"tools": [{"type": "function", "function": {"name": "f<>"}}]},
        {"tools": []},
        {"add_generation_prompt": False, "continue_final_message": True},
    ],
)
def test_chats_are_those_of_transformers(
    template: str | None, options: dict[str, Any], header: dict[str, Any], tmp_path: Path
) -> None:
    ours = Tokenizer.load(write_header(tmp_path / "a.gguf", header))
    chat = [{"role": role, "content": f" {role} says <b>é</b>"} for role in ("system", "user", "assistant", "user")]

    def rendered(tokenizer: Tokenizer) -> str | RequestError:
        try:
            return tokenizer.render_chat(chat, template=template, **options)
        except RequestError as error:
            return error

    got, expected = rendered(ours), rendered(Tokenizer(ours.hugging_face))
    assert str(got) == str(expected)


def test_a_template_that_refuses_and_one_that_reaches_out(header: dict[str, Any], tmp_path: Path) -> None:
    ours = Tokenizer.load(write_header(tmp_path / "a.gguf", header))
    chat = [{"role": "user", "content": "a"}]
    for template, words in (
        ("{{ raise_exception('no such role') }}", "no such role"),
        ("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}", "unsafe"),
        ("{% for %}", "the chat template rejects them"),
    ):
        with pytest.raises(RequestError, match=words):
            ours.render_chat(chat, template=template)


def test_special_tokens_are_those_of_transformers(header: dict[str, Any], tmp_path: Path) -> None:
    """The header may name a special token that its types call normal."""
    types = [1] * len(header["tokenizer.ggml.tokens"])
    normal = {**header, "tokenizer.ggml.token_type": types, "tokenizer.ggml.padding_token_id": 300}
    for number, one in enumerate((header, normal)):
        ours = Tokenizer.load(write_header(tmp_path / f"{number}.gguf", one))
        theirs = Tokenizer(ours.hugging_face)
        assert ours.special_token_ids == theirs.special_token_ids and ours.vocab_size == theirs.vocab_size
        assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
        assert ours.eos_token_id is not None and ours.chat_template == theirs.chat_template
        named = [header["tokenizer.ggml.tokens"][token] for token in sorted(ours.special_token_ids)]
        for text in (*TEXTS, " ".join(named), "".join(named) + "a"):
            for special in (True, False):
                token_ids = ours.encode(text, add_special_tokens=special)
                assert token_ids == theirs.encode(text, add_special_tokens=special)
                for skip in (True, False):
                    expected = theirs.decode(token_ids, skip_special_tokens=skip)
                    assert ours.decode(token_ids, skip_special_tokens=skip) == expected
        with pytest.raises(RequestError, match="not valid Unicode"):
            ours.encode("\ud83d")


def test_a_chat_with_a_gguf_file_imports_no_transformers(header: dict[str, Any], tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from phonograph.text.tokenizer import Tokenizer\n"
        "tokenizer = Tokenizer.load(sys.argv[1])\n"
        "tokenizer.decode(tokenizer.encode_chat([{'role': 'user', 'content': 'a'}]))\n"
        "assert 'transformers' not in sys.modules"
    )
    path = write_header(tmp_path / "a.gguf", header)
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokens(prefix: bool, tmp_path: Path) -> None:
    """Merges follow from the scores; characters without a token become bytes."""
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    theirs = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    theirs.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    corpus = ["Tom has 12 apples and buys 7 more apples", "How many apples does Tom have? Tom has many, many more"]
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=[*special, *pieces], show_progress=False)
    theirs.train_from_iterator(corpus * 5, trainer)
    theirs.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    vocabulary = theirs.get_vocab()
    texts = sorted(vocabulary, key=vocabulary.__getitem__)
    header = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [-float(token) for token in range(len(texts))],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * (len(texts) - 259)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    ours = Tokenizer.load(write_header(tmp_path / "a.gguf", header))
    for text in (*corpus, *TEXTS):
        # Special tokens are bytes of the text to the trained tokenizer's model too, so that only it may merge them.
        assert ours.encode(text) == [1, *theirs.encode(text).ids]
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("a</s>")[-1] == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "t5"}, "'t5' is not supported; supported are gpt2, llama.*--tokenizer"),
        ({"pre": "chatglm-bpe"}, "'chatglm-bpe' is a splitting into words that is not supported; supported are llama"),
        ({"tokens": [1, 2]}, "no list of str named tokenizer.ggml.tokens"),
        ({"token_type": [1, 1]}, "token_type has 2 items for 2048 tokens"),
        ({"merges": ["no such"]}, "merges joins .'no', 'such'."),
        ({"model": "llama"}, "no list of float named tokenizer.ggml.scores"),
    ],
)
def test_damaged_headers(changes: dict[str, Any], words: str, header: dict[str, Any], tmp_path: Path) -> None:
    changed = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    with pytest.raises(ModelError, match=words):
        Tokenizer.load(write_header(tmp_path / "a.gguf", {**header, **changed}))


def test_without_a_tokenizer(tmp_path: Path) -> None:
    """The engine takes token ids, and says for a text that there is no tokenizer."""
    path = tmp_path / "a.gguf"
    write_gguf(path, MODEL_DIRECTORY, lambda name: "Q8_0" if "layers" in name else "F16")
    llm = LLM(model=str(path), max_num_seqs=1, max_model_len=64, enforce_eager=True, device="cpu")
    assert llm.tokenizer is None
    with pytest.raises(ModelError, match="no list of str named tokenizer.ggml.tokens.*--tokenizer"):
        Tokenizer.load(path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("llama-bpe", "llama3", "llama-v3"), ["It", "'s", " ", "123", "45", " cafe", "\u0301\n\n", " ", " ok"]),
        (("qwen2", "deepseek-r1-qwen"), ["It", "'s", " ", "1", "2", "3", "4", "5", " caf\u00e9", "\n\n", " ", " ok"]),
        (("smollm", "starcoder"), ["It", "'s", " ", "1", "2", "3", "4", "5", " cafe", "\u0301", "\n\n ", " ok"]),
        (("gpt-2",), ["It", "'s", " 12345", " cafe", "\u0301", "\n\n ", " ok"]),
        (("tekken",), ["It", "'s", " ", "1", "2", "3", "4", "5", " cafe\u0301", "\n\n", " ", " ok"]),
        (("gpt-4o",), ["It's", " ", "123", "45", " cafe\u0301", "\n\n", " ", " ok"]),
    ],
)
def test_splittings_into_words(
    names: tuple[str, ...], words: list[str], header: dict[str, Any], tmp_path: Path
) -> None:
    for name in names:
        named = {**header, "tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": False}
        backend: Any = Tokenizer.load(write_header(tmp_path / f"{name}.gguf", named)).hugging_face.backend_tokenizer
        text = "It's 12345 cafe\u0301\n\n  ok"
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        assert [decoders.ByteLevel().decode([piece]) for piece in pieces] == words


def test_lists_of_mixed_types_are_refused() -> None:
    for tokens in (["a", 1], [1, "a"], "a"):
        values = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
        file: Any = SimpleNamespace(path="a.gguf", values=values)
        with pytest.raises(ModelError, match="no list of str named tokenizer.ggml.tokens"):
            make_gguf_tokenizer(file)
