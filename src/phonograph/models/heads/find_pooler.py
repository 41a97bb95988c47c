"""Pooler of a model: the head of its architecture, the modules of its folder, or a default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from phonograph.core.pooling_params import PoolingTask, RowActivation
from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.files.sentence_transformers import MODULES_FILE, SentenceModules, read_sentence_modules
from phonograph.models.heads.pooler_spec import Pooler, PoolerStage, Pooling, StageActivation
from phonograph.models.heads.token_classifier import TOKENS, token_rows

if TYPE_CHECKING:
    from phonograph.models.families.family import Family, Settings
    from phonograph.models.spec import ModelSpec

CLASSIFIER, TOKEN_CLASSIFIER = "ForSequenceClassification", "ForTokenClassification"
_ACTIVATIONS: Mapping[str, StageActivation] = {
    "Identity": "none",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Activations of dense modules by the class of torch."""
_ROW_ACTIVATIONS: Mapping[str, RowActivation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
_BARE = (r"^(?!model\.|score\.|lm_head\.)", "model.")
"""Files of decoders without a head may have names without `model.`."""


def with_pooler(
    spec: ModelSpec, family: Family, settings: Settings, raw: Mapping[str, Any], folder: Path, convert: str
) -> ModelSpec:
    """Return the model with its pooler, if it has one: it then generates nothing.

    Args:
        spec: the model.
        family: its family.
        settings: fields of the family.
        raw: content of config.json.
        folder: folder of the model.
        convert: "embed" makes a model that embeds; "none" leaves one that generates.

    Raises:
        UnsupportedModelError: a part of it is not supported.
        ModelError: a file is unusable, or sizes do not go together.
    """
    name, length, source = spec.architecture, spec.context_length, spec.context_source
    if spec.encoder is not None:
        if convert == "embed":
            raise UnsupportedModelError(f"convert=embed makes no embeddings of {name}, which writes text of audio")
        return spec
    if raw.get(TOKENS) is not None and (family.encodes or not name.endswith(CLASSIFIER)):
        problem = f"makes a classifier of a decoder's head; set architectures to one that ends in {CLASSIFIER}"
        raise UnsupportedModelError(f"{TOKENS} {problem}, not {name}")
    if name.endswith((CLASSIFIER, TOKEN_CLASSIFIER)):
        pooler = _classifier(name, family, settings, raw, folder)
    else:
        generates = name.endswith("ForCausalLM")
        modules = None if generates and convert == "none" else read_sentence_modules(folder)
        if generates and modules is None and convert != "embed":
            if spec.causal:
                return spec
            raise UnsupportedModelError(
                f"{name} looks ahead by its config.json, so it generates nothing; convert=embed works"
            )
        pooler = _embedder(spec, family, modules, "convert=embed" if generates else name)
        if modules is not None and modules.max_tokens is not None and modules.max_tokens < length:
            length, source = modules.max_tokens, f"max_seq_length {modules.max_tokens} of sentence_bert_config.json"
    if not spec.causal and any(one.window[1] == 0 for one in spec.attentions.values()):
        raise UnsupportedModelError(f"{name} looks ahead and has windows that look back only, which is not supported")
    unused = family.unused if family.encodes else ("lm_head.",)
    if spec.wrapper is not None:
        raise UnsupportedModelError(f"{spec.wrapper} is a wrapper, from which no embeddings or classes are made")
    return replace(
        spec,
        pooler=pooler,
        tie_word_embeddings=False,
        context_length=length,
        context_source=source,
        renames=spec.renames if family.encodes else (*spec.renames, _BARE),
        skipped=(
            *spec.skipped,
            *(start for start in unused if not any(one.name.startswith(start) for one in pooler.stages)),
        ),
    )


def _embedder(spec: ModelSpec, family: Family, modules: SentenceModules | None, origin: str) -> Pooler:
    default: Pooling = "mean" if family.encodes or not spec.causal else "last"
    token_tasks: tuple[PoolingTask, ...] = ("token_embed",)
    if modules is None:
        origin = f"{origin}: {default} pooling and normalised, as there is no {MODULES_FILE}"
        tasks = ("embed", *(token_tasks if default == "mean" else ()))
        return Pooler(pooling=default, tasks=tasks, activation="normalize", origin=origin)
    if modules.size not in (None, spec.hidden_size):
        raise ModelError(f"1_Pooling has rows of {modules.size} numbers; the model has {spec.hidden_size}")
    stages: list[PoolerStage] = []
    size = spec.hidden_size
    for number, dense in enumerate(modules.dense):
        if dense.activation not in _ACTIVATIONS:
            raise UnsupportedModelError(
                f"activation_function={dense.activation} in {dense.folder} is not supported; supported are "
                f"{', '.join(_ACTIVATIONS)}"
            )
        if dense.num_inputs != size:
            raise ModelError(f"{dense.folder} takes rows of {dense.num_inputs} numbers, and gets {size}")
        size = dense.num_outputs
        stages.append(
            PoolerStage(
                f"modules.{number}",
                dense.num_inputs,
                size,
                dense.bias,
                _ACTIVATIONS[dense.activation],
                folder=dense.folder,
            )
        )
    whole = modules.pooling == "mean" or not spec.causal
    return Pooler(
        pooling=cast("Pooling", modules.pooling),
        tasks=("embed", *(token_tasks if whole and not stages else ())),
        activation="normalize",
        activates=modules.normalizes,
        origin=f"{MODULES_FILE}: {modules.pooling} pooling{', dense' * len(stages)}"
        + (", normalised" if modules.normalizes else ", not normalised"),
        stages=tuple(stages),
    )


def _classifier(name: str, family: Family, settings: Settings, raw: Mapping[str, Any], folder: Path) -> Pooler:
    rows = token_rows(raw, folder, tied=settings.get("tie_word_embeddings") is True)
    labels = _labels(raw) if rows is None else rows.labels
    pooling, stages = family.classifier(settings, name, len(labels))
    stages = (*stages[:-1], stages[-1]._replace(rows=rows))
    origin = f"{name}: {pooling} pooling{', dense' * (len(stages) - 1)}, {len(labels)} labels"
    origin += "" if rows is None else f" of {TOKENS}"
    if name.endswith(TOKEN_CLASSIFIER):
        return Pooler(
            pooling="all",
            tasks=("token_classify",),
            activation="softmax",
            origin=f"{name}: {len(labels)} labels of each token",
            stages=stages,
            labels=labels,
        )
    activation, field = _row_activation(raw, len(labels))
    tasks: tuple[PoolingTask, ...] = ("score", "classify") if len(labels) == 1 else ("classify",)
    return Pooler(
        pooling=pooling,
        tasks=tasks,
        activation=activation,
        origin=f"{origin}, {activation} ({field})",
        stages=stages,
        labels=labels,
        template=None if rows is None else rows.template,
    )


def _labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the classes, in the order of their numbers."""
    names, count = raw.get("id2label"), raw.get("num_labels")
    if names is None:
        return tuple(f"LABEL_{number}" for number in range(2 if count is None else int(count)))
    try:
        by_number = {int(number): str(label) for number, label in names.items()}
    except (AttributeError, TypeError, ValueError):
        by_number = {}
    if not by_number or sorted(by_number) != [*range(len(by_number))]:
        raise ModelError(f"id2label={shortened(repr(names))} must name the classes by their numbers from 0")
    return tuple(by_number[number] for number in range(len(by_number)))


def _row_activation(raw: Mapping[str, Any], num_labels: int) -> tuple[RowActivation, str]:
    """Return the activation of a classifier's row as sentence-transformers and vLLM choose it, and the field."""
    problem = raw.get("problem_type")
    if problem is not None:
        found: Mapping[str, RowActivation] = {
            "regression": "none",
            "single_label_classification": "softmax",
            "multi_label_classification": "sigmoid",
        }
        if problem not in found:
            raise UnsupportedModelError(f"problem_type={problem!r} is not supported; supported are {', '.join(found)}")
        return found[problem], "problem_type"
    inner = raw.get("sentence_transformers")
    name = inner.get("activation_fn") if isinstance(inner, dict) else raw.get("sbert_ce_default_activation_function")
    if name is not None:
        kind = str(name).rpartition(".")[2]
        if kind not in _ROW_ACTIVATIONS:
            raise UnsupportedModelError(
                f"activation {name!r} of the classes is not supported; supported are {', '.join(_ROW_ACTIVATIONS)}"
            )
        return _ROW_ACTIVATIONS[kind], "activation_fn"
    return ("sigmoid" if num_labels == 1 else "softmax"), "num_labels"
