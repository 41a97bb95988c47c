"""Text to tokens and back, through the tokenizer that comes with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any, cast

from phonograph.config.engine_config import EngineConfig
from phonograph.errors import ModelError, RequestError, shortened
from phonograph.models.catalog import catalog_name
from phonograph.models.hub import first_line, hub_problem
from phonograph.models.weights.model_files import DEMO, model_folder
from phonograph.text.detokenizer import TokenBytes, TokenStream

ChatMessage = dict[str, Any]
_SHOWN = 200
"""Characters of a prompt, or of messages, that an error shows."""
_NO_VARIABLES = frozenset({"messages", "conversations", "self"})
"""What a template cannot be given beside the parameters of `apply_chat_template`: its call sets them itself."""
_DECODED_AT_ONCE = 8192
"""Tokens that are decoded while other threads of Python wait."""


class Tokenizer:
    """A Hugging Face tokenizer with a fast backend, which incremental decoding needs.

    special_token_ids: those that are left out of the text where special tokens are to be skipped
    token_bytes:       the text that each token adds
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        added = self._backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.token_bytes = TokenBytes(self._backend)

    @classmethod
    def load(cls, folder: str | Path, *, trust_remote_code: bool = False, revision: str | None = None) -> Tokenizer:
        """Loads the tokenizer of a local folder or hub id.

        Raises:
            ModelError: there is none, it is unusable, or it has no fast backend (tokenizer.json).
        """
        try:
            tokenizer = _tokenizer_class(Path(folder)).from_pretrained(
                str(folder), trust_remote_code=trust_remote_code, revision=revision
            )
        except Exception as error:  # transformers raises nearly anything for files it cannot use
            local = Path(folder).is_dir()
            if not local and (problem := hub_problem(error)) is not None:
                raise ModelError(f"tokenizer {str(folder)!r} is no local folder and {problem}") from error
            shown = str(error) if local else first_line(error)
            raise ModelError(
                f"no usable tokenizer in {folder} ({shown}); give one with --tokenizer, or pass token ids"
            ) from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"the tokenizer in {folder} has no tokenizer.json, which streaming needs")
        return cls(tokenizer)

    @property
    def hugging_face(self) -> Any:
        """The tokenizer of transformers, for libraries that want that."""
        return self._tokenizer

    @property
    def eos_token_id(self) -> int | None:
        return cast("int | None", self._tokenizer.eos_token_id)

    @property
    def bos_token_id(self) -> int | None:
        return cast("int | None", self._tokenizer.bos_token_id)

    @property
    def chat_template(self) -> str | None:
        """The model's own, as it was written."""
        return cast("str | None", self._tokenizer.chat_template)

    @property
    def has_chat_template(self) -> bool:
        return bool(self.chat_template)

    @property
    def vocab_size(self) -> int:
        """Above every token id; some of those below may have no token."""
        return max(self._backend.get_vocab().values()) + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens the model expects around it unless these are not wanted.

        Raises:
            RequestError: the text holds half of a surrogate pair, which no encoding of Unicode allows.
        """
        try:
            # A mask of ones for millions of tokens takes as long as the ids.
            encoded = self._tokenizer(text, add_special_tokens=add_special_tokens, return_attention_mask=False)
            return list(encoded["input_ids"])
        except (TypeError, UnicodeEncodeError):
            raise RequestError(
                "prompt", shortened(text, _SHOWN), "is no Unicode text (half of a surrogate pair)"
            ) from None

    @cached_property
    def max_token_characters(self) -> int | None:
        """The most characters of a text that one token can stand for, or None if there is no such bound.

        Tokens that swallow the white space beside them are taken without it.
        """
        settings = json.loads(self._backend.to_str())
        model = settings["model"]
        # One token for unknown characters stands for a word, or for as many as follow each other.
        fuses_unknown = model["type"] == "Unigram" or model.get("fuse_unk")
        if model["type"] in ("WordLevel", "WordPiece") or (fuses_unknown and not model.get("byte_fallback")):
            return None
        longest = max(map(len, self._backend.get_vocab()))
        # Unicode's composition makes one character of four at most.
        return longest * (1 if settings["normalizer"] is None else 4)

    @cached_property
    def num_tokens_before(self) -> int:
        """Special tokens that `encode` puts before a text."""
        text = self.encode("a", add_special_tokens=False)
        ids = self.encode("a")
        starts = range(len(ids) - len(text) + 1)
        return next((start for start in starts if ids[start : start + len(text)] == text), 0)

    def encode_chat(self, messages: Sequence[ChatMessage], **options: Any) -> list[int]:
        """Return the token ids of the text that `render_chat` makes of a conversation, with the same options.

        Raises:
            RequestError: the model has no chat template, or it does not take these messages.
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
        """A conversation as text, up to where the assistant's answer begins, special tokens included.

        template:               instead of the model's own
        add_generation_prompt:  end with what begins the assistant's answer
        continue_final_message: end within the last message, so that the model goes on writing it
        variables:              more for the template to see
        tools:                  functions that the model may call, as OpenAI describes them

        Raises:
            RequestError: as `encode_chat`.
        """
        # Else whoever sets variables of the template would set options of the tokenizer.
        taken = _NO_VARIABLES | signature(self._tokenizer.apply_chat_template).parameters.keys()
        for name in variables or {}:
            if name in taken:
                raise RequestError("chat_template_kwargs", name, "is no variable of a template")
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
        except Exception as error:  # templates raise what their authors wrote
            problem = f"the chat template refuses them: {shortened(str(error), _SHOWN)}"
            raise RequestError("messages", list(messages), problem) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) > _DECODED_AT_ONCE and not self._tokenizer.clean_up_tokenization_spaces:
            # `decode` keeps all other threads waiting meanwhile, half a second for a million tokens.
            return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def piece(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it, or None where it has no such token."""
        return cast("str | None", self._backend.id_to_token(token_id))

    def stream(self, *, skip_special_tokens: bool, after: Sequence[int] = ()) -> TokenStream:
        """Return a decoder that takes tokens one by one.

        after: tokens whose text the stream continues. A special token ends a text, and the next token begins one.
        """
        return TokenStream(self.token_bytes, self.special_token_ids, skips_special=skip_special_tokens, after=after)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer of the model; None for a local folder or a name of the catalog, which have none: such an engine
    serves token ids only.

    Raises:
        ModelError: there is one and it is unusable.
    """
    if not has_tokenizer(config):
        return None
    name = config.tokenizer or config.model
    source = model_folder(name) if _is_local(name) else name
    return Tokenizer.load(source, trust_remote_code=config.trust_remote_code, revision=config.revision)


def has_tokenizer(config: EngineConfig) -> bool:
    """Return False where `load_tokenizer` returns None, without loading anything."""
    name = config.model
    if config.tokenizer is not None:
        return True
    if not _is_local(name):
        return config.load_format != "dummy" or not catalog_name(name)
    files = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((Path(model_folder(name)) / file).is_file() for file in files)


def _is_local(name: str) -> bool:
    return name == DEMO or Path(name).is_dir()


def _tokenizer_class(folder: Path) -> Any:
    """What transformers' AutoTokenizer would choose where that is plain to see, or AutoTokenizer.

    Either takes seconds to import, AutoTokenizer three times as long: it brings every model's configuration.
    """
    if _is_generic(folder):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _is_generic(folder: Path) -> bool:
    """Whether a local Llama's tokenizer is all in its tokenizer.json, as Llama 3's is. Other models have classes."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        generic = settings["tokenizer_class"] == "PreTrainedTokenizerFast" and "auto_map" not in settings
        return generic and model["model_type"] == "llama" and (folder / "tokenizer.json").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False
