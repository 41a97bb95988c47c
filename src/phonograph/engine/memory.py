"""Memory plan: weights, graphs, and the rest for KV blocks, estimated before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from phonograph.config.engine_config import EngineConfig
from phonograph.core.blocks import most_tokens, pages_for_request
from phonograph.core.device import GIB, DeviceSpec
from phonograph.core.host_resources import free_memory
from phonograph.core.limits import Limits
from phonograph.engine.groups.draft_plan import DraftPlan, keeps_tokens
from phonograph.engine.groups.encoder_notes import encoder_bytes
from phonograph.engine.groups.kv_groups import KVGroups
from phonograph.engine.groups.state_slots import state_bytes
from phonograph.errors import MemoryLimitError
from phonograph.kernels.torch.grouped import TILE
from phonograph.kernels.triton.gemm.product_plan import GemmDevice
from phonograph.models.layer_spec import FeedForward, LayerFeedForward, LayerSpec
from phonograph.models.layers.expert_spec import LayerExperts
from phonograph.models.layers.workspace import Workspace
from phonograph.models.spec import DTYPE_BYTES, ModelSpec
from phonograph.sampling.grammar_masks import bitmask_words
from phonograph.sampling.sampler import Sampler

_CPU_KV_LIMIT = 2 * GIB
"""Limit of the default KV cache on a CPU, where it shares memory with other programs."""
_LIBRARY_BYTES = 334 << 20
"""Allowance for loaded kernels, workspaces of libraries and small buffers."""
_SLEEP_BYTES = 64 << 20
"""Allowance for the unused part of the last chunk of weights and of the KV cache, with enable_sleep_mode."""
_CONTEXT_BYTES = 620 << 20
"""Size of the CUDA context on an H200. Like vLLM's, the engine's share of memory excludes it."""
_SMALLER = "a smaller model, fewer bits a weight (quantization) or a device with more memory works"
_SAMPLE_BYTES_PER_ROW = 33 << 10
"""Scratch of the sampling kernels for a row of logits: candidates of top-k and top-p, with their tokens."""
_GRAPH_BYTES_PER_LAYER = 40 * 1024
"""Driver memory for the nodes of one layer in one captured CUDA graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Sizes in bytes, except num_blocks.

    graphs:    estimate for all captured graphs: on a CPU their shared pool, on a GPU their nodes and the static
        workspace (shared with eager steps), with room for the masks of all rows
    attention: buffers of the attention backends, and tables of further KV groups
    sampling:  state of the slots, such as counts of penalties, and temporaries; with drafts on a GPU also the tokens of
        all slots and the scratch of more rows
    states:    states of all slots, of layers that have them
    num_checkpoints: checkpoints of these states for the prefix cache
    checkpoints: all checkpoints
    block:     one KV block in all layers of a group, and in those of a draft model
    num_tokens: tokens that the cache holds, in sequences of full length if there are windows or several groups
    note:      source of the size of the KV cache
    """

    weights: int
    graphs: int
    attention: int
    sampling: int
    states: int
    num_checkpoints: int
    checkpoints: int
    block: int
    num_blocks: int
    num_tokens: int
    note: str

    @property
    def kv_cache(self) -> int:
        return self.block * self.num_blocks


def plan_memory(
    config: EngineConfig,
    model: ModelSpec,
    device: DeviceSpec,
    limits: Limits,
    *,
    kv: KVGroups,
    attention_bytes: int,
    graph_tokens: int,
    num_graphs: int,
    weights: int,
    draft: DraftPlan | None = None,
) -> MemoryPlan:
    """Size the KV cache.

    Args:
        config: settings of the KV cache.
        model: sizes of the model.
        device: memory of the device.
        limits: sizes of a step and of a request.
        kv: KV groups; their attention has the dtype of the weights.
        attention_bytes: bytes that the attention backend takes in addition to the KV cache.
        graph_tokens: tokens of the largest graph, 0 without graphs.
        num_graphs: number of graphs.
        weights: bytes of the weights.
        draft: draft model of speculation, or None.

    Raises:
        MemoryLimitError: one request of max_model_len tokens does not fit, or the configured cache does not fit the
            device; the message says what fits.
    """
    max_model_len, max_num_seqs = limits.max_model_len, limits.max_num_seqs
    dtype = kv.specs[0].dtype
    if device.kind == "cpu":
        models = [model] if draft is None else [model, draft.model]
        rows = min(graph_tokens, max_num_seqs)
        graphs = sum(estimate_graph_bytes(one, dtype, graph_tokens, rows) for one in models)
        graphs += 0 if draft is None else draft.feature_bytes(limits)
    else:
        workspace = Workspace.nbytes(
            model, limits.max_num_batched_tokens, limits.max_num_logits, dtype, gemm_device=GemmDevice.of(device)
        )
        masks = 0 if model.pooler else bitmask_words(model.vocab_size) * 4 * limits.max_masked_rows
        num_layers = model.num_layers
        if draft is not None:
            workspace += draft.workspace_bytes(limits, device)
            num_layers += limits.draft_tokens * draft.model.num_layers
        graphs = workspace + masks + num_graphs * num_layers * _GRAPH_BYTES_PER_LAYER
        graphs += encoder_bytes(model, dtype, limits)
    sampling = 0
    if model.pooler is None:
        sampling = Sampler.nbytes(
            max_num_seqs=max_num_seqs,
            vocab_size=model.vocab_size,
            device_type=device.kind,
            logits_bytes=DTYPE_BYTES[dtype],
        )
    if device.kind != "cpu" and limits.draft_tokens:
        history = 4 * max_num_seqs * (max_model_len + 1) if keeps_tokens(config, draft) else 0
        sampling += history + _SAMPLE_BYTES_PER_ROW * (limits.max_num_logits - max_num_seqs)
        # Copies of rows of drafts that a grammar masks.
        sampling += (limits.max_masked_rows - max_num_seqs) * model.vocab_size * DTYPE_BYTES[dtype]
    state = state_bytes(model, dtype)
    states = max_num_seqs * state
    taken = weights + graphs + attention_bytes + sampling + states
    if device.kind != "cpu":
        taken += _LIBRARY_BYTES + (_SLEEP_BYTES if config.enable_sleep_mode else 0)
    available, place = _available(device, config.tensor_parallel_size)
    parts = (
        f"weights of {gib(weights)}, graphs with their workspace of {gib(graphs)}, attention, sampling and libraries "
        f"of {gib(taken - weights - graphs - states)}"
        + (f", states of {max_num_seqs} sequences of {gib(states)}" if states else "")
    )
    if taken > available:
        raise MemoryLimitError(
            f"{config.model}: {parts} do not fit {place}; {gib(taken)} and room for the KV cache are needed, at least "
            f"{gib(taken - available)} more; {_SMALLER}"
        )
    block = kv.page_bytes + (0 if draft is None else draft.page_bytes)

    def blocks_of(num_tokens: int) -> int:
        return pages_for_request(kv.groups, num_tokens, limits.max_num_batched_tokens)

    blocks_per_request = blocks_of(max_model_len)
    if limits.whole_prompts:
        num_blocks = max(limits.max_num_batched_tokens // kv.block_sizes[0] + max_num_seqs, blocks_per_request)
        source = "one step of max_num_batched_tokens, as keys live for a step"
    elif config.num_kv_blocks is not None:
        num_blocks, source = config.num_kv_blocks, f"num_kv_blocks={config.num_kv_blocks}"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block
        source = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
    elif device.kind == "cpu":
        source = f"half of the free memory {free_memory().place}, 2 GiB at most"
        granted = min(_CPU_KV_LIMIT // config.tensor_parallel_size, (available - taken) // 2)
        # Blocks beyond those of all running requests would never be used.
        num_blocks = min(granted // block, max_num_seqs * blocks_per_request)
    else:
        source = (
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {device.memory / GIB:.1f} GiB, less weights "
            f"({weights / GIB:.1f}), graphs with their workspace ({graphs / GIB:.2f}), attention "
            f"({attention_bytes / GIB:.2f}), sampling ({sampling / GIB:.2f}) and libraries ({_LIBRARY_BYTES / GIB:.1f})"
            + (f", states of {max_num_seqs} sequences ({states / GIB:.2f})" if states else "")
        )
        share = int(device.memory * config.gpu_memory_utilization)
        num_blocks = max(0, (share - taken) // block)
        if not num_blocks:
            least = -(-1000 * (taken + block) // device.memory) / 1000
            remedy = f"gpu_memory_utilization={least}, {_SMALLER}" if taken + block <= available else _SMALLER
            raise MemoryLimitError(
                f"{config.model}: {parts} leave no KV block in gpu_memory_utilization={config.gpu_memory_utilization} "
                f"of {gib(device.memory)}; at least {gib(taken + block - share)} more are needed; {remedy}"
            )
    share = config.state_checkpoint_share if state and config.enable_prefix_caching else 0.0
    num_checkpoints = int(share * num_blocks * block / state) if share else 0
    checkpoints = num_checkpoints * state
    if config.num_kv_blocks is None:
        num_blocks -= -(-checkpoints // block)
    if num_blocks < blocks_per_request:
        fits = most_tokens(num_blocks, blocks_of, max_model_len)
        sizes = " and ".join(map(str, dict.fromkeys(kv.block_sizes)))
        raise MemoryLimitError(
            f"max_model_len={config.max_model_len or 'auto'}: one request of {max_model_len} tokens needs "
            f"{blocks_per_request} KV blocks of {sizes} tokens ({blocks_per_request * block} bytes), and {source} "
            f"gives {num_blocks}; "
            + (f"lower max_model_len to {fits} or grant more memory" if fits >= 2 else "grant more memory")
        )
    if num_blocks * block + checkpoints > available - taken:
        fits = (available - taken - checkpoints) // block
        what_fits = f"{fits} blocks ({fits * block} bytes) fit"
        if fits < blocks_per_request:
            what_fits += f", and one request of max_model_len={max_model_len} needs {blocks_per_request}"
        elif source.startswith("gpu_memory_utilization"):
            what_fits += f", as with gpu_memory_utilization={1000 * available // device.memory / 1000}"
        cache = f"{source.partition(' ')[0]}: a KV cache of {gib(num_blocks * block)}"
        raise MemoryLimitError(f"{cache} does not fit beside {parts} in {place}; {what_fits}")
    if kv.grows_with_tokens:
        num_tokens = num_blocks * kv.block_sizes[0]
    else:
        whole, rest = divmod(num_blocks, blocks_per_request)
        num_tokens = whole * max_model_len + most_tokens(rest, blocks_of, max_model_len)
    note = f"KV cache of {num_blocks} blocks ({num_tokens} tokens) from {source}"
    return MemoryPlan(
        weights=weights,
        graphs=graphs,
        attention=attention_bytes,
        sampling=sampling,
        states=states,
        num_checkpoints=num_checkpoints,
        checkpoints=checkpoints,
        block=block,
        num_blocks=num_blocks,
        num_tokens=num_tokens,
        note=note,
    )


def _available(device: DeviceSpec, num_ranks: int) -> tuple[int, str]:
    """Return the bytes that a rank can use on a device, and a description of them. Ranks share the memory of a CPU."""
    if device.kind == "cpu":
        of_ranks = free_memory()
        free = of_ranks.available // num_ranks
        share = "" if num_ranks == 1 else f", of {num_ranks} equal parts one"
        return free, f"the {gib(free)} of free memory {of_ranks.place}{share}"
    if device.free is not None:
        return device.free, f"the {gib(device.free)} that are free of {gib(device.memory)} of {device.name}"
    free = device.memory - _CONTEXT_BYTES
    return free, f"the {gib(free)} that the CUDA context leaves of {gib(device.memory)} of {device.name}"


def gib(num_bytes: int) -> str:
    """Return a number of bytes in GiB, for a message."""
    return f"{num_bytes / GIB:.1f} GiB"


def estimate_graph_bytes(model: ModelSpec, dtype: str, tokens: int, rows: int) -> int:
    """Estimate the shared pool: live tensors at the widest point of a layer in the largest graph, and its logits."""
    mixer = max(map(_mixer_width, model.kinds))
    feed_forward = max(_feed_forward_width(layer.feed_forward) for layer in model.kinds)
    width = 2 * model.hidden_size + max(mixer, feed_forward)
    # A quantized product unpacks its weights tile by tile.
    quantized = next(model.quantized_matrices(), None) is not None
    tile = TILE if tokens and quantized else 0
    return DTYPE_BYTES[dtype] * (tile + tokens * width + rows * (model.num_outputs + model.hidden_size))


def _mixer_width(layer: LayerSpec) -> int:
    """Return the numbers of a token next to the stream: projections, and the input of the last one."""
    widths = [0]
    for mixer in (layer.mixer, layer.beside):
        if mixer is not None:
            *projections, output = mixer.matrices
            widths.append(sum(matrix.num_outputs for matrix in projections) + output.num_inputs)
    return max(widths)


def _feed_forward_width(spec: FeedForward | None) -> int:
    """Return the numbers of a token next to the stream. The experts' operator has its own memory outside the pool."""
    if spec is None:
        return 0
    if isinstance(spec, LayerExperts):
        shared = 0 if spec.shared is None else _feed_forward_width(spec.shared) + spec.down.expert_outputs
        return 2 * spec.down.expert_outputs + spec.router.num_outputs + shared
    assert isinstance(spec, LayerFeedForward)
    return 3 * spec.down.num_inputs
