"""Prompts of requests that generate nothing: prompts of the model's folder before texts, and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np

from phonograph.config.engine_config import EngineConfig
from phonograph.core.pooling_params import PoolingParams, PoolingTask
from phonograph.engine.admission import Prompt
from phonograph.engine.offline.prompts import PromptInput, plain_prompt
from phonograph.errors import RequestError, shortened
from phonograph.files.model_files import model_path
from phonograph.files.sentence_transformers import SentencePrompts, read_sentence_prompts
from phonograph.models.heads.pooler_spec import Pooler
from phonograph.text.tokenizer import Tokenizer

_ROLES = ('"query"', '"document"')
"""Roles in a template of pairs, as it compares them."""
_CUTS = 8
"""Attempts to cut a document to a number of tokens."""


@dataclass
class PooledInputs:
    """Prompts of one model.

    Attributes:
        config: of the engine.
        pooler: of the model, or None.
        typed: the model tells the texts of a pair apart by the types of their tokens.
        max_len: most tokens of a prompt.
        tokenizer: of the model, or None.
    """

    config: EngineConfig
    pooler: Pooler | None
    typed: bool
    max_len: int
    tokenizer: Tokenizer | None

    @cached_property
    def prompts(self) -> SentencePrompts:
        """Texts before others that the folder has."""
        folder = model_path(self.config.model, revision=self.config.revision, download_dir=self.config.download_dir)
        return read_sentence_prompts(folder) if folder.is_dir() else SentencePrompts()

    def text(self, prompt: PromptInput, prompt_name: str | None) -> Prompt:
        """Return a prompt; a text after that of the name, or after the folder's default.

        Raises:
            RequestError: the folder has no prompt of that name, or the prompt is neither text nor tokens.
        """
        plain = plain_prompt(prompt)
        name = self.prompts.default if prompt_name is None else prompt_name
        if name is not None and name not in self.prompts.prompts:
            known = ", ".join(self.prompts.prompts) or "none"
            raise RequestError("prompt_name", name, f"the model's folder has these: {known}")
        if not isinstance(plain, str):
            return plain
        text = plain if name is None or not plain else self.prompts.prompts[name] + plain
        return text.lower() if self.prompts.lowers else text

    def pair(
        self,
        first: str,
        second: str,
        params: PoolingParams,
        *,
        keeps_last: bool = False,
        template: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the tokens of a pair of texts.

        Args:
            first: a query.
            second: a document.
            params: their `truncate_prompt_tokens` counts. The ends of the texts are cut, in a template that of the
                document.
            keeps_last: the beginnings of the texts are cut.
            template: chat template of the pair; defaults to that of the model, if it has one for pairs.
            variables: variables of the template.

        Raises:
            RequestError: there is no tokenizer, or it has no token between two texts and there is no template; a text
                is empty; or the template has no room or rejects the texts.
        """
        if self.tokenizer is None:
            raise RequestError("data_1", shortened(first), "is text, and the engine runs without a tokenizer")
        for name, text in (("data_1", first), ("data_2", second)):
            if not isinstance(text, str) or not text:  # pyright: ignore[reportUnnecessaryIsInstance]
                raise RequestError(name, shortened(repr(text)), "must be text that is not empty")
        most = params.truncate_prompt_tokens
        most = self.max_len if most == -1 else most
        template = template or self.template
        if template is not None:
            return self._by_template(template, (first, second), most, variables or {}, keeps_last=keeps_last)
        if variables:
            raise RequestError("chat_template_kwargs", dict(variables), "needs a template of pairs; the model has none")
        return self.tokenizer.encode_cut(first, second, most=most, typed=self.typed, keeps_last=keeps_last)

    @cached_property
    def template(self) -> str | None:
        """Chat template of a pair of texts: that of the model, or the tokenizer's if it has the roles of a pair."""
        if self.pooler is not None and self.pooler.template is not None:
            return self.pooler.template
        found = None if self.tokenizer is None else self.tokenizer.chat_template
        return found if isinstance(found, str) and all(role in found for role in _ROLES) else None

    def _by_template(
        self, template: str, pair: tuple[str, str], most: int | None, variables: Mapping[str, Any], *, keeps_last: bool
    ) -> list[int]:
        """Return the tokens of a pair in a template. A document that is too long loses its end."""
        tokenizer, (query, document) = self.tokenizer, pair
        assert tokenizer is not None
        if keeps_last and most is not None:
            raise RequestError("truncation_side", "left", "a template keeps the beginning of a document; right works")

        def tokens(document: str) -> list[int]:
            messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
            text = tokenizer.render_chat(messages, template=template, add_generation_prompt=False, variables=variables)
            return tokenizer.encode(text)

        found = tokens(document)
        if most is None or len(found) <= most:
            return found
        left = len(tokenizer.encode(document, add_special_tokens=False)) - (len(found) - most)
        # Where a cut splits a word, its part may have more tokens than before.
        for num_kept in range(left, max(left - _CUTS, 0), -1):
            found = tokens(tokenizer.beginning(document, num_kept))
            if len(found) <= most:
                return found
        raise RequestError("truncate_prompt_tokens", most, "leaves no room for a document beside query and template")

    @property
    def scores_pairs(self) -> bool:
        """True if the model scores pairs itself; embeddings are compared by their cosine.

        Raises:
            RequestError: the model has neither.
        """
        tasks: Sequence[PoolingTask] = () if self.pooler is None else self.pooler.tasks
        if "score" in tasks or "embed" in tasks:
            return "score" in tasks
        origin = "the model generates text" if self.pooler is None else self.pooler.origin
        raise RequestError("task", "score", f"needs a classifier with one class, or embeddings; {origin}")


def paired(data_1: object, data_2: object) -> list[tuple[str, str]]:
    """Return pairs of texts: one first text with each second one, or as many of both.

    Raises:
        RequestError: their numbers do not go together, or there are none.
    """
    firsts, seconds = ([one] if isinstance(one, str) else list(cast("Sequence[str]", one)) for one in (data_1, data_2))
    if len(firsts) == 1:
        firsts *= len(seconds)
    if not seconds or len(firsts) != len(seconds):
        problem = f"must be one text, or as many as data_2 has ({len(seconds)}), which must have some"
        raise RequestError("data_1", f"{len(firsts)} texts", problem)
    return list(zip(firsts, seconds, strict=True))


def cosine(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the cosine of two embeddings, float32 [1]; 0 for one of zeros."""
    length = float(np.linalg.norm(first) * np.linalg.norm(second))
    return np.array([float(first @ second) / length if length else 0.0], np.float32)
