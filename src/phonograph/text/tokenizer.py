"""The model's tokenizer: text to tokens and back."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, cast

from phonograph.config.engine_config import EngineConfig
from phonograph.core.token_types import TypedTokens
from phonograph.errors import ModelError, RequestError, shortened
from phonograph.files.catalog import catalog_name
from phonograph.files.gguf_file import read_gguf
from phonograph.files.hub import first_line, hub_problem
from phonograph.files.hub_client import uses_modelscope
from phonograph.files.hub_gguf import gguf_reference
from phonograph.files.model_files import DEMO, is_gguf, model_path
from phonograph.text.detokenizer import TokenBytes, TokenStream
from phonograph.text.gguf_tokenizer import has_gguf_tokenizer, make_gguf_tokenizer
from phonograph.text.kept_places import kept_places
from phonograph.text.light_tokenizer import LightTokenizer, read_light_tokenizer
from phonograph.text.texts_ahead import TextsAhead
from phonograph.text.token_texts import TokenTexts

ChatMessage = dict[str, Any]
_SHOWN = 200
"""Characters of a prompt or of messages in an error."""
_RESERVED = frozenset({"messages", "conversations", "self"})
"""Names that cannot be variables of a template: `apply_chat_template` passes them itself."""
_DECODED_AT_ONCE = 8192
"""Tokens above which decoding must not hold Python's lock."""


class Tokenizer:
    """A Hugging Face tokenizer with a fast backend, which incremental decoding needs.

    Attributes:
        special_token_ids: tokens that are omitted if special tokens are skipped.
        token_bytes: text that each token adds.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._use(tokenizer)

    def _use(self, tokenizer: Any) -> None:
        self._ahead = TextsAhead(tokenizer)
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # Files of sentence-transformers have a length to which texts are cut and padded.
        if self._backend.truncation is not None:
            self._backend.no_truncation()
        if self._backend.padding is not None:
            self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_bytes = TokenBytes(self._backend)
        # These are no variables of a template. Documents are one, and a parameter too.
        self._options = (_RESERVED | signature(tokenizer.apply_chat_template).parameters.keys()) - {"documents"}

    @classmethod
    def load(
        cls,
        folder: str | Path,
        *,
        trust_remote_code: bool = False,
        revision: str | None = None,
        download_dir: str | None = None,
    ) -> Tokenizer:
        """Load the tokenizer of a local folder or GGUF file, or of a hub id.

        Raises:
            ModelError: there is none, it is unusable, or it has no fast backend (tokenizer.json).
        """
        if is_gguf(Path(folder)):
            return cls(make_gguf_tokenizer(read_gguf(Path(folder))))
        try:
            if _is_generic(Path(folder)) and (light := read_light_tokenizer(Path(folder))) is not None:
                return cls(light)
            tokenizer = _tokenizer_class(Path(folder)).from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, revision=revision, cache_dir=download_dir
            )
        except Exception as error:  # transformers raises many types for unusable files
            local = Path(folder).is_dir()
            if not local and (problem := hub_problem(error)) is not None:
                raise ModelError(f"tokenizer {str(folder)!r} is not a local folder and {problem}") from error
            shown = str(error) if local else first_line(error)
            raise ModelError(
                f"no usable tokenizer in {folder} ({shown}); give one with --tokenizer, or pass token ids"
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"the tokenizer in {folder} has no tokenizer.json, which streaming needs")
        return cls(tokenizer)

    @property
    def hugging_face(self) -> Any:
        """The tokenizer of transformers, for libraries that need it."""
        if not isinstance(self._tokenizer, LightTokenizer):
            return self._tokenizer
        found = self._tokenizer.transformers_tokenizer
        if self._tokenizer.folder is not None:
            # Tokens that the caller adds are the engine's too.
            self._use(found)
        return found

    @property
    def eos_token_id(self) -> int | None:
        return cast("int | None", self._tokenizer.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        return cast("int | None", self._tokenizer.bos_token_id)

    @property
    def chat_template(self) -> str | None:
        """The model's chat template."""
        return cast("str | None", self._tokenizer.chat_template)

    @property
    def template_text(self) -> str | None:
        """Text of the model's chat template, or of all if it has several by name."""
        template: object = self._tokenizer.chat_template
        return "\n".join(map(str, template.values())) if isinstance(template, dict) else self.chat_template

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    @property
    def vocab_size(self) -> int:
        """The largest token id plus one. Some smaller ids may have no token."""
        return max(self._backend.get_vocab().values()) + 1

    def encode_ahead(self, texts: Sequence[str]) -> None:
        """Tokenize texts in several threads, for one `encode` or `encode_cut` of each by the calling thread.

        They get special tokens. If one of them is not valid Unicode, nothing is done ahead.
        """
        self._ahead.encode(texts)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, by default with the special tokens that the model expects around it.

        Raises:
            RequestError: the text has a lone surrogate, which is not valid Unicode.
        """
        if add_special_tokens and (ahead := self._ahead.take(text)) is not None:
            return ahead
        try:
            # The mask of ones would take as long as the ids.
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_attention_mask=False)
            return list(encoded["input_ids"])
        except (TypeError, UnicodeEncodeError):
            raise RequestError(
                "prompt", shortened(text, _SHOWN), "is not valid Unicode (half of a surrogate pair)"
            ) from None

    def encode_cut(
        self,
        text: str,
        pair: str | None = None,
        *,
        most: int | None,
        typed: bool = False,
        special: bool = True,
        keeps_last: bool = False,
    ) -> list[int]:
        """Return the tokens of a text or of a pair of texts, with the special tokens that the model expects.

        Args:
            text: the text.
            pair: the second text.
            most: tokens that are kept: the ends of the texts are cut, of two that of the longer one first. None for
                all.
            typed: return `TypedTokens`, with the types that the tokenizer says.
            special: add the special tokens.
            keeps_last: cut the beginnings of the texts, not their ends.

        Raises:
            RequestError: as `encode`; the special tokens alone are `most` or more; or there is no token between the
                texts of a pair.
        """
        if pair is None and special and not typed:
            ahead = self._ahead.take(text)
            if ahead is not None and (most is None or len(ahead) <= most):
                return ahead
        try:
            encoding = self._backend.encode(text, pair, add_special_tokens=special)
        except (TypeError, UnicodeEncodeError):
            raise RequestError(
                "prompt", shortened(text, _SHOWN), "is not valid Unicode (half of a surrogate pair)"
            ) from None
        ids, types, sequences = list(encoding.ids), list(encoding.type_ids), encoding.sequence_ids
        if pair is not None and 1 in sequences and sequences[max(sequences.index(1) - 1, 0)] is not None:
            problem = "is a pair, and the tokenizer has no token between texts; give one text by the model's template"
            raise RequestError("prompt", shortened(text, _SHOWN), problem)
        if most is not None and len(ids) > most:
            kept = kept_places(sequences[::-1] if keeps_last else sequences, most)
            kept = [len(ids) - 1 - place for place in reversed(kept)] if keeps_last else kept
            ids, types = [ids[place] for place in kept], [types[place] for place in kept]
        return TypedTokens.of(ids, types) if typed else ids

    def beginning(self, text: str, most: int) -> str:
        """Return the part of a text that its first `most` tokens stand for."""
        offsets = self._backend.encode(text, add_special_tokens=False).offsets
        return text if len(offsets) <= most else text[: offsets[most - 1][1]]

    @cached_property
    def texts(self) -> TokenTexts:
        """Text of single tokens."""
        return TokenTexts(self)

    @cached_property
    def max_token_characters(self) -> int | None:
        """Maximum characters of a text that one token stands for, or None if there is no bound.

        Without white space that tokens strip.
        """
        settings = json.loads(self._backend.to_str())
        model = settings["model"]
        # One token for unknown characters stands for a word, or for any number of adjacent ones.
        fuses_unknown = model["type"] == "Unigram" or model.get("fuse_unk")
        if model["type"] in ("WordLevel", "WordPiece") or (fuses_unknown and not model.get("byte_fallback")):
            return None
        longest = max(map(len, self._backend.get_vocab()))
        # Unicode's composition joins at most four characters.
        return longest * (1 if settings["normalizer"] is None else 4)

    @cached_property
    def num_tokens_before(self) -> int:
        """Special tokens that `encode` puts before a text."""
        text = self.encode("a", add_special_tokens=False)
        ids = self.encode("a")
        starts = range(len(ids) - len(text) + 1)
        return next((start for start in starts if ids[start : start + len(text)] == text), 0)

    def encode_chat(self, messages: Sequence[ChatMessage], **options: Any) -> list[int]:
        """Return the token ids of the text that `render_chat` returns for the same arguments.

        Raises:
            RequestError: as `render_chat`.
        """
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return a conversation as text with special tokens, up to the start of the assistant's answer.

        Args:
            messages: the conversation.
            template: chat template; default: the model's.
            add_generation_prompt: end with the prefix of the assistant's answer.
            continue_final_message: end within the last message, so that the model continues it.
            variables: further variables of the template.
            tools: functions that the model may call, in OpenAI's format.

        Raises:
            RequestError: the model has no chat template, or the template rejects these messages.
        """
        for name in variables or {}:
            if name in self._options:
                raise RequestError("chat_template_kwargs", name, "is not a variable of a template")
        if template is None and not self.has_chat_template:
            raise RequestError("messages", "...", "the model's tokenizer has no chat template; use a plain prompt")
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=None if tools is None else list(tools),
                tokenize=False,
                **(variables or {}),
            )
        except Exception as error:  # templates raise any error
            problem = f"the chat template rejects them: {shortened(str(error), _SHOWN)}"
            raise RequestError("messages", list(messages), problem) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) > _DECODED_AT_ONCE and not self._tokenizer.clean_up_tokenization_spaces:
            # `decode` holds Python's lock, `decode_batch` does not.
            return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str | None:
        """Return a token as in the vocabulary, or None if there is no such token."""
        return cast("str | None", self._backend.id_to_token(token_id))

    def token_id(self, piece: str) -> int | None:
        """Return the id of a token as in the vocabulary, or None if there is no such token."""
        return cast("int | None", self._backend.token_to_id(piece))

    def stream(
        self, *, skip_special_tokens: bool, shown: Collection[int] = (), after: Sequence[int] = ()
    ) -> TokenStream:
        """Return a decoder that takes tokens one by one; see `TokenStream`."""
        special = self.special_token_ids
        hidden = (special.difference(shown) if shown else special) if skip_special_tokens else ()
        return TokenStream(self.token_bytes, self.special_token_ids, hidden=hidden, after=after)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the tokenizer of the configured model.

    Returns None with skip_tokenizer_init, and for a local folder or file, or catalog name, without a tokenizer. Such an
    engine serves token ids only.

    Raises:
        ModelError: the tokenizer is unusable.
    """
    if not has_tokenizer(config):
        return None
    name = config.tokenizer or config.model
    # Another repository does not have the revisions of the model's.
    revision = config.tokenizer_revision or (config.revision if name == config.model else None)
    source: str | Path = name
    if _is_local(name) or gguf_reference(name) is not None:
        source = model_path(name, revision=revision, download_dir=config.download_dir)
    elif uses_modelscope():
        # transformers knows one hub only.
        source = model_path(name, tokenizer=True, revision=revision, download_dir=config.download_dir)
    return Tokenizer.load(
        source,
        trust_remote_code=config.trust_remote_code,
        revision=revision,
        download_dir=config.download_dir,
    )


def transformers_tokenizer(tokenizer: Tokenizer | None) -> Any:
    """Return the tokenizer of transformers inside a tokenizer.

    Raises:
        RequestError: there is no tokenizer.
    """
    if tokenizer is None:
        raise RequestError("tokenizer", None, "the model has none; give one with tokenizer=, or pass token ids")
    return tokenizer.hugging_face


def has_tokenizer(config: EngineConfig) -> bool:
    """Return False if `load_tokenizer` returns None, without loading anything."""
    name = config.model
    if config.skip_tokenizer_init or config.tokenizer is not None:
        return not config.skip_tokenizer_init
    if not _is_local(name):
        return config.load_format != "dummy" or not catalog_name(name)
    path = model_path(name)
    if is_gguf(path):
        return has_gguf_tokenizer(read_gguf(path))
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((path / file).is_file() for file in files)


def _is_local(name: str) -> bool:
    return name == DEMO or Path(name).is_dir() or is_gguf(Path(name).expanduser())


def _tokenizer_class(folder: Path) -> Any:
    """Return the class that AutoTokenizer would choose if that is evident, else AutoTokenizer.

    AutoTokenizer takes several times as long to import, because it imports every model's configuration.
    """
    if _is_generic(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_generic(folder: Path) -> bool:
    """Return True for a local Llama whose tokenizer.json is complete, as Llama 3's. Other models have classes."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        generic = settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "auto_map" not in settings
        return generic and model["model_type"] == "llama" and (folder / "tokenizer.json").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False
