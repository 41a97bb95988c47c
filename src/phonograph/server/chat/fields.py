"""Fields of requests. Unknown fields, and fields that would change the answer and are not served, are rejected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from phonograph.config.base import nearest
from phonograph.config.server_config import ServerConfig
from phonograph.errors import shortened
from phonograph.server.chat.thinking import Thinking
from phonograph.server.http.api_errors import invalid

MAX_STOP_LENGTH = 1024
"""Maximum characters of a stop string, because each new token is compared with all of them."""

NO_EFFECT = frozenset(
    {
        *("metadata", "prediction", "prompt_cache_key", "prompt_cache_retention", "return_token_offsets"),
        *("safety_identifier", "service_tier", "session_id", "store", "user"),
    }
)
"""Fields of OpenAI and vLLM that do not change the answer. They are accepted, and a header lists them."""

VLLM_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("ec_transfer_params", "kv_transfer_params", "media_io_kwargs", "mm_payload"), ()),
    **dict.fromkeys(("mm_processor_kwargs", "return_mm_kwargs", "vllm_xargs", "watermarking"), ()),
}
"""Fields of vLLM for every protocol that are not served, with neutral values as in `UNSUPPORTED`."""
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    **VLLM_UNSUPPORTED,
    **dict.fromkeys(("audio", "chat_template", "functions", "guided_decoding_backend", "logits_processors"), ()),
    **dict.fromkeys(("prompt_embeds", "prompt_logprob_token_ids", "repetition_detection"), ()),
    **dict.fromkeys(("return_prompt_text", "return_weight_versions", "use_beam_search", "web_search_options"), ()),
    **dict.fromkeys(("function_call", "reasoning_effort"), ("none",)),
    **dict.fromkeys(("include_reasoning", "spaces_between_special_tokens"), (True,)),
    **{"length_penalty": (1,), "modalities": (["text"],), "routed_experts_prompt_start": (0,), "stream_interval": (1,)},
    **{"suffix": ("",), "thinking_token_budget": (-1,), "verbosity": ("medium",)},
}
"""Fields of OpenAI or vLLM that are not served, with neutral values. Null, false, [] and {} are always neutral."""

_REASONS: Mapping[str, str] = {
    "function_call": "tool_choice replaces it",
    "functions": "tools replaces it",
    "guided_decoding_backend": "one library compiles all grammars",
    "logits_processors": "logit_bias, allowed_token_ids and bad_words change logits",
    "prompt_logprob_token_ids": "LLM and AsyncLLM have it; prompt_logprobs has the likeliest tokens at each position",
    "return_prompt_text": "echo has the prompt's text",
    "thinking_token_budget": "chats and responses have it",
    "use_beam_search": "completions and chats have it",
}


def _close(schema: dict[str, Any], body: type[Fields]) -> None:
    schema["properties"] |= {name: {"description": "accepted, without effect"} for name in sorted(body.no_effect)}
    schema["additionalProperties"] = False


class Fields(BaseModel):
    """Fields of a request or of an object in it, with strict JSON types: "5" does not pass as a number.

    prefix:      beginning of the fields' names in messages
    no_effect:   fields that do not change the answer
    unsupported: fields that are not served, with neutral values
    reasons:     what to do without a field that is not served
    """

    prefix: ClassVar[str] = ""
    no_effect: ClassVar[frozenset[str]] = NO_EFFECT
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = UNSUPPORTED
    reasons: ClassVar[Mapping[str, str]] = _REASONS

    # Extra fields are only read to be named in an error; the OpenAPI document excludes them.
    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_close)

    def drop_unknown(self) -> list[str]:
        """Remove fields that neither this server nor another one knows; return their names."""
        extra = self.model_extra or {}
        known = {*self.no_effect, *self.unsupported, "best_of"}
        unknown = [name for name in extra if name not in known]
        for name in unknown:
            del extra[name]
        return [self.prefix + shortened(name) for name in unknown]

    def check(self) -> list[str]:
        """Check the fields; return those that have no effect.

        Raises:
            ApiError: a field is unknown, not supported, or contradicts another.
        """
        ignored: list[str] = []
        for key, value in (self.model_extra or {}).items():
            name = self.prefix + (key if len(key) <= 100 else f"{key[:100]}...")
            if key in self.no_effect:
                if value is not None:
                    ignored.append(name)
            elif key in self.unsupported:
                if not asks_nothing(value, self.unsupported[key]):
                    problem = f"{name} is not supported by this server"
                    if key in self.reasons:
                        problem += f": {self.reasons[key]}"
                    raise invalid(name, problem, code="unsupported_parameter")
            else:
                known = [*type(self).model_fields, *self.no_effect, *self.unsupported]
                hint = nearest(key[:100], known)
                hint = hint if hint.startswith("did you mean") else "this endpoint has no such field"
                raise invalid(name, f"unknown field {name!r}: {hint}", code="unknown_parameter")
        return ignored


class Body(Fields):
    """Body of a request."""

    model: str | None = None

    def complete(self, config: ServerConfig) -> None:
        """Set fields that the request leaves out and the server has a default for."""

    def requested_thinking(self) -> Thinking | None:
        """Return the reasoning that the request asks for; None for other requests."""
        return None


def asks_nothing(value: object, neutral: tuple[object, ...]) -> bool:
    """Return True if a field with this value changes nothing."""
    return value is None or value is False or value in ([], {}) or value in neutral


def _texts(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("must be a string or a list of strings")
    if any(len(text) > MAX_STOP_LENGTH for text in texts):
        raise ValueError(f"a stop string has {MAX_STOP_LENGTH} characters at most")
    return texts


def _biases(value: object) -> dict[int, float]:
    """Return biases by token id, which JSON has as text."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("must map token ids to biases")
    biases: dict[int, float] = {}
    wrong = [key for key in value if not (key.isascii() and key.isdecimal()) or len(key) > 10]
    if wrong:
        raise ValueError(f"no token ids: {', '.join(repr(key[:50]) for key in wrong[:8])}")
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"the bias of token {key} must be a number")
        biases[int(key)] = bias
    return biases


def _prompts(value: object) -> list[str | list[int]]:
    """Return one prompt or several as a list of texts or token ids."""
    problem = "must be a string, a list of token ids, or a list of these"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(problem)
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if not value or not kinds <= {str, list}:
        raise ValueError(problem if value else "is empty")
    if any(isinstance(prompt, list) and set(map(type, prompt)) - {int} for prompt in value):
        raise ValueError(problem)
    return value


def _list_of(kind: type, problem: str, *, least: int = 0) -> BeforeValidator:
    """Return a check that a value is a list of at least `least` items of exactly one type."""

    def check(value: object) -> list[Any]:
        if not isinstance(value, list) or len(value) < least or set(map(type, value)) - {kind}:
            raise ValueError(problem)
        return value

    return BeforeValidator(check)


# The functions above validate whole lists, because pydantic keeps one error per item.
_TEXT_OR_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_ONE_PROMPT: list[dict[str, Any]] = [{"type": "string"}, _IDS]

Stops = Annotated[list[str], BeforeValidator(_texts), WithJsonSchema(_TEXT_OR_TEXTS)]
Biases = Annotated[
    dict[int, float],
    BeforeValidator(_biases),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema({"anyOf": [*_ONE_PROMPT, {"type": "array", "items": {"anyOf": _ONE_PROMPT}, "minItems": 1}]}),
]
Texts = Annotated[
    list[Any],
    _list_of(str, "must be a list of texts"),
    WithJsonSchema({"type": "array", "items": {"type": "string"}}),
]
Choices = Annotated[
    list[Any],
    _list_of(str, "must be a list of texts"),
    WithJsonSchema({"type": "array", "items": {"type": "string"}, "minItems": 1}),
]
Budget = Annotated[int | None, AfterValidator(lambda value: None if value == -1 else value)]
"""Maximum of tokens; -1 is none, as null."""
CacheSalt = Annotated[str, Field(min_length=1, max_length=128)]
TokenIds = Annotated[list[Any], _list_of(int, "must be a list of token ids"), WithJsonSchema(_IDS)]
Documents = Annotated[
    list[Any],
    _list_of(dict, "must be a list of objects"),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
Messages = Annotated[
    list[Any],
    _list_of(dict, "must be a list of one message or more, each an object", least=1),
    WithJsonSchema({"type": "array", "items": {"type": "object"}, "minItems": 1}),
]
