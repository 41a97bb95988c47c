"""Bodies of requests that generate nothing, in the fields of OpenAI's, vLLM's, Cohere's and Jina's clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from phonograph.core.pooling_params import PoolingParams, PoolingTask
from phonograph.server.chat.fields import UNSUPPORTED, Body, CacheSalt, Prompts
from phonograph.server.http.api_errors import invalid

_ONE_TEXT = "must be a text, or an object with a text"


def _text(value: object) -> str:
    """Return a text, which may be in an object as Cohere's and Jina's clients send it."""
    text = value.get("text") if isinstance(value, dict) else value  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    if not isinstance(text, str):
        raise ValueError(_ONE_TEXT)
    if not text:
        raise ValueError("is empty")
    return text


def _text_list(value: object) -> list[str]:
    if not isinstance(value, list):
        return [_text(value)]
    if not value:
        raise ValueError("is empty")
    texts: list[str] = []
    for place, one in enumerate(value):  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        try:
            texts.append(_text(one))
        except ValueError as error:
            raise ValueError(f"item {place} {error}") from None
    return texts


_SCHEMA: list[dict[str, Any]] = [{"type": "string"}, {"type": "object", "required": ["text"]}]
OneText = Annotated[str, BeforeValidator(_text), WithJsonSchema({"anyOf": _SCHEMA})]
TextList = Annotated[
    list[Any],
    BeforeValidator(_text_list),
    WithJsonSchema({"anyOf": [*_SCHEMA, {"type": "array", "items": {"anyOf": _SCHEMA}, "minItems": 1}]}),
]


class PooledBody(Body):
    """Common fields. Null means the default.

    names: names of engine parameters, where the request has another
    """

    names: ClassVar[Mapping[str, str]] = {}

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **UNSUPPORTED,
        "padding": ("do_not_pad",),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "padding": "prompts of a step need no padding",
        "embed_dtype": "numbers are float32",
        "endianness": "bytes of base64 are little endian",
    }

    priority: int | None = None
    cache_salt: CacheSalt | None = None
    request_id: Annotated[str, Field(max_length=200)] | None = None

    @property
    def keeps_last(self) -> bool:
        """True if what is cut of a text is its beginning."""
        return False

    def params(self, task: PoolingTask | None) -> PoolingParams:
        """Return the parameters of the request.

        Raises:
            RequestError: a value is out of range.
        """
        return PoolingParams(task=task)


class VllmBody(PooledBody):
    """Common fields of vLLM."""

    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    use_activation: bool | None = None

    @property
    def keeps_last(self) -> bool:
        return self.truncation_side == "left"

    def params(self, task: PoolingTask | None) -> PoolingParams:
        return PoolingParams(
            task=task, use_activation=self.use_activation, truncate_prompt_tokens=self.truncate_prompt_tokens
        )


class ClassifyBody(VllmBody):
    """POST /classify."""

    input: Prompts
    add_special_tokens: bool | None = None


class EmbeddingBody(ClassifyBody):
    """POST /v1/embeddings. `normalize` is another name of use_activation, of older versions of vLLM."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**PooledBody.unsupported, "messages": ()}
    reasons: ClassVar[Mapping[str, str]] = {
        **PooledBody.reasons,
        "messages": "give texts as input; /tokenize returns the tokens of a conversation",
    }

    dimensions: int | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None

    def check(self) -> list[str]:
        if None not in (self.normalize, self.use_activation) and self.normalize != self.use_activation:
            raise invalid("normalize", f"normalize={self.normalize} contradicts use_activation; give one of them")
        return super().check()

    def params(self, task: PoolingTask | None) -> PoolingParams:
        return PoolingParams(
            task=task,
            dimensions=self.dimensions,
            use_activation=self.normalize if self.use_activation is None else self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class PoolingBody(EmbeddingBody):
    """POST /pooling."""

    task: PoolingTask | None = None


class CohereEmbedBody(PooledBody):
    """POST /v2/embed, of Cohere's clients."""

    names: ClassVar[Mapping[str, str]] = {
        "dimensions": "output_dimension",
        "prompt_name": "input_type",
        "truncate_prompt_tokens": "max_tokens",
    }
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**PooledBody.unsupported, "images": (), "inputs": ()}
    reasons: ClassVar[Mapping[str, str]] = {
        **PooledBody.reasons,
        **dict.fromkeys(("images", "inputs"), "models take text; give texts"),
    }

    texts: TextList | None = None
    input_type: str | None = None
    embedding_types: Annotated[list[Literal["float", "base64", "binary", "ubinary"]], Field(max_length=4)] | None = None
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    output_dimension: int | None = None

    @property
    def keeps_last(self) -> bool:
        return self.truncate == "START"

    @property
    def kinds(self) -> list[str]:
        """Forms of the embeddings in the answer."""
        return [*(self.embedding_types or ("float",))]

    def check(self) -> list[str]:
        ignored = super().check()
        if self.texts is None:
            raise invalid("texts", "texts is missing: give a list of texts")
        return ignored

    def params(self, task: PoolingTask | None) -> PoolingParams:
        most = None if self.truncate == "NONE" else self.max_tokens or -1
        return PoolingParams(task=task, dimensions=self.output_dimension, truncate_prompt_tokens=most)


class PairsBody(VllmBody):
    """Common fields of scores and ranks of pairs of texts. 0 tokens is no limit.

    `instruction` is the variable of that name in a template of pairs.
    """

    max_tokens_per_query: Annotated[int, Field(ge=0)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=0)] | None = None
    instruction: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the template of a pair."""
        given = {} if self.instruction is None else {"instruction": self.instruction}
        return {**given, **(self.chat_template_kwargs or {})}


_PAIRS = (("data_1", "data_2"), ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"))


class ScoreBody(PairsBody):
    """POST /score: pairs of texts, under one of vLLM's four pairs of names."""

    data_1: TextList | None = None
    data_2: TextList | None = None
    text_1: TextList | None = None
    text_2: TextList | None = None
    queries: TextList | None = None
    documents: TextList | None = None
    items: TextList | None = None

    @property
    def pair_fields(self) -> tuple[str, str]:
        """Names of the fields with the first and the second texts.

        Raises:
            ApiError: the request has not exactly one pair of them.
        """
        named = {name for pair in _PAIRS for name in pair if getattr(self, name) is not None}
        found = next((pair for pair in _PAIRS if named == set(pair)), None)
        if found is None:
            works = ", or ".join(f"{first} and {second}" for first, second in _PAIRS)
            raise invalid("data_1", f"the request has {', '.join(sorted(named)) or 'no texts'}; give {works}")
        return found


class RerankBody(PairsBody):
    """POST /rerank, /v1/rerank and /v2/rerank. `top_n` 0 is all."""

    query: OneText
    documents: TextList
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        **PooledBody.unsupported,
        "max_chunks_per_doc": (1,),
        "rank_fields": (["text"],),
    }
    reasons: ClassVar[Mapping[str, str]] = {
        **PooledBody.reasons,
        "rank_fields": "a document has one text",
        "max_chunks_per_doc": "a document is one text; max_tokens_per_doc cuts it",
    }
