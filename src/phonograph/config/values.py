"""Kinds of setting values. Each reads text (flags, YAML, environment) and Python objects."""

from __future__ import annotations

import fractions
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_args

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from phonograph.graphs.modes import GraphMode

_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NULL = frozenset({"null", "~"})
_AUTO = frozenset({"auto", "-1"})
_DECIMAL = re.compile(r"(\d+(?:\.\d+)?)([kmgt])")
_BINARY = re.compile(r"(\d+)([KMGT])")


def unless_null(value: object) -> object:
    """Return None for text that means null, and any other value unchanged."""
    return None if isinstance(value, str) and value.strip().lower() in _NULL else value


@dataclass(frozen=True, slots=True)
class ValueKind:
    """Kind of a setting's values, as metadata of a pydantic field.

    Attributes:
        works: valid values, in words that follow "must be".
        parse: converts a value other than None; raises TypeError or ValueError for an invalid one.
        metavar: name of the value in a flag's help.
        installed: returns further valid values, those of installed packages.
    """

    works: str
    parse: Callable[[Any], object]
    metavar: str
    installed: Callable[[], list[str]] = list

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.read, handler(source))

    def read(self, value: object) -> object:
        """Return the value to store. None stays None.

        Raises:
            ValueError: the value is invalid.
        """
        value = unless_null(value)
        if value is None:
            return None
        try:
            return self.parse(value)
        except (TypeError, OverflowError) as error:
            raise ValueError(str(error)) from None


def whole(low: int, high: int | None = None) -> ValueKind:
    """Return the kind of integers from `low` to `high`."""

    def parse(value: object) -> int:
        if isinstance(value, bool):
            raise TypeError("a truth value is not a number")
        number = _whole(value) if isinstance(value, str) else operator.index(value)  # pyright: ignore[reportArgumentType]
        if number < low or (high is not None and number > high):
            raise ValueError("out of range")
        return number

    return ValueKind(f"a whole number >= {low}" + (f" and <= {high}" if high is not None else ""), parse, "N")


def _whole(text: str) -> int:
    """Return the number of a text: 32k is 32,000 and 32K is 32,768, as in vLLM."""
    text = text.strip()
    if (binary := _BINARY.fullmatch(text)) is not None:
        return int(binary[1]) << 10 * ("KMGT".index(binary[2]) + 1)
    if (decimal := _DECIMAL.fullmatch(text)) is None:
        return int(text)
    number = fractions.Fraction(decimal[1]) * 1000 ** ("kmgt".index(decimal[2]) + 1)
    if number.denominator != 1:
        raise ValueError("not whole")
    return number.numerator


def auto_or(kind: ValueKind, meaning: str) -> ValueKind:
    """Return `kind` with auto and -1, vLLM's words for a choice of the engine.

    `meaning` is what the engine chooses, in words that follow "auto (or -1) for".
    """

    def parse(value: object) -> object:
        if not isinstance(value, bool) and str(value).strip().lower() in _AUTO:
            return None
        return kind.parse(value)

    return ValueKind(f"{kind.works}, or auto (or -1) for {meaning}", parse, f"{kind.metavar}|auto")


def one_of(
    literal: object, synonyms: Mapping[str, str] = MappingProxyType({}), *, group: str | None = None
) -> ValueKind:
    """Return the kind of a Literal's strings or numbers; case is ignored.

    `synonyms` are vLLM's other names of some of them. With `group`, the names of that group of entry points are valid
    too; their packages are not imported.
    """
    installed: Callable[[], list[str]] = list if group is None else partial(_installed_names, group)
    values = {str(value).lower(): value for value in get_args(literal)}
    words = [str(value) for value in values.values()]
    values |= {name: values[value] for name, value in synonyms.items()}

    def parse(value: object) -> object:
        text = str(value).strip().lower()
        if text in values:
            return values[text]
        if text in installed():
            return text
        raise ValueError("not one of them")

    return ValueKind(f"one of {', '.join(words)}", parse, "|".join(words), installed)


def _installed_names(group: str) -> list[str]:
    return sorted({point.name.lower() for point in entry_points(group=group)})


def _parse_text(value: Any) -> str:
    text = os.fspath(value)
    if not isinstance(text, str) or not text.strip():
        raise ValueError("empty")
    return text


def _parse_flag(value: object) -> bool:
    text = str(value).strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError("not a truth value")
    return text in _TRUE


def _number(accepts: Callable[[float], bool]) -> Callable[[Any], float]:
    """Return a parser of the finite numbers that `accepts` accepts."""

    def parse(value: Any) -> float:
        if isinstance(value, bool):
            raise TypeError("a truth value is not a number")
        number = float(value)
        if not (math.isfinite(number) and accepts(number)):
            raise ValueError("out of range")
        return number

    return parse


def _parse_texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        # vLLM takes JSON lists, such as '["*"]'.
        listed = json.loads(value) if value.lstrip().startswith("[") else value.split(",")
        value = [item.strip() if isinstance(item, str) else item for item in listed]
    if isinstance(value, Mapping) or not isinstance(value, Iterable):
        raise TypeError("not a list")
    texts = tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("not text")
    return texts


def _parse_model(value: object) -> str:
    """Return a model's name without the address of the hub, which llama.cpp's and Ollama's users write before it."""
    return re.sub(r"^(https?://)?(huggingface\.co|hf\.co)/(?=.)", "", _parse_text(value)).rstrip("/")


def _parse_mode(value: object) -> GraphMode:
    if isinstance(value, GraphMode):
        return value
    if not isinstance(value, str) or value.strip().upper() not in GraphMode.__members__:
        raise ValueError("not a mode")
    return GraphMode[value.strip().upper()]


def _parse_sizes(value: Any) -> tuple[int, ...]:
    if isinstance(value, str):
        value = re.split(r"\s*,\s*|\s+", value.strip().removeprefix("[").removesuffix("]").strip())
    if isinstance(value, Mapping):
        raise TypeError("a mapping is not a list")
    parse = whole(1).parse
    sizes: set[Any] = {parse(size) for size in value} if isinstance(value, Iterable) else {parse(value)}
    if not sizes:
        raise ValueError("empty")
    return tuple(sorted(sizes))


def _parse_object(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        value = json.loads(value)
    if not isinstance(value, Mapping):
        raise TypeError("not an object")
    return {str(name): _read_scalars(item) for name, item in value.items()}


def _read_scalars(value: Any) -> Any:
    """Convert texts that are JSON numbers, true, false or null: YAML scalars arrive as text."""
    if isinstance(value, Mapping):
        return {str(name): _read_scalars(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_read_scalars(item) for item in value]
    if not isinstance(value, str):
        return value
    try:
        scalar = json.loads(value)
    except ValueError:
        return value
    return value if isinstance(scalar, str | list | dict) else scalar


DType = Literal["auto", "float32", "float16", "bfloat16"]
DTYPE_SYNONYMS = {
    **{"half": "float16", "float": "float32"},
    **{f"torch.{name}": name for name in ("float32", "float16", "bfloat16")},
}
QuantizationMethod = Literal["gptq", "awq", "compressed-tensors", "fp8", "auto-round", "mxfp4"]
HeadFormat = Literal["fp8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
Convert = Literal["auto", "embed", "none"]
ModelImpl = Literal["auto", "phonograph", "transformers"]
CpuProductsChoice = Literal["auto", "int4", "float32"]
DeviceKind = Literal["auto", "cpu", "cuda"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"]
KVCacheLayout = Literal["NHD", "HND"]
SchedulingPolicy = Literal["fcfs", "priority"]
Strictness = Literal["strict", "relaxed"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
CascadeAttention = Literal["auto", "off"]
FlashAttnVersion = Literal[2, 3, 4]

_text = ValueKind("text that is not empty", _parse_text, "TEXT")
Text = Annotated[str, _text]
OptionalText = Annotated[str | None, _text]
ModelName = Annotated[str, ValueKind("text that is not empty", _parse_model, "TEXT")]
Texts = Annotated[
    tuple[str, ...], ValueKind("texts, as a list or with commas between them", _parse_texts, "TEXT,TEXT,...")
]
Flag = Annotated[bool, ValueKind("true or false", _parse_flag, "true|false")]
Fraction = Annotated[float, ValueKind("a number > 0 and <= 1", _number(lambda number: 0 < number <= 1), "X")]
Count = Annotated[int, whole(0)]
CountOrAll = Annotated[int, whole(-1)]
Size = Annotated[int, whole(1)]
OptionalCount = Annotated[int | None, whole(0)]
OptionalSize = Annotated[int | None, whole(1)]
OptionalContext = Annotated[int | None, auto_or(whole(1), "the largest that fits")]
# Bounds far above any useful value: tables and graphs are sized by them at the start.
OptionalSeqs = Annotated[int | None, whole(1, 1 << 17)]
OptionalStepTokens = Annotated[int | None, whole(1, 1 << 20)]
Seed = Annotated[int, whole(0, 2**63 - 1)]
Seconds = Annotated[float, ValueKind("seconds >= 0", _number(lambda number: number >= 0), "SECONDS")]
_parse_duration = _number(lambda number: number > 0)
Duration = Annotated[float, ValueKind("seconds > 0", _parse_duration, "SECONDS")]
OptionalDuration = Annotated[float | None, ValueKind("seconds > 0, or null for no limit", _parse_duration, "SECONDS")]
OptionalObject = Annotated[
    Mapping[str, Any] | None, ValueKind('a JSON object such as {"rope_theta": 1000000.0}', _parse_object, "JSON")
]
_mode = ValueKind(f"one of {', '.join(GraphMode.__members__)}", _parse_mode, "MODE")
OptionalMode = Annotated[GraphMode | None, _mode]
OptionalSizes = Annotated[
    tuple[int, ...] | None,
    ValueKind("whole numbers >= 1, as one number, a list or text such as '1,2,4'", _parse_sizes, "N,N,..."),
]
