"""Checks of requests against the model's vocabulary and the engine's limits, before they are queued.

`SamplingParams` makes the checks that need neither. A step does not check again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from phonograph.config.engine_config import EngineConfig
from phonograph.core.grammar import Grammar
from phonograph.core.pooling_params import PoolingParams
from phonograph.core.request import Request
from phonograph.core.sampling_params import SamplingParams
from phonograph.core.token_types import EncoderTokens, TypedTokens
from phonograph.errors import ConfigError, RequestError, counted, shortened
from phonograph.models.heads.encoder_specs import AudioEncoder, TextEncoder
from phonograph.models.heads.pooler_spec import Pooler
from phonograph.structured.token_rules import TimestampRules, with_token_rules
from phonograph.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    # It imports torch, which the server's process does without.
    from phonograph.models.spec import ModelSpec

Prompt = str | Sequence[int]
Item = TypeVar("Item")
MAX_REQUEST_ID = 256
"""Maximum number of characters of a request's id."""
SLEEP_TAGS = ("weights", "kv_cache")
"""Names of the two parts of memory that sleep gives back, which are vLLM's."""
_INT64 = range(-(2**63), 2**63)
_TOGETHER = 64
"""Texts that are tokenized at the same time."""


def admitted_config(
    model: str | Path | None, config: EngineConfig | None, settings: Mapping[str, Any], *, serves: bool = True
) -> EngineConfig:
    """Return the configuration of an engine, from a whole configuration or from a model and settings.

    Args:
        model: folder, GGUF file, hub id or "demo"; None with `config`.
        config: in place of model and settings.
        settings: fields of EngineConfig.
        serves: False for an engine that is only verified.

    Raises:
        ConfigError: both forms are used, a setting is wrong, or an engine cannot serve requests with it.
    """
    settings = dict(settings) if model is None else {"model": model, **settings}
    if config is not None and settings:
        raise ConfigError(next(iter(settings)), next(iter(settings.values())), "give settings or config, not both")
    config = config or EngineConfig(**settings)
    if config.num_speculative_tokens and serves:
        problem = "graphs with drafts can be explained and verified with it; to speculate, give speculative_config"
        raise ConfigError("num_speculative_tokens", config.num_speculative_tokens, problem)
    return config


def admitted_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        RequestError: a token is outside the model's vocabulary, or the prompt is text that cannot be tokenized.
    """
    if isinstance(prompt, EncoderTokens):
        return EncoderTokens(admitted_token_ids(prompt, vocab_size), prompt.features)
    if not isinstance(prompt, str):
        return admitted_token_ids(prompt, vocab_size)
    if tokenizer is None:
        raise RequestError("prompt", prompt, "is text, and the engine runs without a tokenizer; give token ids")
    if not prompt:
        raise RequestError("prompt", prompt, "is empty; at least one token is needed")
    token_ids = tokenizer.encode(prompt)
    wrong = _unknown_token(token_ids, vocab_size)
    if wrong is not None:
        problem = f"has token {wrong} of the tokenizer, and the model's token ids are 0 to {vocab_size - 1}"
        raise RequestError("prompt", shortened(prompt), problem)
    return token_ids


def admitted_pooling(params: PoolingParams, pooler: Pooler | None, size: int) -> PoolingParams:
    """Return the parameters of a request that generates nothing, with its task.

    Args:
        params: parameters of the request.
        pooler: of the model.
        size: numbers of a row.

    Raises:
        RequestError: the model has no such task, or fewer dimensions.
    """
    if pooler is None:
        problem = "the model generates text; an engine with convert=embed makes embeddings of its last layer"
        raise RequestError("task", params.task, problem)
    task = pooler.tasks[0] if params.task is None else params.task
    if task not in pooler.tasks:
        raise RequestError("task", task, f"the model has {' and '.join(pooler.tasks)} ({pooler.origin})")
    if params.dimensions is not None:
        if pooler.labels:
            raise RequestError("dimensions", params.dimensions, "is for embeddings; classes have none to cut")
        if params.dimensions > size:
            raise RequestError("dimensions", params.dimensions, f"the model has {size}; 1 to {size} work")
    return params if task == params.task else replace(params, task=task)


def refuse_generation(pooler: Pooler | None) -> None:
    """Check that the model generates.

    Raises:
        RequestError: it has a pooler.
    """
    if pooler is not None:
        problem = f"the model generates nothing; its tasks are {' and '.join(pooler.tasks)} ({pooler.origin})"
        raise RequestError("task", "generate", problem)


def refuse_logits(mode: str, work: str) -> None:
    """Check that the engine reports log-probabilities, for work that adds them up.

    Args:
        mode: `logprobs_mode` of the engine.
        work: what the request asks for.

    Raises:
        RequestError: it reports logits.
    """
    if mode.endswith("logits"):
        raise RequestError("logprobs_mode", mode, f"{work} adds up log-probabilities; raw_logprobs works")


def admit_encoder_input(prompt: Prompt, encoder: AudioEncoder | TextEncoder | None, vocab_size: int) -> None:
    """Check that a prompt has input for the encoder of the model if it has one, and none else.

    Raises:
        RequestError: it has not, or its frames or tokens are not those of the model.
    """
    features = prompt.features if isinstance(prompt, EncoderTokens) else None
    if isinstance(encoder, TextEncoder):
        most = encoder.num_positions
        if features is None or features.ndim != 1 or not 0 < len(features) <= most:
            has = None if features is None else f"{features.size} tokens"
            raise RequestError("encoder_prompt", has, f"the model reads 1 to {counted(most, 'token')}")
        admitted_token_ids(features.tolist(), vocab_size)
        return
    if (features is None) != (encoder is None):
        problem = "the model reads no audio" if encoder is None else "is missing, and the model writes text of audio"
        raise RequestError("audio", None if features is None else "an array", problem)
    shape = None if encoder is None else encoder.input_shape
    if features is not None and features.shape != shape:
        raise RequestError("audio", list(features.shape), f"has other frames than the model's {shape}")


def admitted_whole_prompt(
    prompt: Prompt,
    params: PoolingParams,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    max_len: int,
    *,
    special: bool = True,
    keeps_last: bool = False,
) -> list[int]:
    """Return the tokens of a prompt of a model that generates nothing; they may have types.

    Args:
        prompt: text or tokens.
        params: their `truncate_prompt_tokens` counts; a text that is cut keeps the special tokens after it.
        tokenizer: of the text.
        vocab_size: token ids of the model are below it.
        max_len: most tokens of a prompt.
        special: add special tokens to a text.
        keeps_last: what is cut is the beginning of the prompt, not its end.

    Raises:
        RequestError: as `admitted_prompt`, or more tokens should be kept than the model takes.
    """
    most = params.truncate_prompt_tokens
    if most is not None and most > max_len:
        problem = f"the model takes {max_len} tokens; 1 to {max_len} work, or -1 for as many"
        raise RequestError("truncate_prompt_tokens", most, problem)
    most = max_len if most == -1 else most
    if isinstance(prompt, TypedTokens):
        admitted_token_ids(prompt.plain, vocab_size)
        return prompt
    if not isinstance(prompt, str) or tokenizer is None or not prompt:
        token_ids = admitted_prompt(prompt, tokenizer, vocab_size)
        return token_ids[-most:] if keeps_last and most is not None else token_ids[:most]
    token_ids = tokenizer.encode_cut(prompt, most=most, special=special, keeps_last=keeps_last)
    return _in_vocabulary(token_ids, vocab_size)


def tokenized_ahead(tokenizer: Tokenizer | None, prompts: Iterable[Item]) -> Iterator[Item]:
    """Yield prompts, whose texts are tokenized before in several threads, some at a time.

    Args:
        tokenizer: of the texts; the calling thread takes the tokens from it.
        prompts: texts, tokens or errors.
    """
    prompts = iter(prompts)
    while group := list(islice(prompts, _TOGETHER)):
        texts = [prompt for prompt in group if isinstance(prompt, str)]
        if tokenizer is not None and len(texts) > 1:
            tokenizer.encode_ahead(texts)
        yield from group


def admit_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> None:
    """Check that stop strings can be found in the output.

    Raises:
        RequestError: there is no tokenizer.
    """
    if params.stop and tokenizer is None:
        raise RequestError("stop", list(params.stop), "needs a tokenizer; use stop_token_ids")


def admitted_bad_words(params: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """Return parameters whose bad words are token ids: each text as it stands, and after a space.

    Raises:
        RequestError: there is a text and no tokenizer.
    """
    if all(not isinstance(word, str) for word in params.bad_words):
        return params
    if tokenizer is None:
        raise RequestError("bad_words", list(params.bad_words), "needs a tokenizer; give token ids")
    found: dict[tuple[int, ...], None] = {}
    for word in params.bad_words:
        texts = (word, f" {word.lstrip()}") if isinstance(word, str) else ()
        for token_ids in (word,) if not texts else (tokenizer.encode(text, add_special_tokens=False) for text in texts):
            found[tuple(cast("Sequence[int]", token_ids))] = None
    return params.with_checked(bad_words=tuple(filter(None, found)))


def admitted_token_ids(prompt: Iterable[object], vocab_size: int) -> list[int]:
    """Return the token ids of a prompt as Python integers. The prompt may be an array or a tensor.

    Raises:
        RequestError: an item is not an integer, or not a token id of the model.
    """
    to_list = getattr(prompt, "tolist", None)
    values: object = prompt if to_list is None else to_list()
    items: list[object] = list(values) if isinstance(values, Iterable) else [values]
    # Long prompts of Python integers take no loop in Python.
    if set(map(type, items)) != {int}:
        items = [_integer(item) for item in items]
    return _in_vocabulary(cast("list[int]", items), vocab_size)


def _in_vocabulary(token_ids: list[int], vocab_size: int) -> list[int]:
    wrong = _unknown_token(token_ids, vocab_size)
    if wrong is not None:
        raise RequestError("prompt", wrong, f"the model's token ids are 0 to {vocab_size - 1}")
    return token_ids


def _integer(token_id: object) -> int:
    if isinstance(token_id, bool) or not isinstance(token_id, Integral):
        raise RequestError("prompt", token_id, "must be text or a list of integers")
    return int(token_id)


def _unknown_token(token_ids: Sequence[int], vocab_size: int) -> int | None:
    """Return the first token id outside the vocabulary, or None."""
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return None
    return next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)


def admit_parameters(params: SamplingParams, prompt_len: int, vocab_size: int, context_len: int) -> None:
    """Check the parameters of a request against the vocabulary and the context length.

    Raises:
        RequestError: a token id is outside the vocabulary, `min_tokens` exceeds the room in the context, or the rows of
            `prompt_logprob_token_ids` are not those of the prompt.
    """
    params.check_vocabulary(vocab_size)
    rows, num_scored = params.prompt_logprob_token_ids, prompt_len - 1 - params.prompt_logprob_start
    if rows is not None and len(rows) != num_scored:
        problem = f"must be {num_scored} scored rows: all of {counted(prompt_len, 'token')} of the prompt but the first"
        problem += f" and prompt_logprob_start={params.prompt_logprob_start}"
        raise RequestError("prompt_logprob_token_ids", f"{len(rows)} rows", problem)
    room = context_len - prompt_len
    # The scheduler refuses a prompt that leaves no room, with an error about the prompt.
    if params.min_tokens > room > 0:
        problem = f"at most {counted(room, 'token')} can follow a prompt of {prompt_len} in a context of {context_len}"
        raise RequestError("min_tokens", params.min_tokens, problem)


def admit_cache_salt(cache_salt: object) -> None:
    """Check the salt of a request's cached prefixes.

    Raises:
        RequestError: it is neither None nor a non-empty string.
    """
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        problem = "must be a non-empty string; without it cached prefixes are shared with all requests without a salt"
        raise RequestError("cache_salt", shortened(repr(cache_salt)), problem)


def admit_names(request_id: object, priority: object) -> None:
    """Check the id and the priority of a request.

    Raises:
        RequestError: the id is not a string of 1 to 256 characters, or the priority is not an integer of 64 bits.
    """
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_REQUEST_ID:
        shown = shortened(str(request_id))
        raise RequestError("request_id", shown, f"must be a string of 1 to {MAX_REQUEST_ID} characters")
    # The scheduler sorts requests by priority.
    if isinstance(priority, bool) or not isinstance(priority, Integral) or int(priority) not in _INT64:
        raise RequestError("priority", priority, "must be an integer of 64 bits; smaller is served earlier")


def admit_level(level: Any) -> None:
    """Check the level of a sleep.

    Raises:
        RequestError: there is no such level.
    """
    if isinstance(level, bool) or level not in (1, 2):
        raise RequestError("level", shortened(repr(level)), "must be 1, to keep the weights in host memory, or 2")


def admitted_tags(tags: object) -> tuple[str, ...]:
    """Return the tags of a call of `wake_up`; None stands for all.

    Raises:
        RequestError: one is unknown, or they are no list of texts.
    """
    if tags is None:
        return SLEEP_TAGS
    if isinstance(tags, str) or not isinstance(tags, Sequence) or not all(tag in SLEEP_TAGS for tag in tags):  # pyright: ignore[reportUnknownVariableType]
        raise RequestError("tags", shortened(repr(tags)), f"must be a list of {' and '.join(SLEEP_TAGS)}")  # pyright: ignore[reportUnknownArgumentType]
    return tuple(tags)  # pyright: ignore[reportUnknownArgumentType]


def with_model_rules(grammar: Grammar | None, request: Request, model: ModelSpec) -> Grammar | None:
    """Return a grammar with the token rules of a request and of its model.

    A model of speech writes timestamps by its rules, unless the prompt has its token for none of them, or the request
    chooses its tokens otherwise.
    """
    encoder, params = model.encoder, request.params
    if not isinstance(encoder, AudioEncoder):
        return with_token_rules(grammar, params, model.vocab_size)
    first, is_free = encoder.first_timestamp, grammar is None and params.allowed_token_ids is None
    if first is not None and is_free and first - 1 not in request.prompt_token_ids:
        end, most_first = min(model.eos_token_ids, default=first), encoder.max_first_timestamp
        grammar = TimestampRules(model.vocab_size, first=first, end=end, most_first=most_first)
    return with_token_rules(grammar, params, model.vocab_size, encoder.suppressed, encoder.suppressed_first)
