"""Tokenizer of a GGUF file, built from its header: byte-level BPE ("gpt2") and SentencePiece's BPE ("llama").

The header names its splitting into words by a word of llama.cpp's (`tokenizer.ggml.pre`). A word that is not known here
is rejected, since another splitting would give other tokens in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from phonograph.errors import ModelError, shortened
from phonograph.files.gguf_file import GgufFile
from phonograph.text.light_tokenizer import LightTokenizer

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
"""Types of tokens in `tokenizer.ggml.token_type`."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s|\p{N}{1,%(digits)d}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED_WORDS % {"end": "", "digits": 1}
_O200K = _CASED_WORDS % {"end": "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": 3}


class _Splitting(NamedTuple):
    """Splitting into words.

    Attributes:
        pattern: words; empty for those of GPT-2.
        digits: each digit is a word.
        composes: text is brought into Unicode's form NFC.
        whole_words: a word that is a token is not built from merges.
        bos: a text begins with the bos token if the header does not say it.
    """

    pattern: str = ""
    digits: bool = False
    composes: bool = False
    whole_words: bool = False
    bos: bool = False


_LLAMA3 = _Splitting(_WORDS % 3, whole_words=True, bos=True)
_QWEN2 = _Splitting(_WORDS % 1, composes=True)
_SPLITTINGS: Mapping[str, _Splitting] = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("smollm", "starcoder"), _Splitting(digits=True)),
    "gpt-2": _Splitting(),
    "tekken": _Splitting(_TEKKEN, whole_words=True, bos=True),
    "gpt-4o": _Splitting(_O200K, whole_words=True),
}


def has_gguf_tokenizer(file: GgufFile) -> bool:
    """Return False if the header has no tokenizer."""
    return file.values.get("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def make_gguf_tokenizer(file: GgufFile) -> LightTokenizer:
    """Return the file's tokenizer with its chat template.

    Raises:
        ModelError: a key is missing or has the wrong type, or the tokenizer is of a kind that is not supported.
    """
    header = _Header(file)
    kind = file.values.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise header.error(f"tokenizer.ggml.model={shortened(repr(kind))} is not supported; supported are gpt2, llama")
    tokenizer, bos = _byte_level(header) if kind == "gpt2" else _sentencepiece(header)
    tokenizer.add_tokens(header.added(_USER_DEFINED))
    tokenizer.add_special_tokens(header.added(_CONTROL))
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    special = {name: header.special(key) for name, key in names.items()}
    named = dict.fromkeys(text for text in special.values() if text is not None)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in named])
    _frame(tokenizer, header, special, bos)
    template = file.values.get("tokenizer.chat_template")
    texts = {f"{name}_token": text for name, text in special.items() if text is not None}
    return LightTokenizer(tokenizer, texts, template if isinstance(template, str) else None)


class _Header:
    """The tokenizer's keys."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.tokens: list[str] = self.items("tokens", str, None)
        types = self._file.values.get("tokenizer.ggml.token_type")
        count = len(self.tokens)
        self.types: list[int] = [_NORMAL] * count if types is None else self.items("token_type", int, count)

    def error(self, problem: str) -> ModelError:
        return ModelError(f"{self._file.path}: {problem}; give another tokenizer with --tokenizer, or pass token ids")

    def items(self, name: str, kind: type, count: int | None) -> list[Any]:
        key = f"tokenizer.ggml.{name}"
        value = self._file.values.get(key)
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise self.error(f"the header has no list of {kind.__name__} named {key}")
        if count not in (None, len(value)):
            raise self.error(f"{key} has {len(value)} items for {count} tokens")
        return value

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._file.values.get(f"tokenizer.ggml.{name}", default))

    def special(self, name: str) -> str | None:
        """Return the text of a token that the header names by its id."""
        token_id = self._file.values.get(f"tokenizer.ggml.{name}_token_id")
        return self.tokens[token_id] if type(token_id) is int and 0 <= token_id < len(self.tokens) else None

    def splitting(self) -> _Splitting:
        name = self._file.values.get("tokenizer.ggml.pre")
        if not isinstance(name, str) or name not in _SPLITTINGS:
            raise self.error(
                f"tokenizer.ggml.pre={shortened(repr(name))} is a splitting into words that is not supported; "
                f"supported are {', '.join(_SPLITTINGS)}"
            )
        return _SPLITTINGS[name]

    def added(self, kind: int) -> list[AddedToken]:
        """Return the tokens of a type, which are found in a text before it is split."""
        pairs = zip(self.tokens, self.types, strict=True)
        return [AddedToken(text, normalized=False, special=kind == _CONTROL) for text, own in pairs if own == kind]


def _byte_level(header: _Header) -> tuple[Tokenizer, bool]:
    splitting = header.splitting()
    merges: list[tuple[str, str]] = []
    for line in header.items("merges", str, None):
        left, _, right = line.partition(" ")
        merges.append((left, right))
    vocabulary = {text: token for token, text in enumerate(header.tokens)}
    missing = next((pair for pair in merges if not vocabulary.keys() >= {*pair, "".join(pair)}), None)
    if missing is not None:
        raise header.error(f"tokenizer.ggml.merges joins {missing}, of which one, or the result, is not a token")
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=splitting.whole_words))
    if splitting.composes:
        tokenizer.normalizer = normalizers.NFC()
    parts: list[Any] = []
    if splitting.digits:
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern:
        parts.append(pre_tokenizers.Split(Regex(splitting.pattern), "isolated"))
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splitting.pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, splitting.bos


def _sentencepiece(header: _Header) -> tuple[Tokenizer, bool]:
    scores = header.items("scores", float, len(header.tokens))
    vocabulary = {text: token for token, text in enumerate(header.tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges(vocabulary, scores, header.types),
            unk_token=header.special("unknown"),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    space = "\u2581"
    steps: list[Any] = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.flag("add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Replace(" ", space)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Return the merges by which SentencePiece builds each token, the highest score first.

    Pairs that build the same token are in the order of transformers' conversion.
    """
    found: list[tuple[float, int, int, int, int, str, str]] = []
    for text, token in vocabulary.items():
        if types[token] not in (_NORMAL, _USER_DEFINED):
            continue
        for middle in range(1, len(text)):
            left, right = text[:middle], text[middle:]
            if left in vocabulary and right in vocabulary:
                order = (-scores[token], -len(left), -len(right), vocabulary[left], vocabulary[right])
                found.append((*order, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _frame(tokenizer: Tokenizer, header: _Header, special: Mapping[str, str | None], bos: bool) -> None:
    """Put the special tokens that the header asks for around each text."""
    first = special["bos"] if header.flag("add_bos_token", bos) else None
    last = special["eos"] if header.flag("add_eos_token", False) else None
    before, after = ([] if text is None else [text] for text in (first, last))
    if before or after:
        ids = [(text, header.tokens.index(text)) for text in dict.fromkeys((*before, *after))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after], pair=[*before, "$A", *after, *before, "$B", *after], special_tokens=ids
        )
