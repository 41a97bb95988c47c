"""Decisions for the draft model of speculation: its attention, its keys in the target's blocks, and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from safetensors import safe_open

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.selection import Selection
from phonograph.config.engine_config import EngineConfig
from phonograph.core.device import DeviceSpec
from phonograph.core.limits import Limits
from phonograph.engine.groups.kv_groups import KVGroups, make_kv_groups
from phonograph.engine.groups.select_backends import select_backends
from phonograph.errors import ConfigError, counted
from phonograph.files.model_files import is_gguf, model_path, read_json
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.models.heads.eagle import DraftSpec, read_eagle
from phonograph.models.heads.eagle_config import method_of
from phonograph.models.heads.shared_weights import num_copied
from phonograph.models.layers.workspace import Workspace
from phonograph.models.modules.module_spec import ModuleSpec
from phonograph.models.spec import DTYPE_BYTES, ModelSpec, read_model_spec
from phonograph.models.weights.loading import weight_files

_TAKES_DRAFTS = "triton or flash_attn"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """A draft model whose layers have keys and values of their own in the blocks of the target's only KV group.

    Attributes:
        model: sizes of the draft model.
        dtype: type of its weights.
        attention: attention of its layers.
        selection: backend of it.
        page_bytes: bytes of its layers in a block.
        taps: hidden states of the target that a draft head reads, the stream that enters each layer; empty for a model
            of its own.
        copied: numbers of the target's embedding and matrix of logits that a head has copies of, because a rank has a
            part of them.
        num_ranks: ranks of the target; the draft model is on rank 0.
    """

    model: ModelSpec
    dtype: str
    attention: AttentionSpec
    selection: Selection
    page_bytes: int
    taps: tuple[int, ...] = ()
    copied: int = 0
    num_ranks: int = 1

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes(self.dtype) + self.copied * DTYPE_BYTES[self.dtype]

    def feature_bytes(self, limits: Limits) -> int:
        """Return the bytes of the states that a draft head reads, its features, and logits by the target's tokens."""
        features = self.model.features
        if features is None:
            return 0
        width = features.memory_size(self.model.hidden_size)
        numbers = limits.max_num_batched_tokens * width + limits.max_num_seqs * features.vocab_size
        return numbers * DTYPE_BYTES[self.dtype]

    def workspace_bytes(self, limits: Limits, device: DeviceSpec) -> int:
        """Return the bytes of the intermediates of its passes on a GPU, with those of features."""
        return self.feature_bytes(limits) + Workspace.nbytes(
            self.model,
            limits.max_num_batched_tokens,
            limits.max_num_seqs,
            self.dtype,
            gemm_device=GemmDevice.of(device),
        )

    @property
    def note(self) -> str:
        """Its sizes, for `explain`."""
        parts = f"{counted(self.model.num_layers, 'layer')}, {self.weight_bytes / (1 << 20):.1f} MiB of weights"
        kind = "head" if self.taps else "model"
        note = f"draft {kind} {self.model.architecture}: {parts}, {self.page_bytes / 1024:.1f} KiB of each block"
        if self.num_ranks == 1:
            return note
        copies = self.copied * DTYPE_BYTES[self.dtype] / (1 << 20)
        of_target = f", with {copies:.1f} MiB of copies of the target's embedding or head" if copies else ""
        return f"{note}; it is on rank 0{of_target}, and the plan of each rank has room for it"


def read_draft_spec(config: EngineConfig, target: ModelSpec) -> DraftSpec:
    """Return the draft model, or the draft head with the states that it reads.

    Args:
        config: has a draft model.
        target: the model that verifies, of all ranks.

    Raises:
        ConfigError: it has another vocabulary, or is not what the method says.
        ModelError: as `read_model_spec` and `read_eagle`.
    """
    speculation = config.speculation
    assert speculation is not None and speculation.model is not None
    is_dummy = config.load_format == "dummy"
    find = partial(model_path, speculation.model, revision=speculation.revision, download_dir=config.download_dir)
    folder = find(config_only=is_dummy)
    method = None if is_gguf(folder) else method_of(read_json(folder / "config.json"))
    # The authors' files of EAGLE-1 name the architecture of a whole model.
    fitting = (method,) if method is not None else ("draft_model", "eagle") if not is_gguf(folder) else ("draft_model",)
    if speculation.method not in fitting:
        raise ConfigError(
            "speculative_config.method", speculation.method, f"does not fit the model; {fitting[0]} works"
        )
    if speculation.method != "draft_model":
        # The names of its tensors say what it has of its own.
        names = None if is_dummy else _tensor_names(find(weights=True))
        return read_eagle(folder, target, method=speculation.method, tensors=names)
    spec = read_model_spec(folder, trust_remote_code=config.trust_remote_code)
    if spec.vocab_size != target.vocab_size:
        raise ConfigError(
            "speculative_config.model",
            speculation.model,
            f"has a vocabulary of {spec.vocab_size} tokens and the model {target.vocab_size}; a draft model with the "
            "tokenizer of the model works",
        )
    return DraftSpec(model=spec, taps=(), notes=())


def _tensor_names(folder: Path) -> set[str]:
    """Return the names in the files of a draft head, without `model.`."""
    names: set[str] = set()
    for file in weight_files(folder):
        with safe_open(file, framework="pt") as tensors:
            names |= {name.removeprefix("model.") for name in tensors.keys()}  # noqa: SIM118 (not a dictionary)
    return names


def plan_draft(
    config: EngineConfig, draft: DraftSpec, target: ModelSpec, dtype: str, attention: list[AttentionSpec],
    kv: KVGroups, limits: Limits, device: DeviceSpec,
) -> DraftPlan:  # fmt: skip
    """Decide how a draft model runs beside a target.

    Args:
        config: has the draft model.
        draft: the draft model.
        target: the model that verifies, of all ranks.
        dtype: type of its weights.
        attention: attention of each of its layers.
        kv: KV groups of a rank of the target.
        limits: what runs at once.
        device: the device.

    Raises:
        ConfigError: one of the models has windows that the context exceeds, the draft model has a shorter context, or
            it has states, an encoder or a pooler, or is a module of transformers.
        BackendError: no backend serves its attention.
    """
    speculation, model, num_ranks = config.speculation, draft.model, config.tensor_parallel_size
    assert speculation is not None

    def refused(problem: str) -> ConfigError:
        return ConfigError("speculative_config.model", speculation.model, problem)

    if isinstance(model, ModuleSpec) or model.states or model.encoder is not None or model.pooler is not None:
        raise refused(
            f"is of {model.architecture}; a model that generates, has no states or encoder and needs no module of "
            "transformers works, and so does method ngram"
        )
    group, *others = kv.groups
    if others or group.window is not None:
        raise refused("works with a model of one KV group without a window, yet; method ngram works")
    if limits.max_model_len > model.context_length and not draft.taps:
        raise refused(
            f"has a context of {model.context_length} tokens ({model.context_source}), and max_model_len is "
            f"{limits.max_model_len}; max_model_len={model.context_length} works"
        )
    size = kv.block_sizes[0]
    # Ranks that share the tokens of a head keep parts of a block; a draft model has whole ones.
    specs = [replace(one, block_size=size, lse=False, non_causal=False) for one in attention]
    sources = [one.kv_layer for one in model.attentions.values()]
    own = make_kv_groups(specs, max_model_len=limits.max_model_len, block_size=size, sources=sources)
    group, *others = own.groups
    if others or group.window is not None or group.readers:
        raise refused("must have layers of one kind of attention, without a window; method ngram works")
    _, selected, _ = select_backends(config.model_copy(update={"block_size": size}), own, device)
    (selection,) = selected.values()
    return DraftPlan(
        model=model, dtype=dtype, attention=own.specs[0], selection=selection, page_bytes=own.page_bytes,
        taps=draft.taps, num_ranks=num_ranks,
        copied=0 if num_ranks == 1 or model.features is None else num_copied(model.features, target),
    )  # fmt: skip


def keeps_tokens(config: EngineConfig, draft: DraftPlan | None) -> bool:
    """Return True if a GPU keeps the tokens of all sequences, for prompt lookup or for a draft head."""
    speculation = config.speculation
    return speculation is not None and not speculation.on_host and (draft is None or bool(draft.taps))


def wait_reason(config: EngineConfig, selections: Iterable[Selection], device: DeviceSpec) -> str | None:
    """Return the reason why a GPU's host must know the tokens of a step to send the next one; None if it need not.

    Args:
        config: of the engine.
        selections: attention backends of the model.
        device: the device. On a CPU a step ends before the next one anyway.
    """
    if config.speculation is None or device.kind == "cpu":
        return None
    if config.speculation.on_host:
        return f"the host makes the drafts of method {config.speculation.method}"
    labels = [one.capabilities.label for one in selections if not one.capabilities.takes_length_bounds]
    return f"{labels[0]} plans with exact lengths, which depend on the drafts that are accepted" if labels else None


def check_speculation(
    config: EngineConfig, selections: Iterable[Selection], device: DeviceSpec, *, in_passes: bool = False
) -> None:
    """Check that steps with drafts run on the selected backends, and that nothing else asks for decodes of one token.

    Args:
        config: has speculation.
        selections: attention backends.
        device: the device.
        in_passes: they serve a draft model, whose passes begin where a step's acceptance ends.

    Raises:
        ConfigError: they do not.
    """

    def refused(problem: str) -> ConfigError:
        return ConfigError("speculative_config", config.speculative_config, problem)

    speculation = config.speculation
    if device.kind == "cpu" and speculation is not None and speculation.synthetic_rates:
        raise refused("rejection_sample_method synthetic works on a GPU; leave it out")
    for one in selections:
        label = one.capabilities.label
        if in_passes and not one.capabilities.takes_length_bounds:
            raise refused(
                f"{label} plans with exact lengths, which the host does not know before the passes of a draft model; "
                f"attention_backend {_TAKES_DRAFTS} works, and so does method ngram"
            )
        if not one.capabilities.takes_ragged_decodes:
            raise refused(f"{label} takes decodes of one length; attention_backend {_TAKES_DRAFTS} works")
