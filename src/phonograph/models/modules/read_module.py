"""Reads the specification of a model that transformers' own module runs, from the module on the meta device.

No code of a checkpoint is imported: the module is one of the installed transformers.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch.fx.experimental import _config as symbolic_config
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging
from transformers.utils.generic import ModelOutput

from phonograph.errors import ModelError, UnsupportedModelError, shortened
from phonograph.graphs.tape.guards import CaptureProbe
from phonograph.models.end_tokens import model_end_tokens, split_end_tokens
from phonograph.models.hf_config import check_overrides, with_overrides
from phonograph.models.layer_spec import UNLIMITED, LayerSizes, LayerSpec, decoder_layer
from phonograph.models.layers.layer_matrix import LayerMatrix, MatrixPart
from phonograph.models.modules.module_attention import IMPLEMENTATION, Recorder
from phonograph.models.modules.module_experts import experts_notes
from phonograph.models.modules.module_spec import ModuleSpec, RecordedAttention
from phonograph.models.registry import architecture_name
from phonograph.models.weights.tensor_shapes import DTYPE_BYTES

log = logging.getLogger(__name__)

_TOKENS = 4
"""Tokens of the step that runs on the meta device."""


class HeadInput(torch.nn.Module):
    """The place of a module's decoder: it returns the states that the head reads.

    Attributes:
        hidden_TE: the states.
        kind: class of the decoder's output.
    """

    hidden_TE: torch.Tensor
    kind: type[ModelOutput]

    def forward(self, *_: Any, **__: Any) -> ModelOutput:
        """Return the states as the output of the decoder."""
        return self.kind(last_hidden_state=self.hidden_TE[None])


class CutModule(NamedTuple):
    """A module whose decoder and head run apart.

    Attributes:
        decoder: all but the head.
        whole: the module, with `head_input` in the place of the decoder.
        head_input: states that the head reads.
    """

    decoder: torch.nn.Module
    whole: PreTrainedModel
    head_input: HeadInput

    def run(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return the decoder's output [T, E]."""
        output = self.decoder(
            input_ids=input_ids_T[None], position_ids=positions_T[None], attention_mask=None, use_cache=False
        )
        self.head_input.kind = type(output)
        return output.last_hidden_state[0]

    def logits(self, hidden_NE: torch.Tensor) -> torch.Tensor:
        """Return the logits [N, V] of states, after `run` has run once."""
        self.head_input.hidden_TE = hidden_NE
        try:
            return self.whole(input_ids=None, use_cache=False).logits[0]
        finally:
            del self.head_input.hidden_TE


def cut_module(module: PreTrainedModel) -> CutModule:
    """Put a `HeadInput` in the place of the decoder.

    Raises:
        UnsupportedModelError: the decoder takes no positions.
    """
    decoder = module.get_decoder()
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        raise UnsupportedModelError(f"{type(decoder).__name__} takes no positions")
    name = next(name for name, one in module.named_modules() if one is decoder)
    parent, _, last = name.rpartition(".")
    head_input = HeadInput()
    setattr(module.get_submodule(parent), last, head_input)
    return CutModule(decoder, module, head_input)


def read_module_spec(
    path: Path, raw: Mapping[str, Any], overrides: Mapping[str, Any], reason: str, wrapper: str | None
) -> ModuleSpec:
    """Return the spec of a model that transformers' module runs.

    Args:
        path: config.json.
        raw: its content.
        overrides: fields that replace those of the file.
        reason: why the module runs it.
        wrapper: architecture of the model around it in the checkpoint, or None.

    Raises:
        UnsupportedModelError: transformers has no such module, or the module needs what a step has not.
        ModelError: the configuration is unusable.
        ConfigError: an override names no field.
    """
    check_overrides(overrides, raw, _config({"model_type": raw.get("model_type")}).to_dict())
    raw = with_overrides(raw, overrides)
    name = architecture_name(raw)
    if wrapper is not None:
        raise UnsupportedModelError(f"{wrapper} wraps the model, whose tensors only model_impl=phonograph finds")
    if raw.get("quantization_config") is not None:
        raise UnsupportedModelError("quantization_config is not supported for transformers' modules; 16 bits are")
    module = build_module(name, raw)
    config: Any = module.config
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    of_experts = experts_notes(module)
    calls, logits, uncapturable = _record(module)
    length = getattr(config, "max_position_embeddings", None)
    if type(length) is not int:
        raise ModelError(f"max_position_embeddings={length!r} must be an integer")
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModelError(f"dtype={dtype!r} is not supported; supported are {', '.join(DTYPE_BYTES)}")
    end_tokens, note = split_end_tokens(model_end_tokens(config.eos_token_id, path), logits.shape[1])
    if reason != "model_impl=transformers":
        log.warning("%s: %s, so that the slower module of transformers runs it", path, reason)
    notes = (f"module {type(module).__name__} of transformers {transformers.__version__}: {reason}", *of_experts)
    padded = next((call for call in calls if call.value_size < call.head_size), None)
    if padded is not None:
        notes += (f"the cache has values of {padded.value_size} numbers padded to the {padded.head_size} of keys",)
    return ModuleSpec(
        architecture=name,
        layers=_layers(calls, config.hidden_size, shapes, logits.shape[1], length),
        head=LayerMatrix("lm_head", "", (MatrixPart("lm_head", logits.shape[1]),), config.hidden_size),
        hidden_size=config.hidden_size,
        vocab_size=logits.shape[1],
        context_length=length,
        context_source=f"max_position_embeddings {length}",
        rms_norm_eps=0.0,
        tie_word_embeddings=False,  # Tied tensors are one parameter of the module.
        dtype=dtype,
        eos_token_ids=end_tokens,
        notes=notes if note is None else (*notes, note),
        config=json.dumps(dict(raw)),
        calls=calls,
        shapes=shapes,
        uncapturable=uncapturable,
    )


def _config(raw: Mapping[str, Any]) -> Any:
    model_type: Any = raw.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"model_type={model_type!r} is none of transformers {transformers.__version__}, and code of a checkpoint "
            "does not run here"
        )
    # With the token of padding, GPT-2 looks for it in each step; nothing else of a forward pass uses it.
    fields = {key: value for key, value in raw.items() if key != "auto_map"} | {"pad_token_id": None}
    try:
        return CONFIG_MAPPING[model_type].from_dict(fields)
    except Exception as error:  # transformers' checks raise errors of many types
        raise ModelError(f"transformers refuses the configuration: {shortened(str(error))}") from error


def build_module(name: str, raw: Mapping[str, Any]) -> PreTrainedModel:
    """Return the module on the meta device."""
    config = _config(raw)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None or kind.__name__ != name:
        has = "none" if kind is None else kind.__name__
        raise UnsupportedModelError(f"transformers has {has} for model_type={raw['model_type']!r}, and not {name!r}")
    try:
        with quiet(), torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION, dtype=torch.float32)
    except Exception as error:  # whatever a module does with its configuration
        problem = shortened(f"{type(error).__name__}: {error}")
        raise UnsupportedModelError(f"{name} cannot be built with our attention ({problem})") from error
    if any(hasattr(one, "experts") for one in module.modules()):
        # The eager implementation reads on the host which experts a step has.
        module.set_experts_implementation("batched_mm")
    return module.eval()


def _record(module: PreTrainedModel) -> tuple[tuple[RecordedAttention, ...], torch.Tensor, str | None]:
    """Run a step on the meta device. Return the attention of each layer, logits, and what a graph cannot hold."""
    name = type(module).__name__
    kept = next((type(one).__name__ for one in module.modules() if isinstance(one, torch.nn.Conv1d)), None)
    if kept is not None or getattr(module, "_is_stateful", False):
        raise UnsupportedModelError(f"{name} keeps a state of its own between tokens ({kept or 'recurrent layers'})")
    recorder = Recorder(module)
    cut = cut_module(module)
    ids_T = torch.zeros(_TOKENS, dtype=torch.int64, device="meta")
    # Shapes that depend on data get their largest size.
    any_shape = symbolic_config.patch(meta_nonzero_assume_all_nonzero=True)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with quiet(), torch.inference_mode(), any_shape, CaptureProbe() as probe:
            logits_TV = cut.logits(cut.run(ids_T, ids_T))
    except UnsupportedModelError:
        raise
    except Exception as error:  # whatever a module does with a step
        problem = shortened(f"{type(error).__name__}: {error}")
        raise UnsupportedModelError(f"{name} cannot run with packed tokens and our attention ({problem})") from error
    num_layers = module.config.num_hidden_layers
    if len(recorder.calls) != num_layers:
        raise UnsupportedModelError(
            f"{len(recorder.calls)} of {num_layers} layers of {name} call attention by AttentionInterface; all must"
        )
    _check_windows(module.config, recorder.calls, name)
    return tuple(recorder.calls), logits_TV, probe.problem


def _check_windows(config: Any, calls: list[RecordedAttention], name: str) -> None:
    """Check that layers pass their windows to attention; others have them in a mask only.

    Raises:
        UnsupportedModelError: one does not.
    """
    # A class without the field has a window of another model's configuration, which it does not read.
    window = getattr(config, "sliding_window", None) if hasattr(type(config), "sliding_window") else None
    has_window = window is not None and getattr(config, "use_sliding_window", True) is not False
    types = getattr(config, "layer_types", None)
    if types is None and has_window and all(call.window == UNLIMITED for call in calls):
        raise UnsupportedModelError(f"sliding_window={window}: no layer of {name} passes it to its attention")
    for index, (kind, call) in enumerate(zip(types or (), calls, strict=types is not None)):
        if kind != "full_attention" and (kind != "sliding_attention" or call.window == UNLIMITED):
            raise UnsupportedModelError(f"layer {index} of {name} is of type {kind}, with a mask that only it knows")


def _layers(
    calls: tuple[RecordedAttention, ...], hidden_size: int, shapes: Mapping[str, tuple[int, ...]], vocab_size: int,
    length: int,
) -> tuple[LayerSpec, ...]:  # fmt: skip
    """Return layers with the recorded attention, and matrices as wide as the widest of the module."""
    widest = max(max(shape) for shape in shapes.values() if len(shape) == 2 and vocab_size not in shape)
    made: dict[RecordedAttention, LayerSpec] = {}
    for call in calls:
        kind = call._replace(module="", sinks=call.sinks and "sinks")
        if kind not in made:
            layer = decoder_layer(
                LayerSizes(hidden_size, widest, call.num_query_heads, call.num_kv_heads, call.head_size),
                window=call.window,
                scale=call.scale,
                softcap=call.softcap,
                sinks=call.sinks is not None,
            )
            made[kind] = layer.within(length)
    return tuple(made[call._replace(module="", sinks=call.sinks and "sinks")] for call in calls)


@contextmanager
def quiet() -> Generator[None]:
    """Keep transformers' advice on faster kernels and its progress bars out of the log."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
