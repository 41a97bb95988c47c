"""Tokenizer without transformers, whose import takes longer than the weights of a small model.

It has the methods of transformers' fast tokenizer that `Tokenizer` uses. Transformers is imported only to render chats
with tools, with a message to continue, or with a template of the `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_UNDERSTOOD = {*_NAMED, "additional_special_tokens", "added_tokens_decoder", "chat_template", "tokenizer_class"} | {
    "clean_up_tokenization_spaces",
    "model_input_names",
    "model_max_length",
}
"""Settings of tokenizer_config.json with which a tokenizer needs nothing of transformers."""
_OTHER_FILES = ("added_tokens.json", "special_tokens_map.json", "chat_template.jinja", "additional_chat_templates")
"""Files of a tokenizer that only transformers reads."""


class LightTokenizer:
    """Backend of the library tokenizers, with special tokens and a chat template.

    Attributes:
        backend_tokenizer: splits and joins texts.
        chat_template: template of chats, or None.
        clean_up_tokenization_spaces: False, since decoded text is not changed.
        folder: folder from which it was read, or None.
    """

    clean_up_tokenization_spaces = False

    def __init__(
        self,
        backend: Backend,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        folder: Path | None = None,
    ) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.folder = folder
        self._special_tokens = dict(special_tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._token_id("eos_token")

    def __call__(
        self, text: str | list[str], *, add_special_tokens: bool, return_attention_mask: bool
    ) -> dict[str, list[int] | list[list[int]]]:
        del return_attention_mask  # there is none
        if isinstance(text, str):
            return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}
        encodings = self.backend_tokenizer.encode_batch_fast(text, add_special_tokens=add_special_tokens)
        return {"input_ids": [encoding.ids for encoding in encodings]}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        documents: list[Any] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = False,
        **variables: Any,
    ) -> str:
        """Return a conversation as text; see transformers' method of this name."""
        template = chat_template or self.chat_template
        if template is None or tools is not None or continue_final_message or "endgeneration" in template:
            return self.transformers_tokenizer.apply_chat_template(
                conversation,
                chat_template=chat_template,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=tokenize,
                **variables,
            )
        return _compiled(template).render(
            messages=conversation,
            tools=None,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """The same tokenizer as one of transformers."""
        from transformers import PreTrainedTokenizerFast

        if self.folder is not None:
            return PreTrainedTokenizerFast.from_pretrained(str(self.folder))
        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            clean_up_tokenization_spaces=False,
            chat_template=self.chat_template,
            **self._special_tokens,
        )

    def _token_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)


def read_light_tokenizer(folder: Path) -> LightTokenizer | None:
    """Return the tokenizer of a folder whose class is PreTrainedTokenizerFast, or None if it needs transformers."""
    settings: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    template = settings.get("chat_template")
    other = not settings.keys() <= _UNDERSTOOD or any((folder / name).exists() for name in _OTHER_FILES)
    if other or settings.get("clean_up_tokenization_spaces") or not isinstance(template, str | None):
        return None
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    content = json.loads(text)
    fields = {str(token["id"]): {**token, "id": None} for token in content.get("added_tokens") or ()}
    decoder = {key: {**token, "id": None} for key, token in settings.get("added_tokens_decoder", fields).items()}
    special = {token["content"] for token in fields.values() if token["special"]}
    named = {name: _content(settings[name]) for name in _NAMED if settings.get(name) is not None}
    additional = map(_content, settings.get("additional_special_tokens") or ())
    # Transformers would add a missing token, and decoded text would have it.
    if decoder != fields or not {*named.values(), *additional} <= special:
        return None
    backend = Backend.from_str(text)
    if backend.post_processor is None:
        # It gives the second text of a pair another type; transformers makes the same.
        backend.post_processor = TemplateProcessing("$A", "$A $B:1")
    return LightTokenizer(backend, named, template, folder)


def _content(token: str | Mapping[str, Any]) -> str:
    """Return the text of a special token, which a file has as a text or as fields."""
    return token if isinstance(token, str) else cast("str", token["content"])


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """Compile a chat template in transformers' dialect of Jinja."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json  # Jinja's own escapes HTML
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)  # pyright: ignore[reportCallIssue, reportArgumentType]
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
