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
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 4, "vocab_size": 128256,
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
    "layer_types": [f"{kind}_attention" for kind in ("full", "full", "sliding", "full")],
}  # fmt: skip

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 1152,
    "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256,
    "num_hidden_layers": 6, "sliding_window": 512, "max_position_embeddings": 32768, "torch_dtype": "bfloat16",
    "layer_types": [f"{kind}_attention" for kind in (*["sliding"] * 4, "full", "sliding")],
}  # fmt: skip


MODELS = {"llama": LLAMA, "qwen3": QWEN3, "windows": WINDOWS, "gemma3": GEMMA3}
THIRD = {
    "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000, "max_position_embeddings": 2048,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
}  # fmt: skip
DRAFTERS: dict[str, dict[str, Any]] = {
    "draft_model": {**QWEN3, "num_hidden_layers": 2, "vocab_size": LLAMA["vocab_size"]},
    "eagle3": {**LLAMA, "num_hidden_layers": 1, **THIRD},
    "eagle3 with norms": {**LLAMA, "num_hidden_layers": 1, **THIRD, "fc_norm": True, "norm_output": True},
    "eagle": {**LLAMA, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]},
}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Kernels that each model launches, and Llama with each drafter and on two ranks; one process starts them."""
    folder, words = tmp_path_factory.mktemp("starts"), []

    def write(name: str, config: dict[str, Any]) -> str:
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        return str(folder / name)

    for name, config in MODELS.items():
        words += [write(name, config), "{}"]
    target = write("target", {**LLAMA, "num_hidden_layers": 3, "max_position_embeddings": 32768})
    for name in ("ngram", *DRAFTERS):
        speculation = {"method": name.split()[0], "num_speculative_tokens": 4}
        if name in DRAFTERS:
            speculation["model"] = write(name, DRAFTERS[name])
        words += [target, json.dumps({"speculative_config": speculation})]
    one_head = write("one head", {**LLAMA, "num_key_value_heads": 1})
    for divided in (1, 2):
        words += [one_head, json.dumps({"tensor_parallel_size": 2, "decode_context_parallel_size": divided})]
    found = report_of(Path(__file__).with_name("start_for_hopper.py"), *words, TRITON_INTERPRET="0")
    return dict(zip((*MODELS, "ngram", *DRAFTERS, "ranks", "divided"), found, strict=True))


def test_all_kernels_are_compiled_before_the_captures(reports: dict[str, dict[str, Any]]) -> None:
    """One of attention for each window, which takes longest to compile.

    Where prefixes are shared, decodes of one token have one of their own, and those of one sequence another. So has one
    row, where torch forgets the stride between rows, and Llama's heads have the kernel of long prompts. Graphs for much
    shared prefix have that kernel too, the same for all windows, and one for own keys.
    """
    num_attention = {"llama": 7, "qwen3": 7, "windows": 13, "gemma3": 8}
    for name in MODELS:
        found = reports[name]
        few, every, captured, eager = (set(found[kind]) for kind in ("few", "every", "captured", "eager"))
        assert found["graphs"] > 100 and len(every) > 30 and len(captured) > 25 and len(eager) > 10, name
        assert few == every, name
        attention = [kernel for kernel in few if kernel.startswith(("_attention_kernel", "_prefill_kernel"))]
        assert len(attention) == num_attention[name]
        assert captured <= few and eager <= few, name


def test_so_are_those_of_speculation(reports: dict[str, dict[str, Any]]) -> None:
    """Acceptance and drafts, decodes of several tokens, and the passes of a draft model of other sizes."""
    passes = {"_send_kernel", "_first_rows_kernel", "_next_row_kernel", "_listed_rows_kernel"}
    kernels = {
        "ngram": {"_ngram_kernel"},
        "draft_model": passes,
        "eagle3": {"_gather_kernel", *passes},
        "eagle3 with norms": {"_norm_kernel", *passes},
        "eagle": {"_gather_kernel", *passes},
    }
    for name, launched in kernels.items():
        found = reports[name]
        few, every, captured, eager = (set(found[kind]) for kind in ("few", "every", "captured", "eager"))
        assert few == every and captured <= few and eager <= few, name
        names = {kernel.split()[0] for kernel in few}
        assert {"_accept_kernel", *launched} <= names and ("_send_kernel" in names) == (name != "ngram"), name
        assert found["graphs"] > 150, name


def test_so_are_those_of_ranks(reports: dict[str, dict[str, Any]]) -> None:
    """Sums over peer memory with and without a norm; with one KV head also parts of attention and their merge."""
    kernels = {
        "ranks": {"_sum_rows_kernel"},
        "divided": {"_sum_rows_kernel", "_share_rows_kernel", "_merge_heads_kernel"},
    }
    for name, launched in kernels.items():
        found = reports[name]
        few, every, captured, eager = (set(found[kind]) for kind in ("few", "every", "captured", "eager"))
        assert few == every and captured <= few and eager <= few, name
        assert launched <= {kernel.split()[0] for kernel in few}, name
        assert found["graphs"] > 100, name
