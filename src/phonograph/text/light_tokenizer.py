"""Tokenizer without transformers, whose import takes longer than the weights of a small model.

It has the methods of transformers' fast tokenizer that `Tokenizer` uses. Transformers is imported only to render chats
with tools, with a message to continue, or with a template of the `generation` tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from tokenizers import Tokenizer as Backend


class LightTokenizer:
    """Backend of the library tokenizers, with special tokens and a chat template.

    Attributes:
        backend_tokenizer: splits and joins texts.
        chat_template: template of chats, or None.
        clean_up_tokenization_spaces: False, since decoded text is not changed.
    """

    clean_up_tokenization_spaces = False

    def __init__(self, backend: Backend, special_tokens: Mapping[str, str], chat_template: str | None) -> None:
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self._special_tokens = dict(special_tokens)

    @property
    def bos_token_id(self) -> int | None:
        return self._token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._token_id("eos_token")

    def __call__(self, text: str, *, add_special_tokens: bool, return_attention_mask: bool) -> dict[str, list[int]]:
        del return_attention_mask  # there is none
        return {"input_ids": self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        chat_template: str | None = None,
        tools: list[Any] | None = None,
        documents: None = None,
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
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_tokens, **variables},
        )

    @cached_property
    def transformers_tokenizer(self) -> Any:
        """The same tokenizer as one of transformers."""
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.backend_tokenizer,
            clean_up_tokenization_spaces=False,
            chat_template=self.chat_template,
            **self._special_tokens,
        )

    def _token_id(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self.backend_tokenizer.token_to_id(text)


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
