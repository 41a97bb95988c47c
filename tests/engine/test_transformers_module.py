"""A module of transformers, its attention swapped for ours, as a step: on the tape, and in a CUDA graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from phonograph.attention.attention_spec import AttentionSpec
from phonograph.attention.backend import AttentionBackend, AttentionLayer
from phonograph.attention.metadata import CommonMetadata
from phonograph.attention.reference.backend import ReferenceBackend
from phonograph.core.limits import Limits
from phonograph.graphs.modes import GraphKey, GraphSet
from phonograph.graphs.runtime import GraphRuntime
from phonograph.graphs.tape.tape import TapeRuntime
from phonograph.runner.step_attention import StepAttention

HEADS, KV_HEADS, HEAD_SIZE, LAYERS, VOCAB = 4, 2, 16, 3, 97
BLOCK, BLOCKS_PER_SEQ, TOKENS, REQUESTS = 16, 2, 12, 3
KEY = GraphKey(GraphSet.MIXED, TOKENS, REQUESTS)
attend: StepAttention | None = None


def phonograph_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Take [1, H, T, D] as transformers calls it, and return [1, T, H, D]."""
    assert attend is not None
    layer: Any = module.layer_idx
    out_THD = attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), layer)
    return out_THD[None], None


class Step:
    """The module's step over persistent tensors, with attention of a backend."""

    def __init__(self, backend: AttentionBackend, runtime: GraphRuntime, dtype: torch.dtype) -> None:
        device = backend.device
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            head_dim=HEAD_SIZE,
        )
        torch.manual_seed(0)
        self.module = LlamaForCausalLM(config).to(device, dtype).eval()
        self.device = device
        self.builder = backend.make_builder()

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.ids, self.positions = zeros(TOKENS, dtype=torch.int64), zeros(TOKENS, dtype=torch.int64)
        self.slots, self.starts, self.lens = zeros(TOKENS, dtype=torch.int64), zeros(REQUESTS + 1), zeros(REQUESTS)
        self.blocks = torch.arange(REQUESTS * BLOCKS_PER_SEQ, dtype=torch.int32, device=device).view(REQUESTS, -1)
        shape = (2, REQUESTS * BLOCKS_PER_SEQ, BLOCK, KV_HEADS, HEAD_SIZE)
        caches = [torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(LAYERS)]
        layers = [AttentionLayer(index=index, scale=HEAD_SIZE**-0.5) for index in range(LAYERS)]
        self.attention = StepAttention([backend], layers, caches, [self.slots], runtime)

    def write(self, query_lens: list[int]) -> list[torch.Tensor]:
        """Write random sequences, all new, decodes first. Returns the token ids of each."""
        sequences = [torch.randint(VOCAB, (length,)) for length in query_lens]
        starts = np.cumsum([0, *query_lens]).astype(np.int32)
        positions = torch.cat([torch.arange(length) for length in query_lens])
        first_slots = torch.arange(REQUESTS).repeat_interleave(torch.tensor(query_lens)) * BLOCK * BLOCKS_PER_SEQ
        self.ids.copy_(torch.cat(sequences))
        self.positions.copy_(positions)
        self.slots.copy_(first_slots + positions)
        self.starts.copy_(torch.from_numpy(starts))
        self.lens.copy_(torch.tensor(query_lens))
        num_decodes = query_lens.count(1)
        common = CommonMetadata(
            num_reqs=REQUESTS,
            num_decodes=num_decodes,
            num_tokens=TOKENS,
            num_decode_tokens=num_decodes,
            max_query_len=max(query_lens),
            max_seq_len=max(query_lens),
            query_start_loc=self.starts,
            seq_lens=self.lens,
            block_table=self.blocks,
            slot_mapping=self.slots,
            query_start_loc_cpu=starts,
            seq_lens_cpu=np.array(query_lens, np.int32),
        )
        self.attention.metadata = [self.builder.build(common, key=KEY)]
        return sequences

    def run(self) -> tuple[torch.Tensor, ...]:
        global attend
        attend = self.attention
        self.module.set_attn_implementation("of this test")
        self.attention.schedule()
        out = self.module(
            input_ids=self.ids[None], position_ids=self.positions[None], attention_mask=None, use_cache=False
        )
        return (out.logits[0],)

    def expected(self, sequences: list[torch.Tensor]) -> torch.Tensor:
        """Return the logits of transformers' own attention, in float64, sequence by sequence."""
        module = LlamaForCausalLM(self.module.config).to(self.device, torch.float64).eval()
        module.load_state_dict(self.module.state_dict())
        module.set_attn_implementation("eager")
        return torch.cat([module(ids.to(self.device)[None], use_cache=False).logits[0] for ids in sequences])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    # Under a name of its own: engines in this process have theirs.
    monkeypatch.setitem(AttentionInterface._global_mapping, "of this test", phonograph_attention)


def check_replays(step: Step, runtime: GraphRuntime, limit: float) -> None:
    """Capture the step on one batch, and compare replays on others with transformers' own attention."""
    with torch.inference_mode():
        step.write([1, 7, 4])
        step.run()
    graph = runtime.capture(step.run)
    for query_lens in ([1, 5, 6], [1, 1, 10], [4, 4, 4]):
        with torch.inference_mode():
            sequences = step.write(query_lens)
            runtime.poison()
            graph.replay()
            runtime.synchronize()
            wanted, got = step.expected(sequences), graph.outputs[0].double()
        assert (got - wanted).norm() <= limit * wanted.norm(), query_lens


def make_spec(dtype: str) -> AttentionSpec:
    return AttentionSpec(
        num_query_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=dtype,
        kv_cache_dtype=dtype,
        block_size=BLOCK,
    )


LIMITS = Limits(max_num_seqs=REQUESTS, max_num_batched_tokens=TOKENS, max_model_len=BLOCK * BLOCKS_PER_SEQ)


def test_on_the_tape() -> None:
    runtime = TapeRuntime()
    backend = ReferenceBackend(make_spec("float32"), torch.device("cpu"), LIMITS)
    check_replays(Step(backend, runtime, torch.float32), runtime, 1e-5)


@pytest.mark.gpu
def test_in_a_cuda_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    from phonograph.attention.triton.backend import TritonBackend
    from phonograph.graphs.cuda import CudaRuntime

    device = torch.device("cuda", torch.cuda.current_device())
    runtime = CudaRuntime(device)
    with runtime.scope():
        backend = TritonBackend(make_spec("bfloat16"), device, LIMITS)
        check_replays(Step(backend, runtime, torch.bfloat16), runtime, 3e-2)
