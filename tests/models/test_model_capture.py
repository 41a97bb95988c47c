"""A step of the decoder can be captured, replays on other data, and stays short."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB_SIZE, load_model, make_checkpoint

from phonograph.graphs.tape.tape import TapeRuntime
from phonograph.models.spec import read_model_spec


@pytest.mark.parametrize(("family", "calls_a_layer"), [("llama3", 20), ("llama_bias", 22), ("qwen3", 25)])
@pytest.mark.parametrize("num_tokens", [1, 13])
def test_replay_on_other_tokens_and_positions(family: str, calls_a_layer: int, num_tokens: int, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    spec = read_model_spec(tmp_path)
    decoder = load_model(spec, tmp_path, dtype=torch.float32, device=torch.device("cpu"))
    group = spec.layers[0].attention.num_query_heads // spec.layers[0].attention.num_kv_heads
    input_ids = torch.randint(VOCAB_SIZE, (num_tokens,))
    positions = torch.randint(spec.context_length, (num_tokens,))
    out = torch.empty(num_tokens, spec.layers[0].attention.num_query_heads, spec.layers[0].attention.head_size)

    def attention(query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor, layer: int) -> torch.Tensor:
        """Not attention, but something of all three in one call for each query head of a KV head."""
        for head in range(group):
            torch.addcmul(value_TKD, query_THD[:, head::group], key_TKD, out=out[:, head::group])
        return out

    def step() -> tuple[torch.Tensor, ...]:
        hidden = decoder.forward(input_ids, positions, attention)
        return hidden, decoder.logits(hidden[:1])

    runtime = TapeRuntime()
    graph = runtime.capture(step)
    assert len(graph.steps) <= (calls_a_layer + group) * spec.num_layers + 8
    for _ in range(3):
        input_ids.copy_(torch.randint(VOCAB_SIZE, (num_tokens,)))
        positions.copy_(torch.randint(spec.context_length, (num_tokens,)))
        runtime.poison()
        out.fill_(torch.nan)
        graph.replay()
        with torch.inference_mode():
            replayed = [tensor.clone() for tensor in graph.outputs]
            expected = step()
        for actual, eager in zip(replayed, expected, strict=True):
            torch.testing.assert_close(actual, eager, rtol=0, atol=1e-6)
