"""Folders of sentence-transformers: modules after the model, length of texts, and prompts before them.

A module or a setting that changes the result and is not known is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.files.model_files import read_json, read_json_list

MODULES_FILE = "modules.json"
_LENGTH_FILES = ("sentence_bert_config.json", "sentence_roberta_config.json", "sentence_distilbert_config.json")
_PROMPTS_FILE = "config_sentence_transformers.json"
_MODES = {"cls": "first", "mean": "mean", "lasttoken": "last"}
"""Modes of `1_Pooling`, and the name of each here."""
_MODE_FIELDS = {"pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "lasttoken"}
_DENSE_FIELDS = ("in_features", "out_features", "bias", "activation_function")
_DENSE_DEFAULTS = {"module_input_name": "sentence_embedding", "module_output_name": "sentence_embedding"}


@dataclass(frozen=True, kw_only=True)
class DenseModule:
    """A dense module: its folder, its sizes, and the name of its activation without the path of its class."""

    folder: str
    num_inputs: int
    num_outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True, kw_only=True)
class SentenceModules:
    """Modules of a folder.

    Attributes:
        pooling: "first", "mean" or "last".
        size: numbers of a row that are pooled, or None if the file does not say.
        normalizes: True if the result is divided by its norm.
        max_tokens: longest text in tokens, or None.
    """

    pooling: str
    size: int | None
    dense: tuple[DenseModule, ...] = ()
    normalizes: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class SentencePrompts:
    """Texts that are put before a text, by name, the name of the default or None, and True if texts are lowered."""

    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    default: str | None = None
    lowers: bool = False


def read_sentence_modules(folder: Path) -> SentenceModules | None:
    """Return the modules of a folder, or None if it has no modules.json, or no pooling in it.

    Raises:
        UnsupportedModelError: a module, or a setting of one, is not supported.
        ModelError: a file is unusable.
    """
    path = folder / MODULES_FILE
    if not path.is_file():
        return None
    pooling: tuple[str, int | None] | None = None
    dense: list[DenseModule] = []
    normalizes = False
    for module in _entries(path):
        kind, place = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind == "Transformer" and pooling is None:
            continue
        if kind == "Pooling" and pooling is None:
            pooling = _read_pooling(folder / place / "config.json", _has_prompts(folder))
        elif kind == "Dense" and pooling is not None and not normalizes:
            dense.append(_read_dense(folder, place))
        elif kind == "Normalize" and pooling is not None:
            normalizes = True
        else:
            raise UnsupportedModelError(
                f"module {shortened(repr(module.get('type')))} in {path} is not supported in this place; supported are "
                "Transformer, then Pooling, Dense and Normalize"
            )
    if pooling is None:
        return None
    length = _text_settings(folder).get("max_seq_length")
    return SentenceModules(
        pooling=pooling[0],
        size=pooling[1],
        dense=tuple(dense),
        normalizes=normalizes,
        max_tokens=length if isinstance(length, int) and length > 0 else None,
    )


def read_sentence_prompts(folder: Path) -> SentencePrompts:
    """Return the prompts of a folder.

    Raises:
        ModelError: they are not texts by name.
    """
    path = folder / _PROMPTS_FILE
    content = read_json(path) if path.is_file() else {}
    prompts, default = content.get("prompts") or {}, content.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError(f"prompts={shortened(repr(prompts))} in {path} must be texts by name")
    if default is not None and default not in prompts:
        raise ModelError(f"default_prompt_name={default!r} in {path} must be one of {', '.join(prompts) or 'none'}")
    lowers = bool(_text_settings(folder).get("do_lower_case"))
    return SentencePrompts(prompts={**prompts}, default=default, lowers=lowers)


def _text_settings(folder: Path) -> Mapping[str, Any]:
    return next((read_json(folder / name) for name in _LENGTH_FILES if (folder / name).is_file()), {})


def _entries(path: Path) -> list[Mapping[str, Any]]:
    content: Any = read_json_list(path)
    if all(isinstance(module, dict) for module in content):
        return content
    raise ModelError(f"{path} must be a list of modules with type and path")


def _has_prompts(folder: Path) -> bool:
    return any(read_sentence_prompts(folder).prompts.values())


def _read_pooling(path: Path, has_prompts: bool) -> tuple[str, int | None]:
    content = read_json(path)
    named = content.get("pooling_mode")
    modes = (
        (named if isinstance(named, list) else [named])
        if named is not None
        else [
            _MODE_FIELDS.get(name, name.removeprefix("pooling_mode_").removesuffix("_tokens"))
            for name, value in content.items()
            if name.startswith("pooling_mode_") and value
        ]
    )
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModelError(
            f"pooling by {' and '.join(map(str, modes)) or 'nothing'} in {path} is not supported; one of "
            f"{', '.join(_MODES)} is"
        )
    if content.get("include_prompt") is False and has_prompts:
        raise UnsupportedModelError(f"include_prompt=false in {path} is not supported: prompts are pooled too")
    size = content.get("word_embedding_dimension", content.get("embedding_dimension"))
    return _MODES[modes[0]], size if isinstance(size, int) else None


def _read_dense(folder: Path, place: str) -> DenseModule:
    path = folder / place / "config.json"
    content = read_json(path)
    unknown = [
        name
        for name, value in content.items()
        if name not in _DENSE_FIELDS and value is not None and value != _DENSE_DEFAULTS.get(name)
    ]
    sizes = [content.get(name) for name in ("in_features", "out_features")]
    if unknown or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise UnsupportedModelError(
            f"{path} has {', '.join(unknown) or 'no sizes'}; a dense module has {', '.join(_DENSE_FIELDS)}"
        )
    return DenseModule(
        folder=place,
        num_inputs=content["in_features"],
        num_outputs=content["out_features"],
        bias=bool(content.get("bias", True)),
        activation=str(content.get("activation_function") or "Tanh").rpartition(".")[2],
    )
