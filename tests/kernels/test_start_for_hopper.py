"""A start compiles every kernel that the graphs of an H200 and its eager steps launch, by running few layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from programs import report_of

pytest.importorskip("triton")
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 6, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3 = {
    **LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024,
    "intermediate_size": 3072, "num_attention_heads": 16, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
WINDOWS = {
    **LLAMA, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True,
    "sliding_window": 4096, "max_position_embeddings": 40960,
    "layer_types": [f"{kind}_attention" for kind in ("full", "full", "full", "sliding", "full", "full")],
}  # fmt: skip

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
    "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "num_hidden_layers": 7, "sliding_window": 512, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
}  # fmt: skip


def start(config: dict[str, Any], folder: Path, *words: str) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(config))
    return report_of(Path(__file__).with_name("start_for_hopper.py"), str(folder), *words, TRITON_INTERPRET="0")


@pytest.mark.parametrize("config", [LLAMA, QWEN3, WINDOWS, GEMMA3], ids=["llama", "qwen3", "windows", "gemma3"])
def test_all_kernels_are_compiled_before_the_captures(config: dict[str, Any], tmp_path: Path) -> None:
    found = start(config, tmp_path)
    few, every, captured, eager = (set(found[name]) for name in ("few", "every", "captured", "eager"))
    assert found["graphs"] > 100 and len(every) > 30 and len(captured) > 25 and len(eager) > 10
    assert few == every
    # One of each window, for one sequence too, where torch forgets the stride between rows, and for Llama's heads the
    # kernel of long prompts. They take longest to compile.
    attention = [name for name in few if name.startswith(("_attention_kernel", "_prefill_kernel"))]
    assert len(attention) == (6 if config is WINDOWS else 4 if config is GEMMA3 else 3)
    assert captured <= few and eager <= few


THIRD = {
    "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000, "max_position_embeddings": 2048,
    "eagle_aux_hidden_state_layer_ids": [0, 3, 6],
}  # fmt: skip
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": THIRD,
    "eagle3 with norms": THIRD | {"fc_norm": True, "norm_output": True},
    "eagle": {"architectures": ["LlamaForCausalLMEagle"]},
}


@pytest.mark.parametrize("proposer", ["ngram", "draft_model", *HEADS])
def test_so_are_those_of_speculation(proposer: str, tmp_path: Path) -> None:
    """Acceptance and drafts, decodes of several tokens, and the passes of a draft model of other sizes."""
    method = proposer.split()[0]
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    kernels = {"_accept_kernel", "_ngram_kernel"}
    if method == "draft_model":
        draft = tmp_path / "draft"
        draft.mkdir()
        (draft / "config.json").write_text(json.dumps({**QWEN3, "vocab_size": LLAMA["vocab_size"]}))
        speculation["model"] = str(draft)
        kernels = {"_accept_kernel", "_first_rows_kernel", "_next_row_kernel"}
    if proposer in HEADS:
        head = tmp_path / "head"
        head.mkdir()
        (head / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1, **HEADS[proposer]}))
        speculation["model"] = str(head)
        gathers = "_gather_kernel" if method == proposer else "_norm_kernel"
        kernels = {"_accept_kernel", "_first_rows_kernel", "_next_row_kernel", gathers}
    config = {**LLAMA, "max_position_embeddings": 32768}
    found = start(config, tmp_path, json.dumps(speculation))
    few, every, captured, eager = (set(found[name]) for name in ("few", "every", "captured", "eager"))
    assert few == every and captured <= few and eager <= few
    assert kernels <= {name.split()[0] for name in few} and found["graphs"] > 150
